"""`ffncli.benchmark`: run what `ffn bench` runs, on this machine."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ffncli.bench.records import Method
from ffncli.bench.request.grid import BenchRequest, Grid, build_request
from ffncli.bench.request.options import (
    Certificates,
    KernelOptions,
    MethodOptions,
    Save,
    Suite,
    certificate_files,
    require_compatible,
)
from ffncli.bench.request.suite import public_suite, suite_request, track_of
from ffncli.bench.results.csv_file import ResultRows
from ffncli.errors import FFNError, option
from ffncli.options.accept import instance, listed
from ffncli.options.opt import call
from ffncli.options.shared import Force

if TYPE_CHECKING:
    from ffncli.bench.suite import Result

# The fields of a method that a user may set when running a suite; the suite fixes all other fields.
_OF_TIME = ("processes", "precision", "max_time", "load_time", "call_time", "memory_limit", "isolate")


@dataclass(frozen=True, kw_only=True)
class BenchQuestion(Grid, KernelOptions, MethodOptions):
    """Verify kernels, then time them in fresh processes; return a row for every case and kernel, as in the CSV of `ffn
    bench`.

    The arguments have the same names and meanings as the command-line options (`passes` is `--pass`). Lists may be
    Python lists: `tokens=[1, 32]`, `kernel=["eager", "mine.py:mlp"]`. `source` is a string or a path; dimensions are
    keywords too; `device` defaults to the CPU. `precision` is a fraction (0.01: to within 1 %); `max_time` is in
    seconds for each case. `method` specifies how kernels are measured; other arguments override it. `save` names a CSV,
    and the rounds are saved next to it; without `save`, nothing is kept. `suite` names a public suite, which fixes the
    cases for the device, and you choose only the kernels. Times are in seconds.

    Returns a tuple of rows; its `frame()` is a DataFrame with the CSV's columns.

    Raises FFNError for an impossible request, and for an argument of the wrong type, naming the accepted types. A
    kernel that is wrong or fails gets a row with that status.
    """

    method: Annotated[Method | None, instance(Method, "a Method")] = None
    suite: Suite = None
    certificate: Certificates = None
    save: Save = None
    force: Force = False


def measured(question: BenchQuestion) -> "Result":
    """Measure what the question asks for; without `save`, the result's files are gone afterwards."""
    from ffncli.bench.suite import new_run, run  # not at the top: help reads this file

    request = _request(question)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.csv") if question.save is None else Path(os.path.expanduser(question.save))
        with new_run(path, request, question.force, question.part) as journal:
            return run(journal)


def benchmarked(question: BenchQuestion) -> ResultRows:
    """Measure what the question asks for; return its rows."""
    return ResultRows(measured(question).rows)


benchmark = call(BenchQuestion, benchmarked, "benchmark")


def _request(question: BenchQuestion) -> BenchRequest:
    """Build the request to measure. Raises FFNError if it is impossible."""
    require_compatible(question)
    certificates = certificate_files(question.certificate)
    if question.suite is None:
        grid = replace(question, device=question.device or "cpu")
        named = (listed(question.kernel), question.baseline, question.method_over(question.method))
        return build_request(grid, *named, certificates=certificates)[0]
    method = question.method
    if method and replace(method, **{name: getattr(Method(), name) for name in _OF_TIME}) != Method():
        what = f"{option('suite', question.suite)} fixes the rest of the method"
        raise FFNError(what, f"in your method, set only {', '.join(_OF_TIME)}")
    public, track = public_suite(question.suite), track_of(listed(question.device) or ("cpu",))
    how = question.method_over(replace(method, seed=public.seed) if method else public.method(track))
    return suite_request(public, track, listed(question.kernel), how, certificates=certificates)[0]
