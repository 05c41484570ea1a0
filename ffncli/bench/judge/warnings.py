"""Warnings, reasons to trust a ratio less: their stable codes, and advice on each warning. No warning drops a row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from math import ceil, exp, expm1, log, log1p
from statistics import median

from ffncli.bench.judge import statistics
from ffncli.bench.judge.ratios import BUSY, Means, differs, disturbed_share
from ffncli.bench.judge.statistics import Interval
from ffncli.bench.records import LEAST_TIME, Method, TimedBlock
from ffncli.bench.results.row import BenchWarning, ResultRow
from ffncli.show.text import percent

_DRIFT = 0.02
_SHARE = 0.1  # share of the blocks
_STOLEN = 0.01  # share of the blocks
_ROOF = 1.02
_PATIENCE = 600.0  # do not propose more than this many seconds for one case


class Code(StrEnum):
    """The warning codes, in the order in which a row lists them."""

    ONE_PROCESS = "one-process"
    UNRESOLVED = "unresolved"
    PRECISION = "precision"
    PREEMPTED = "preempted"
    THROTTLED = "throttled"
    STOLEN = "stolen"
    LOAD = "load"
    WAITING = "waiting"
    CLOCK = "clock"
    GPU_THROTTLED = "gpu-throttled"
    POWER_CAPPED = "power-capped"
    LAUNCH_BOUND = "launch-bound"
    DRIFT = "drift"
    CORRELATED = "correlated"
    SPIKES = "spikes"
    ROOF = "roof"
    ENVIRONMENT = "environment"


ADVICE: Mapping[str, str] = {
    Code.ONE_PROCESS: "the interval covers this process only: use --processes 5 to compare or to gate",
    Code.UNRESOLVED: "identical code timed twice differed by more than the margin, which widens the intervals: stop"
    " other work, or use --threads 1 or a larger --max-time",
    Code.PRECISION: "raise --max-time, or relax --precision",
    Code.PREEMPTED: "other work ran on these cores, which widens the intervals: stop it, or use --threads 1",
    Code.THROTTLED: "the container used up its CPU quota: use fewer --threads, or raise the quota",
    Code.STOLEN: "the hypervisor took CPU time (steal): measure on a dedicated machine",
    Code.LOAD: "more tasks are waiting than there are cores: stop the other work",
    Code.WAITING: "the threads waited for each other or for a core: use fewer --threads for such a small case",
    Code.CLOCK: "the CPU runs below its rated clock (power, heat or a governor): ratios hold, times are long",
    Code.GPU_THROTTLED: "the GPU lowered its clock (heat or a power problem): ratios hold, times are not reproducible",
    Code.POWER_CAPPED: "the GPU lowered its clock to stay within its power limit, so times are valid for this limit"
    " only; --sustained shows the effect of each kernel's own power",
    Code.LAUNCH_BOUND: "the GPU waited for the host, so times include launches: use more tokens, or a kernel with"
    " fewer launches",
    Code.DRIFT: "the machine's speed changed during the run: ratios hold, times are not reproducible",
    Code.CORRELATED: "consecutive processes are correlated, so the interval was widened: use more --processes",
    Code.SPIKES: "many blocks took much longer than the rest: other work, or memory being moved",
    Code.ROOF: "faster than this machine's limit: check the cache mode or the timing",
    Code.ENVIRONMENT: "the processes ran in different environments: measure again in a single environment",
}

TOPICS: Mapping[str, str] = {  # the topic of `ffn explain` that a warning's advice ends with
    **dict.fromkeys((Code.ONE_PROCESS, Code.PRECISION, Code.CORRELATED), "interval"),
    **dict.fromkeys((Code.DRIFT, Code.CLOCK, Code.GPU_THROTTLED, Code.POWER_CAPPED), "drift"),
    Code.LAUNCH_BOUND: "kernel", Code.SPIKES: "outlier", Code.ROOF: "roofline",
    **dict.fromkeys((Code.UNRESOLVED, Code.PREEMPTED, Code.THROTTLED, Code.STOLEN, Code.LOAD, Code.WAITING,
                     Code.ENVIRONMENT), "noise"),
}  # fmt: skip

ONE_THREAD: Mapping[str, str] = {
    Code.UNRESOLVED: "identical code timed twice differed by more than the margin, which widens the intervals: stop"
    " other work, or raise --max-time",
    Code.PREEMPTED: "other work ran on this core: stop it",
    Code.THROTTLED: "the container used up its CPU quota: raise the quota",
    Code.WAITING: "the thread waited for a core: stop the other work",
}


def advice(warning: BenchWarning, threads: int = 0) -> str:
    """Return what to do about a warning; "" if this version does not know its code.

    `threads` is the largest number of threads used, 0 if unknown. For rows on one thread, the advice does not propose
    fewer threads.
    """
    known = ONE_THREAD if threads == 1 and warning.code in ONE_THREAD else ADVICE
    text = known.get(warning.code, "")
    return f"{text} (ffn explain {TOPICS[warning.code]})" if text else ""


def has(warnings: Iterable[BenchWarning], code: Code) -> bool:
    """Return whether any of the warnings has this code."""
    return any(warning.code == code for warning in warnings)


def by_kind(rows: Sequence[ResultRow]) -> list[tuple[BenchWarning, list[ResultRow]]]:
    """Return the first warning of every kind with the rows that have a warning of this kind, most important first."""
    kinds: dict[str, tuple[BenchWarning, list[ResultRow]]] = {}
    for row in rows:
        for warning in row.warnings:
            _, concerned = kinds.setdefault(warning.code, (warning, []))
            concerned += [row] if row not in concerned[-1:] else []
    order: list[str] = list(Code)
    return [kinds[code] for code in sorted(kinds, key=lambda code: order.index(code) if code in order else len(order))]


def of_case(anchors: Sequence[TimedBlock], aa: Interval | None, method: Method, processes: int) -> list[BenchWarning]:
    """Return the warnings that apply to all rows of a case, derived from the anchor's blocks and the A/A interval."""
    warnings = []
    if processes == 1:
        warnings.append(BenchWarning(Code.ONE_PROCESS, "1 process"))
    if aa is not None and differs(aa, method.margin):
        text = f"this machine cannot resolve {percent(method.margin, 2)} here"
        warnings.append(BenchWarning(Code.UNRESOLVED, f"{text}, A/A ratio {exp(aa.low):.3f} to {exp(aa.high):.3f}"))
    drift = halves(anchors)
    if drift is not None and abs(drift) > log1p(_DRIFT):
        warnings.append(
            BenchWarning(Code.DRIFT, f"{'+' if drift > 0 else '−'}{percent(abs(expm1(drift)), 2)} between halves")
        )
    return warnings


def halves(blocks: Sequence[TimedBlock]) -> float | None:
    """Return the log ratio of the second half of an arm's blocks to the first; None for fewer than 4."""
    ordered = sorted(blocks, key=lambda b: (b.process, b.placement, b.round))
    times = [log(max(b.per_call, LEAST_TIME)) for b in ordered]
    if len(times) < 4:
        return None
    middle = len(times) // 2
    return median(times[-middle:]) - median(times[:middle])


def of_ratio(ratio: Means, method: Method, early: bool = False) -> list[BenchWarning]:
    """Return the warnings about a kernel's interval: precision not reached, correlated processes.

    `early` says that the processes ended before --max-time, so that more time would not help.
    """
    warnings = []
    reached, wanted = ratio.interval.half_width, log1p(method.precision)
    if not ratio.interval.bounded:
        warnings.append(BenchWarning(Code.PRECISION, "a single value has no interval"))
    elif reached > wanted:
        more = min(reached / wanted, 1e6) ** 2  # capped: nobody runs that many rounds
        rounds = ceil(ratio.rounds * more)
        text = f"±{percent(expm1(reached), 2)} reached, ±{percent(method.precision, 2)} wanted"
        seconds = float(f"{method.max_time * rounds / ratio.rounds:.2g}")
        option = f" (--max-time {seconds:g}s)" if seconds <= _PATIENCE else ""  # capped: nobody waits for days
        if early:  # each process is precise, but they differ
            option = f" (--processes {ceil(method.processes * more)})" if seconds <= _PATIENCE else ""
        needed = f"about {rounds} rounds needed, {ratio.rounds} done{option}"
        if statistics.certain(ratio.interval.value, reached, method.margin):
            needed = f"{ratio.rounds} rounds done, the verdict is certain"
        warnings.append(BenchWarning(Code.PRECISION, f"{text}: {needed}"))
    factor = statistics.widening(ratio.correlation)
    if factor > 1:
        warnings.append(BenchWarning(Code.CORRELATED, f"r = {ratio.correlation:.2f}, interval × {factor:.2f}"))
    return warnings


def of_blocks(blocks: Sequence[TimedBlock], ratio_clock: str = "wall") -> list[BenchWarning]:
    """Return the warnings that follow from the flags and figures of the blocks of a kernel and of the baseline.

    `ratio_clock` is the clock of their ratio (`ratios.Means`).
    """
    warnings = []
    if (share := disturbed_share(blocks)) > BUSY:
        of = ", ratio of processor times" if ratio_clock == "thread" else ""
        warnings.append(BenchWarning(Code.PREEMPTED, f"{percent(share, 2)} of the blocks{of}"))
    for code, least in ((Code.THROTTLED, 0.0), (Code.STOLEN, _STOLEN)):
        share = _share(blocks, code.value.__eq__)
        if share > least:
            warnings.append(BenchWarning(code, f"{percent(share, 2)} of the blocks"))
    load, clock, cpu = (figures(blocks, name) for name in ("load", "clock", "cpu"))
    if load:
        warnings.append(BenchWarning(Code.LOAD, f"{max(load):.1f}"))
    if len(cpu) > len(blocks) / 2:
        warnings.append(BenchWarning(Code.WAITING, f"threads were busy {percent(median(cpu), 2)} of the time"))
    # The GPU's state is not read in every block: its flags are counted over the blocks in which it was read.
    read = [block for block in blocks if figures([block], "power")] or blocks
    if len(clock) > _SHARE * len(read):
        warnings.append(BenchWarning(Code.CLOCK, f"{percent(median(clock), 2)} of the rated clock"))
    for code, judged, which in (
        (Code.GPU_THROTTLED, read, "its readings"),
        (Code.POWER_CAPPED, read, "its readings"),
        (Code.LAUNCH_BOUND, blocks, "the blocks"),
    ):
        share = _share(judged, code.value.__eq__)
        if share > _SHARE:
            at = f", at {median(sm):.0f} MHz" if code == Code.POWER_CAPPED and (sm := figures(judged, "sm")) else ""
            warnings.append(BenchWarning(code, f"{percent(share, 2)} of {which}{at}"))
    share = outside(blocks)
    if share > _SHARE:
        warnings.append(BenchWarning(Code.SPIKES, f"{percent(share, 2)} of the blocks"))
    return warnings


def of_roof(roof: float | None, datasheet: float | None) -> list[BenchWarning]:
    """Return a warning for each roof that the time exceeds by more than 2 %."""
    return [
        BenchWarning(Code.ROOF, f"{percent(fraction, 2)} of the {name} roof")
        for name, fraction in (("measured", roof), ("datasheet", datasheet))
        if fraction is not None and fraction > _ROOF
    ]


def figures(blocks: Sequence[TimedBlock], name: str) -> list[float]:
    """Return the figure `name` of every block that has it."""
    return [value for block in blocks if (value := block.figure(name)) is not None]


def outside(blocks: Sequence[TimedBlock]) -> float:
    """Return the share of blocks beyond `statistics.SPIKE` scaled MADs from their placement's median."""
    placements: dict[tuple[str, int, int], list[float]] = {}
    for block in blocks:
        key = (block.kernel, block.process, block.placement)
        placements.setdefault(key, []).append(log(max(block.per_call, LEAST_TIME)))
    total = count = 0
    for kernel in {key[0] for key in placements}:
        away = [t - median(ts) for key, ts in placements.items() if key[0] == kernel for t in ts]
        width = statistics.SCALE * median(abs(a) for a in away)
        total += len(away)
        count += sum(abs(a) > statistics.SPIKE * width for a in away) if width > 0 else 0
    return count / total if total else 0.0


def _share(blocks: Sequence[TimedBlock], is_one: Callable[[str], bool]) -> float:
    return sum(any(is_one(flag) for flag in block.flags) for block in blocks) / len(blocks) if blocks else 0.0


# --- what a row could have resolved -----------------------------------------------------------------------------------


def resolvable_difference(row: ResultRow, margin: float) -> float | None:
    """Return the smallest difference from the baseline that an interval as wide as this row's could have decided, as a
    fraction (0.05: a kernel that takes 5 % longer, or correspondingly less time).

    A verdict needs the whole interval beyond the margin, so this is the margin plus the interval's half-width, on the
    log scale. None for the baseline, and for a row without an interval.
    """
    if row.status != "ok" or row.kernel == row.baseline or not row.ratio_low or not row.ratio_high:
        return None
    return expm1(log1p(margin) + (log(row.ratio_high) - log(row.ratio_low)) / 2)
