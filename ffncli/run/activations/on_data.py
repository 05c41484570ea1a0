"""The actual inputs of the activations in a model's layers, and the outputs of other activations for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ffncli.block.activations import SOFT_CAPPED, TABLE
from ffncli.block.steps import Activation, Experts, Step, block_inputs, ffn_span, ffn_steps, parameters, walk
from ffncli.errors import FFNError
from ffncli.models.model import Layer, Resolved
from ffncli.run.activations.swap_statistics import ActivationInput, SwapStatistics
from ffncli.run.engine.execute import activation, apply, execute, mix, possible, received, unmixed
from ffncli.run.engine.inputs import InputSource
from ffncli.run.engine.prepare import Prepared, Token, prepare
from ffncli.run.measure.gap import Agreement, agreement
from ffncli.run.measure.statistics import NotFinite, where_not_finite
from ffncli.run.pretrained.capture import prepared, run_model
from ffncli.run.pretrained.prompt import Prompt, layers_of, reached

_CHUNK = 1 << 21  # values of an activation per chunk: 16 MB in float64


@dataclass(frozen=True)
class LayerData:
    """One layer's activations; `weights` says where these come from, `agreement` is with the model's own FFN."""

    stack: str
    layer: int
    tokens: int
    weights: str
    activations: tuple[ActivationInput, ...]
    agreement: Agreement | None
    not_finite: tuple[NotFinite, ...]


@dataclass(frozen=True)
class ActivationData:
    """The requested layers of the model, each stack's tokens, and notes on the run."""

    model: Resolved
    layers: tuple[LayerData, ...]
    tokens: Mapping[str, tuple[Token, ...]]
    notes: tuple[str, ...]


def activations_on_data(
    resolved: Resolved, prompt: Prompt | None, others: Sequence[str], *, layer: int | str | None = None,
    input: InputSource | None = None, leading: tuple[int, ...] | None = None, dtype: str | None = None,
    device: str = "cpu", seed: int | None = None,
) -> ActivationData:  # fmt: skip
    """The inputs of the activations of a layer (`all`: of every layer) and the outputs of `others` for them.

    With a prompt the model runs once, and each layer is processed as soon as it has run; else every layer gets the
    same input, as `prepare` takes it. `others` are canonical names.
    """
    layers = layers_of(resolved) if layer == "all" else [resolved.model.layer(layer)]
    if prompt is None:
        notes: dict[str, None] = {}
        rows = []
        for one in layers:
            ready = prepare(resolved, one, input=input, leading=leading, dtype=dtype, device=device, seed=seed)
            rows.append(look(ready, _ffn_input(ready), others))
            notes |= dict.fromkeys(ready.notes)
        return ActivationData(resolved, tuple(rows), {}, tuple(notes))
    layers, silent = reached(resolved, layers) if layer == "all" else (layers, ())
    data: dict[Layer, LayerData] = {}
    tokens: dict[str, tuple[Token, ...]] = {}
    doubts: dict[str, None] = {}

    def reached_layer(layer: Layer, layer_tokens: tuple[Token, ...], enters: Tensor, leaves: Tensor) -> None:
        ready = prepared(resolved, layer, layer_tokens, enters, leaves, (), dtype, device)
        data[layer] = look(ready, enters, others)
        tokens[layer.stack] = layer_tokens
        doubts.update(dict.fromkeys(ready.notes))

    run_notes = run_model(resolved, layers, prompt, reached_layer, dtype=dtype, device=device)
    ordered = tuple(data[layer] for layer in layers if layer in data)
    return ActivationData(resolved, ordered, tokens, (*silent, *run_notes, *doubts))


def _ffn_input(ready: Prepared) -> Tensor:
    """The FFN's input: the block's input, or the output of the steps before the FFN."""
    start, _ = ffn_span(ready.steps)
    if start in ready.inputs:
        return ready.inputs[start]
    names = [step.output for step in ready.steps]
    head = ready.steps[: names.index(start) + 1]
    with torch.no_grad():
        return next(e.tensor for e in execute(head, ready.weights, ready.inputs, ready.mode) if e.name == start)


def look(ready: Prepared, enters: Tensor, others: Sequence[str]) -> LayerData:
    """Run one layer's FFN on `enters` [..., d_model], some tokens at a time, with its own activation and with `others`.

    No tensor as wide as d_ff is kept. Raises FFNError if no token reaches an activation.
    """
    steps, layer, flat = ffn_steps(ready.steps), ready.layer, enters.reshape(-1, enters.shape[-1])
    start, _ = ffn_span(steps)
    acts = [step for _, step in walk(steps) if is_act(step)]
    original = next(step.op.function for step in acts if isinstance(step.op, Activation))
    statistics = SwapStatistics(tuple(dict.fromkeys((original, *others))), _most(steps, flat.shape[0]))
    ours: list[Tensor] = []
    with torch.no_grad():
        for rows in _chunks(flat, steps):
            outs = run_variants(steps, ready.weights, {start: rows}, statistics.names, statistics.add)
            statistics.add_outputs(outs)
            if ready.reference is not None:
                ours.append(outs[0])
    if not statistics.places:
        raise FFNError(f"no token reaches an activation of {layer.stack} layer {layer.index}", "give more tokens")
    model_agreement = agreement(torch.cat(ours), ready.reference) if ready.reference is not None else None
    bad = (*where_not_finite("input", {start: flat}), *where_not_finite("weight", ready.weights))
    return LayerData(layer.stack, layer.index, flat.shape[0], ready.origin, statistics.inputs(), model_agreement, bad)


def _chunks(flat: Tensor, steps: Sequence[Step]) -> Iterator[Tensor]:
    """Some tokens at a time, by the width of d_ff."""
    widest = max(axis.size for axes in parameters(steps).values() for axis in axes if axis.name == "d_ff")
    size = max(1, _CHUNK // widest)
    for at in range(0, flat.shape[0], size):
        yield flat[at : at + size]


def _most(steps: Sequence[Step], tokens: int) -> Mapping[str, int]:
    """The most rows that an activation can receive: a token may go to several experts."""
    most = {"": tokens}
    for step in steps:
        if isinstance(step.op, Experts):
            route = next(s for s in steps if s.output == step.inputs[1])
            most[step.output] = tokens * getattr(route.op, "top_k", 1)
    return most


# A block run once for several activations: everything that does not depend on the activation is computed once.
#
# A callback receives the input and the outputs of each activation. Experts are run one after the other.

# (the step's whole name, the step, the expert or None, its input [rows, d_ff], each activation's output for that)
Watch = Callable[[str, Step, int | None, Tensor, Sequence[Tensor]], None]


def is_act(step: Step) -> bool:
    """Whether a step is the block's own activation, not a clip of up or a score of the router or the mix."""
    return isinstance(step.op, Activation) and step.output.rpartition(".")[2] == "act"


def run_variants(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], names: Sequence[str],
    watch: Watch, place: tuple[str, int | None] = ("", None),
) -> list[Tensor]:  # fmt: skip
    """The last step's output with each activation of `names` in place of the block's own, in eval mode.

    `inputs` are flat, [tokens, d_model]. The block's own activation keeps its learned parameters, others have their
    initial values. `watch` is called for every activation as it runs; `place` is the prefix of its name, and its
    expert.
    """
    tensors = {name: [tensor] for name, tensor in inputs.items()}
    last_use = {name: at for at, step in enumerate(steps) for name in step.inputs}
    for at, step in enumerate(steps):
        x = [tensors[name] for name in step.inputs]
        if isinstance(step.op, Experts):
            out = _experts(step, step.op, x[0][0], x[1][0], weights, names, watch)
        else:
            params = {name.rpartition(".")[2]: weights[name] for name in step.parameters()}
            with possible(step, x[0][0]):
                if isinstance(step.op, Activation) and is_act(step):
                    out = [_instead(step.op, name, params, x[0][0]) for name in names]
                    watch(place[0] + step.output, step, place[1], x[0][0], out)
                else:
                    several = max(len(versions) for versions in x)
                    out = [apply(step, params, [v[min(i, len(v) - 1)] for v in x]) for i in range(several)]
        tensors[step.output] = out
        for name in {*step.inputs}:
            if last_use[name] == at:
                del tensors[name]
        del x, out
    return tensors[steps[-1].output]


def _instead(op: Activation, name: str, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The output for x of the activation of that name in place of `op`, with its limits and its plus.

    A soft cap is left out with a function that has no linear factor.
    """
    if name == op.function:
        return activation(op, params, x)
    learned = {key: torch.tensor(value, dtype=x.dtype, device=x.device) for key, value in TABLE[name].learned.items()}
    soft_cap = op.soft_cap if name in SOFT_CAPPED else None
    return activation(replace(op, function=name, soft_cap=soft_cap), learned, x)


def _experts(
    step: Step,
    op: Experts,
    x: Tensor,
    route: Tensor,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
    watch: Watch,
) -> list[Tensor]:
    outs = [unmixed(op, x, route) for _ in names]
    (entry,) = block_inputs(op.program)
    for one in received(step, op, x, route, weights):
        place = (f"{step.output}.", one.expert)
        results = run_variants(op.program, one.weights, {entry: one.x}, names, watch, place)
        for out, result in zip(outs, results, strict=True):
            mix(out, one, result)
    return outs
