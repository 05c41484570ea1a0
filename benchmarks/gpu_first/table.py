"""Every probe by its part. A part takes less than ten minutes, as its limits add up to no more."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu_first import clock, device, facts, faults, method
from benchmarks.gpu_first.probe import Probe

PARTS: Mapping[str, tuple[Probe, ...]] = {
    "facts": facts.PROBES,
    "device": device.PROBES,
    "clock": clock.PROBES,
    "faults": faults.PROBES,
    "method": method.METHOD,
    "repeat": method.REPEAT,
}
LONGEST_PART_S = 600


def probe_of(name: str) -> Probe:
    """The probe of that name. Raises KeyError."""
    return {probe.name: probe for probes in PARTS.values() for probe in probes}[name]


def listing() -> str:
    """Every probe on a line: part, finding, name, limit in seconds, question."""
    lines = []
    for part, probes in PARTS.items():
        lines.append(f"{part}: at most {sum(probe.limit_s for probe in probes)} s")
        lines += [f"  {p.finding:<4} {p.name:<16} {p.limit_s:>4} s  {p.question}" for p in probes]
    return "\n".join(lines)
