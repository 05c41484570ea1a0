"""`ffncli.benchmark`: what `ffn bench` does, as a call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ffncli.bench.opening import begun
from ffncli.bench.public.definition import public_suite, suite_request, track_of
from ffncli.bench.records import Method
from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import Grid
from ffncli.bench.request.parts import grid_part
from ffncli.bench.results.row import ResultRow
from ffncli.bench.suite import run
from ffncli.errors import FFNError
from ffncli.models.dimensions import Dimensions

_OF_TIME = ("processes", "precision", "max_time", "load_time", "call_time", "memory_limit")  # a suite fixes the rest


def benchmark(
    source: str | None = None,
    dimensions: Dimensions | None = None,
    *,
    tokens: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    passes: Sequence[str] = (),
    caches: Sequence[str] = (),
    devices: Sequence[str] = ("cpu",),
    threads: Sequence[int] = (),
    kernels: Sequence[str] = (),
    baseline: str | None = None,
    method: Method | None = None,
    save: str | Path | None = None,
    force: bool = False,
    certificates: Sequence[str | Path] = (),
    routings: Sequence[str] = (),
    input: str | Path | None = None,
    shard: str | None = None,
    suite: str | None = None,
) -> tuple[ResultRow, ...]:
    """Verify, then time kernels in fresh processes; a row for every case and kernel, as in the CSV.

    `source`, `kernels` and the lists are as on the command line, () their defaults. `save` names a CSV, with the rounds
    file next to it; without one nothing is kept. `certificates` are files of `ffn verify --referee`, `input`
    is a file of real x, `shard` a part of the grid such as "3/8". `suite` names a public suite: its cases for the
    device, and nothing of yours but the kernels. Times in seconds. Raises FFNError for an impossible request; a kernel
    that is wrong or fails is a row with that status.
    """
    grid = Grid(
        source, dimensions or Dimensions(), tuple(tokens), tuple(dtypes), tuple(passes), tuple(caches), tuple(devices),
        tuple(threads), routings=tuple(routings), input=None if input is None else str(input),
    )  # fmt: skip
    named = tuple(map(str, certificates))
    if suite is None:
        request, _ = build_request(grid, kernels, baseline, method or Method(), certificates=named)
    else:
        if baseline is not None or replace(grid, devices=()) != Grid():
            raise FFNError(f"suite {suite} contradicts a source, cases and a baseline of yours", "its own are fixed")
        if method and replace(method, **{name: getattr(Method(), name) for name in _OF_TIME}) != Method():
            raise FFNError(f"suite {suite} contradicts a method of yours", f"of it choose {', '.join(_OF_TIME)} alone")
        public, track = public_suite(suite), track_of(devices)
        how = replace(method, seed=public.seed) if method else public.method(track)
        request, _ = suite_request(public, track, kernels, how, certificates=named)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.csv") if save is None else Path(os.path.expanduser(save))
        part = None if shard is None else grid_part("shard")(shard)
        with begun(path, request, force, part) as journal:
            return run(journal).rows
