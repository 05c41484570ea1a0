"""--sustained: a kernel and the baseline in turns of 300 ms, each at its own steady clock.

The ordinary ratio is at equal clock: within rounds of short blocks all arms have the same clock. A kernel that draws
more power runs slower when it runs alone for long (on a B200: 1965 → 1580 MHz after 5 ms). Turns go A B B A, so that a
clock that drops evenly affects both alike. Two turns of each make no interval: the ratio of either pair is shown.

Power is the energy counter's difference over a turn: `nvmlDeviceGetPowerUsage` is the mean of the last second on most
cards, so after a turn of a third of it both sides would show the mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, fsum, log

from ffncli.bench.activity import REPORTER
from ffncli.bench.judge.ratios import paired
from ffncli.bench.machine.devices import GpuProbe, Sample
from ffncli.bench.records import TimedBlock
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.rounds import Arm
from ffncli.dataclass import dataclass

TURN = 0.3  # s
WORTH_SAYING = 0.01  # difference to the ratio at equal clock
_TRIES = 4  # a clock that rises under load makes the first turns too short


@dataclass(frozen=True)
class SustainedSide:
    """One arm: seconds of a call, geometric mean of its turns; mean clock in MHz and power in W if known."""

    name: str
    time_s: float
    clock_mhz: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class Sustained:
    """Both arms; `ratio` is the kernel's time over the baseline's, `pairs` are those of the first and the second turns.

    `launch_bound`: in some turn the GPU waited for the host, so that its clock and power are not those of full work.
    """

    kernel: SustainedSide
    baseline: SustainedSide
    pairs: tuple[float, float]
    launch_bound: bool = False

    @property
    def ratio(self) -> float:
        """Below 1 the kernel is faster."""
        return self.kernel.time_s / self.baseline.time_s


def sustained(
    kernel: Arm, baseline: Arm, clock: Clock, probe: GpuProbe | None = None, seconds: float = TURN
) -> Sustained:
    """Turns of at least `seconds` each: kernel, baseline, baseline, kernel. The GPU is read after each turn."""
    calls = {arm.name: _enough(arm, clock, seconds) for arm in (kernel, baseline)}
    turns: dict[str, list[_Turn]] = {kernel.name: [], baseline.name: []}
    for arm in (kernel, baseline, baseline, kernel):
        REPORTER.calls(arm.name)
        turns[arm.name].append(_turn(arm, calls[arm.name], clock, probe))
    REPORTER.rests()
    pairs = [a.time_s / b.time_s for a, b in zip(turns[kernel.name], turns[baseline.name], strict=True)]
    behind = any(turn.launch_bound for side in turns.values() for turn in side)
    sides = [_side(arm.name, turns[arm.name]) for arm in (kernel, baseline)]
    return Sustained(sides[0], sides[1], (pairs[0], pairs[1]), behind)


@dataclass(frozen=True)
class _Turn:
    """Seconds of a call, and the GPU's state during them."""

    time_s: float
    clock_mhz: int | None
    power_w: float | None
    launch_bound: bool


def _turn(arm: Arm, inner: int, clock: Clock, probe: GpuProbe | None) -> _Turn:
    began, before = clock.now(), probe.energy() if probe else None
    taken = clock.time(arm.call, inner, arm.before)
    seconds, after = clock.now() - began, probe.energy() if probe else None
    sample = probe.fresh() if probe else Sample()  # last: meanwhile the GPU is idle
    power = sample.power_w if before is None or after is None else (after - before) / seconds
    return _Turn(taken / inner / arm.calls, sample.sm_mhz, power, bool(getattr(clock, "launch_bound", False)))


def sustained_remarks(
    arms: Mapping[str, Arm], baseline: str, blocks: Sequence[TimedBlock], clock: Clock, probe: GpuProbe | None
) -> dict[str, str]:
    """For each arm that was compared with the baseline in these blocks, a note if its ratio in long turns differs."""
    remarks: dict[str, str] = {}
    base = arms.get(baseline)
    for name, arm in arms.items():
        ratio = paired(blocks, name, baseline)
        if base is not None and arm is not base and ratio is not None:
            turns = sustained(arm, base, clock, probe)
            remarks[name] = note(turns, exp(ratio.interval.value))
    return remarks


def note(result: Sustained, equal_clock: float) -> str:
    """The ratios in words if both pairs of turns differ from that at equal clock, by more than 1 % together.

    Also, at whatever ratio, that the turns were launch-bound: they say nothing about sustained work then.
    """
    if result.launch_bound:
        return "sustained: the GPU waited for the host in these turns, so its clock is not that of full work"
    apart = [log(ratio / equal_clock) for ratio in result.pairs]
    if min(apart) <= 0 <= max(apart) or abs(log(result.ratio / equal_clock)) <= log(1 + WORTH_SAYING):
        return ""
    low, high = sorted(result.pairs)
    turns = f"two turns of each: {low:.3f} and {high:.3f}"
    states = ", ".join(filter(None, (_state(result.kernel), _state(result.baseline), turns)))
    return f"sustained {result.ratio:.3f} ({states}), at equal clock {equal_clock:.3f}"


def _enough(arm: Arm, clock: Clock, seconds: float) -> int:
    """The number of calls that takes a tenth longer than a turn, from growing turns (which warm the device).

    What runs before each call, to empty caches, is part of a turn: of short calls it is nearly all.
    """
    inner = 1
    for share in (0.01, 0.1, *(1.0,) * _TRIES):
        REPORTER.calls(arm.name)
        began, taken = clock.now(), clock.time(arm.call, inner, arm.before)
        if arm.before:
            taken = clock.now() - began
        if share == 1.0 and taken >= seconds:
            break
        inner = max(1, ceil(1.1 * share * seconds / max(taken / inner, 1e-9)))
    return inner


def _side(name: str, turns: Sequence[_Turn]) -> SustainedSide:
    time_s = exp(fsum(log(turn.time_s) for turn in turns) / len(turns))
    clocks = [float(turn.clock_mhz) for turn in turns if turn.clock_mhz is not None]
    powers = [turn.power_w for turn in turns if turn.power_w is not None]
    return SustainedSide(name, time_s, _mean(clocks), _mean(powers))


def _mean(values: Sequence[float]) -> float | None:
    return fsum(values) / len(values) if values else None


def _state(side: SustainedSide) -> str:
    """`packed 1410 MHz 640 W`."""
    parts = (
        "" if side.clock_mhz is None else f"{side.clock_mhz:.0f} MHz",
        "" if side.power_w is None else f"{side.power_w:.0f} W",
    )
    readings = " ".join(filter(None, parts))
    return f"{side.name} {readings}" if readings else ""
