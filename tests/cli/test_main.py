"""The frame around every command: help, completion, the version, errors, which modules start, the lists of models."""

import importlib.metadata
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ffncli import __version__
from ffncli.bench.machine.machine import environment
from ffncli.cli import models as models_module
from ffncli.cli.main import COMMANDS, _terminated
from ffncli.errors import FFNError
from tests.oracles.checkpoints import LLAMA, MIXTRAL, folder, tensors
from tests.oracles.counts import MOE


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


def test_the_version_says_what_decides_the_numbers(call, stdout_of, monkeypatch):
    out = stdout_of("--version")
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


def test_active_parameters_are_shown_where_any_model_has_experts(call):
    dense = call("models", "gpt2")[1]
    assert "active" not in dense
    both = call("models", "LLAMA")[1]
    assert [line.split()[0] for line in both.splitlines()[1:]][:2] == ["llama-65b", "llama-2-7b"]
    rows = {line.split()[0]: line.split() for line in call("models")[1].splitlines()[1:]}
    assert set(MOE) <= set(rows)
    assert rows["mixtral-8x7b"][-4:] == ["45.10", "B", "11.28", "B"]
    assert rows["llama-4-maverick"][-4:] == ["395.6", "B", "12.10", "B"]  # only every second layer has experts
    assert rows["llama-2-7b"][1:] == ["2023", "4,096", "11,008", "silu", "32", "4.329", "B"]
    assert max(map(len, call("models")[1].splitlines())) <= 80


def test_a_search_looks_at_every_name_a_model_has(call):
    found = json.loads(call("models", "Llama3", "--json")[1])["rows"]
    assert [(row["name"], row["aliases"]) for row in found] == [
        ("llama-3.1-8b", ["llama-3-8b"]), ("llama-3.1-70b", ["llama-3-70b", "llama-3.3-70b"]), ("llama-3.1-405b", []),
        ("llama-3.2-1b", []), ("llama-3.2-3b", []),
    ]  # fmt: skip
    assert call("models", "r1")[1].splitlines()[1].split()[0] == "deepseek-v3"
    assert call("models", "zzz")[0] == 2


def test_a_search_looks_at_years_and_organisations(call):
    rows = json.loads(call("models", "2026", "--json")[1])["rows"]
    assert {row["year"] for row in rows} == {2026}
    rows = json.loads(call("models", "meta", "--json")[1])["rows"]
    assert {"llama-2-7b", "opt-125m", "llama-4-scout"} <= {row["name"] for row in rows}
    assert {row["organisation"] for row in rows} == {"meta"}


LLAMA_3 = "did you mean 'llama-3.2-1b' or 'llama-3.2-3b' or 'llama-3.1-8b'?"
LLAMA_4 = "did you mean 'llama-4-scout' or 'llama-4-maverick' or 'llama-3.2-1b'?"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("llama", f"{LLAMA_4} `ffn models llama` lists 11"), ("lama", f"{LLAMA_4} `ffn models lama` lists 11"),
        ("llama3", f"{LLAMA_3} `ffn models llama3` lists 5"), ("llama-3", f"{LLAMA_3} `ffn models llama-3` lists 5"),
        ("phi", "did you mean 'phi-4' or 'phi-4-mini' or 'phi-3.5-moe'? `ffn models phi` lists 5"),
        ("lama2", "did you mean 'llama-2-7b' or 'llama-2-13b' or 'llama-2-70b'?"),
        ("lama-2-7b", "did you mean 'llama-2-7b'?"),
        ("mistrl", "did you mean 'mistral-small-4' or 'mistral-large-4' or 'mistral-medium-3.5'?"),
        ("mixtrl", "did you mean 'mixtral-8x7b' or 'mixtral-8x22b' or 'mixtral-8x22b-it'?"),
        ("bert-base-uncasd", "did you mean 'bert-base'?"),  # of an alias the model's own name
        ("deepseek-v4.1", "did you mean 'deepseek-v4-flash' or 'deepseek-v4-pro'?"),  # an unknown generation
        ("qwen3.8-flash-next", "did you mean 'qwen3.8' or 'qwen3-8b'?"),
        ("llama-5", LLAMA_4),
        ("123", "`ffn models` lists the known models; a path or 512x2048:gelu also works"),
    ],
)  # fmt: skip
def test_the_family_that_is_meant_is_offered_the_newest_first(call, typed, hint):
    assert call("params", typed) == (2, "", f"error: unknown model '{typed}'; {hint}\n")


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


EACH = """
from ffncli.cli.main import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as end:
        assert not end.code, command
    assert not {"torch", "pandas", "numpy"} & {*sys.modules}, command
"""


def test_a_command_without_tensors_loads_no_tensor_library() -> None:
    assert not loaded(EACH, *LIGHT_COMMANDS) & HEAVY


@pytest.mark.parametrize("command", ["params llama-2-7b", "models", "activations"])
def test_rich_stays_away_from_a_pipe(command: str) -> None:
    assert "rich" not in loaded_by(command)


def test_activations_loads_nothing_that_was_not_asked_for() -> None:
    """No model's data, no pictures and no blocks of equal size for the plain table."""
    unasked = {
        "ffncli.cli.activations.data_page", "ffncli.run.activations.call", "ffncli.run.activations.rounding",
        "ffncli.models.source", "ffncli.show.plots.image", "ffncli.models.counting.iso_params",
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
    modules = loaded_by(command)
    assert {name for name, (module, _) in COMMANDS.items() if module in modules} == expected


@pytest.mark.parametrize("module", ["pandas", "rich", "numpy"])
def test_the_probe_sees_a_module_that_was_loaded(module: str) -> None:
    assert module in loaded(f"import {module}; {MAIN}", "--version")


def test_what_a_worker_sends_of_its_surroundings_loads_no_tensor_library() -> None:
    """A version that is no plain text would: torch's own is a class of torch's."""
    code = f"import pickle; pickle.loads({pickle.dumps(environment('cpu'))!r})"
    assert not loaded(code) & HEAVY


def test_the_probe_sees_that_a_trace_loads_torch() -> None:
    assert "torch" in loaded_by("trace")
