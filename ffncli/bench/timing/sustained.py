"""--sustained: a kernel and the baseline in turns of 300 ms, each at its own steady clock.

The ordinary ratio is at equal clock: within rounds of short blocks all arms have the same clock. A kernel that draws
more power runs slower when it runs alone for long (on a B200: 1965 → 1580 MHz after 5 ms). Turns go A B B A, so that a
clock that drops evenly affects both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, fsum, log

from ffncli.bench.machine.nvml import GpuProbe, Sample
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.rounds import Arm

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
    """Both arms; `ratio` is the kernel's time over the baseline's."""

    kernel: SustainedSide
    baseline: SustainedSide

    @property
    def ratio(self) -> float:
        """Below 1 the kernel is faster."""
        return self.kernel.time_s / self.baseline.time_s


def sustained(
    kernel: Arm, baseline: Arm, clock: Clock, probe: GpuProbe | None = None, seconds: float = TURN
) -> Sustained:
    """Turns of at least `seconds` each: kernel, baseline, baseline, kernel. The GPU is read after each turn."""
    calls = {arm.name: _enough(arm, clock, seconds) for arm in (kernel, baseline)}
    turns: dict[str, list[tuple[float, Sample]]] = {kernel.name: [], baseline.name: []}
    for arm in (kernel, baseline, baseline, kernel):
        inner = calls[arm.name]
        taken = clock.time(arm.call, inner, arm.before)
        turns[arm.name].append((taken / inner / arm.calls, probe.fresh() if probe else Sample()))
    return Sustained(_side(kernel.name, turns[kernel.name]), _side(baseline.name, turns[baseline.name]))


def note(result: Sustained, equal_clock: float) -> str:
    """Both ratios in words if they differ by more than 1 %, else empty."""
    if abs(log(result.ratio / equal_clock)) <= log(1 + WORTH_SAYING):
        return ""
    sides = ", ".join(filter(None, (_state(result.kernel), _state(result.baseline))))
    at = f" ({sides})" if sides else ""
    return f"sustained {result.ratio:.3f}{at}, at equal clock {equal_clock:.3f}"


def _enough(arm: Arm, clock: Clock, seconds: float) -> int:
    """The number of calls that takes a tenth longer than a turn, from growing turns (which warm the device)."""
    inner = 1
    for share in (0.01, 0.1, *(1.0,) * _TRIES):
        taken = clock.time(arm.call, inner, arm.before)
        if share == 1.0 and taken >= seconds:
            break
        inner = max(1, ceil(1.1 * share * seconds / max(taken / inner, 1e-9)))
    return inner


def _side(name: str, turns: Sequence[tuple[float, Sample]]) -> SustainedSide:
    time_s = exp(fsum(log(seconds) for seconds, _ in turns) / len(turns))
    clocks = [float(sample.sm_mhz) for _, sample in turns if sample.sm_mhz is not None]
    powers = [sample.power_w for _, sample in turns if sample.power_w is not None]
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
