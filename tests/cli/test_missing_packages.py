"""A required package that is missing or broken: one line that names the command to install it, and exit code 3."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ffncli.system.packages import REQUIRED, package_error
from tests import ROOT

pytestmark = pytest.mark.install

INSTALL_TORCH = "error: torch is not installed; pip install 'torch>=2.10'"
BLOCK_IMPORTS = """
    import os, sys

    for name in os.environ["MISSING"].split():
        sys.modules[name] = None
"""


@pytest.fixture
def ffn_without(tmp_path):
    """`ffn_without("torch", "trace", ...)`: the command, and every worker it starts, in a Python without torch."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(BLOCK_IMPORTS))

    def run(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_with(tmp_path, *arguments, MISSING=missing)

    return run


def run_with(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command with the modules in `folder` before all others."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "ffncli", *arguments],
        env={**os.environ, **variables, "PYTHONPATH": path}, cwd=folder,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "trace",
        "trace 4x8 --layer 0 --json",
        "verify 4x8",
        "bench 8x16 --quick -q --save results.csv",
        "bench --selftest",
        "approximate",
        "activations gelu --rounding",
        "activations --source 4x8",
        "compare a.npz b.npz",
    ],
)
def test_without_torch_a_command_that_computes_names_what_to_install(command, ffn_without, tmp_path):
    if command.startswith("compare"):
        import numpy

        numpy.savez(tmp_path / "a.npz", x=[1.0])
        numpy.savez(tmp_path / "b.npz", x=[1.0])
    done = ffn_without("torch", *command.split())
    assert (done.returncode, done.stdout) == (3, "")
    *notes, error = done.stderr.splitlines()
    assert error == INSTALL_TORCH
    assert all(line.startswith("note: ") for line in notes)
    assert not (notes and command.startswith("bench"))  # it fails before it says where results go
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize("command", ["params gpt2", "models gpt2", "activations gelu", "--version", "trace --help"])
def test_without_torch_a_command_that_counts_works(command, ffn_without):
    done = ffn_without("torch numpy pandas safetensors", *command.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_without_torch_doctor_shows_the_rest_and_fails(ffn_without):
    done = ffn_without("torch", "doctor", "--no-noise")
    assert done.returncode == 3
    assert done.stdout
    assert done.stderr == "error: ffn cannot run here: torch; pip install --force-reinstall 'torch>=2.10'\n"


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("typer", "params gpt2"),
        ("typer", "--help"),
        ("typer", "params --nope"),
        ("numpy", "bench 8x16 --quick -q --save results.csv"),
        ("threadpoolctl", "bench 8x16 --quick -q --save results.csv"),
        ("filelock", "bench 8x16 --quick -q --save results.csv"),
    ],
)
def test_every_other_package_is_named_too(package, command, ffn_without):
    done = ffn_without(package, *command.split())
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"error: {package} is not installed; pip install '{package}>={REQUIRED[package]}'\n"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('libtorch_cpu.so: cannot open shared object file')", "OSError: libtorch_cpu.so: cannot open"),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("from torch._C import nothing", "ModuleNotFoundError: No module named 'torch._C'"),
    ],
    ids=["library", "dependency", "half-removed"],
)
@pytest.mark.parametrize("command", ["trace 4x8", "bench 8x16 --quick -q --save results.csv"])
def test_a_torch_that_does_not_load_is_reported_with_its_reason(command, body, reason, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(body)
    done = run_with(tmp_path, *command.split())
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"error: torch does not load ({reason}")
    assert done.stderr.endswith("; pip install --force-reinstall 'torch>=2.10'\n")
    assert done.stderr.count("\n") == 1


def test_the_package_at_fault_is_named_not_the_one_that_imports_it(tmp_path):
    for package, body in (("torch", "import numpy"), ("numpy", "raise ImportError('built for another Python')")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(body)
    done = run_with(tmp_path, "trace", "4x8")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: numpy does not load (ImportError: built for another Python); pip install")


def test_a_package_without_one_of_its_modules_is_broken():
    error = package_error(ModuleNotFoundError("No module named 'rich.console'", name="rich.console"))
    assert str(error).startswith("rich does not load (ModuleNotFoundError: No module named 'rich.console')")
    assert error.code == 3
    assert package_error(ModuleNotFoundError("No module named 'transformers'", name="transformers")) is None


def test_an_error_after_loading_is_still_a_bug(tmp_path):
    """Only what happens while a package is imported is its installation's fault."""
    (tmp_path / "sitecustomize.py").write_text("import ffncli.models.catalog as c\ndel c.find\n")
    done = run_with(tmp_path, "params", "gpt2")
    assert done.returncode == 70
    assert done.stderr.startswith("error: a bug in ffn: AttributeError")


@pytest.mark.parametrize("name", ["trace", "survey", "verify", "approximate"])
def test_without_torch_a_library_call_raises_the_same(name, ffn_without, tmp_path):
    call = "ffncli.approximate()" if name == "approximate" else f"ffncli.{name}('gpt2', d_model=4, d_ff=8)"
    code = f"import ffncli\ntry: {call}\nexcept ffncli.FFNError as e: print(int(e.code), e)"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, "MISSING": "torch"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == f"3 {INSTALL_TORCH.removeprefix('error: ')}\n", done.stderr
