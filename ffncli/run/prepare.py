"""From what was asked to what can run: steps, weights, inputs and mode of one layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.block.steps import Step, block_inputs, parameters
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.models.examples import Example
from ffncli.models.model import Layer, Model
from ffncli.run.execute import Mode
from ffncli.run.inputs import make_input
from ffncli.run.weights import demand_memory, random_weights, stored_weights


@dataclass(frozen=True)
class Request:
    """What a run may choose. None takes the source's own: its example's input and mask, tokens 4, fp32, eval."""

    layer: str | None = None
    input: str | None = None
    leading: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str = "cpu"
    seed: int | None = None
    train: bool | None = None


@dataclass(frozen=True)
class Prepared:
    """Everything `trace` needs. `layer` is the one that was chosen; `origin` says where the weights come from."""

    layer: Layer
    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    mode: Mode
    origin: str
    notes: tuple[str, ...]


def prepare(model: Model, request: Request, example: Example | None = None) -> Prepared:
    """Weights first, then inputs, from one generator seeded with `request.seed` (0): so torch users can repeat it.

    Raises FFNError for a layer, dtype, device or input that cannot be.
    """
    layer = model.layer(request.layer)
    steps = next(g for g in model.groups if g.stack == layer.stack and layer.index in g.layers).steps
    dtype: torch.dtype = getattr(torch, dtypes.dtype("fp32" if request.dtype is None else request.dtype).torch)
    device = _device(request.device)
    generator = torch.Generator().manual_seed(request.seed or 0)
    weights, origin = _weights(model, layer, steps, example, generator, dtype, device)
    leading = request.leading or (example.shape[:-1] if example and request.input is None else None)
    default = example.input if example else "randn"
    text = default if request.input is None else request.input
    demand_memory(_input_size(leading, layer) * 8, "the input and its intermediates", "give fewer tokens")
    names = block_inputs(steps)
    first = make_input(text, leading, layer.spec.d_model, dtype, generator).to(device)
    inputs = {names[0]: first}
    for name in names[1:]:  # a parallel block's other branch: nothing is known of it, so it is drawn
        inputs[name] = torch.randn(first.shape, generator=generator).to(device, dtype)
    notes = [f"the input '{name}' is drawn at random, as x may be" for name in names[1:]]
    train = bool(example and example.dropped) if request.train is None else request.train
    mode = Mode(train, _masks(example, request, steps, inputs), generator)
    return Prepared(layer, steps, weights, inputs, mode, origin, tuple(notes))


def _weights(
    model: Model, layer: Layer, steps: tuple[Step, ...], example: Example | None, generator: torch.Generator,
    dtype: torch.dtype, device: str,
) -> tuple[Mapping[str, Tensor], str]:  # fmt: skip
    if example and set(parameters(steps)) == set(example.weights):
        given = {name: torch.tensor(values, dtype=torch.float64) for name, values in example.weights.items()}
        return {name: tensor.to(device, dtype) for name, tensor in given.items()}, "the notebook's weights"
    stored = stored_weights(model, layer, dtype, device)
    if stored is not None:
        return stored, f"weights of {layer.stack} layer {layer.index}"
    return random_weights(steps, generator, dtype, device), f"random weights, seed {generator.initial_seed()}"


def _masks(
    example: Example | None, request: Request, steps: tuple[Step, ...], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The example's own dropout masks, where input and seed are the example's too."""
    if not example or request.seed is not None or tuple(next(iter(inputs.values())).shape) != example.shape:
        return {}
    masks: dict[str, Tensor] = {}
    for step in steps:
        if step.output in example.dropped:
            keep = torch.ones(*example.shape[:-1], example.model.main.spec.d_ff, dtype=torch.bool)
            for token, unit in example.dropped[step.output]:
                keep.flatten(0, -2)[token, unit] = False
            masks[step.output] = keep.to(next(iter(inputs.values())).device)
    return masks


def _input_size(leading: tuple[int, ...] | None, layer: Layer) -> int:
    """Values in the widest intermediate, for a check before anything is allocated."""
    tokens = 1
    for size in leading or (4,):
        tokens *= size
    return tokens * (layer.spec.d_model + 3 * layer.spec.d_ff)


def _device(text: str) -> str:
    """`cpu`, `cuda` or `cuda:1`, if this machine has it."""
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", text)
    if not match:
        raise FFNError(f"--device: unknown device {shown(text)}", "use cpu, cuda or cuda:1")
    if text != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise FFNError(f"--device {text}: this machine has no such GPU", "use --device cpu", ExitCode.ENVIRONMENT)
    return text
