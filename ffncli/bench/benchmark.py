"""`ffncli.benchmark`: what `ffn bench` does, as a call with the command line's names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

from ffncli.bench.records import Method
from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import BenchRequest, Grid
from ffncli.bench.request.parts import grid_part
from ffncli.bench.request.suite import public_suite, suite_request, track_of
from ffncli.bench.results.csv_file import ResultRows
from ffncli.bench.suite import new_run, run
from ffncli.errors import FFNError
from ffncli.run.user.arguments import DimensionNames, converted

_OF_TIME = ("processes", "precision", "max_time", "load_time", "call_time", "memory_limit")  # a suite fixes the rest
_QUICK = {"processes": 3, "precision": 0.03}
_FilePath = str | os.PathLike[str]


def benchmark(
    source: _FilePath | None = None,
    *,
    tokens: int | Iterable[int] = (),
    dtype: str | Iterable[str] = (),
    passes: str | Iterable[str] = (),
    cache: str | Iterable[str] = (),
    device: str | Iterable[str] = "cpu",
    threads: int | Iterable[int] = (),
    routing: str | Iterable[str] = (),
    input: _FilePath | None = None,
    kernel: str | Iterable[str] = (),
    baseline: str | None = None,
    certificate: _FilePath | Iterable[_FilePath] = (),
    precision: float | None = None,
    max_time: float | None = None,
    processes: int | None = None,
    quick: bool = False,
    seed: int | None = None,
    method: Method | None = None,
    suite: str | None = None,
    shard: str | None = None,
    save: _FilePath | None = None,
    force: bool = False,
    **dimensions: Unpack[DimensionNames],
) -> ResultRows:
    """Verify, then time kernels in fresh processes; a row for every case and kernel, as in the CSV of `ffn bench`.

    The arguments are the command line's options by their names (`passes` are those of `--pass`), and mean the same;
    lists may be lists: `tokens=[1, 32]`, `kernel=["eager", "mine.py:mlp"]`. `source` is text or a path, dimensions are
    keywords too. `precision` is a share (0.01: to within 1 %), `max_time` are seconds for each case. `method` sets
    everything else about how it is measured; those named here go before it. `save` names a CSV, with the rounds next to
    it; without one nothing is kept. `suite` names a public suite: its cases for the device, and nothing of yours but
    the kernels. Times in seconds.

    What it returns is a tuple of the rows; its `frame()` is a DataFrame with the CSV's columns.

    Raises FFNError for an impossible request, and for an argument of another type, naming the accepted; a kernel that
    is wrong or fails is a row with that status.
    """
    options = converted(locals(), "benchmark")
    request = _request(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.csv") if save is None else Path(os.path.expanduser(options["save"]))
        part = None if shard is None else grid_part("shard")(options["shard"])
        with new_run(path, request, force, part) as journal:
            return ResultRows(run(journal).rows)


def _request(options: Mapping[str, Any]) -> BenchRequest:
    """What is measured and how. Raises FFNError for an impossible request."""
    grid = Grid(
        options["source"], options["dimensions"], options["tokens"], options["dtype"], options["passes"],
        options["cache"], options["device"], options["threads"], routings=options["routing"], input=options["input"],
    )  # fmt: skip
    method, suite = _method(options), options["suite"]
    if suite is None:
        named = (options["kernel"], options["baseline"], method or Method())
        return build_request(grid, *named, certificates=options["certificate"])[0]
    if options["baseline"] is not None or replace(grid, devices=()) != Grid():
        raise FFNError(f"suite {suite} contradicts a source, cases and a baseline of yours", "its own are fixed")
    if method and replace(method, **{name: getattr(Method(), name) for name in _OF_TIME}) != Method():
        raise FFNError(f"suite {suite} contradicts a method of yours", f"of it choose {', '.join(_OF_TIME)} alone")
    public, track = public_suite(suite), track_of(grid.devices)
    how = replace(method, seed=public.seed) if method else public.method(track)
    return suite_request(public, track, options["kernel"], how, certificates=options["certificate"])[0]


def _method(options: Mapping[str, Any]) -> Method | None:
    """The requested method; None if nothing was requested of it. Raises FFNError for another type."""
    method: Method | None = options["method"]
    named = {name: options[name] for name in ("precision", "max_time", "processes", "seed")}
    chosen = (_QUICK if options["quick"] else {}) | {name: value for name, value in named.items() if value is not None}
    if not chosen:
        return method
    start = method or Method()
    return replace(start, **{one.name: chosen.get(one.name, getattr(start, one.name)) for one in fields(Method)})
