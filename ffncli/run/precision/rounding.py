"""A layer's FFN in float64, with some of its tensors rounded to a format: the matrices, and what they read.

Only the FFN's own matrices are rounded (gate, up and down; in experts and in shared experts too), never the router, so
that rounding does not change which experts a token gets.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.formats import Format
from ffncli.block.steps import Experts, Linear, Step, block_inputs, ffn_steps, walk
from ffncli.errors import FFNError
from ffncli.run.engine.execute import Mode, execute, run
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.weights import require_memory
from ffncli.run.precision.question import What
from ffncli.run.quantize.quantized import Quantized, quantize

TENSORS = ("x", "W1", "W3", "hidden", "W2")
INPUTS = ("x", "hidden")


@dataclass(frozen=True)
class ExactLayer:
    """A layer's FFN, from ffn_input to ffn_output, unrounded: in float64, or inside a model in the model's dtype."""

    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]

    def tensors(self, what: What) -> tuple[str, ...]:
        """Return the names of the tensors that are rounded: all matrices, all of their inputs, or both."""
        gated = any(name == "W3" for name in matrices(self.steps).values())
        names = [name for name in TENSORS if gated or name != "W3"]
        return tuple(name for name in names if what == "both" or (name in INPUTS) == (what == "inputs"))


def exact_layer(ready: Prepared) -> ExactLayer:
    """Convert a prepared layer to float64; what comes before the FFN, such as a norm, runs in float64 too."""
    require_memory(3 * 8 * sum(t.numel() for t in ready.weights.values()), "the layer's weights in float64")
    weights = {name: _double(tensor) for name, tensor in ready.weights.items()}
    inputs = {name: _double(tensor) for name, tensor in ready.inputs.items()}
    block = ffn_steps(ready.steps)
    wanted = block_inputs(block)
    if any(name not in inputs for name in wanted):
        with torch.no_grad():
            for event in execute(ready.steps, weights, inputs):
                inputs[event.name] = event.tensor
                if all(name in inputs for name in wanted):
                    break
    return ExactLayer(block, weights, {name: inputs[name] for name in wanted})


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def matrices(steps: Sequence[Step]) -> dict[str, str]:
    """Return the parameters to round, with their names in formulas: {"gate.weight": "W1", ...}. In a mixture, W1 is the
    name of every expert's W1."""
    names: dict[str, str] = {}
    labels = _labels(steps)
    for step in steps:
        inner, prefix = (step.op.program, step.prefix) if isinstance(step.op, Experts) else ((step,), "")
        for one in inner:
            if kind := _kind(one):
                names[f"{prefix}{one.output}.weight"] = labels[kind]
    return names


def _labels(steps: Sequence[Step]) -> dict[str, str]:
    """Return the names in formulas of gate, up and down."""
    gated = any(_kind(step) == "gate" for _, step in walk(steps))
    return {"gate": "W1", "up": "W3" if gated else "W1", "down": "W2"}


def _kind(step: Step) -> str:
    """Return gate, up or down for a Linear of the FFN itself, else an empty string."""
    kind = step.output.rpartition(".")[2]
    return kind if isinstance(step.op, Linear) and kind in ("gate", "up", "down") else ""


def read_by(step: Step) -> str:
    """Return the name of the tensor that a step reads if it is one of those to round: x or hidden."""
    return {"": "", "down": "hidden"}.get(_kind(step), "x")


def read_in(name: str, step: Step) -> str:
    """Return the name of what a step reads, given the step's printed name: `experts.3.x` for `experts.3.gate`."""
    read, (within, dot, _) = read_by(step), name.rpartition(".")
    return read and f"{within}{dot}{read}"


def is_input(name: str) -> bool:
    """Return whether a name means what matrices read, such as `hidden` and `experts.3.x`."""
    return name.rpartition(".")[2] in INPUTS


def for_inputs(form: Format) -> Format:
    """Return the format for the inputs of a matrix: where its tiles share scales, the values of one token do."""
    return replace(form, shared=form.shared.replace("block", "g")) if form.shared.startswith("block") else form


def rounded(tensor: Tensor, form: Format) -> Tensor:
    """Return a tensor with every value rounded to the format; the experts of a stack are rounded one by one."""
    values = [one.dequantize() for one in quantized(tensor, form)]
    return (torch.stack(values) if tensor.dim() > 2 else values[0]).to(tensor.dtype)


def quantized(tensor: Tensor, form: Format) -> list[Quantized]:
    """Quantize a matrix, or each matrix of a stack."""
    return [quantize(one, form) for one in matrices_in(tensor)]


def matrices_in(tensor: Tensor) -> list[Tensor]:
    """Return the matrices of a stack [experts, out, in], or the matrix itself."""
    return [*tensor] if tensor.dim() > 2 else [tensor]


class RoundedLayer:
    """A layer in a format: `output` runs it with any choice of its tensors rounded."""

    def __init__(self, layer: ExactLayer, form: Format, names: Collection[str]) -> None:
        """Round the matrices among `names`; raise FFNError, with the matrix's name, if the format does not fit."""
        self.layer, self.form, self.names = layer, form, tuple(names)
        self._weights: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for parameter, name in matrices(layer.steps).items():
            if name in names:
                try:
                    self._weights[name][parameter] = rounded(layer.weights[parameter], form)
                except FFNError as error:
                    raise error.within(name) from None

    @torch.no_grad()
    def output(
        self, chosen: Collection[str], sums: torch.dtype | None = None, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the layer's output with the tensors `chosen` rounded. `sums` is the dtype in which the matrices add up
        their products (`added_up`); None: torch's own sums. `inputs` replace the layer's."""
        weights = dict(self.layer.weights)
        for name in chosen:
            weights |= self._weights[name]

        def linear(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            name = read_by(step)
            x = self.read(name, x) if name in chosen else x
            if not name or sums is None:
                return functional.linear(x, weight, bias)
            out = added_up(x, weight, sums)
            return out if bias is None else out + bias

        given = self.layer.inputs if inputs is None else inputs
        return run(self.layer.steps, weights, given, Mode(linear=linear))

    def read(self, name: str, x: Tensor) -> Tensor:
        """Return an input of a matrix, rounded, as one row per token."""
        try:
            return rounded_input(x, self.form)
        except FFNError as error:
            raise error.within(name) from None


def rounded_input(x: Tensor, form: Format) -> Tensor:
    """Return what a matrix reads, [..., channels], rounded token by token."""
    return rounded(x.flatten(0, -2), for_inputs(form)).reshape(x.shape)


@torch.no_grad()
def mixed_output(layer: ExactLayer, formats: Mapping[str, Format], inputs: bool) -> Tensor:
    """Return a layer's output with a format for each matrix, such as {"W1": nvfp4}; the others are exact. With
    `inputs`, what a matrix reads is rounded to that matrix's format too."""
    weights, labels = dict(layer.weights), _labels(layer.steps)
    for parameter, name in matrices(layer.steps).items():
        if name in formats:
            weights[parameter] = rounded(weights[parameter], formats[name])

    def linear(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        form = formats.get(labels.get(_kind(step), "")) if inputs else None
        return functional.linear(x if form is None else rounded_input(x, form), weight, bias)

    return run(layer.steps, weights, layer.inputs, Mode(linear=linear))


def added_up(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ, with products added one by one, from channel 0 upwards, and each sum rounded to `dtype`."""
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=dtype, device=x.device)
    for channel in range(x.shape[-1]):
        total = (total.to(x.dtype) + x[..., channel, None] * weight[:, channel]).to(dtype)
    return total.to(x.dtype)


@torch.no_grad()
def exact_output(layer: ExactLayer) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the exact output, and what the layer's matrices read [..., channels], by name: `x`, `hidden`, `shared.x`,
    and for each expert that gets a token, `experts.3.hidden`, with a row per token."""
    output, last, read = torch.empty(0), torch.empty(0), dict[str, Tensor]()

    def linear(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal last
        last = x
        return functional.linear(x, weight, bias)

    for event in execute(layer.steps, layer.weights, layer.inputs, Mode(linear=linear)):
        output = event.tensor
        if name := read_in(event.name, event.step):
            read.setdefault(name, last)  # gate and up read the same
    return output, read
