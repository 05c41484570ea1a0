"""`ffn doctor`: the command, and its rows as JSON, CSV and a readable page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

from ffncli.bench.doctor import doctor
from ffncli.bench.doctor.doctor import DoctorCheck
from ffncli.bench.timing.modes import auto_choice
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.common.summaries import csv_table, in_json
from ffncli.errors import ExitCode, FFNError, option
from ffncli.options.accept import ABOVE_ZERO, THREADS
from ffncli.options.opt import COMPUTE, Opt, Options
from ffncli.show.color import progress, shows_bar
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import percent, plural
from ffncli.system import host

if TYPE_CHECKING:
    from ffncli.bench.doctor.noise import Noise
    from ffncli.bench.timing.modes.auto_choice import AutoChoice

CONVENTIONS = {
    "status": "ok; note: worth knowing; missing: can be installed; bad: installed but does not work",
    "resolvable_difference": "half-width of the 95 % interval (over fresh processes) of the ratio between two timings"
    " of the same small matmul; if the interval excludes 1, the distance of its end from 1; 0.01 is 1 %",
}
_WIDTH = 54  # maximum length of a value, so that the table fits 80 columns
_SECONDS = 10.0
_test = partial(Opt, group="Noise test", daily=True)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """Options for the noise test, and for the kernels that `auto` has chosen."""

    no_noise: Annotated[bool, _test("--no-noise", help="Skip the noise test.")] = False
    seconds: Annotated[
        float | None,
        _test("--seconds", metavar="N", accepts=ABOVE_ZERO, help=f"Length of the noise test. [default: {_SECONDS:g}]"),
    ] = None
    threads: Annotated[
        int | None,
        Opt(
            "--threads", accepts=THREADS, group=COMPUTE, daily=True,
            help="CPU threads of the noise test. [default: as in `ffn bench`]",
        ),
    ] = None  # fmt: skip
    clear_cache: Annotated[
        bool,
        Opt(
            "--clear-cache",
            group=COMPUTE,
            help="Forget which kernels ffn bench --kernel auto has chosen on this machine.",
        ),
    ] = False


@spread
def command(*, options: DoctorOptions, show: OutputOptions) -> None:
    """Show what this machine can do (versions, processor, caches, compiler, GPU, extras with the command that installs
    them), and test for 10 seconds how small a difference it can measure.

    Examples:
      ffn doctor
      ffn doctor --no-noise                # in a second
      ffn doctor --seconds 60 --threads 1  # a longer noise test
      ffn doctor --no-noise --json         # for a bug report
    """
    output = show.output()
    if options.no_noise and (options.seconds is not None or options.threads is not None):
        name = "seconds" if options.seconds is not None else "threads"
        raise FFNError(f"{option(name)} contradicts {option('no_noise')}", "it is an option of the noise test")
    if options.clear_cache:
        count = auto_choice.clear()
        output.note(f"{count} {plural('choice', count)} of auto removed")
    checks = list(doctor.checks())
    lacking = doctor.lacking(checks)
    noise = None
    if not options.no_noise and not lacking:
        noise = _noise(options.seconds or _SECONDS, options.threads or host.default_threads(), output)
        checks.append(doctor.noise_check(noise))
    output.show(answer(checks, noise, auto_choice.choices()))
    if lacking:
        names = ", ".join(check.name for check in lacking)
        raise FFNError(f"ffn cannot run here: {names}", lacking[0].advice, ExitCode.ENVIRONMENT)


def _noise(seconds: float, threads: int, output: Output) -> Noise | None:
    """Run the noise test with a progress bar, or with a note if the output is a pipe."""
    from ffncli.bench.doctor.noise import measure_noise, processes_for

    count = processes_for(seconds)
    if not shows_bar(output.quiet):
        output.note(f"noise test: {seconds:g} s")
    with progress(count, "identical code against itself", output.quiet, output.color) as advance:
        return measure_noise(seconds, threads, advance)


def answer(
    checks: Sequence[DoctorCheck], noise: Noise | None, choices: Sequence[tuple[str, AutoChoice]] = ()
) -> Answer:
    """Build the answer: all `rows` in JSON, one line per row in CSV; `choices` are the kernels chosen by `auto`."""
    rows = in_json(checks)
    body = {
        "rows": rows,
        "resolvable_difference": noise.resolvable_difference if noise else None,
        "noise": in_json(noise),
        "choices": [{"case": case, **asdict(choice)} for case, choice in choices],
    }
    parts: list[Part] = [Table(("", "value", "status"), [row for check in checks for row in _rows(check)])]
    if advised := [check for check in checks if check.advice]:
        parts += [Heading("What to do"), *(Line(f"{check.name}: {check.advice}") for check in advised)]
    if choices:
        parts += [Heading("Kernels that auto has chosen"), *(Line(f"{case}: {one.note}") for case, one in choices)]
    if noise:
        parts += [Heading("How small a difference this machine can measure"), *map(Line, _in_words(noise))]
    return Answer("doctor", body, csv_table(rows), parts, CONVENTIONS)


def _rows(check: DoctorCheck) -> list[tuple[str, str, str]]:
    """Return the table rows of a check; a long value continues in additional rows."""
    first, *others = wrap(check.value, _WIDTH, break_long_words=False) or [""]
    return [(check.name, first, check.status), *(("", other, "") for other in others)]


def _in_words(noise: Noise) -> list[str]:
    threads = f"{noise.threads} {plural('thread', noise.threads)}"
    lines = [
        f"Identical code against itself, {noise.processes} fresh processes, {noise.rounds} rounds, {threads},"
        f" {noise.seconds:.0f} s: ratio {noise.aa_ratio:.4f}, 95 % interval {noise.aa_low:.4f} to {noise.aa_high:.4f}.",
    ]
    if noise.sequential_times_longer > 1.5 and isfinite(noise.sequential_times_longer):
        lines.append(
            f"Timed one after the other in the same time, only differences of {percent(noise.sequential_difference, 2)}"
            f" or more could be resolved; matching this would take {noise.sequential_times_longer:.2g} times as long,"
            " if those errors average out."
        )
    if noise.is_troubled:
        lines.append(
            f"{percent(noise.troubled, 2)} of the blocks were disturbed: preempted, throttled or delayed by the host."
        )
    return lines
