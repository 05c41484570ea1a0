"""One environment for all tests: no colour, no settings of the developer's terminal, reproducible hypothesis."""

import csv
import functools
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from ffncli.bench.doctor.doctor import WITHOUT_AMX, bf16_product_ending
from ffncli.system import host
from ffncli.system.cgroup import ROOT

for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "NO_COLOR", "PYTHONUNBUFFERED"):
    os.environ.pop(name, None)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # any request fails: nobody listens there
os.environ["HF_HOME"] = os.path.join(tempfile.gettempdir(), "ffn-tests-without-a-hub")
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), "ffn-tests-state")  # results without --save
os.environ["XDG_CACHE_HOME"] = os.path.join(tempfile.gettempdir(), "ffn-tests-cache")  # what auto chooses
os.environ["TOKENIZERS_PARALLELISM"] = "false"
_has_amx = "PYTEST_XDIST_WORKER" not in os.environ and "amx_tile" in host.isa(ROOT)
if _has_amx and bf16_product_ending() == -signal.SIGILL:  # a virtual machine that reports AMX but has none
    os.environ.update([WITHOUT_AMX.removeprefix("export ").split("=")])


TESTS = Path(__file__).parent
MARKED = {  # every test in these folders has the mark
    "architectures": ("architectures", "models/config"),
    "browser": ("browser",),
    "cheats": ("cheats",),
    "models": ("cli/experts", "run/corpus", "run/in_model", "run/pretrained"),
    "ranks": ("ranks",),
}
assert all((TESTS / folder).is_dir() for folders in MARKED.values() for folder in folders), "a folder has moved"


@functools.cache
def marks_of(path: Path) -> frozenset[str]:
    """Return the marks that every test of this file has, from its folders and its own `pytestmark`."""
    folders = {folder.relative_to(TESTS).as_posix() for folder in path.parents if folder.is_relative_to(TESTS)}
    of_folders = (mark for mark, marked in MARKED.items() if not folders.isdisjoint(marked))
    return frozenset([*of_folders, *_OF_FILE.findall(path.read_text("utf-8"))])


_OF_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.(\w+)", re.MULTILINE)


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in marks_of(item.path):
        if mark in MARKED:
            item.add_marker(mark)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files of which `-m "a or b"` or `-m "not (a or b)"` takes no test: each process would import them all."""
    expression = re.fullmatch(r"(not \()?(\w+(?: or \w+)*)\)?", config.option.markexpr)
    if collection_path.suffix != ".py" or not expression:
        return None
    names, always = set(expression[2].split(" or ")), marks_of(collection_path)
    if expression[1]:
        return True if names & always else None
    text = collection_path.read_text("utf-8")
    return None if names & always or any(f"mark.{name}" in text for name in names) else True


def pytest_collection_finish() -> None:
    """Freeze the existing objects, which live to the end, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of each architecture first and in a row, so that its model is built and saved only once."""
    items.sort(key=_architecture)


def _architecture(item: pytest.Item) -> tuple[bool, str]:
    marked = item.get_closest_marker("architecture") is not None and isinstance(item, pytest.Function)
    return (not marked, item.callspec.params["name"] if marked else "")


settings.register_profile("ffn", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ffn")


@pytest.fixture
def ffn() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the real command line in a separate process."""

    def run(
        *arguments: str, cwd: Path | None = None, stdin: str | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run( [sys.executable, "-m",
            "ffncli", *arguments], capture_output=True, text=True, cwd=cwd, input=stdin, env={**os.environ, **env},
        timeout=120, )  # fmt: skip

    return run


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process (fast), and return its exit code, stdout and stderr."""
    from ffncli.cli.main import main

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def stdout_of(call: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Return what a command prints; it must succeed, and print nothing to stderr unless `notes` is true."""

    def run(*arguments: str, notes: bool = False) -> str:
        code, out, err = call(*arguments)
        assert (code, "" if notes else err) == (0, ""), (arguments, err)
        return out

    return run


@pytest.fixture
def json_of(stdout_of: Callable[..., str]) -> Callable[..., Any]:
    """Return the parsed output of a command with --json."""
    return lambda *arguments, notes=False: json.loads(stdout_of(*arguments, "--json", notes=notes))


@pytest.fixture
def csv_of(stdout_of: Callable[..., str]) -> Callable[..., list[dict[str, str]]]:
    """Return the rows of a command with --csv."""
    return lambda *arguments, notes=False: list(
        csv.DictReader(io.StringIO(stdout_of(*arguments, "--csv", notes=notes)))
    )


@pytest.fixture(autouse=True)
def same_numbers():
    """Let every test draw the same random numbers, alone or with others; use one thread, since workers share cores."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes 3 ms to store the call stack
        torch.set_num_threads(1)
