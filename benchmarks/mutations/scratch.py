"""A copy of the working tree, where tests run and code is broken: never the checkout itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from benchmarks.benched import ROOT


@dataclass(frozen=True)
class Ended:
    """A command's exit code, None where its time was over, and what it printed."""

    code: int | None
    output: str


@dataclass(frozen=True)
class Tree:
    """The copy, and a folder beside it for whatever is not part of it."""

    root: Path
    beside: Path

    def run(self, command: Sequence[str], limit: float | None, more: Mapping[str, str]) -> Ended:
        """Run it in the copy, whose package is the one that is imported; gone with all it started when this returns."""
        path = os.pathsep.join(filter(None, [more.get("PYTHONPATH"), str(self.root), os.environ.get("PYTHONPATH")]))
        with open(self.beside / "output", "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                command, cwd=self.root, env={**os.environ, **more, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return Ended(code, output.read())

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """The file with that text, and afterwards as it was. Python trusts a compiled file of the same size and second:
        there is none."""
        path = self.root / file
        before = path.read_text("utf-8")
        compiled = Path(cache_from_source(str(path)))
        try:
            path.write_text(text, "utf-8")
            compiled.unlink(missing_ok=True)
            yield
        finally:
            path.write_text(before, "utf-8")
            compiled.unlink(missing_ok=True)


@contextmanager
def tree() -> Iterator[Tree]:
    """A copy of all that git knows or would add, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory(prefix="ffn-mutations-") as name:
        copy = Tree(Path(name, "tree"), Path(name))
        for file in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / file).is_file():
                (copy.root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, copy.root / file)
        yield copy
