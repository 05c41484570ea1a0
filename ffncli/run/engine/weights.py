"""Weights for a block: drawn as torch draws them, or read from the model's files. Canonical names and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.block.cost import cost
from ffncli.block.steps import Activation, Experts, Linear, Norm, Route, Step
from ffncli.errors import ExitCode, FFNError
from ffncli.models.files.checkpoint import PLAIN, Checkpoint
from ffncli.models.model import Layer, Resolved
from ffncli.models.tensors import layout
from ffncli.models.tensors.matching import block_tensors
from ffncli.models.tensors.read_weights import read_weights
from ffncli.system.cgroup import ROOT
from ffncli.system.host import available_memory

Weights = Mapping[str, Tensor]


def random_weights(
    steps: Sequence[Step], generator: torch.Generator, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """Weights as nn.Linear, nn.LayerNorm and torch's other modules initialise theirs, in step order.

    With `torch.manual_seed(S)` and a generator of seed S, a module that declares the same Linears in the same order has
    the same tensors (experts one after the other, each with its own program's order). Drawn in float32 on the
    generator's device, where each tensor is then cast. Raises FFNError (exit 3) if this machine's memory is too small.
    """
    if generator.device.type == "cpu":
        advice = "take a smaller block" + ("" if dtype.itemsize <= 2 else " or --dtype bf16")
        require_memory(cost(steps).params * dtype.itemsize, advice=advice)
    drawn = {name: tensor.to(device) for step in steps for name, tensor in _draw(step, generator, dtype).items()}
    return drawn | {name: tensor.to(device) for step in steps for name, tensor in _tables(step, generator).items()}


def _tables(step: Step, generator: torch.Generator) -> dict[str, Tensor]:
    """A route's table: for each token id, experts that follow each other, from a random one on."""
    if not isinstance(step.op, Route) or not step.op.lookup:
        return {}
    shape = (step.op.lookup.size, 1)
    first = torch.randint(step.op.experts.size, shape, generator=generator, device=generator.device)
    (name,) = step.tables()
    return {name: (first + torch.arange(step.op.top_k, device=generator.device)) % step.op.experts.size}


def _draw(step: Step, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    op, there = step.op, generator.device
    if isinstance(op, Experts):
        together = {
            step.prefix + name: torch.empty([axis.size for axis in axes], dtype=dtype, device=there)
            for name, axes in op.parameters().items()
        }
        for e in range(op.experts.size):
            for inner in op.program:
                for name, tensor in _draw(inner, generator, dtype).items():
                    place = together[step.prefix + name]
                    (place if op.is_common(name) else place[e]).copy_(tensor)
        return together
    shapes = {name: tuple(axis.size for axis in axes) for name, axes in step.parameters().items()}
    if isinstance(op, Linear):
        return {name: _linear(shape, op.into.size, generator).to(dtype) for name, shape in shapes.items()}
    if isinstance(op, Norm):
        ones = {"weight": 0.0 if op.weight == "one_plus" else 1.0, "bias": 0.0}
        return {name: _filled(shape, ones[name.rpartition(".")[2]], dtype, there) for name, shape in shapes.items()}
    if isinstance(op, Activation):
        first = TABLE[op.function].learned
        return {name: _filled(shape, first[name.rpartition(".")[2]], dtype, there) for name, shape in shapes.items()}
    first = {"factor": 1.0}  # a correction is 0
    return {n: _filled(shape, first.get(n.rpartition(".")[2], 0.0), dtype, there) for n, shape in shapes.items()}


def _filled(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def _linear(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """nn.Linear: weight Kaiming-uniform with a = √5, bias uniform, both within ±1/√fan_in."""
    tensor = torch.empty(shape, device=generator.device)
    if len(shape) == 2:
        torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    else:
        torch.nn.init.uniform_(tensor, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator)
    return tensor


def located_weights(resolved: Resolved, layer: Layer) -> tuple[layout.Located, ...] | None:
    """Where one layer's parameters are in the model's files, without norms it does not describe; None without files.

    Raises FFNError naming what is missing.
    """
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        return None
    named = block_tensors(resolved, checkpoint, layer.stack, layer.index)
    if named is None:
        raise FFNError(f"{checkpoint.where}: no FFN tensors of the {layer.stack}", "is the file complete?")
    return layout.locate(named, layer.spec)


def packed_formats(located: Sequence[layout.Located]) -> tuple[str, ...]:
    """The packed formats among them (`fp8-block128`, `Q4_0`), in order; none for plain floats."""
    return tuple(dict.fromkeys(item.slice.format for item in located if item.slice.format not in ("", *PLAIN)))


def stored_weights(
    resolved: Resolved, layer: Layer, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor] | None:
    """One layer's weights from the model's files, without reading other tensors; None if the model has no files.

    A norm whose tensors are unknown is left out.
    """
    located = located_weights(resolved, layer)
    if located is None or resolved.checkpoint is None:
        return None
    return read_located(resolved.checkpoint, located, dtype, device, resolved.quantization)


def read_located(
    checkpoint: Checkpoint,
    located: Sequence[layout.Located],
    dtype: torch.dtype,
    device: str = "cpu",
    quantization: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """The same for tensors that are already located; `quantization` is the config's quantization_config.

    Raises FFNError (exit 3) if memory is too small.
    """
    require_memory(sum(math.prod(axis.size for axis in item.axes) for item in located) * dtype.itemsize)
    return read_weights(checkpoint, tuple(located), dtype, device, quantization)


def require_memory(
    size: int,
    what: str = "the block's weights",
    advice: str = "take a smaller block or --dtype bf16",
    root: Path = ROOT,
) -> None:
    """Raises FFNError (exit 3) if `size` bytes exceed this machine's free memory: better than the OOM killer.

    `root` is the root of the file system with the memory figures.
    """
    available = available_memory(root)
    if available is not None and size > available:
        need, free = f"{size / 1e9:,.1f} GB", f"{available / 1e9:,.1f} GB"
        raise FFNError(f"{what} would need {need}, but only {free} of memory is free", advice, ExitCode.ENVIRONMENT)
