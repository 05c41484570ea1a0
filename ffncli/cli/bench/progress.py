"""How far a benchmark is: a bar in a terminal, else a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from ffncli.bench.records import Case
from ffncli.bench.request.grid import BenchRequest
from ffncli.show.output import Output, print_error
from ffncli.show.progress import progress, seconds_text, shows_bar
from ffncli.show.text import plural


@contextmanager
def unit_progress(request: BenchRequest, done: int, output: Output) -> Iterator[Callable[[int, Case], None]]:
    """Shows how far a run is, of which `done` units are there already; yields what is to be called after each unit."""
    longest = len(request.cases) * request.method.max_time + request.method.processes * 5
    if longest > 60 and not done:
        counted = f"{len(request.cases)} {plural('case', len(request.cases))}"
        most = f"at most about {seconds_text(longest)}, less where --precision is reached"
        output.note(f"{counted} in {request.method.processes} processes: {most}")
    count, start, every = done, monotonic(), max(1, request.units // 10)
    bar = shows_bar(output.quiet)
    with progress(request.units, "measuring", output.quiet, output.color) as advance:
        advance(done)

        def tell(process: int, case: Case) -> None:
            nonlocal count
            count += 1
            advance(1)
            if not (bar or output.quiet) and (count % every == 0 or count == request.units):
                left = (monotonic() - start) / (count - done) * (request.units - count)
                print_error(
                    f"process {process + 1} of {request.method.processes}, {count} of {request.units} units done"
                    + (f", about {seconds_text(left)} left" if count < request.units else "")
                )

        yield tell
