"""For a forward pass of all FFN blocks, count the bytes moved and the arithmetic intensity by token count. For an
accelerator, compute the minimum time according to its data sheet, and whether the weights fit into its memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import Step
from ffncli.block.traffic import Bound, Traffic, rank_experts_touched, time_floor, tokens_at, traffic
from ffncli.models.model import Group, Model
from ffncli.system.hardware import Device


@dataclass(frozen=True)
class TokenCost:
    """A forward pass of all layers' FFNs (or of the single block of bare dimensions) on `tokens` tokens, on rank 0 of
    `ranks`.

    Under expert parallelism, every rank starts with `tokens` tokens. `*_fused` is the minimum that any implementation
    must move: the input and output of each block. `experts_touched` is the expected number of routed experts that a
    main layer reads; None without experts. Conventions: `block/traffic.py`.
    """

    name: str
    tokens: int
    dtype: str
    activation_dtype: str
    ranks: int
    experts_touched: float | None
    weight_bytes_read: int
    activation_bytes: int
    activation_bytes_fused: int
    matmul_flops: int
    flops_per_byte: float
    flops_per_byte_fused: float


def token_costs(
    model: Model, weights: DType, tokens: Sequence[int], ranks: int = 1, ep: int = 1
) -> tuple[TokenCost, ...]:
    """Build a record for each token count, over `ranks` tensor-parallel times `ep` expert-parallel ranks.

    Call `parallel.split` first: if widths do not divide over the ranks, it raises an error that suggests possible rank
    counts.
    """
    moe = model.main.spec.moe
    out = []
    for number in tokens:
        moved = model_traffic(model, weights, number, ranks, ep)
        out.append(
            TokenCost(
                model.name,
                number,
                weights.name,
                activation_dtype(weights).name,
                ranks * ep,
                rank_experts_touched(moe.experts // ep, moe.top_k, number, ep) if moe else None,
                moved.weight_bytes_read,
                moved.activation_bytes,
                moved.activation_bytes_fused,
                moved.matmul_flops,
                moved.flops_per_byte(),
                moved.flops_per_byte(fused=True),
            )
        )
    return tuple(out)


def model_traffic(model: Model, weights: DType, tokens: int = 1, ranks: int = 1, ep: int = 1) -> Traffic:
    """Return the traffic of rank 0, summed over all layers."""
    activations, grid = activation_dtype(weights), Ranks(ranks, ep)
    parts = (
        traffic(steps_of(group, 0, grid), weights, activations, tokens).times(len(group.layers) * group.runs)
        for group in model.groups
    )
    return sum(parts, Traffic())


def ridge_tokens(
    model: Model, weights: DType, flops_per_byte: float, ranks: int = 1, fused: bool = False, ep: int = 1
) -> int | None:
    """Return the smallest token count at which the FFNs reach this intensity; None if no token count does."""
    return tokens_at(flops_per_byte, lambda tokens: model_traffic(model, weights, tokens, ranks, ep), fused)


# Formats with dedicated tensor cores; every other stored format is unpacked to the activations' format.
_RATES = {
    "fp8": "fp8", "fp8_e5m2": "fp8", "mxfp8": "fp8", "int8": "int8", "mxfp4": "fp4", "nvfp4": "fp4",
}  # fmt: skip


@dataclass(frozen=True)
class DeviceFloor:
    """A forward pass of all layers' FFNs (or of the single block of bare dimensions) on `tokens` tokens, on one of
    `ranks` such devices.

    `rate` is the format whose dense peak applies: the weights' format if the device computes in it, else the
    activations' format. If no rate is published, values that depend on it are None. Traffic is the minimum that any
    implementation moves; time between devices is not counted. `approximate`: a value on the data sheet is accurate only
    to 10 %. `needed_bytes` is the size of the whole model's weights, or of the FFNs' weights if the other sizes are
    unknown; `fits` compares `needed_bytes` with the largest memory on sale. Both are None for several ranks.
    """

    device: str
    tokens: int
    ranks: int
    rate: str | None
    peak_flops_per_s: float | None
    bytes_per_s: float
    ridge_flops_per_byte: float | None
    flops_per_byte: float
    bound: Bound | None
    compute_s: float | None
    memory_s: float
    floor_s: float | None
    needed_bytes: int | None
    memory_bytes: int | None
    fits: bool | None
    approximate: bool
    source: str


def rate_format(device: Device, weights: DType) -> str | None:
    """Return the format of the device's best published peak for matmuls with these weights; None if there is none."""
    formats = (_RATES.get(weights.name.partition("-")[0]), activation_dtype(weights).name)
    return next((name for name in formats if name is not None and name in device.tflops), None)


def ridge_of(device: Device, weights: DType) -> float | None:
    """Return the FLOPs per byte above which matmuls with these weights are compute-bound; None if no rate is known."""
    peak = device.flops_per_s(rate_format(device, weights) or "")
    return None if peak is None else peak / device.bytes_per_s


def device_floors(
    device: Device, costs: Sequence[TokenCost], weights: DType, needed_bytes: int | None
) -> tuple[DeviceFloor, ...]:
    """Build a record for each token count; `needed_bytes` is the size of all weights that the device stores."""
    rate = rate_format(device, weights)
    peak, memory = device.flops_per_s(rate or ""), device.memory_bytes
    floors = []
    for one in costs:
        moved, needed = one.weight_bytes_read + one.activation_bytes_fused, needed_bytes if one.ranks == 1 else None
        floor = None if peak is None else time_floor(one.matmul_flops, moved, peak, device.bytes_per_s)
        floors.append(
            DeviceFloor(
                device=device.name,
                tokens=one.tokens,
                ranks=one.ranks,
                rate=rate,
                peak_flops_per_s=peak,
                bytes_per_s=device.bytes_per_s,
                ridge_flops_per_byte=ridge_of(device, weights),
                flops_per_byte=one.flops_per_byte_fused,
                bound=floor.bound if floor else None,
                compute_s=floor.compute_s if floor else None,
                memory_s=moved / device.bytes_per_s,
                floor_s=floor.seconds if floor else None,
                needed_bytes=needed,
                memory_bytes=memory,
                fits=None if needed is None or memory is None else needed <= memory,
                approximate=bool(device.approx & {"memory", rate}),
                source=device.source,
            )
        )
    return tuple(floors)


def steps_of(group: Group, rank: int, ranks: Ranks) -> tuple[Step, ...]:
    """Return a rank's steps; under expert parallelism, every rank runs dense layers in full, for its own tokens."""
    return rank_steps(group.steps, rank, ranks if group.spec.moe else Ranks(ranks.tp))
