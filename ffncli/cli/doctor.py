"""`ffn doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.bench.doctor import doctor
from ffncli.cli.common.options import OutputOptions, above_zero, positive, spread
from ffncli.cli.doctor_page import answer, failure, noise_check
from ffncli.errors import FFNError
from ffncli.show.output import Output
from ffncli.show.progress import progress, shows_bar
from ffncli.system import host

if TYPE_CHECKING:
    from ffncli.bench.doctor.noise import Noise

_SECONDS = 10.0

Without = Annotated[bool, typer.Option("--no-noise", help="Skip the noise test.")]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", metavar="N", parser=above_zero("--seconds"), help="Of the noise test, default 10."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        parser=positive("--threads", 4096),
        help="CPU threads of the noise test; default: as many as `ffn bench` uses.",
    ),
]


@spread
def command(
    *, no_noise: Without = False, seconds: Seconds = None, threads: Threads = None, show: OutputOptions
) -> None:
    """Show what this machine can do, and what difference it can resolve: versions, processor, caches, compiler,
    GPU, extras with the command that installs them, and a noise test of 10 seconds.

    Try: ffn doctor --no-noise
    """
    output = show.output()
    if no_noise and (seconds is not None or threads is not None):
        option = "--seconds" if seconds is not None else "--threads"
        raise FFNError(f"{option} contradicts --no-noise", "it is an option of the noise test")
    checks = list(doctor.checks())
    lacking = doctor.lacking(checks)
    found = None
    if not no_noise and not lacking:
        found = _noise(seconds or _SECONDS, threads or host.default_threads(), output)
        checks.append(noise_check(found))
    output.show(answer(checks, found))
    if lacking:
        raise failure(lacking)


def _noise(seconds: float, threads: int, output: Output) -> Noise | None:
    """The noise test, with a bar while it runs; in a pipe a note that it does."""
    from ffncli.bench.doctor.noise import measure_noise, processes_for

    count = processes_for(seconds)
    if not shows_bar(output.quiet):
        output.note(f"noise test: {seconds:g} s")
    with progress(count, "the same code against itself", output.quiet, output.color) as told:
        return measure_noise(seconds, threads, told)
