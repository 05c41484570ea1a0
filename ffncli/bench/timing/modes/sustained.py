"""--sustained: a kernel and the baseline alternate in turns of 300 ms, each at its own steady clock.

The ordinary ratio is measured at equal clock: within rounds of short blocks, all arms have the same clock. A kernel
that draws more power slows down if it runs alone for long (on a B200: 1965 → 1580 MHz after 5 ms). The turns are A B B
A, so that a steadily falling clock affects both alike. Two turns of each arm are too few for an interval, so the ratios
of both pairs of turns are shown.

A turn's power is the increase of the energy counter divided by the turn's time. `nvmlDeviceGetPowerUsage` averages over
the last second on most cards; a turn lasts a third of that, so it would mix both sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, fsum, log

from ffncli.bench.judge.ratios import paired
from ffncli.bench.machine.devices import GpuProbe, Sample
from ffncli.bench.records import TimedBlock
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import Arm

TURN = 0.3  # s
WORTH_SAYING = 0.01  # minimum difference to the ratio at equal clock
_TRIES = 4  # repeated because a clock that rises under load makes the first turns too short


@dataclass
class Turns:
    """The turns of one arm: the seconds per call in each turn, and the GPU's clock in MHz and power in W, if known.

    `launch_bound` is true if the GPU waited for the host in some turn; its clock and power are then not those under
    full load.
    """

    name: str
    times: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    launch_bound: bool = False

    @property
    def time_s(self) -> float:
        """Seconds per call, as the geometric mean over the turns."""
        return exp(fsum(map(log, self.times)) / len(self.times))

    @property
    def state(self) -> str:
        """The means as a string such as `1410 MHz 640 W`; empty if neither is known."""
        means = [
            f"{fsum(of) / len(of):.0f} {unit}" for of, unit in ((self.clocks_mhz, "MHz"), (self.powers_w, "W")) if of
        ]
        return " ".join((self.name, *means)) if means else ""

    def take(self, arm: Arm, inner: int, clock: Clock, probe: GpuProbe | None) -> None:
        """Run one more turn, of `inner` calls, and then read the GPU."""
        REPORTER.calls(arm.name)
        began, before = clock.now(), probe.energy() if probe else None
        taken = clock.time(arm.call, inner, arm.before)
        seconds, after = clock.now() - began, probe.energy() if probe else None
        sample = probe.fresh() if probe else Sample()  # last: the GPU idles meanwhile
        power = sample.power_w if before is None or after is None else (after - before) / seconds
        self.times.append(taken / inner / arm.calls)
        self.clocks_mhz += [] if sample.sm_mhz is None else [sample.sm_mhz]
        self.powers_w += [] if power is None else [power]
        self.launch_bound = self.launch_bound or bool(getattr(clock, "launch_bound", False))


def sustained(
    kernel: Arm, baseline: Arm, clock: Clock, probe: GpuProbe | None = None, seconds: float = TURN
) -> tuple[Turns, Turns]:
    """Run turns of at least `seconds`: kernel, baseline, baseline, kernel. Return (kernel turns, baseline turns)."""
    calls = {arm.name: _enough(arm, clock, seconds) for arm in (kernel, baseline)}
    turns = {arm.name: Turns(arm.name) for arm in (kernel, baseline)}
    for arm in (kernel, baseline, baseline, kernel):
        turns[arm.name].take(arm, calls[arm.name], clock, probe)
    REPORTER.rests()
    return turns[kernel.name], turns[baseline.name]


def sustained_remarks(
    arms: Mapping[str, Arm], baseline: str, blocks: Sequence[TimedBlock], clock: Clock, probe: GpuProbe | None
) -> dict[str, str]:
    """Return each arm's note, which is empty unless the arm's ratio in long turns differs from its ratio at equal
    clock."""
    remarks: dict[str, str] = {}
    base = arms.get(baseline)
    for name, arm in arms.items():
        ratio = paired(blocks, name, baseline)
        if base is not None and arm is not base and ratio is not None:
            remarks[name] = note(*sustained(arm, base, clock, probe), exp(ratio.interval.value))
    return remarks


def note(kernel: Turns, baseline: Turns, equal_clock: float) -> str:
    """Return the ratios in words, if both pairs' ratios differ from the ratio at equal clock in the same direction, and
    their mean differs from it by more than 1 %.

    If the turns were launch-bound, the note reports that, whatever the ratio, because such turns do not measure
    sustained work.
    """
    if kernel.launch_bound or baseline.launch_bound:
        return "sustained: the GPU waited for the host in these turns, so its clock is not the clock under full load"
    ratio = kernel.time_s / baseline.time_s
    low, high = sorted(a / b for a, b in zip(kernel.times, baseline.times, strict=True))
    one_says_the_same = log(low / equal_clock) <= 0 <= log(high / equal_clock)
    if one_says_the_same or abs(log(ratio / equal_clock)) <= log(1 + WORTH_SAYING):
        return ""
    turns = f"two turns of each: {low:.3f} and {high:.3f}"
    states = ", ".join(filter(None, (kernel.state, baseline.state, turns)))
    return f"sustained {ratio:.3f} ({states}), at equal clock {equal_clock:.3f}"


def _enough(arm: Arm, clock: Clock, seconds: float) -> int:
    """Return the number of calls that take a tenth longer than a turn, found by turns of increasing length (which warm
    up the device).

    A turn includes the work before each call, such as emptying caches; if calls are short, that work is nearly the
    whole turn.
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
