"""`ffncli.benchmark`: what `ffn bench` does, as a call."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ffncli.bench.opening import begun
from ffncli.bench.records import Method
from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import Grid
from ffncli.bench.request.parts import grid_part
from ffncli.bench.results.row import ResultRow
from ffncli.bench.suite import run
from ffncli.models.dimensions import Dimensions


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
) -> tuple[ResultRow, ...]:
    """Verify, then time kernels in fresh processes; a row for every case and kernel, as in the CSV.

    `source`, `kernels` and the lists are as on the command line, () their defaults. `save` names a CSV, with the rounds
    file next to it; without one nothing is kept. `certificates` are files of `ffn verify --referee`, `input`
    is a file of real x, `shard` a part of the grid such as "3/8". Times in seconds. Raises FFNError for an impossible
    request; a kernel that is wrong or fails is a row with that status.
    """
    grid = Grid(
        source, dimensions or Dimensions(), tuple(tokens), tuple(dtypes), tuple(passes), tuple(caches), tuple(devices),
        tuple(threads), routings=tuple(routings), input=None if input is None else str(input),
    )  # fmt: skip
    request, _ = build_request(grid, kernels, baseline, method or Method(), certificates=tuple(map(str, certificates)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.csv") if save is None else Path(os.path.expanduser(save))
        part = None if shard is None else grid_part("shard")(shard)
        with begun(path, request, force, part) as journal:
            return run(journal).rows
