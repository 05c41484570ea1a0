"""What training a model's FFNs takes on one rank: bytes of weights, gradients and optimizer state, bytes kept for the
backward pass, and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Annotated, Literal, TypeAlias, get_args

from ffncli.block.cost import cost, step_costs
from ffncli.block.dtypes import DType
from ffncli.block.kept import KeptTensor, Recompute, elementwise, kept
from ffncli.block.shard import Ranks
from ffncli.block.steps import Experts, Step, experts_per_token, input_shapes, untied_parameters
from ffncli.errors import FFNError, option
from ffncli.models.counting.parallel import check_ranks
from ffncli.models.counting.traffic import steps_of
from ffncli.models.model import Model
from ffncli.options.accept import RANKS, choice, whole
from ffncli.options.conflicts import Conflict
from ffncli.options.opt import Opt, Options

Optimizer: TypeAlias = Literal["adamw", "adamw8bit", "muon", "sgd"]
_training = partial(Opt, group="Training")
_STEP, _FP32 = 4, 4  # AdamW's count of its steps is a float32; scales and tables of 8-bit states are, too
_BLOCK, _LEAST, _CODES = 256, 4096, 256  # torchao's AdamW8bit: values per scale, least values of a tensor, code table
_MASTER = 2 + 4 + 4 + 8  # bytes per parameter with fp32 master weights, gradients and AdamW states next to bf16 weights


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """The options of `ffn params --training`."""

    training: Annotated[
        Optimizer | None,
        _training(
            "--training", accepts=choice(*get_args(Optimizer)), metavar="OPTIMIZER",
            help="Count the memory and FLOPs of training with adamw, adamw8bit, muon or sgd (without momentum).",
        ),
    ] = None  # fmt: skip
    recompute: Annotated[
        Recompute | None,
        _training(
            "--recompute", accepts=choice(*get_args(Recompute)),
            help="Compute again for the backward pass: none, act (the steps between the projections) or block."
            " [default: none]",
        ),
    ] = None  # fmt: skip
    zero: Annotated[
        int | None,
        _training(
            "--zero", accepts=whole(0, 3), metavar="0..3",
            help="ZeRO stage: shard optimizer state (1), gradients (2) and weights (3) over data-parallel ranks."
            " [default: 0]",
        ),
    ] = None  # fmt: skip
    dp: Annotated[
        int | None,
        _training("--dp", "--data-parallel", accepts=RANKS, help="Data-parallel ranks, next to --ep. [default: 1]"),
    ] = None


TRAINING_RULES = (
    Conflict("recompute zero dp", needs="training"),
    Conflict("training", contradicts="iso_params everything", why="use one at a time"),
)


@dataclass(frozen=True)
class TrainedLayer:
    """One layer of a group on rank 0: what it keeps for the backward pass, tensor by tensor and in all."""

    stack: str
    layers: tuple[int, ...]
    kept: tuple[KeptTensor, ...]
    kept_bytes: int


@dataclass(frozen=True)
class Simplification:
    """A simplification of common frameworks and calculators: what they take, its bytes, and our bytes for the same."""

    name: str
    bytes: int
    exact_bytes: int


@dataclass(frozen=True)
class TrainingMemory:
    """The training of all FFNs of a model on rank 0, in bytes, and its FLOPs for `tokens` tokens of this rank.

    `params` includes the norms of the blocks. `kept_bytes` is what an unfused eager forward pass keeps for the backward
    pass, each storage once. Matmul FLOPs of a backward pass are twice those of the forward pass; `recomputed_flops` are
    those of steps that run again, elementwise ones included.
    """

    optimizer: Optimizer
    dtype: str
    tokens: int
    recompute: Recompute
    zero: int
    tp: int
    ep: int
    dp: int
    params: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    total_bytes: int
    forward_matmul_flops: int
    backward_matmul_flops: int
    recomputed_flops: int
    layers: tuple[TrainedLayer, ...]
    simplifications: tuple[Simplification, ...]


def training_memory(
    model: Model, options: TrainingOptions, weights: DType, tokens: int = 1, tp: int = 1, ep: int = 1
) -> TrainingMemory:
    """Count the training of a model's FFNs on rank 0 of tp × ep × dp ranks, with weights, gradients and activations in
    one format.

    Raises FFNError for a format that torch does not train in, for an impossible split, and if the number of active
    experts is unknown.
    """
    assert options.training is not None
    if "top_k" in model.unknown:
        raise FFNError(f"{option('training')}: how many experts a token uses is not known", "give --top-k")
    if not weights.computable:
        raise FFNError(f"{option('training')}: weights in {weights.name} are not trained", "give --dtype bf16 or fp32")
    ranks, width = Ranks(tp, ep), weights.block_bytes
    check_ranks(model, ranks, weights)
    dp, zero, recompute = options.dp or 1, options.zero or 0, options.recompute or "none"
    layers, forward, again = [], 0, 0
    numbers = {"dense": 0, "experts": 0}
    state = dict.fromkeys(numbers, 0)
    for group in model.groups:
        steps, times = steps_of(group, 0, ranks), len(group.layers)
        tensors = kept(steps, tokens, width, recompute)
        layers.append(TrainedLayer(group.stack, group.layers, tensors, sum(one.bytes for one in tensors)))
        for name, shape in tensor_shapes(steps).items():
            kind = "experts" if name in _routed(steps) else "dense"
            numbers[kind] += times * prod(shape)
            state[kind] += times * optimizer_bytes(options.training, shape, width)
        runs, spent = times * group.runs, cost(steps, tokens)
        forward += runs * spent.matmul_flops
        again += runs * {"none": 0, "act": _again_flops(steps, tokens), "block": spent.flops}[recompute]
    replicas = {"dense": dp * ep, "experts": dp}

    def sharded(sizes: Mapping[str, int], stage: int) -> int:
        return sum(ceil(size / (replicas[kind] if zero >= stage else 1)) for kind, size in sizes.items())

    sizes = {kind: number * width for kind, number in numbers.items()}
    kept_bytes = sum(
        one.kept_bytes * len(one.layers) * group.runs for one, group in zip(layers, model.groups, strict=True)
    )
    parts = (sharded(sizes, 3), sharded(sizes, 2), sharded(state, 1), kept_bytes)
    unsharded = 2 * sum(sizes.values()) + sum(state.values())
    return TrainingMemory(
        options.training, weights.name, tokens, recompute, zero, tp, ep, dp, sum(numbers.values()), *parts, sum(parts),
        forward, 2 * forward, again, tuple(layers), _simplifications(model, ranks, width, tokens, numbers, unsharded),
    )  # fmt: skip


def tensor_shapes(steps: Sequence[Step]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each trained tensor of a block; the experts' matrices are one tensor."""
    return {name: tuple(axis.size for axis in axes) for name, axes in untied_parameters(steps).items()}


def _routed(steps: Sequence[Step]) -> frozenset[str]:
    """Return the names of the tensors that expert parallelism splits."""
    return frozenset(
        name for step in steps if isinstance(step.op, Experts) and not step.op.always for name in step.parameters()
    )


def optimizer_bytes(optimizer: Optimizer, shape: Sequence[int], width: int) -> int:
    """Return the bytes of one tensor's optimizer state, as torch and torchao store it next to weights of `width` bytes.

    AdamW: two states like the weight, and a count of steps. Its 8-bit form (torchao): a byte per value, a float32 scale
    per 256 values and a table of 256 float32 codes, twice; small tensors and those without whole blocks stay as they
    are. Muon: one state like the weight for matrices, each expert's a matrix of its own; AdamW for vectors. SGD
    without momentum: nothing.
    """
    numbers = prod(shape)
    if optimizer == "sgd":
        return 0
    if optimizer == "muon" and len(shape) > 1:
        return numbers * width
    if optimizer == "adamw8bit" and numbers >= _LEAST and numbers % _BLOCK == 0:
        return 2 * (numbers + numbers // _BLOCK * _FP32 + _CODES * _FP32) + _STEP
    return 2 * numbers * width + _STEP


def _again_flops(steps: Sequence[Step], tokens: int, prefix: str = "") -> int:
    """Return the FLOPs of the elementwise steps between the projections, which `act` computes again."""
    names, costs, taken = elementwise(steps, prefix), step_costs(steps, input_shapes(steps, (tokens,))), 0
    for step in steps:
        if isinstance(step.op, Experts):
            rows = tokens * experts_per_token(steps)[step.output]
            taken += _again_flops(step.op.program, rows, f"{prefix}{step.output}[e].")
        elif prefix + step.output in names:
            taken += costs[step.output].flops
    return taken


def _simplifications(
    model: Model, ranks: Ranks, width: int, tokens: int, numbers: Mapping[str, int], unsharded: int
) -> tuple[Simplification, ...]:
    """Return the simplifications that give other bytes for this model."""
    out = [Simplification("fp32 master weights, gradients and AdamW states next to bf16 weights, 18 bytes a parameter",
                          sum(numbers.values()) * _MASTER, unsharded)]  # fmt: skip
    active = exact = 0
    for group in model.groups:
        steps = steps_of(group, 0, ranks)
        mixed = next((step.op for step in steps if isinstance(step.op, Experts) and not step.op.always), None)
        if mixed is None or group.spec.moe is None:
            continue
        times = len(group.layers) * group.runs
        active += times * group.spec.moe.top_k * sum(one.bytes for one in kept(mixed.program, tokens, width))
        exact += times * sum(
            one.bytes for one in kept(steps, tokens, width) if one.step.startswith(("experts", "route"))
        )
    if active:
        out.append(Simplification("activations of all experts, scaled by the active share: leaves out the router's"
                                  " tensors and the rows and weights of each expert", active, exact))  # fmt: skip
    if ranks.tp > 1 and numbers["experts"]:
        what = "experts whole on every tensor-parallel rank (expert tensor parallelism 1), not divided by tp"
        out.append(Simplification(what, numbers["experts"] * ranks.tp * width, numbers["experts"] * width))
    return tuple(out)
