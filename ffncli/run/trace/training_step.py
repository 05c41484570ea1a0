"""One training step of a traced block: the loss, every gradient and, with a learning rate, the new weights and the new
loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffncli.block.steps import Linear, Step, block_inputs, ffn_steps
from ffncli.block.symbols import weight_symbol
from ffncli.errors import FFNError, option, shown
from ffncli.kernels.choice import parse
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.backward import ForwardPass, Gradient, backward, forward
from ffncli.run.engine.inputs import given_values
from ffncli.run.engine.prepare import Prepared, Token
from ffncli.run.engine.trace import excerpt
from ffncli.run.engine.weights import packed_parameters
from ffncli.run.measure.statistics import statistics
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.trace.step_question import StepOptions
from ffncli.system.notebook import record_table
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

_MOST_LINES = 8


@dataclass(frozen=True)
class GradientRecord:
    """The gradient of the loss with respect to the tensor `name`: `up`, `x`, or a weight such as `up.weight`, in
    torch's layout. `symbol` = `formula` is printed: `dW1 = xᵀ · d up`, whose shape is that of the formula's W1.

    Statistics are those of a step's record; `norm` is the L2 norm of the finite values. Inside an expert, `tokens` are
    the flat indices of its tokens, one per row.
    """

    name: str
    symbol: str
    formula: str
    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float
    zeros: int
    nan: int
    inf: int
    values: Any
    values_index: tuple[tuple[int, ...], ...]
    weight: bool
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class NewWeight:
    """A weight after one step of gradient descent, `new` = `formula`: `W1 - 0.1 · dW1`; values in torch's layout."""

    name: str
    symbol: str
    formula: str
    shape: tuple[int, ...]
    values: Any
    values_index: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, repr=False, eq=False)
class TrainingStep:
    """A backward pass, last step first, and one step of gradient descent if there is a learning rate `lr`.

    `step["up.weight"]` is a complete gradient. `formula` defines the `loss`. `loss_after` is the loss with
    `new_weights`, of the same inputs (and dropout masks); `change` = loss_after - loss, and `predicted_change` is what
    the first order predicts: -lr · Σ gradient² over all weights. `weights` are the complete new weights by name.
    """

    objective: str
    formula: str
    loss: float
    lr: float | None
    loss_after: float | None
    change: float | None
    predicted_change: float | None
    gradients: tuple[GradientRecord, ...]
    new_weights: tuple[NewWeight, ...] = ()
    notes: tuple[str, ...] = ()
    tensors: Mapping[str, Gradient] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    ran: ForwardPass | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Return the complete gradient of a step, an input or a weight, by the tensor's name."""
        self.gradient(name)
        return self.tensors[name].tensor

    def __iter__(self) -> Any:
        """Iterate over the names of the gradients."""
        return (record.name for record in self.gradients)

    def __len__(self) -> int:
        return len(self.gradients)

    def gradient(self, name: str) -> GradientRecord:
        """Return the record of a gradient."""
        for record in self.gradients:
            if record.name == name:
                return record
        raise FFNError(f"no gradient of {shown(name)}", "there are those of " + ", ".join(self))

    @package_errors()
    def frame(self, name: str | None = None) -> DataFrame:
        """Return one row per gradient (its statistics), or with a `name` one row per value: `row`, `column`, `value`;
        the columns of a weight are its inputs. An expert's index is in the row: row = expert · rows + row."""
        import pandas

        if name is None:
            left_out = ("values", "values_index", "tokens")
            return pandas.DataFrame([{k: v for k, v in vars(r).items() if k not in left_out} for r in self.gradients])
        tensor = self[name]
        flat = tensor.reshape(-1, tensor.shape[-1]).double().cpu()
        rows, columns = flat.shape
        places = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
        named = {"row": places[0].numpy(), "column": places[1].numpy(), "value": flat.flatten().numpy()}
        return pandas.DataFrame(named)

    def __repr__(self) -> str:
        after = "" if self.loss_after is None else f" → {self.loss_after:.6g} with lr {self.lr:g}"
        lines = [f"<TrainingStep: {self.objective} {self.loss:.6g}{after}"]
        lines += [f"  {one.symbol} = {one.formula}" for one in self.gradients[:_MOST_LINES]]
        more = len(self.gradients) - _MOST_LINES
        return "\n".join(lines + ([f"  … {more} more gradients"] if more > 0 else [])) + ">"

    def _repr_html_(self) -> str:
        """Return a table for notebooks, with a row per gradient."""
        names = ("gradient", "formula", "shape", "min", "max", "norm")
        rows = [(one.symbol, one.formula, [*one.shape], one.min, one.max, one.norm) for one in self.gradients]
        return record_table(repr(self)[1:].splitlines()[0], names, rows)


# --- the loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """A loss of the tensor `reads`: its name, its formula, the formula of its gradient, and a function that returns
    (loss, gradient) in float64."""

    name: str
    reads: str
    formula: str
    of_output: str
    compute: Callable[[Tensor], tuple[float, Tensor]]


def objective_of(options: StepOptions, steps: Sequence[Step], shape: Callable[[str], tuple[int, ...]]) -> Objective:
    """Return the loss that the options request; `shape` returns the shape of a step's tensor.

    `cross-entropy` reads the logits of a final layer, if there is one, otherwise the block's output as logits over
    d_model. Raises FFNError for a target that does not fit.
    """
    kind, last = options.loss or "sum", steps[-1].output
    if kind == "sum":
        return Objective(kind, last, f"Σ {last}", "1", lambda y: (float(y.sum()), torch.ones_like(y)))
    if kind == "mse":
        wanted = shape(last)
        target = torch.zeros(wanted, dtype=torch.float64)
        if options.target is not None:
            target = _fitted(given_values(options.target, "target").double(), wanted, last)
        count = target.numel()

        def squares(y: Tensor) -> tuple[float, Tensor]:
            off = y - target.to(y.device)
            return float(off.square().mean()), 2 * off / count

        return Objective(kind, last, f"mean(({last} - target)²)", f"2 · ({last} - target) / {count}", squares)
    reads = "logits" if any(step.output == "logits" for step in steps) else last
    classes = _classes(options.target, shape(reads), reads)

    def entropy(y: Tensor) -> tuple[float, Tensor]:
        logs = y.log_softmax(-1).flatten(0, -2)
        at = classes.to(y.device)[:, None]
        gradient = logs.exp().scatter_add(-1, at, -torch.ones_like(logs[:, :1])) / len(logs)
        return float(-logs.gather(-1, at).mean()), gradient.reshape(y.shape)

    text = f"(softmax({reads}) - onehot(target)) / {len(classes)}"
    return Objective(kind, reads, f"mean(-log softmax({reads})[target])", text, entropy)


def _fitted(target: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if target.numel() != prod(shape) or (target.dim() > 1 and tuple(target.shape) != shape):
        has = f"has shape {list(target.shape)}" if target.dim() > 1 else f"has {target.numel()} values"
        raise FFNError(f"{option('target')} {has}, but {name} has shape {list(shape)}")
    return target.reshape(shape)


def _classes(target: Any, shape: tuple[int, ...], name: str) -> Tensor:
    """Return one class index per token of a tensor [..., classes]."""
    tokens = prod(shape[:-1])
    what = f"{option('target')}: cross-entropy needs one class from 0 to {shape[-1] - 1} for each of {tokens} tokens"
    if target is None:
        raise FFNError(what, f"such as {option('target', ','.join(['0'] * min(tokens, 4)))}")
    values = given_values(target, "target").double().flatten()
    if values.numel() != tokens:
        raise FFNError(f"{what}, got {values.numel()} values")
    wrong = ~((values >= 0) & (values < shape[-1]) & (values == values.floor()))
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise FFNError(f"{what}, got {values[first].item():g} for token {first}", f"the classes are those of {name}")
    return values.long()


# --- the step ---------------------------------------------------------------------------------------------------------


def training_step(
    model: Resolved, prepared: Prepared, options: StepOptions, show: int | None = 8,
    inside: frozenset[int] | None = frozenset(), mask_state: Tensor | None = None,
) -> TrainingStep:  # fmt: skip
    """Go back through a prepared block, and take one step if there is a learning rate.

    `show` and `inside` are as in `trace`; `mask_state` is the generator's state before the dropout masks were drawn.
    Raises FFNError for a target that does not fit, and for a step of packed weights.
    """
    packed = packed_parameters(model, prepared.layer)
    notes = _packed_notes(packed, options.lr)
    ran = _run(prepared, prepared.weights, mask_state)
    objective = objective_of(options, prepared.steps, lambda name: tuple(ran.tensors[name].shape))
    output = ran.tensors[objective.reads]
    loss, gradient = objective.compute(output.double())
    upstream = {objective.reads: (objective.of_output, gradient.to(output.dtype))}
    if options.kernel is None:
        gradients: Iterable[Gradient] = backward(prepared.steps, ran, upstream)
    else:
        gradients = kernel_gradients(prepared, options.kernel, upstream[objective.reads][1])
    kept = {one.name: one for one in gradients if one.name not in packed}
    records = tuple(record_of(one, show) for one in kept.values() if _shown(one, inside))
    step = TrainingStep(
        objective.name, objective.formula, loss, options.lr, None, None, None, records, (), notes, kept, {}, ran
    )
    if options.lr is None:
        return step

    def loss_of(weights: Mapping[str, Tensor]) -> float:
        return objective.compute(_run(prepared, weights, mask_state).tensors[objective.reads].double())[0]

    return stepped(step, prepared, loss_of, show)


def model_step(
    model: Resolved, prompt: Prompt, prepared: Prepared, options: StepOptions, show: int | None = 8,
    inside: frozenset[int] | None = frozenset(), dtype: str | None = None, device: str = "cpu",
) -> TrainingStep:  # fmt: skip
    """Go back through a layer's FFN from the loss of the model's next tokens, and take one step of its weights alone if
    there is a learning rate. The new loss is that of the model with our steps in place of the FFN."""
    from ffncli.run.pretrained.next_tokens import gradient_of_output, next_tokens

    packed = packed_parameters(model, prepared.layer)
    notes = _packed_notes(packed, options.lr)
    with next_tokens(model, [prepared.layer], prompt, dtype, device) as read:
        ran = _run(prepared, prepared.weights, None)
        output = gradient_of_output(prepared.steps, read.upstream[prepared.layer])
        kept = {one.name: one for one in backward(prepared.steps, ran, output) if one.name not in packed}
        records = tuple(record_of(one, show) for one in kept.values() if _shown(one, inside))
        text = f"mean(-log softmax(logits)[next token]) over {read.count} tokens"
        step = TrainingStep(
            "next-tokens", text, read.loss, options.lr, None, None, None, records, (), notes, kept, {}, ran
        )
        if options.lr is None:
            return step
        before = read.loss_with(prepared.layer, prepared.weights)
        return stepped(step, prepared, lambda w: step.loss + read.loss_with(prepared.layer, w) - before, show)


@dataclass(frozen=True)
class LayerGradients:
    """The L2 norms of one layer's gradients: of its FFN's output and input over all tokens, and of each weight."""

    stack: str
    layer: int
    output_norm: float
    input_norm: float
    weight_norms: Mapping[str, float]


def layer_gradients(
    model: Resolved, layers: Sequence[Layer], prompt: Prompt, dtype: str | None = None, device: str = "cpu"
) -> tuple[float, tuple[LayerGradients, ...]]:
    """Return (the loss of the model's next tokens, the norms of the gradients of every layer's FFN)."""
    from ffncli.run.pretrained.capture import prepared as ready_layer
    from ffncli.run.pretrained.next_tokens import gradient_of_output, next_tokens

    rows = []
    with next_tokens(model, layers, prompt, dtype, device) as read:
        ids = read.arguments["input_ids"].flatten().tolist()
        tokens = tuple(Token(at, number) for at, number in enumerate(ids))
        for layer in layers:
            x, upstream = read.entering[layer], read.upstream[layer]
            ready = ready_layer(model, layer, tokens, x, x, (), dtype, device)
            ran = forward(ready.steps, ready.weights, ready.inputs)
            start, packed = next(iter(ready.inputs)), packed_parameters(model, layer)
            norms = {
                one.name: float(one.tensor.double().norm())
                for one in backward(ready.steps, ran, gradient_of_output(ready.steps, upstream))
                if one.name == start or (one.weight and one.name not in packed)
            }
            of_input = norms.pop(start, 0.0)
            rows.append(LayerGradients(layer.stack, layer.index, float(upstream.double().norm()), of_input, norms))
        return read.loss, tuple(rows)


def stepped(
    step: TrainingStep, prepared: Prepared, loss_of: Callable[[Mapping[str, Tensor]], float], show: int | None
) -> TrainingStep:
    """Return the same step with the new weights, the loss that `loss_of` returns for them, and the predicted change."""
    assert step.lr is not None
    rate = step.lr
    for linear in (one for one in prepared.steps if isinstance(one.op, Linear) and one.op.tied):
        what = f"{option('lr', rate)}: {linear.output} shares a tensor with another step, which gets both gradients"
        raise FFNError(what, f"leave out {option('lr')}")
    weights = dict(prepared.weights)
    changed = {name: one for name, one in step.tensors.items() if one.weight and name in weights}
    for name, one in changed.items():
        weights[name] = weights[name].add(one.tensor, alpha=-rate)
    after = loss_of(weights)
    predicted = -rate * sum(float(one.tensor.double().square().sum()) for one in changed.values())
    new = [
        NewWeight(
            name, one.symbol[1:], f"{one.symbol[1:]} - {rate:g} · {one.symbol}", tuple(weights[name].shape),
            *reversed(excerpt(weights[name], show)),
        )
        for name, one in changed.items()
    ]  # fmt: skip
    return replace(
        step, loss_after=after, change=after - step.loss, predicted_change=predicted, new_weights=tuple(new),
        weights=weights,
    )  # fmt: skip


def record_of(one: Gradient, show: int | None) -> GradientRecord:
    """Return the record of a gradient, with an excerpt of its values."""
    index, values = excerpt(one.tensor, show)
    summary = statistics(one.tensor)
    finite = one.tensor.double().nan_to_num(0.0, 0.0, 0.0)
    return GradientRecord(
        one.name, one.symbol, one.formula, tuple(one.tensor.shape), str(one.tensor.dtype).removeprefix("torch."),
        summary.min, summary.max, summary.mean, summary.std, float(finite.norm()), summary.zeros, summary.nan,
        summary.inf, values, index, one.weight, None if one.tokens is None else tuple(one.tokens.tolist()),
    )  # fmt: skip


def _shown(one: Gradient, inside: frozenset[int] | None) -> bool:
    return one.tokens is None or inside is None or int(one.name.split(".")[1]) in inside


def _run(prepared: Prepared, weights: Mapping[str, Tensor], mask_state: Tensor | None) -> ForwardPass:
    """Run the block again, with the dropout masks of its first run."""
    if mask_state is not None and prepared.mode.generator is not None:
        prepared.mode.generator.set_state(mask_state)
    return forward(prepared.steps, weights, prepared.inputs, prepared.mode)


def _packed_notes(packed: Mapping[str, str], lr: float | None) -> tuple[str, ...]:
    if not packed:
        return ()
    names = ", ".join(packed)
    kinds = " and ".join(dict.fromkeys(packed.values()))
    if lr is not None:
        what = f"{option('lr', lr)}: {names} are packed as {kinds}, and a step cannot change codes"
        raise FFNError(what, f"leave out {option('lr')}, or give a source with plain weights")
    return (f"{names}: codes of {kinds} have no gradient, so only the gradients of inputs pass through them",)


def kernel_gradients(prepared: Prepared, kernel: str, upstream: Tensor) -> list[Gradient]:
    """Return the gradients that a kernel's own backward pass computes, in a process of its own: of the weights, in
    reverse order, and of the input.

    Raises FFNError if the block is more than an FFN, and if the kernel refuses it or fails.
    """
    from ffncli.run.user.hosted import KernelFailure, hosted

    block, (entry, *others) = prepared.steps, block_inputs(prepared.steps)
    if ffn_steps(block) != tuple(block) or others:
        what = f"{option('kernel')} computes an FFN, but this block is more than that"
        raise FFNError(what, f"give dimensions such as 512x2048:swiglu, without {option('norm')}")
    choice = parse(kernel)
    x, weights = prepared.inputs[entry].flatten(0, -2), prepared.weights
    names = (*(name for name in reversed([*weights]) if weights[name].is_floating_point()), "x")
    with torch.no_grad(), hosted(choice, "cpu", torch.get_num_threads()) as host:
        try:
            refusal = host.load(prepared.layer.spec, block, weights, x.dtype, len(x), True)
            if refusal is not None:
                raise FFNError(f"{choice.label}: {refusal}", "give a block that the kernel supports")
            given = host.gradients(x, upstream.flatten(0, -2), names) if host.trains else None
        except KernelFailure as failure:
            raise FFNError(f"{choice.label}: {failure}") from None
        if given is None:
            raise FFNError(f"{choice.label} has a forward pass only", "its output requires no gradient")
        label = host.name
    parts = {name: name.rpartition(".") for name in weights}
    symbols = {name: "d" + weight_symbol(owner, kind, block) for name, (owner, _, kind) in parts.items()}
    return [
        Gradient(
            entry if name == "x" else name, f"d {entry}" if name == "x" else symbols[name], f"backward of {label}",
            given.by_name[name].reshape(prepared.inputs[entry].shape if name == "x" else weights[name].shape),
            weight=name != "x",
        )
        for name in names
    ]  # fmt: skip
