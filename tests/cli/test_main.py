"""The frame around every command: help, completion, the version, and what each kind of error becomes."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
import typer

from ffncli import __version__
from ffncli.cli import models as models_module
from ffncli.cli.main import _terminated
from ffncli.errors import FFNError
from tests.oracles.checkpoints import LLAMA, folder


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (FFNError("no", "yes", code=3), 3, "error: no; yes\n"),
        (MemoryError(), 3, "error: not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 3, "error: not enough memory"),
        (RuntimeError("CUDA out of memory. Tried"), 3, "error: not enough memory"),
        (OSError(28, "No space left on device"), 3, "error: cannot write to standard output: No space left on device"),
        (OSError(2, "No such file", "x"), 70, "error: a bug in ffn: FileNotFoundError"),
        (RuntimeError("boom " + "x" * 9000), 70, "error: a bug in ffn: RuntimeError: boom"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_an_error_becomes(error, code, says, call, monkeypatch):
    def command() -> None:
        raise error

    monkeypatch.setattr(models_module, "command", command)
    found, out, err = call("models")
    assert (found, out) == (code, "")
    assert err.lstrip().startswith(says)
    assert len(err) < 500


def test_debug_shows_where_it_happened(call):
    code, _, err = call("params", "zzzz", "--debug")
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("error: unknown model 'zzzz'")
    assert call("--debug", "params", "--nope")[2].endswith("see `ffn params --help`\n")


def test_the_version_says_what_decides_the_numbers(call, monkeypatch):
    code, out, err = call("--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"ffn {re.escape(__version__)} \(torch \d\S+, Python 3\.\d+\.\d+\)\n", out)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "(torch missing," in call("--version")[1]


def test_a_termination_unwinds():
    with pytest.raises(SystemExit) as stop:
        _terminated(15, None)
    assert stop.value.code == 143


def test_a_directory_where_a_command_belongs(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "mine", LLAMA)
    assert call("mine")[2] == "error: No such command 'mine'; to count that model: ffn params mine\n"
