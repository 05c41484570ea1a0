"""figures: what a case must compute and move, and how close its time is to the machine's limit; measured_roof:
that limit. The roofline model (Williams, Waterman, Patterson 2009). RooflineFigures need no torch.

FLOPs are those of the matrix products, as `block/cost.py` counts them. Forward+backward is three times forward: every
product has two of its size in backward, the gradients of its input and of its weights.

Bytes are compulsory: what even an infinite cache would have to move. Forward: every used weight (of the
experts, those that received tokens where that was counted, else those expected to) and x are read once, the output is
written once. Forward+backward: these, and the output's gradient read, the gradients of x and of the weights written.

Data that a cache may keep between calls is not bound by memory: in `warm` and `shared` anything may stay, in
`cold-weights` all but the weights, after `flush` written data may stay in the cache. So up to one last-level cache of
those bytes is subtracted before memory time is counted; if everything fits, the arithmetic is the only
bound. The columns `bytes` and `gbytes_per_s` cover all compulsory bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ffncli.bench.records import Case, Roof
from ffncli.block.cost import cost
from ffncli.block.dtypes import dtype
from ffncli.block.recipe import steps as steps_of
from ffncli.block.shard import rank_steps
from ffncli.block.steps import (
    Activation,
    Experts,
    Linear,
    Multiply,
    Shape,
    Step,
    experts_per_token,
    ffn_steps,
    input_shapes,
    shapes,
)
from ffncli.block.traffic import TimeFloor, time_floor, traffic
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.counting.parallel import all_to_all_bytes, exchanged, reduced_bytes, ring_all_reduce_bytes
from ffncli.system import hardware


@dataclass(frozen=True)
class RooflineFigures:
    """Figures of one case and time. `tflops` and `gbytes_per_s` are rates, fractions are of the least possible time.

    `fusion_saving_max`: the traffic that fusing the activation with its products can save at most, over the least time
    of the block (0.086: at most about 8.6 %). It is an estimate, not a bound: it takes both versions to reach the same
    rate of the products. None is unknown.

    `ridge_flops_per_byte` is the machine balance: the measured peak over the measured bandwidth, those of the data
    sheet where no roof was measured. `bound` says on which side of it the case lies with `flops_per_byte`, those of the
    bytes that no cache holds; None where a cache holds all.
    """

    flops: int
    bytes: int
    tflops: float | None = None
    gbytes_per_s: float | None = None
    roof_fraction: float | None = None
    datasheet_fraction: float | None = None
    fusion_saving_max: float | None = None
    bound: str = ""
    flops_per_byte: float | None = None
    ridge_flops_per_byte: float | None = None


@dataclass(frozen=True)
class Work:
    """The work of a case: FLOPs of its products; bytes of weights and of activations, read and written."""

    flops: int
    weights_read: int
    weights_written: int
    activations_read: int
    activations_written: int

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.weights_read + self.weights_written + self.activations_read + self.activations_written

    def from_memory(self, cache: str, llc: int) -> int:
        """The bytes that cannot have been in a last-level cache of this size already, or stay there."""
        kept = {
            "cold-weights": self.bytes - self.weights_read,
            "flush": self.weights_written + self.activations_written,
        }.get(cache, self.bytes)
        return self.bytes - min(kept, llc)


def figures(
    case: Case,
    time_s: float | None,
    roof: Roof,
    device_name: str,
    tf32: bool = False,
    experts_touched: float | None = None,
) -> RooflineFigures:
    """The cost of `case`, and the rates of `time_s` seconds relative to the measured roof and the device's data sheet.

    `case.cache` is the mode actually used. `tf32` says that float32 products ran in TF32. `experts_touched`: the number
    of experts that received tokens, the mean of a call; None: what independent uniform routing gives.
    """
    work = work_of(case, experts_touched)
    known = hardware.find(device_name) if case.device != "cpu" else None
    llc = roof.llc_bytes if roof.llc_bytes is not None else known.llc_bytes if known else 0
    sheet = Roof(known.flops_per_s(case.dtype, tf32), known.bytes_per_s) if known else Roof()
    least = least_time(work, case.cache, roof, llc)
    at_best = least_time(work, case.cache, sheet, llc)
    judged, best, moved = least or at_best, roof if least else sheet, work.from_memory(case.cache, llc)
    rate = None if not time_s else 1 / time_s
    return RooflineFigures(
        flops=work.flops,
        bytes=work.bytes,
        tflops=_times(rate, work.flops / 1e12),
        gbytes_per_s=_times(rate, work.bytes / 1e9),
        roof_fraction=_times(rate, least.seconds if least else None),
        datasheet_fraction=_times(rate, at_best.seconds if at_best else None),
        fusion_saving_max=fusable_bytes(case) / roof.bytes_per_s / least.seconds
        if least and roof.bytes_per_s
        else None,
        bound=judged.bound if judged else "",
        flops_per_byte=work.flops / moved if moved else None,
        ridge_flops_per_byte=best.flops_per_s / best.bytes_per_s if best.flops_per_s and best.bytes_per_s else None,
    )


def least_time(work: Work, cache: str, roof: Roof, llc: int) -> TimeFloor | None:
    """What the arithmetic and the memory need; None where a rate is unknown."""
    if not roof.flops_per_s or not roof.bytes_per_s:
        return None
    return time_floor(work.flops, work.from_memory(cache, llc), roof.flops_per_s, roof.bytes_per_s)


def work_of(case: Case, experts_touched: float | None = None) -> Work:
    """The FLOPs and bytes of the case, by the conventions above."""
    kind, body = dtype(case.dtype), ffn_steps(steps_of(case.spec))
    moved = traffic(body, kind, kind, case.tokens, experts_touched)
    weights, flops = moved.weight_bytes_read, cost(body, case.tokens).matmul_flops
    inputs = sum(prod(shape) for shape in input_shapes(body, (case.tokens,)).values()) * kind.block_bytes
    output = moved.activation_bytes_fused - inputs
    if case.passes == "forward":
        return Work(flops, weights, 0, inputs, output)
    return Work(3 * flops, weights, weights, inputs + output, output + inputs)


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


# --- fusion -----------------------------------------------------------------------------------------------------------


def fusable_bytes(case: Case) -> int:
    """Bytes between the products that a fused kernel need not move: what they write for the activation to read.

    Forward: gate and up (of a plain block: up), written and read; the activation's result has to be written
    either way. Forward+backward: backward needs gate and up, so only reading them is saved, and in backward the
    gradient of the down projection's input, written and read.
    """
    body = ffn_steps(steps_of(case.spec))
    entering, leaving = _between(body, input_shapes(body, (case.tokens,)))
    numbers = 2 * entering if case.passes == "forward" else entering + 2 * leaving
    return numbers * dtype(case.dtype).block_bytes


def _between(body: Sequence[Step], inputs: Mapping[str, Shape]) -> tuple[int, int]:
    """How many numbers the products write for elementwise steps, and how many those make for the next product.

    Only for products into d_ff: a shared expert's gate or its output, mixed in after the down projection, are not
    part of it.
    """
    known = shapes(body, inputs)
    taken = experts_per_token(body)
    elementwise = {name for step in body if isinstance(step.op, (Activation, Multiply)) for name in step.inputs}
    entering = leaving = 0
    for step in body:
        match step.op:
            case Linear(out=out) if out.name == "d_ff" and step.output in elementwise:
                entering += prod(known[step.output])
            case Linear(into=into) if into.name == "d_ff":
                leaving += prod(known[step.inputs[0]])
            case Experts():
                chosen = prod(known[step.inputs[0]][:-1]) * taken[step.output]
                inner = _between(step.op.program, input_shapes(step.op.program, (chosen,)))
                entering, leaving = entering + inner[0], leaving + inner[1]
    return entering, leaving


# --- over ranks: what is sent -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """How many numbers a rank puts into each all-reduce, and into each all-to-all, of one call.

    Those of an all-to-all are a multiple of the ranks, each of which gets as many: every expert is equally likely.
    """

    all_reduced: tuple[int, ...]
    exchanged: tuple[int, ...]


def sent_by_rank(case: Case) -> Sent:
    """The collectives of one call of what a rank is given of the case."""
    ranks, kind, tokens = case.ranks, dtype(case.dtype), case.of_rank.tokens
    steps = kernel_steps(steps_of(case.spec))
    reduced = reduced_bytes(rank_steps(steps, 0, ranks), kind) if ranks.tp > 1 else []
    numbers = [tokens * values for values in exchanged(steps)] if ranks.ep > 1 else []
    return Sent(
        tuple(round(tokens * size / kind.block_bytes) for size in reduced),
        tuple(max(1, count // ranks.ep) * ranks.ep for count in numbers),
    )


def communication_bytes(case: Case) -> float:
    """The bytes that a rank sends for one call: mean over ranks, and where every expert is equally likely."""
    kind, tokens, steps = dtype(case.dtype), case.of_rank.tokens, kernel_steps(steps_of(case.spec))
    reduced = sum(sent_by_rank(case).all_reduced) * kind.block_bytes
    bytes_sent = ring_all_reduce_bytes(int(reduced), case.ranks.tp)
    if case.ranks.ep > 1:
        sizes = (tokens * values * kind.block_bytes for values in exchanged(steps))
        bytes_sent += sum(all_to_all_bytes(int(size), case.ranks.ep) for size in sizes)
    return bytes_sent
