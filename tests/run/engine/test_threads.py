"""How threads wait is set before torch is imported, whichever command imports it; how many is set for each alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ffncli.run.engine.threads import one_thread, set_threads
from tests.oracles.checkpoints import LLAMA, folder, tensors
from tests.oracles.own_modules import MODULES

# Says what OMP_WAIT_POLICY is when torch is asked for, and ends there: no torch is loaded.
PROBE = """
import os, sys
class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy", os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Probe())
from ffncli.cli.main import main
main(sys.argv[1:])
"""
COMMANDS = [
    "trace 4x8", "trace 4x8 --layer all", "trace mine.py:FFN", "verify 4x8", "verify mine.py:FFN",
    "verify 4x8 --against mine.py:FFN", "activations gelu --rounding", "activations --source 4x8",
    "activations --source mine.py:FFN", "approximate --steps 1 --seeds 1 --d-ff 1",
    "precision 4x8 --dtype fp8", "precision mine.py:FFN --dtype fp8",
]  # fmt: skip


def policy(command: str, where: Path, **environment: str) -> str:
    (where / "mine.py").write_text("import torch\n")
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *command.split()],
        capture_output=True, text=True, cwd=where, env={**plain, **environment}, timeout=60,
    )  # fmt: skip
    return run.stdout.partition("policy ")[2].strip() or run.stderr


@pytest.mark.parametrize(
    ("command", "waits"),
    [
        *((command, "passive") for command in COMMANDS),
        ("params mine.py:FFN", "None"),
        ("bench mine.py:FFN --quick", "None"),
    ],
)
def test_threads_sleep_in_every_command_that_computes(command: str, waits: str, tmp_path: Path):
    """Others leave it as it is: what ffn bench's workers inherit decides what is measured."""
    assert policy(command, tmp_path) == waits


def test_who_has_said_how_threads_wait_is_obeyed(tmp_path: Path):
    assert policy("trace 4x8", tmp_path, OMP_WAIT_POLICY="active") == "active"


CALLS = [
    "trace('4x8:relu')", "survey('llama-2-7b', d_model=8, d_ff=16)", "verify('4x8:relu', check='zero')",
    "trace('mine.py:FeedForwardBlock', d_model=8, d_ff=24, dropout=0.1)",
    "approximate(activations=['relu'], widths=['1'], seeds=1, steps=1)",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.runs
def test_what_a_call_set_is_no_users_wish(call: str, tmp_path: Path):
    """libgomp itself says what it read when torch loaded it; a worker of ffn bench waits as it always does."""
    (tmp_path / "mine.py").write_text(MODULES)
    code = f"""
import os, ffncli
from ffncli.bench.launch import environment
ffncli.{call}
print(os.environ.get("OMP_WAIT_POLICY"), environment(1, "fixed")["OMP_WAIT_POLICY"])
"""
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={**plain, "OMP_DISPLAY_ENV": "TRUE"}, timeout=120,
    )  # fmt: skip
    assert run.stdout == "None active\n", run.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in run.stderr or sys.platform != "linux"


@pytest.mark.parametrize("command", ["trace", "trace --layer all", "verify --check zero", "activations --source"])
def test_every_command_computes_with_as_many_threads(command: str, call, tmp_path: Path):
    name, *options = command.split()
    model = str(folder(tmp_path, LLAMA, tensors("llama")))
    torch.set_num_threads(1)
    code, _, error = call(name, *options, model, "--threads", "3")
    assert (code, torch.get_num_threads()) == (0, 3), error


def test_torchs_number_stays_where_none_is_asked_for():
    torch.set_num_threads(2)
    set_threads(None)
    assert torch.get_num_threads() == 2
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
