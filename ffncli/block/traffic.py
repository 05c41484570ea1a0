"""How many bytes a forward pass moves between memory and the processor, and how many FLOPs it performs per byte.

Weights are counted from ffn_input to ffn_output, with a cold cache: every weight that is used is read once. In MoE,
only the experts chosen by at least one token are read: under uniform and independent routing a token skips an expert
with probability 1 - k/E, so that T tokens are expected to touch E · (1 - (1 - k/E)^T) of E experts. The activations of
all steps, norm and residual included as in `cost`, are counted in two ways: unfused, every step reads its inputs and
writes its output; fused, only the block's inputs are read and its output is written. Dropout moves nothing (the forward
pass is in eval mode), and a collective moves its bytes over the interconnect, not through memory. Real programs usually
lie between these two counts: they run a sequence of kernels, which pass their results through memory. A kernel computes
one matrix product, or several that read the same tensor, or the elementwise steps between two matrix products.
`launches` lists these kernels. FLOPs per byte is the arithmetic intensity of the roofline model (Williams, Waterman,
Patterson 2009).

The same model gives a lower bound on the time of some work on some hardware (`time_floor`): at best, arithmetic and
memory traffic overlap completely, and the longer of their times is the floor. If both take the same time, the FLOPs per
byte equal the hardware's ridge point, its peak rate divided by its bandwidth.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, expm1, isfinite, log1p, prod
from typing import Literal

from ffncli.block import steps as ops
from ffncli.block.cost import Additive, cost, step_costs
from ffncli.block.dtypes import DType, parameter_bytes
from ffncli.block.steps import Shape, Step, experts_per_token, ffn_steps, input_shapes, shapes
from ffncli.errors import FFNError, shown

CONVENTIONS: Mapping[str, str] = {
    "weight_bytes_read": "every weight once; of E experts, only the E · (1 - (1 - top_k/E)^tokens) that uniform routing"
    " is expected to touch; over n expert-parallel ranks, one n-th of the experts that n times as many tokens touch",
    "activation_bytes": "unfused: every step reads its inputs and writes its output, including norm and residual (the"
    " steps counted in elementwise_flops); fused: only the block's inputs and output",
    "flops_per_byte": "matmul FLOPs divided by weight and activation bytes",
}


@dataclass(frozen=True)
class Traffic(Additive):
    """Bytes moved and matmul FLOPs done by some blocks on some tokens; the parts' traffic adds up to the whole."""

    weight_bytes_read: int = 0
    activation_bytes: int = 0
    activation_bytes_fused: int = 0
    matmul_flops: int = 0

    def moved(self, fused: bool = False) -> int:
        """Return the sum of weight and activation bytes."""
        return self.weight_bytes_read + (self.activation_bytes_fused if fused else self.activation_bytes)

    def flops_per_byte(self, fused: bool = False) -> float:
        """Return the arithmetic intensity: matmul FLOPs divided by the bytes moved."""
        return self.matmul_flops / self.moved(fused)


@dataclass(frozen=True)
class KernelTraffic:
    """The work of one kernel; `routed` is True if it computes experts that tokens are routed to, `shared` if it
    computes shared experts. A product maps each row's `k` values to `n`; both are 0 for elementwise steps."""

    work: Traffic
    routed: bool = False
    shared: bool = False
    k: int = 0
    n: int = 0


def traffic(
    steps: Sequence[Step], weights: DType, activations: DType, tokens: int = 1, touched: float | None = None
) -> Traffic:
    """Return the traffic of one block on `tokens` tokens. Raises FFNError if a row is not a whole number of the
    format's blocks.

    `touched` is the number of experts that receive tokens; None stands for the number expected under uniform routing.
    """
    inputs = input_shapes(steps, (tokens,))
    ends = sum(prod(shape) for shape in inputs.values()) + prod(shapes(steps, inputs)[steps[-1].output])
    return Traffic(
        _weight_bytes_read(ffn_steps(steps), weights, tokens, touched),
        activations.block_bytes * _elements(steps, inputs),
        activations.block_bytes * ends,
        cost(steps, tokens).matmul_flops,
    )


def launches(
    steps: Sequence[Step], weights: DType, activations: DType, tokens: int = 1, touched: float | None = None
) -> tuple[KernelTraffic, ...]:
    """Return the kernels of one block in order of execution.

    Their FLOPs and weight bytes add up to those of `traffic`, except for rounding to whole bytes. Each step of a
    mixture's experts is one kernel, which works on one row for each pair of a token and an expert; mixing the outputs
    is another kernel.
    """
    return tuple(_launches(steps, input_shapes(steps, (tokens,)), weights, activations.block_bytes, touched))


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """Return the expected number of distinct experts if each token chooses `top_k`, all equally likely."""
    if tokens == 1 or top_k == experts:
        return top_k
    return -experts * expm1(tokens * log1p(-top_k / experts))  # 1 - (1 - k/E)^T cancels where k/E is small


def rank_experts_touched(experts: int, top_k: int, tokens: int, ranks: int) -> float:
    """Return how many of a rank's experts are expected to be chosen if every rank has `tokens` tokens."""
    everywhere = experts_touched(experts * ranks, top_k, tokens * ranks)
    return everywhere if ranks == 1 else everywhere / ranks  # division by 1 would turn an int into a float


def tokens_at(flops_per_byte: float, measure: Callable[[int], Traffic], fused: bool = False) -> int | None:
    """Return the smallest number of tokens whose traffic, `measure(tokens)`, reaches this intensity; None if it is
    never reached.

    With W weight bytes, and per token F FLOPs and A activation bytes, F·T / (W + A·T) grows with T towards F/A and
    reaches r at T = r·W / (F - r·A). If some experts are still untouched, W is smaller, so this T is an upper bound,
    which bisection then lowers. Raises FFNError for an intensity that is not a positive number.
    """
    if not (isfinite(flops_per_byte) and flops_per_byte > 0):
        raise FFNError(f"FLOPs per byte must be a positive number, got {shown(flops_per_byte)}")
    goal = Fraction(flops_per_byte)  # exact: with floats the answer could be off by a token at large counts
    one = measure(1)
    gain = one.matmul_flops - goal * (one.moved(fused) - one.weight_bytes_read)
    if gain <= 0:
        return None
    low, high = 0, max(1, ceil(goal * measure(_EVERY_EXPERT).weight_bytes_read / gain))
    while high - low > 1:
        middle = (low + high) // 2
        moved = measure(middle)
        low, high = (low, middle) if moved.matmul_flops >= goal * moved.moved(fused) else (middle, high)
    return high


_EVERY_EXPERT = 2**60  # enough tokens to touch every expert of any block


def _weight_bytes_read(body: Sequence[Step], dtype: DType, tokens: int, touched: float | None) -> int:
    taken = experts_per_token(body)
    total = 0
    for step in body:
        sizes = {name: parameter_bytes(name, axes, dtype) for name, axes in step.parameters().items()}
        total += _read_of(step, sizes, taken.get(step.output, 0), tokens, touched)
    return total


def _read_of(step: Step, sizes: Mapping[str, int], top_k: int, tokens: int, touched: float | None) -> int:
    """Return how many bytes a step reads of its parameters, which have these sizes; routed experts are read only if
    they receive tokens."""
    read = sum(sizes.values())
    if not isinstance(step.op, ops.Experts) or step.op.always:
        return read
    experts = step.op.experts.size
    expected = rank_experts_touched(experts, top_k, tokens, step.op.ranks) if touched is None else touched
    common = sum(size for name, size in sizes.items() if step.op.is_common(name))
    return common + round((read - common) * expected / experts)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _launches(
    steps: Sequence[Step], inputs: Mapping[str, Shape], dtype: DType, width: int, touched: float | None
) -> Iterator[KernelTraffic]:
    known, costs, body = shapes(steps, inputs), step_costs(steps, inputs), ffn_steps(steps)
    for group in _together(steps):
        if isinstance(group[0].op, ops.Experts):
            yield from _expert_launches(group[0], experts_per_token(steps), known, dtype, width, touched)
            continue
        made = {step.output for step in group}
        outside = {name for step in steps if step not in group for name in step.inputs} | {steps[-1].output}
        read = {name for step in group for name in step.inputs} - made
        moved = width * sum(prod(known[name]) for name in (*read, *(made & outside)))
        weights = sum(
            parameter_bytes(name, axes, dtype)
            for step in group if step in body for name, axes in step.parameters().items()
        )  # fmt: skip
        work = Traffic(weights, moved, moved, sum(costs[name].matmul_flops for name in made))
        shared = all(step.output.startswith("shared.") for step in group)
        product = isinstance(group[0].op, ops.Linear)
        k, n = (known[group[0].inputs[0]][-1], sum(known[name][-1] for name in made)) if product else (0, 0)
        yield KernelTraffic(work, shared=shared, k=k, n=n)


def _together(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Group the steps into kernels: matrix products that read the same tensor, and runs of elementwise steps."""
    group: list[Step] = []
    for step in steps:
        if isinstance(step.op, (ops.Dropout, ops.AllReduce)):
            continue
        alone = isinstance(step.op, ops.Experts) or any(isinstance(other.op, ops.Experts) for other in group)
        kinds = {isinstance(other.op, ops.Linear) for other in (*group, step)}
        if group and (alone or len(kinds) > 1 or (True in kinds and step.inputs != group[0].inputs)):
            yield group
            group = []
        group.append(step)
    if group:
        yield group


def _expert_launches(
    step: Step, taken: Mapping[str, int], known: Mapping[str, Shape], dtype: DType, width: int, touched: float | None
) -> Iterator[KernelTraffic]:
    """Yield the kernels of the experts' program, each on one row per pair of a token and an expert, then the kernel
    that mixes the outputs. Only experts that receive tokens have their weights read."""
    op = step.op
    assert isinstance(op, ops.Experts)
    top_k, x = taken[step.output], known[step.inputs[0]]
    tokens, rows = prod(x[:-1]), prod(x[:-1]) * top_k
    known_in = input_shapes(op.program, (rows,))
    for group, one in zip(_together(op.program), _launches(op.program, known_in, dtype, width, None), strict=True):
        names = tuple(f"{step.prefix}{inner.output}." for inner in group)
        sizes = {n: parameter_bytes(n, axes, dtype) for n, axes in step.parameters().items() if n.startswith(names)}
        read = _read_of(step, sizes, top_k, tokens, touched)
        yield replace(one, work=replace(one.work, weight_bytes_read=read), routed=not op.always, shared=op.always)
    out = prod(known[step.output])
    mixed = width * (out * top_k + out)
    yield KernelTraffic(Traffic(0, mixed, mixed), routed=not op.always, shared=op.always)


def _elements(steps: Sequence[Step], inputs: Mapping[str, Shape]) -> int:
    """Return the number of values that unfused steps read and write."""
    shapes_by_name = shapes(steps, inputs)
    taken = experts_per_token(steps)
    total = 0
    for step in steps:
        match step.op:
            case ops.Dropout() | ops.AllReduce():
                pass
            case ops.Experts():
                x, route = step.inputs
                total += _expert_elements(step.op, taken[step.output], shapes_by_name[x]) + prod(shapes_by_name[route])
            case _:
                total += sum(prod(shapes_by_name[name]) for name in (*step.inputs, step.output))
    return total


def _expert_elements(op: ops.Experts, top_k: int, x: Shape) -> int:
    """Return the values read and written by the programs of all chosen experts, and by mixing, which reads their
    outputs and writes the sum.

    If the route's weights multiply the experts' inputs, these are first read, multiplied and written.
    """
    chosen = prod(x[:-1]) * top_k
    program = _elements(op.program, input_shapes(op.program, (chosen,)))
    weighing = 2 * chosen * x[-1] if op.weigh == "input" else 0
    return program + weighing + (chosen + prod(x[:-1])) * x[-1]


Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class TimeFloor:
    """The time of the arithmetic at the peak rate and the time of the traffic at full bandwidth, in seconds."""

    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The floor, which is the longer of the two times."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> Bound:
        """The part that takes longer; `compute` if both take the same time."""
        return "memory" if self.memory_s > self.compute_s else "compute"


def time_floor(flops: float, moved_bytes: float, flops_per_s: float, bytes_per_s: float) -> TimeFloor:
    """Return the time floor of `flops` and `moved_bytes`; both rates must be positive."""
    return TimeFloor(flops / flops_per_s, moved_bytes / bytes_per_s)
