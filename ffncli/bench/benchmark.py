"""`ffncli.benchmark`: what `ffn bench` does on this machine."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ffncli.bench.records import Method
from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import BenchRequest, Grid
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
from ffncli.bench.suite import new_run, run
from ffncli.errors import FFNError, option, shown
from ffncli.options.accept import listed
from ffncli.options.opt import call
from ffncli.options.shared import Force

_OF_TIME = ("processes", "precision", "max_time", "load_time", "call_time", "memory_limit")  # a suite fixes the rest


@dataclass(frozen=True, kw_only=True)
class BenchQuestion(Grid, KernelOptions, MethodOptions):
    """Verify, then time kernels in fresh processes; a row for every case and kernel, as in the CSV of `ffn bench`.

    The arguments are the command line's options by their names (`passes` are those of `--pass`), and mean the same;
    lists may be lists: `tokens=[1, 32]`, `kernel=["eager", "mine.py:mlp"]`. `source` is text or a path, dimensions are
    keywords too; `device` is the CPU by default. `precision` is a share (0.01: to within 1 %), `max_time` are seconds
    for each case. `method` sets everything about how it is measured; the arguments go before it. `save` names a CSV,
    with the rounds next to it; without one nothing is kept. `suite` names a public suite: its cases for the device, and
    nothing of yours but the kernels. Times in seconds.

    What it returns is a tuple of the rows; its `frame()` is a DataFrame with the CSV's columns.

    Raises FFNError for an impossible request, and for an argument of another type, naming the accepted; a kernel that
    is wrong or fails is a row with that status.
    """

    method: Method | None = None
    suite: Suite = None
    certificate: Certificates = None
    save: Save = None
    force: Force = False


def benchmarked(question: BenchQuestion) -> ResultRows:
    """Measure what a question asks."""
    request = _request(question)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.csv") if question.save is None else Path(os.path.expanduser(question.save))
        with new_run(path, request, question.force, question.part) as journal:
            return ResultRows(run(journal).rows)


benchmark = call(BenchQuestion, benchmarked, "benchmark")


def _request(question: BenchQuestion) -> BenchRequest:
    """What is measured and how. Raises FFNError for an impossible request."""
    if question.method is not None and not isinstance(question.method, Method):
        raise FFNError(f"{option('method')} must be a Method, got {shown(question.method)}")
    require_compatible(question)
    certificates = certificate_files(question.certificate)
    if question.suite is None:
        grid = replace(question, device=question.device or "cpu")
        named = (listed(question.kernel), question.baseline, question.method_over(question.method))
        return build_request(grid, *named, certificates=certificates)[0]
    method = question.method
    if method and replace(method, **{name: getattr(Method(), name) for name in _OF_TIME}) != Method():
        what = f"{option('suite', question.suite)} contradicts a method of yours"
        raise FFNError(what, f"of it choose {', '.join(_OF_TIME)} alone")
    public, track = public_suite(question.suite), track_of(listed(question.device) or ("cpu",))
    how = question.method_over(replace(method, seed=public.seed) if method else public.method(track))
    return suite_request(public, track, listed(question.kernel), how, certificates=certificates)[0]
