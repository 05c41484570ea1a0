"""The effect of changing one layer's FFN: on each step of the block, and on the whole model's prediction."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block.recipe import steps
from ffncli.block.steps import Step, ffn_span, ffn_steps, id_inputs
from ffncli.errors import ExitCode, FFNError
from ffncli.models.model import Layer, Resolved, folder_of
from ffncli.run.engine.changes import Change, NoUnit, WeightChange, changed, edits_of
from ffncli.run.engine.execute import EVAL, Mode, execute, run
from ffncli.run.engine.locate import LiveFFN, live_ffn, live_weights
from ffncli.run.engine.prepare import device_of, dtype_of
from ffncli.run.measure.statistics import unravel
from ffncli.run.pretrained.capture import ForwardInput, first_tensor, forward_arguments, kept
from ffncli.run.pretrained.loading import Pretrained, cannot, demanding, offline, read_config
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import token_text, tokenizer_of, tokens_of


@dataclass(frozen=True)
class TokenChange:
    """A token with its probability and its logit before and after the change."""

    id: int
    text: str | None
    old_probability: float
    new_probability: float
    old_logit: float
    new_logit: float


@dataclass(frozen=True)
class PredictionChange:
    """The change of the prediction after the token at `position`. `tokens` are the most likely tokens before and after
    the change, sorted by descending change of probability.

    `logit_change` is the largest absolute change of a logit; `divergence` is the Kullback-Leibler divergence of the new
    distribution from the old distribution, Σ old · ln(old / new), in nats; `argmax_changed` is True if the most likely
    token has changed.
    """

    position: int
    logit_change: float
    divergence: float
    argmax_changed: bool
    tokens: tuple[TokenChange, ...]


def prediction_change(
    resolved: Resolved,
    layer: Layer,
    prompt: Prompt,
    changes: Mapping[Layer, Sequence[Change]],
    top: int,
    dtype: str | None = None,
    device: str = "cpu",
) -> PredictionChange:
    """Predict the token after the prompt, without and with the changes of FFNs, each under its layer."""
    path = folder_of(resolved, prompt.option)
    computed, device = dtype_of(dtype), device_of(device)
    with offline() as transformers:
        config, tokenizer = read_config(transformers, path), tokenizer_of(transformers, path)
        tokens = tokens_of(prompt, tokenizer, path)
        loaded = kept(resolved, transformers, path, config, computed, device, with_head=True)
        inputs = forward_arguments(loaded, tokens, tokenizer, [layer])
        old = output_of(loaded, inputs)[-1].double()
        with ExitStack() as every:
            for one, some in changes.items():
                ids = torch.tensor([[token.id] for token in inputs.of(one.stack)], device=device)
                live = live_ffn(loaded.module, resolved, one)
                every.enter_context(changed_model(loaded.module, one, live, ids, some))
            new = output_of(loaded, inputs)[-1].double()
    return _compared(old, new, len(tokens) - 1, top, tokenizer)


def output_of(loaded: Pretrained, inputs: ForwardInput, gradient: bool = False) -> Tensor:
    """Return the logits of every position, [positions, vocab], or a base model's last hidden state."""
    with torch.set_grad_enabled(gradient), demanding(loaded):
        try:
            answer = loaded.module(**inputs.arguments)
            out: Tensor = answer.logits if "logits" in answer else answer.last_hidden_state
        except (FFNError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"transformers cannot run {loaded.config.model_type} on this prompt"
            raise cannot(what, error, ExitCode.ENVIRONMENT) from None
    return out.reshape(-1, out.shape[-1])


@contextmanager
def changed_model(
    module: nn.Module, layer: Layer, live: LiveFFN, ids: Tensor | None, changes: Sequence[Change]
) -> Iterator[None]:
    """Apply the changes to a layer's FFN; they are undone at the end of the context.

    Weights are changed in place. If that is impossible, or if the gate is ablated, ffncli's steps replace the FFN;
    `ids` [tokens, 1] are the token ids of the FFN's input, needed if a table of token ids chooses the experts.
    """
    weights = live_weights(module, live.located)
    # Writing to a view of a parameter changes the model; writing to a copy (of fused or interleaved tensors) would not.
    stored = {p.untyped_storage().data_ptr() for p in module.parameters()}
    in_place = all(
        isinstance(c, WeightChange) and weights[c.name].untyped_storage().data_ptr() in stored for c in changes
    )
    if not in_place:
        block = ffn_steps(steps(layer.spec))

        def compute(x: Tensor) -> Tensor:
            given = {ffn_span(block)[0]: x, **({} if ids is None else dict.fromkeys(id_inputs(block), ids))}
            mode = Mode(edits=edits_of(changes))
            return run(*changed(block, live_weights(module, live.located), changes), given, mode)

        with replaced_ffn(module, live, compute):
            yield
        return
    before = {c.name: weights[c.name].clone() for c in changes if isinstance(c, WeightChange)}
    try:
        for change in changes:
            if isinstance(change, WeightChange):
                change.apply(weights)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in before.items():
                weights[name].copy_(tensor)


@contextmanager
def replaced_ffn(module: nn.Module, live: LiveFFN, compute: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the output of a layer's FFN by a function of its input [tokens, d_model], within the context."""
    entered: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(first_tensor(args, kwargs))

    def leave(first: bool) -> Any:
        def put(_: nn.Module, args: Any, output: Any) -> Any:
            tensor: Tensor = output[0] if isinstance(output, tuple) else output
            out = torch.zeros_like(tensor)
            if first:
                out = compute(entered[-1].reshape(-1, entered[-1].shape[-1])).view_as(tensor)
            return (out, *output[1:]) if isinstance(output, tuple) else out

        return put

    handles = [module.get_submodule(live.enters).register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [module.get_submodule(leaf).register_forward_hook(leave(not at)) for at, leaf in enumerate(live.leaves)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compared(old: Tensor, new: Tensor, position: int, top: int, tokenizer: Any) -> PredictionChange:
    before, after = old.log_softmax(-1), new.log_softmax(-1)
    named = list(dict.fromkeys([*before.topk(min(top, old.numel())).indices.tolist(),
                                *after.topk(min(top, old.numel())).indices.tolist()]))  # fmt: skip
    tokens = [
        TokenChange(
            i, token_text(tokenizer, i), float(before[i].exp()), float(after[i].exp()), float(old[i]), float(new[i])
        )
        for i in named
    ]
    tokens.sort(key=lambda token: -abs(token.new_probability - token.old_probability))
    divergence = float((before.exp() * (before - after)).nan_to_num(0.0).sum())
    return PredictionChange(
        position, float((new - old).abs().max()), max(0.0, divergence), bool(old.argmax() != new.argmax()),
        tuple(tokens),
    )  # fmt: skip


@dataclass(frozen=True)
class StepChange:
    """The change of one step: `changed` of its `values` elements differ. The largest difference is at `at`, where `old`
    becomes `new`.

    `difference` = new - old; `relative` is ‖new − old‖ / ‖old‖ over the whole step, None if all old values are 0.
    """

    name: str
    values: int
    changed: int
    at: tuple[int, ...] | None
    old: float | None
    new: float | None
    difference: float
    relative: float | None


def step_changes(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], changes: Sequence[Change]
) -> tuple[StepChange, ...]:
    """Compare a block's steps before and after the changes, in order; steps inside experts are left out. A removed unit
    is 0 in its step."""
    new_steps, new_weights = changed(steps, weights, changes)
    with torch.no_grad():
        old = (event for event in execute(steps, weights, inputs, EVAL) if event.expert is None)
        mode = Mode(edits=edits_of(changes))
        new = (event for event in execute(new_steps, new_weights, inputs, mode) if event.expert is None)
        return tuple(
            step_change(a.name, a.tensor, _without(changes, b.name, b.tensor)) for a, b in zip(old, new, strict=True)
        )


def _without(changes: Sequence[Change], name: str, tensor: Tensor) -> Tensor:
    """Return a step's values with its removed units set to 0."""
    units = [change.unit for change in changes if isinstance(change, NoUnit) and change.step == name]
    return tensor.index_fill(-1, torch.tensor(units, device=tensor.device), 0) if units else tensor


def step_change(name: str, old: Tensor, new: Tensor) -> StepChange:
    """Compare the values of a step before and after a change."""
    differ = ~((old == new) | (old.isnan() & new.isnan()))
    count = int(differ.sum())
    if not count:
        return StepChange(name, old.numel(), 0, None, None, None, 0.0, 0.0)
    gap = (new.double() - old.double()).masked_fill(~differ, 0.0)
    at = unravel(int(gap.abs().nan_to_num(torch.inf, torch.inf).argmax()), old.shape)
    size = float(old.double().norm())
    return StepChange(
        name, old.numel(), count, at, float(old[at]), float(new[at]), float(gap[at]),
        float(gap.norm()) / size if size else None,
    )  # fmt: skip
