"""Derive records from several rows of a result: a kernel's speed as one size changes, its speed-up on more threads, and
the share of a block's time that each step takes. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from ffncli.bench.judge.environment_match import block_of
from ffncli.bench.judge.statistics import mean_ratio, welch
from ffncli.bench.records import BLOCK, STEP, Case
from ffncli.bench.results.row import ASKED, BLOCK_COLUMNS, ResultRow, columns
from ffncli.block.cost import step_costs
from ffncli.block.recipe import steps
from ffncli.block.steps import Experts, Shape, Step, experts_per_token, input_shapes
from ffncli.errors import FFNError
from ffncli.kernels.kernel import kernel_steps

SIZES = ("tokens", "d_ff", "d_model", "threads")  # the columns that may be swept; in a tie, the first wins
_NO_SWEEP = "--plot draws speed by size, but no size has two values here"


@dataclass(frozen=True)
class SpeedPoint:
    """A speed at one size: the baseline's time over the kernel's, in the same rounds, with its 95 % interval."""

    size: int
    speed: float
    speed_low: float | None
    speed_high: float | None
    verdict: str


@dataclass(frozen=True)
class SpeedCurve:
    """One kernel's points, in order of increasing size."""

    kernel: str
    points: tuple[SpeedPoint, ...]


@dataclass(frozen=True)
class SpeedSweep:
    """Cases that differ in `axis` and in the columns that depend on it (for example, the cache mode may depend on the
    number of tokens).

    `block` is the measured block. `where` distinguishes this sweep from the other sweeps of the same rows; it is empty
    if this is the only sweep.
    """

    axis: str
    baseline: str
    block: str
    where: str
    curves: tuple[SpeedCurve, ...]


def speed_sweeps(rows: Sequence[ResultRow]) -> tuple[SpeedSweep, ...]:
    """Return the sweeps of a result, in its order; none if no size has two values or nothing was timed."""
    timed = [row for row in rows if row.status == "ok" and row.ratio]
    counts = {name: len({getattr(row, name) for row in timed} - {None}) for name in SIZES}
    axis = max(SIZES, key=lambda name: counts[name])
    if counts[axis] < 2:
        return ()
    several = () if _are_of_one_grid(timed) else ("run_id",)
    others = (*several, *BLOCK_COLUMNS, *ASKED, "baseline")
    varying = [name for name in others if name != axis and not _decided_by(axis, name, timed)]
    # A curve never mixes kinds of machines, even if each size was measured on only one kind.
    if len({row.hardware for row in timed}) > 1:
        varying.append("hardware")
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in timed:
        if getattr(row, axis) is not None:
            groups.setdefault(tuple(getattr(row, name) for name in varying), []).append(row)
    sweeps = []
    for values, group in groups.items():
        if len({getattr(row, axis) for row in group}) > 1:
            where = ", ".join(_value(name, value) for name, value in zip(varying, values, strict=True))
            base = group[0].baseline
            kernels = sorted(dict.fromkeys(row.kernel for row in group), key=lambda name: name != base)
            curves = tuple(_curve(axis, kernel, group) for kernel in kernels)
            sweeps.append(SpeedSweep(axis, base, _block(axis, group), where, curves))
    return tuple(sweeps)


def require_sweeps(rows: Sequence[ResultRow]) -> tuple[SpeedSweep, ...]:
    """Return the sweeps of a stored result. Raises FFNError if it has no sweeps."""
    sweeps = speed_sweeps(rows)
    if not sweeps:
        raise FFNError(_NO_SWEEP, "measure one with ffn bench --tokens 1,16,256 --save FILE.csv")
    return sweeps


def _are_of_one_grid(rows: Sequence[ResultRow]) -> bool:
    """Return whether rows of several runs fit into one grid: no case and kernel occurs twice, and versions agree."""
    shared = columns("environment", one_per_grid=True)
    versions = {tuple(getattr(row, name) for name in shared) for row in rows}
    return len({(row.case, row.kernel) for row in rows}) == len(rows) and len(versions) == 1


def _decided_by(axis: str, name: str, rows: Sequence[ResultRow]) -> bool:
    """Return whether rows with equal `axis` have equal `name`, which then does not divide the rows into sweeps."""
    values: dict[Any, set[Any]] = {}
    for row in rows:
        values.setdefault(getattr(row, axis), set()).add(getattr(row, name))
    return all(len(some) == 1 for some in values.values())


def _curve(axis: str, kernel: str, rows: Sequence[ResultRow]) -> SpeedCurve:
    """Return a kernel's curve. Speeds are reciprocals of time ratios, so the ends of each interval are swapped."""
    points = []
    for row in rows:
        if row.kernel == kernel and row.ratio:
            low, high = (1 / end if end else None for end in (row.ratio_high, row.ratio_low))
            points.append(SpeedPoint(getattr(row, axis), 1 / row.ratio, low, high, row.verdict))
    return SpeedCurve(kernel, tuple(sorted(points, key=lambda point: point.size)))


def _block(axis: str, rows: Sequence[ResultRow]) -> str:
    """Return the block that all rows measure, without the width that is swept."""
    names = list(dict.fromkeys(block_of(row) for row in rows))
    if len(names) == 1:
        return names[0]
    sizes = [getattr(row, axis) for row in rows]
    return f"{rows[0].activation}, {axis} from {min(sizes)} to {max(sizes)}"


def _value(name: str, value: Any) -> str:
    """Return a value in words, as in `bf16`, `32 tokens` or `d_ff 512`."""
    if name in ("tokens", "threads"):
        return f"{value} {name}"
    return str(value) if isinstance(value, str) else f"{name} {value}"


# --- more threads -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThreadScaling:
    """One kernel of one case on `threads` threads, compared with `base_threads`, the fewest threads that were measured.

    `speed_up` is the time on `base_threads` divided by the time on `threads`, with its 95 % interval if both were
    measured in at least two processes. `efficiency` is `speed_up` divided by `threads / base_threads`: 1 if twice the
    threads take half the time.
    """

    case: str
    kernel: str
    base_threads: int
    threads: int
    speed_up: float
    speed_up_low: float | None
    speed_up_high: float | None
    efficiency: float


def thread_scaling(cases: Sequence[Case], rows: Sequence[ResultRow]) -> tuple[ThreadScaling, ...]:
    """Return a record for every row that was also measured on fewer threads of the same machine; () for a GPU."""
    hosts = {row.case: row.host for row in rows}
    times = {(row.case, row.kernel): [*map(log, row.process_times_s)] for row in rows if row.status == "ok"}
    scalings = []
    for fewest, case in _pairs(cases, hosts):
        for kernel in dict.fromkeys(row.kernel for row in rows):
            before, after = times.get((fewest.key, kernel), []), times.get((case.key, kernel), [])
            speed_up = mean_ratio(after, before)
            if speed_up is None:
                continue
            shift = welch(after, before)
            interval = shift.ratio() if shift else None
            scalings.append(
                ThreadScaling(
                    case.key, kernel, fewest.threads, case.threads, speed_up,
                    interval.low if interval else None, interval.high if interval else None,
                    speed_up * fewest.threads / case.threads,
                )
            )  # fmt: skip
    return tuple(scalings)


def _pairs(cases: Sequence[Case], hosts: Mapping[str, str]) -> list[tuple[Case, Case]]:
    """Return pairs of (a case on the fewest threads, the same case on more threads); `hosts` maps each case to its
    machine."""
    alike: dict[tuple[Case, str | None], list[Case]] = {}
    for case in cases:
        if case.device == "cpu":
            alike.setdefault((replace(case, threads=1), hosts.get(case.key)), []).append(case)
    groups = [sorted(group, key=lambda case: case.threads) for group in alike.values()]
    return [(group[0], case) for group in groups for case in group[1:]]


# --- steps of a block -------------------------------------------------------------------------------------------------


_INSIDE = "[e]."


@dataclass(frozen=True)
class StepShare:
    """One step of a case, or the `whole` block. A step `inside` experts covers all experts that received a token.

    `share` is the step's share of the block's time, with its interval; `flops_share` is its share of the block's FLOPs.
    None means unknown or not timed.
    """

    name: str
    op: str
    whole: bool
    inside: bool
    status: str
    share: float | None
    low: float | None
    high: float | None
    time_s: float | None
    flops_share: float | None
    flops_per_s: float | None


def step_shares(case: Case, rows: Sequence[ResultRow]) -> tuple[StepShare, ...]:
    """Return a record for each of the case's rows. A row's ratio to the block is its share of the block's time."""
    costs = _costs(case)
    return tuple(_share(row, *costs.get(row.kernel.removeprefix(STEP), ("", 0)), costs[BLOCK][1]) for row in rows)


def together(shares: Sequence[StepShare]) -> float | None:
    """Return the sum of the steps' shares, without steps inside experts; None if a share is unknown."""
    parts = [one.share for one in shares if not (one.whole or one.inside)]
    known = [share for share in parts if share is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _share(row: ResultRow, op: str, flops: int, whole: int) -> StepShare:
    name = row.kernel.removeprefix(STEP)
    return StepShare(
        name, op, row.kernel == BLOCK, _INSIDE in name, row.status, row.ratio, row.ratio_low, row.ratio_high,
        row.time_s, flops / whole if whole else None, flops / row.time_s if row.time_s else None,
    )  # fmt: skip


def _costs(case: Case) -> dict[str, tuple[str, int]]:
    """Return a mapping from BLOCK and each step, also those inside experts, to (op, FLOPs on the case's tokens)."""
    block = kernel_steps(steps(case.spec))
    inputs = input_shapes(block, (case.tokens,))
    costs = _of(block, inputs)
    for step in block:
        if isinstance(step.op, Experts):
            chosen = case.tokens * experts_per_token(block)[step.output]
            inner = _of(step.op.program, input_shapes(step.op.program, (chosen,)))
            costs |= {f"{step.output}{_INSIDE}{name}": value for name, value in inner.items()}
    return costs | {BLOCK: (BLOCK, sum(flops for name, (_, flops) in costs.items() if _INSIDE not in name))}


def _of(block: Sequence[Step], inputs: Mapping[str, Shape]) -> dict[str, tuple[str, int]]:
    costs = step_costs(block, inputs)
    return {step.output: (step.op.name, costs[step.output].flops) for step in block}
