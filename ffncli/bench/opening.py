"""Where a run's results go: a new one begins there, an unfinished one is resumed, each locked while it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.request.parts import GridPart
from ffncli.bench.results import journal as journals
from ffncli.bench.results.grid_file import grid_bytes, whole_grid
from ffncli.bench.results.journal import Journal, changed, locked, require_same, sha256, software
from ffncli.errors import ExitCode, FFNError, shown_path
from ffncli.system.files import results_folder
from ffncli.version import __version__


def default_path(part: GridPart | None = None) -> Path:
    """`benchmarks/results/20261122T060338Z-host.csv` in a checkout that has this folder, else in the user's state
    folder, which is created; of a part `...-host-3of8.csv`. Raises FFNError if that fails."""
    import platform
    import re

    folder = results_folder(Path.cwd())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot create {shown_path(folder)}: {error.strerror}"
        raise FFNError(why, "name a file: --save FILE.csv", ExitCode.ENVIRONMENT) from None
    host = re.sub(r"[^\w-]+", "-", platform.node())[:40].strip("-") or "host"
    which = "" if part is None else f"-{part.index}of{part.count}"
    return folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{host}{which}.csv"


@contextmanager
def begun(path: Path, request: BenchRequest, force: bool = False, part: GridPart | None = None) -> Iterator[Journal]:
    """A new run into `path`, locked, of a part of the cases or of all. Raises FFNError if it cannot be written."""
    import secrets

    from ffncli.bench.judge.summary import summarise

    now = datetime.now(UTC)
    run = {"run_id": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}", "started_utc": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
    grid = None if part is None else whole_grid(request, part.count)
    mine = request if grid is None or part is None else grid.request_of(part)
    with locked(path):
        same = software() if mine.cluster is None else {"ffncli": __version__}  # the machines that measure may differ
        stored = None if grid is None else grid_bytes(grid)
        opened = journals.begin(path, mine, run, same, summarise, force, stored)
        try:
            yield opened
        finally:
            if not opened.count and mine.cases:
                opened.discard()


@contextmanager
def resumed(path: Path) -> Iterator[Journal]:
    """The unfinished run of `path`, locked. Raises FFNError if there is none, or if the conditions have changed."""
    from ffncli.bench.judge.summary import summarise

    with locked(path):
        opened = journals.resume(path, summarise)
        require_same("its run began with", opened.software, software())
        for name, digest in opened.request.files.items():
            if sha256(Path(name)) != digest:
                raise changed(f"{shown_path(Path(name))} has changed since its run began")
        yield opened
