"""What starting costs: which modules a command loads. Seen in a process of its own, at its end."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles.checkpoints import LLAMA, MIXTRAL, folder, tensors

HEAVY = {"torch", "pandas", "numpy"}
LIGHT_COMMANDS = (
    "-h",
    "--help",
    "--version",
    "params llama-2-7b",
    "plan llama-2-7b",
    "plan --help",
    "models",
    "activations",
    "activations --plot",
    "activations --help",
    "explain",
    "explain --help",
    "explain gelu",
    "explain swiglu",
    "explain 4x",
    "export --help",
    "export llama-2-7b --as latex",
    "export mixtral-8x7b --as torch",
    "export mixtral-8x7b --as flashinfer-trace --json",
    "activations gelu_tanh --against gelu --plot",
    "approximate --help",
    "params --help",
    "trace --help",
    "verify --help",
    "bench --help",
    "compare --help",
    "doctor --help",
    "trace -h",
    "verify -h",
    "bench -h",
)
PROBE = """
import json, sys
before = set(sys.modules)
try:
    exec(sys.argv.pop(1))
finally:
    sys.stderr.write("\\n" + json.dumps(sorted(set(sys.modules) - before)))
"""
MAIN = "from ffncli.cli.main import main; main()"


def loaded(statement: str, *arguments: str) -> set[str]:
    """The modules that `statement` leaves in sys.modules, with `arguments` as the command line; stdout is a pipe."""
    command = [sys.executable, "-c", PROBE, statement, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def loaded_by(command: str) -> set[str]:
    return loaded(MAIN, *command.split())


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_a_command_without_tensors_loads_no_tensor_library(command: str) -> None:
    assert not loaded_by(command) & HEAVY


@pytest.mark.parametrize("command", ["params llama-2-7b", "models", "activations"])
def test_rich_stays_away_from_a_pipe(command: str) -> None:
    assert "rich" not in loaded_by(command)


def test_activations_loads_nothing_that_was_not_asked_for() -> None:
    """No differences, formats, gated facts or pictures for the plain table."""
    unasked = {
        "ffncli.block.analysis.difference", "ffncli.block.analysis.rounding", "ffncli.block.analysis.gated",
        "ffncli.cli.activations.gated_page", "ffncli.cli.activations.against_page",
        "ffncli.cli.activations.data_page", "ffncli.cli.activations.curves_page",
        "ffncli.show.plots.image", "ffncli.models.counting.iso_params",
    }  # fmt: skip
    assert not loaded_by("activations") & unasked


def test_counting_a_checkpoint_loads_no_tensor_library(tmp_path: Path) -> None:
    """The headers are read by our own lines: opening a file through safetensors would load numpy or torch."""
    for family, config in (("llama", LLAMA), ("mixtral", MIXTRAL)):
        (tmp_path / family).mkdir()
        source = folder(tmp_path / family, config, tensors(family))
        assert not loaded(MAIN, "params", source, "--json") & {*HEAVY, "rich", "safetensors"}


def test_importing_the_package_loads_nothing_else() -> None:
    modules = loaded("import ffncli")
    assert {m for m in modules if m.startswith("ffncli")} == {"ffncli"}
    assert not modules & {*HEAVY, "rich", "typer"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("-h", set()),
        ("--help", set()),
        ("--version", set()),
        ("params llama-2-7b", {"params"}),
        ("params --help", {"params"}),
        ("models", {"models"}),
        ("trace --help", {"trace"}),
    ],
)
def test_only_the_invoked_command_is_imported(command: str, expected: set[str]) -> None:
    from ffncli.cli.main import COMMANDS

    modules = loaded_by(command)
    assert {name for name, (module, _) in COMMANDS.items() if module in modules} == expected


@pytest.mark.parametrize("module", ["pandas", "rich", "numpy"])
def test_the_probe_sees_a_module_that_was_loaded(module: str) -> None:
    assert module in loaded(f"import {module}; {MAIN}", "--version")


def test_what_a_worker_sends_of_its_surroundings_loads_no_tensor_library() -> None:
    """A version that is no plain text would: torch's own is a class of torch's."""
    from ffncli.bench.machine.machine import environment

    code = f"import pickle; pickle.loads({pickle.dumps(environment('cpu'))!r})"
    assert not loaded(code) & HEAVY


def test_the_probe_sees_that_a_trace_loads_torch() -> None:
    assert "torch" in loaded_by("trace")
