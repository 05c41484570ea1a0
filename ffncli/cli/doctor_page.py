"""The rows of `ffn doctor` as JSON, as CSV and as a page to read: what there is, what to do, what can be resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING

from ffncli.bench.doctor.doctor import DoctorCheck
from ffncli.bench.records import Method
from ffncli.errors import ExitCode, FFNError
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import percent, plural

if TYPE_CHECKING:
    from ffncli.bench.doctor.noise import Noise

CONVENTIONS = {
    "status": "ok; note: worth knowing; missing: can be installed; bad: is here and does not work",
    "resolvable_difference": "half-width of the 95 % interval, over fresh processes, of the ratio of a small product to"
    " itself, or how far its end is from 1 where it does not hold 1; of 1: 0.01 is 1 %",
}
_MARGIN = Method().margin
_TROUBLED = 0.1
_WIDTH = 54  # of a value, so that the table fits 80 columns


def noise_check(noise: Noise | None) -> DoctorCheck:
    """The noise test as a row."""
    if noise is None:
        advice = "its processes failed; python -m ffncli.bench.doctor.noise 0 1 0 says why"
        return DoctorCheck("noise", "not measured", "bad", advice)
    value = f"differences of {percent(noise.resolvable_difference, 2)} and more can be told"
    if noise.resolvable_difference <= _MARGIN:
        return DoctorCheck("noise", value)
    advice = f"ffn bench decides at {percent(_MARGIN, 2)}: expect `inconclusive`"
    if noise.troubled > _TROUBLED:
        advice += "; end other work, or try --threads 1"
    else:
        advice += "; give it more processes or a larger --max-time"
    return DoctorCheck("noise", value, "note", advice)


def answer(checks: Sequence[DoctorCheck], noise: Noise | None) -> Answer:
    """All rows: `rows` in JSON, a line each in CSV."""
    names = tuple(field.name for field in fields(DoctorCheck))
    flat = Table(names, [tuple(getattr(check, name) for name in names) for check in checks])
    body = {
        "rows": [asdict(check) for check in checks],
        "resolvable_difference": noise.resolvable_difference if noise else None,
        "noise": asdict(noise) if noise else None,
    }
    parts: list[Part] = [Table(("", "value", "status"), [row for check in checks for row in _rows(check)])]
    if advised := [check for check in checks if check.advice]:
        parts += [Heading("What to do"), *(Line(f"{check.name}: {check.advice}") for check in advised)]
    if noise:
        parts += [Heading("What this machine can tell apart"), *map(Line, _in_words(noise))]
    return Answer("doctor", body, flat, parts, CONVENTIONS)


def failure(lacking: Sequence[DoctorCheck]) -> FFNError:
    """The error that names what nothing runs without; the answer has been shown before it."""
    names = ", ".join(check.name for check in lacking)
    return FFNError(f"ffn cannot run here: {names}", lacking[0].advice, ExitCode.ENVIRONMENT)


def _rows(check: DoctorCheck) -> list[tuple[str, str, str]]:
    """A row of the table; a long value goes on in the next ones."""
    first, *others = wrap(check.value, _WIDTH, break_long_words=False) or [""]
    return [(check.name, first, check.status), *(("", other, "") for other in others)]


def _in_words(noise: Noise) -> list[str]:
    threads = f"{noise.threads} {plural('thread', noise.threads)}"
    lines = [
        f"The same code against itself, {noise.processes} fresh processes, {noise.rounds} rounds, {threads},"
        f" {noise.seconds:.0f} s: ratio {noise.aa_ratio:.4f}, 95 % interval {noise.aa_low:.4f} to {noise.aa_high:.4f}.",
    ]
    if noise.sequential_times_longer > 1.5 and isfinite(noise.sequential_times_longer):
        lines.append(
            f"Timed one after the other in the same time, only {percent(noise.sequential_difference, 2)} could be told:"
            f" {noise.sequential_times_longer:.2g} times the time, if those errors average out."
        )
    if noise.troubled > _TROUBLED:
        lines.append(f"{percent(noise.troubled, 2)} of the blocks were preempted, throttled or stolen from.")
    return lines
