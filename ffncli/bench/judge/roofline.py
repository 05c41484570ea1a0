"""The roofline model (Williams, Waterman, Patterson 2009). `figures` computes what a case must compute and move, and
how close its time is to the machine's limit. Needs no torch.

FLOPs are counted for the matrix products, as in `block/cost.py`. Forward+backward has three times the FLOPs of forward:
for each matrix product in forward, backward has two of the same size, one for the gradient of the input and one for the
gradient of the weights.

Bytes are compulsory: even an infinite cache would have to move them. Forward: x and every used weight are read once,
and the output is written once. The used experts are the experts that received tokens or, if tokens were not counted,
the experts expected to receive tokens. Forward+backward adds reading the output's gradient and writing the gradients of
x and of the weights.

Data that a cache may keep between calls is not limited by memory bandwidth: in the modes `warm` and `shared` all data
may stay in the cache, in `cold-weights` all data except the weights, and in `flush` written data. So up to one
last-level cache of these bytes is subtracted before the memory time is computed; if everything fits, arithmetic is the
only limit. The columns `bytes` and `gbytes_per_s` still cover all compulsory bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ffncli.bench.records import Case, Roof
from ffncli.block import steps as ops
from ffncli.block.cost import cost
from ffncli.block.dtypes import dtype
from ffncli.block.recipe import steps as steps_of
from ffncli.block.shard import rank_steps
from ffncli.block.steps import Shape, Step, experts_per_token, ffn_steps, input_shapes, shapes
from ffncli.block.traffic import TimeFloor, time_floor, traffic
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.counting.parallel import all_to_all_bytes, exchanged, reduced_bytes, ring_all_reduce_bytes
from ffncli.system import hardware


@dataclass(frozen=True)
class RooflineFigures:
    """The roofline figures of one case and time. `tflops` and `gbytes_per_s` are rates; the fractions are the least
    possible time divided by the measured time.

    `fusion_saving_max` is the most time that fusing the activation with its matrix products can save by moving fewer
    bytes, as a share of the block's least time (0.086: about 8.6 %). It is an estimate, not a bound: it assumes that
    the matrix products run at the same rate in both versions. None means unknown.

    `ridge_flops_per_byte` is the machine balance: peak divided by bandwidth, both measured, or from the data sheet if
    no roof was measured. `flops_per_byte` counts only bytes that no cache holds (None if a cache holds all bytes);
    `bound` says on which side of the ridge this value lies.
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
    """The work of a case: the FLOPs of its matmuls, and the bytes of weights and activations read and written."""

    flops: int
    weights_read: int
    weights_written: int
    activations_read: int
    activations_written: int

    @property
    def bytes(self) -> int:
        """The sum of all bytes."""
        return self.weights_read + self.weights_written + self.activations_read + self.activations_written

    def from_memory(self, cache: str, llc: int) -> int:
        """Return the bytes that move from or to memory because a last-level cache of `llc` bytes cannot keep them."""
        kept = {
            "cold-weights": self.bytes - self.weights_read,
            "flush": self.weights_written + self.activations_written,
        }.get(cache, self.bytes)
        return self.bytes - min(kept, llc)  # a cache holds at most `llc` of these bytes


def figures(
    case: Case,
    time_s: float | None,
    roof: Roof,
    device_name: str,
    tf32: bool = False,
    experts_touched: float | None = None,
) -> RooflineFigures:
    """Return the cost of `case` and, for a time of `time_s` seconds, its rates relative to the measured roof and the
    device's data sheet.

    `case.cache` is the mode actually used. `tf32` says whether float32 matmuls ran in TF32. `experts_touched` is the
    mean number of experts that received tokens in a call; None assumes independent uniform routing.
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
    """Return the least time that the arithmetic and the memory traffic allow; None if a rate is unknown."""
    if not roof.flops_per_s or not roof.bytes_per_s:
        return None
    return time_floor(work.flops, work.from_memory(cache, llc), roof.flops_per_s, roof.bytes_per_s)


def work_of(case: Case, experts_touched: float | None = None) -> Work:
    """Return the FLOPs and bytes of the case, by the conventions at the top of this file."""
    kind, body = dtype(case.dtype), ffn_steps(steps_of(case.spec))
    moved = traffic(body, kind, kind, case.tokens, experts_touched)
    weights, flops = moved.weight_bytes_read, cost(body, case.tokens).matmul_flops
    inputs = sum(prod(shape) for shape in input_shapes(body, (case.tokens,)).values()) * kind.block_bytes
    output = moved.activation_bytes_fused - inputs
    if case.passes == "forward":
        return Work(flops, weights, 0, inputs, output)
    # For each forward matmul, backward has two of the same size: for the gradients of its input and of its weights.
    return Work(3 * flops, weights, weights, inputs + output, output + inputs)


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


# --- fusion -----------------------------------------------------------------------------------------------------------


def fusable_bytes(case: Case) -> int:
    """Return the bytes of memory traffic that a fused kernel saves by not writing, and not reading back, values between
    the matrix products.

    Forward: fusing saves writing and reading gate and up (only up in a plain block); the activation's result must be
    written in any case. Forward+backward: backward needs gate and up, so forward saves only reading them; backward
    saves writing and reading the gradient of the down projection's input.
    """
    body = ffn_steps(steps_of(case.spec))
    entering, leaving = _between(body, input_shapes(body, (case.tokens,)))
    numbers = 2 * entering if case.passes == "forward" else entering + 2 * leaving
    return numbers * dtype(case.dtype).block_bytes


def _between(body: Sequence[Step], inputs: Mapping[str, Shape]) -> tuple[int, int]:
    """Return how many values the matrix products write for elementwise steps, and how many values these steps write for
    the next matrix product.

    Only matrix products into d_ff count. A shared expert's gate and output do not count, as they are mixed in after the
    down projection.
    """
    known = shapes(body, inputs)
    taken = experts_per_token(body)
    elementwise = {name for step in body if isinstance(step.op, (ops.Activation, ops.Multiply)) for name in step.inputs}
    entering = leaving = 0
    for step in body:
        match step.op:
            case ops.Linear(out=out) if out.name == "d_ff" and step.output in elementwise:
                entering += prod(known[step.output])
            case ops.Linear(into=into) if into.name == "d_ff":
                leaving += prod(known[step.inputs[0]])
            case ops.Experts():
                chosen = prod(known[step.inputs[0]][:-1]) * taken[step.output]
                inner = _between(step.op.program, input_shapes(step.op.program, (chosen,)))
                entering, leaving = entering + inner[0], leaving + inner[1]
    return entering, leaving


# --- data sent between ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """The number of values that a rank passes to each all-reduce and to each all-to-all of one call.

    Every expert is assumed equally likely, so each rank receives the same number of values in an all-to-all, and the
    total is a multiple of the number of ranks.
    """

    all_reduced: tuple[int, ...]
    exchanged: tuple[int, ...]


def sent_by_rank(case: Case) -> Sent:
    """Return the collectives of one call, for the part of the case that one rank computes."""
    ranks, kind, tokens = case.ranks, dtype(case.dtype), case.of_rank.tokens
    steps = kernel_steps(steps_of(case.spec))
    reduced = reduced_bytes(rank_steps(steps, 0, ranks), kind) if ranks.tp > 1 else []
    numbers = [tokens * values for values in exchanged(steps)] if ranks.ep > 1 else []
    return Sent(
        tuple(round(tokens * size / kind.block_bytes) for size in reduced),
        tuple(max(1, count // ranks.ep) * ranks.ep for count in numbers),
    )


def communication_bytes(case: Case) -> float:
    """Return the bytes that a rank sends in one call: the mean over ranks, assuming that every expert is equally
    likely."""
    kind, tokens, steps = dtype(case.dtype), case.of_rank.tokens, kernel_steps(steps_of(case.spec))
    reduced = sum(sent_by_rank(case).all_reduced) * kind.block_bytes
    bytes_sent = ring_all_reduce_bytes(int(reduced), case.ranks.tp)
    if case.ranks.ep > 1:
        sizes = (tokens * values * kind.block_bytes for values in exchanged(steps))
        bytes_sent += sum(all_to_all_bytes(int(size), case.ranks.ep) for size in sizes)
    return bytes_sent
