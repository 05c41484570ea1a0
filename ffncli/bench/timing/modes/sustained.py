"""--sustained: a kernel and the baseline in turns of 300 ms, each at its own steady clock.

The ordinary ratio is at equal clock: within rounds of short blocks all arms have the same clock. A kernel that draws
more power runs slower when it runs alone for long (on a B200: 1965 → 1580 MHz after 5 ms). Turns go A B B A, so that a
clock that drops evenly affects both alike. Two turns of each make no interval: the ratio of either pair is shown.

Power is the energy counter's difference over a turn: `nvmlDeviceGetPowerUsage` is the mean of the last second on most
cards, so after a turn of a third of it both sides would show the mixture.
"""

from __future__ import annotations

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
WORTH_SAYING = 0.01  # difference to the ratio at equal clock
_TRIES = 4  # a clock that rises under load makes the first turns too short


@dataclass
class Turns:
    """The turns of one arm: seconds of a call in each, and the GPU's clock in MHz and power in W where these are known.

    `launch_bound`: in some turn the GPU waited for the host, so that its clock and power are not those of full work.
    """

    name: str
    times: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    launch_bound: bool = False

    @property
    def time_s(self) -> float:
        """Seconds of a call, the geometric mean of the turns."""
        return exp(fsum(map(log, self.times)) / len(self.times))

    @property
    def state(self) -> str:
        """`packed 1410 MHz 640 W`, the means; empty if neither is known."""
        means = [
            f"{fsum(of) / len(of):.0f} {unit}" for of, unit in ((self.clocks_mhz, "MHz"), (self.powers_w, "W")) if of
        ]
        return " ".join((self.name, *means)) if means else ""

    def take(self, arm: Arm, inner: int, clock: Clock, probe: GpuProbe | None) -> None:
        """One more turn, of so many calls. The GPU is read after it."""
        REPORTER.calls(arm.name)
        began, before = clock.now(), probe.energy() if probe else None
        taken = clock.time(arm.call, inner, arm.before)
        seconds, after = clock.now() - began, probe.energy() if probe else None
        sample = probe.fresh() if probe else Sample()  # last: meanwhile the GPU is idle
        power = sample.power_w if before is None or after is None else (after - before) / seconds
        self.times.append(taken / inner / arm.calls)
        self.clocks_mhz += [] if sample.sm_mhz is None else [sample.sm_mhz]
        self.powers_w += [] if power is None else [power]
        self.launch_bound = self.launch_bound or bool(getattr(clock, "launch_bound", False))


def sustained(
    kernel: Arm, baseline: Arm, clock: Clock, probe: GpuProbe | None = None, seconds: float = TURN
) -> tuple[Turns, Turns]:
    """Turns of at least `seconds` each: kernel, baseline, baseline, kernel; those of the kernel and of the baseline."""
    calls = {arm.name: _enough(arm, clock, seconds) for arm in (kernel, baseline)}
    turns = {arm.name: Turns(arm.name) for arm in (kernel, baseline)}
    for arm in (kernel, baseline, baseline, kernel):
        turns[arm.name].take(arm, calls[arm.name], clock, probe)
    REPORTER.rests()
    return turns[kernel.name], turns[baseline.name]


def sustained_remarks(
    arms: Mapping[str, Arm], baseline: str, blocks: Sequence[TimedBlock], clock: Clock, probe: GpuProbe | None
) -> dict[str, str]:
    """For each arm that was compared with the baseline in these blocks, a note if its ratio in long turns differs."""
    remarks: dict[str, str] = {}
    base = arms.get(baseline)
    for name, arm in arms.items():
        ratio = paired(blocks, name, baseline)
        if base is not None and arm is not base and ratio is not None:
            remarks[name] = note(*sustained(arm, base, clock, probe), exp(ratio.interval.value))
    return remarks


def note(kernel: Turns, baseline: Turns, equal_clock: float) -> str:
    """The ratios in words if both pairs of turns differ from that at equal clock, by more than 1 % together.

    Also, at whatever ratio, that the turns were launch-bound: they say nothing about sustained work then.
    """
    if kernel.launch_bound or baseline.launch_bound:
        return "sustained: the GPU waited for the host in these turns, so its clock is not that of full work"
    ratio = kernel.time_s / baseline.time_s
    low, high = sorted(a / b for a, b in zip(kernel.times, baseline.times, strict=True))
    one_says_the_same = log(low / equal_clock) <= 0 <= log(high / equal_clock)
    if one_says_the_same or abs(log(ratio / equal_clock)) <= log(1 + WORTH_SAYING):
        return ""
    turns = f"two turns of each: {low:.3f} and {high:.3f}"
    states = ", ".join(filter(None, (kernel.state, baseline.state, turns)))
    return f"sustained {ratio:.3f} ({states}), at equal clock {equal_clock:.3f}"


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
