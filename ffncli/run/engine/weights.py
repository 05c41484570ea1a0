"""Weights for a block, in canonical names and shapes: drawn as torch draws them, or read from the model's files."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffncli.block import steps as ops
from ffncli.block.activations import TABLE
from ffncli.block.cost import cost
from ffncli.block.recipe import route_of, steps
from ffncli.block.steps import Step, ffn_span, of_norm, parameters, tables
from ffncli.errors import ExitCode, FFNError, option, shown
from ffncli.models.files.checkpoint import PLAIN, Checkpoint
from ffncli.models.model import Example, Layer, Resolved
from ffncli.models.tensors import layout
from ffncli.models.tensors.matching import block_tensors
from ffncli.models.tensors.read_weights import read_weights
from ffncli.system.cgroup import ROOT
from ffncli.system.host import available_memory

Weights = Mapping[str, Tensor]


RANDOM = "random weights"
_Draw = Callable[[tuple[int, ...], int, torch.Generator], Tensor]  # (shape, fan_in, generator) → values


def layer_weights(
    resolved: Resolved,
    layer: Layer,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: str,
    integers: bool = False,
) -> tuple[tuple[Step, ...], Mapping[str, Tensor], str, tuple[str, ...]]:
    """Return (the steps whose weights are complete, the layer's weights, their origin, notes on assumptions). The
    weights are an example's, a module's, or those of the model's files; otherwise random. `integers` draws small
    integers, and raises FFNError if there are other weights."""
    block, example, notes = resolved.block(layer), resolved.example, tuple[str, ...]()
    if example and fits(example, block):
        exact = {name: torch.tensor(values, dtype=torch.float64) for name, values in example.weights.items()}
        tensors: Mapping[str, Tensor] = {name: tensor.to(device, dtype) for name, tensor in exact.items()}
        origin = "fixed weights"
    elif resolved.weights is not None:
        module = resolved.weights[layer.stack, layer.index]
        tensors, origin = {n: tensor.to(device, dtype) for n, tensor in module.items()}, "the module's own weights"
    elif (stored := stored_layer(resolved, layer, dtype, device)) is not None:
        tensors, origin, notes = stored
    else:
        tensors = random_weights(block, generator, dtype, device, small_integers if integers else _linear)
        if integers:  # a router's smaller ones: with the others, one expert would have almost all of the share
            tensors = {name: x.clamp(-1, 1) if name.startswith("router.") else x for name, x in tensors.items()}
        origin = f"{RANDOM}{', small integers' if integers else ''}, seed {generator.initial_seed()}"
    if integers and not origin.startswith(RANDOM):
        raise FFNError(f"{option('integers', True)} draws weights, but {resolved.model.name} has its own")
    block, lost = steps_with_weights(block, tensors)
    notes += lost
    if resolved.from_tensors and not resolved.model.model_type and layer.spec.moe:
        notes += ("assumed, because the files do not say: softmax over all experts, the chosen weights normalised",)
    if example and example.weights and not fits(example, block):
        notes += ("the example's weights do not fit these dimensions, so random weights are used",)
    return block, tensors, origin, notes


def fits(example: Example, block: Sequence[Step]) -> bool:
    """Return whether the example's weights match the block's parameters in names and shapes."""
    shapes = {name: tuple(torch.tensor(values).shape) for name, values in example.weights.items()}
    return shapes == {name: tuple(axis.size for axis in axes) for name, axes in parameters(block).items()}


def stored_layer(
    resolved: Resolved, layer: Layer, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Mapping[str, Tensor], str, tuple[str, ...]] | None:
    """Return (a layer's weights from the model's files, their origin, notes); None if there are no files.

    Norms whose tensors are unknown are left out.
    """
    located = located_weights(resolved, layer)
    if located is None or resolved.checkpoint is None:
        return None
    assumed = tuple(dict.fromkeys(item.slice.assumed for item in located if item.slice.assumed))
    doubts = tuple(f"assumed, because the files do not say: {text}" for text in assumed)
    packed = " and ".join(packed_formats(located))
    origin = f"weights of {layer.stack} layer {layer.index}" + (f", unpacked from {packed}" if packed else "")
    weights = read_located(resolved.checkpoint, located, dtype, device, resolved.quantization)
    for name in tables(steps(layer.spec)):
        least, most, experts = int(weights[name].min()), int(weights[name].max()), route_of(layer.spec).experts.size
        if not 0 <= least <= most < experts:
            what = f"{shown(resolved.source)}: the table of {layer.stack} layer {layer.index} lists experts {least} to"
            raise FFNError(f"{what} {most}", f"the layer has experts 0 to {experts - 1}")
    return weights, origin, doubts


def steps_with_weights(
    block: tuple[Step, ...], weights: Mapping[str, Tensor]
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """Return (the block's steps, except norms with missing weights; notes).

    If the norm before the FFN is missing, only the FFN remains, because the FFN's input would be the missing norm's
    output.
    """
    lost = [s.output for s in block if of_norm(s) and s.parameters().keys() - weights.keys()]
    if not lost:
        return block, ()
    start, end = ffn_span([step for step in block if step.output not in lost])
    names = [step.output for step in block]
    first, last = names.index(start) + 1 if start in names else 0, names.index(end) + 1
    if {*lost} & {*names[:first]}:
        where = f"the trace begins at ffn_input, which is '{start}', and ends at ffn_output"
        return block[first:last], (f"this file does not describe the norm before the FFN: {where}",)
    where = f"the trace ends at ffn_output, which is '{end}'"
    return block[:last], (f"this file does not describe the norm after the FFN: {where}",)


def random_weights(
    steps: Sequence[Step],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    linear: _Draw | None = None,
) -> dict[str, Tensor]:
    """Draw weights in step order, with the initialisation of nn.Linear, nn.LayerNorm and torch's other modules.

    With a generator seeded with S, the tensors equal those of a module that is built after `torch.manual_seed(S)` and
    declares the same Linears in the same order (experts one after the other, each in the order of its program). Tensors
    are drawn in float32 on the generator's device and cast there. `linear` draws the tensors of a Linear another way.
    """
    if generator.device.type == "cpu":
        advice = "take a smaller block" + ("" if dtype.itemsize <= 2 else f" or {option('dtype', 'bf16')}")
        require_memory(cost(steps).params * dtype.itemsize, advice=advice)
    drawn = {
        name: tensor.to(device)
        for step in steps
        for name, tensor in _draw(step, generator, dtype, linear or _linear).items()
    }
    # Draw tables after all weights, so that a block has the same weights with or without a table.
    return drawn | {name: tensor.to(device) for step in steps for name, tensor in _tables(step, generator).items()}


def _tables(step: Step, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a route's table: consecutive experts for each token id, starting at a random expert."""
    if not isinstance(step.op, ops.Route) or not step.op.lookup:
        return {}
    shape = (step.op.lookup.size, 1)
    first = torch.randint(step.op.experts.size, shape, generator=generator, device=generator.device)
    (name,) = step.tables()
    return {name: (first + torch.arange(step.op.top_k, device=generator.device)) % step.op.experts.size}


def _draw(step: Step, generator: torch.Generator, dtype: torch.dtype, linear: _Draw) -> dict[str, Tensor]:
    op, there = step.op, generator.device
    if isinstance(op, ops.Experts):
        together = {
            step.prefix + name: torch.empty([axis.size for axis in axes], dtype=dtype, device=there)
            for name, axes in op.parameters().items()
        }
        for e in range(op.experts.size):
            for inner in op.program:
                for name, tensor in _draw(inner, generator, dtype, linear).items():
                    place = together[step.prefix + name]
                    (place if op.is_common(name) else place[e]).copy_(tensor)
        return together
    shapes = {name: tuple(axis.size for axis in axes) for name, axes in step.parameters().items()}
    if isinstance(op, ops.Linear):
        return {name: linear(shape, op.into.size, generator).to(dtype) for name, shape in shapes.items()}
    first: Mapping[str, float] = {"factor": 1.0}
    if isinstance(op, ops.Norm):
        first = {"weight": 0.0 if op.weight == "one_plus" else 1.0}
    elif isinstance(op, ops.Activation):
        first = TABLE[op.function].learned
    values = {name: first.get(name.rpartition(".")[2], 0.0) for name in shapes}  # a bias, a correction and so on are 0
    return {name: torch.full(shapes[name], value, dtype=dtype, device=there) for name, value in values.items()}


def _linear(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Initialise like nn.Linear: weight Kaiming-uniform with a = √5, bias uniform, both within ±1/√fan_in."""
    tensor = torch.empty(shape, device=generator.device)
    if len(shape) == 2:
        torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    else:
        torch.nn.init.uniform_(tensor, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator)
    return tensor


def small_integers(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Draw integers from -3 to 3, with which sums are done in one's head."""
    return torch.randint(-3, 4, shape, generator=generator, device=generator.device).float()


def located_weights(resolved: Resolved, layer: Layer) -> tuple[layout.Located, ...] | None:
    """Locate a layer's parameters in the model's files, except missing norms; None if there are no files."""
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        return None
    named = block_tensors(resolved, checkpoint, layer.stack, layer.index)
    if named is None:
        raise FFNError(f"{checkpoint.where}: no FFN tensors of the {layer.stack}", "is the file complete?")
    return layout.locate(named, layer.spec)


def packed_formats(located: Sequence[layout.Located]) -> tuple[str, ...]:
    """Return the packed formats of the tensors (`fp8-block128`, `Q4_0`), in order; empty for plain floats."""
    return tuple(dict.fromkeys(item.slice.format for item in located if item.slice.format not in ("", *PLAIN)))


def packed_parameters(resolved: Resolved, layer: Layer) -> dict[str, str]:
    """Return a mapping from each of a layer's parameters that the files store packed to its format."""
    located = located_weights(resolved, layer) or ()
    return {item.parameter: name for item in located for name in packed_formats([item])}


def read_located(
    checkpoint: Checkpoint,
    located: Sequence[layout.Located],
    dtype: torch.dtype,
    device: str = "cpu",
    quantization: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Read tensors that were already located; `quantization` is the config's quantization_config."""
    require_memory(sum(math.prod(axis.size for axis in item.axes) for item in located) * dtype.itemsize)
    return read_weights(checkpoint, tuple(located), dtype, device, quantization)


def require_memory(
    size: int,
    what: str = "the block's weights",
    advice: str = f"take a smaller block or {option('dtype', 'bf16')}",
    root: Path = ROOT,
) -> None:
    """Raise FFNError (exit 3) if `size` bytes exceed this machine's free memory, instead of letting the OOM killer end
    the process.

    `root` is the root of the file system from which memory figures are read.
    """
    available = available_memory(root)
    if available is not None and size > available:
        need, free = f"{size / 1e9:,.1f} GB", f"{available / 1e9:,.1f} GB"
        raise FFNError(f"{what} would need {need}, but only {free} of memory is free", advice, ExitCode.ENVIRONMENT)
