"""`.ci/install` on an index whose torch depends on a CUDA package: torch is always installed at the end.

The index is a folder of small wheels on 127.0.0.1; `make test-install` prints the time and bytes of each case.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest

from tests import ROOT
from tests.oracles.package_index import PackageIndex, package_index, write_wheel, write_wheel_of_pip

pytestmark = pytest.mark.install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PIP_KNOWS_GROUPS = tuple(map(int, version("pip").split(".")[:2])) >= (25, 1)
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "ffncli"
version = "0"

[dependency-groups]
test = ["checker"]
"""
BUILD_EDITABLE = """

def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(Path(folder), "ffncli", "0").rename(f"{folder}/ffncli-0-py3-none-any.whl").name
"""
CONSTRAINTS = "torch==2.13.0\nuv==0.13.9\n"
UV_INSTALLS = """
import json, os, pathlib, sys, sysconfig
pathlib.Path("uv.log").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
print("Would install 1 package\\n + torch==2.13.0+cpu", file=sys.stderr)
if "--dry-run" not in sys.argv:
    info = pathlib.Path(sysconfig.get_path("purelib"), "torch-2.13.0+cpu.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: torch\\nVersion: 2.13.0+cpu\\n")
"""
UV_FAILS = """
import sys
sys.exit("error: Request failed after 3 retries\\n  cause: Failed to fetch\\n  cause: failed to lookup address")
"""
UV_FAILS_LATER = """
import sys
print(" + torch==2.13.0+cpu")
sys.exit(0 if "--dry-run" in sys.argv else 2)
"""
UV_HANGS = "import time; time.sleep(100)"


@dataclass
class Machine:
    """A directory with a small project, an environment that has only pip, and the index that pip uses."""

    folder: Path
    index: PackageIndex
    wheels: Path

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `.ci/install venv test`."""
        return self._run([".ci/install", "venv", "test"], variables)

    def install_torch(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run only the step of `.ci/install` that installs torch."""
        return self._run(["venv/bin/python", ".ci/install_torch.py"], variables)

    def _run(self, command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command with pip on this index, and print its time and the bytes downloaded."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "TORCH_"))}
        environment = clean | {
            "PIP_INDEX_URL": self.index.url, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1",
            "PIP_ROOT_USER_ACTION": "ignore", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable,
        } | variables  # fmt: skip
        self.index.downloads.clear()
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        seconds, downloads = time.perf_counter() - start, self.index.downloads
        print(f"\n{seconds:5.1f} s  {sum(downloads.values()):11,} bytes  {', '.join(downloads)}\n{done.stderr}", end="")
        return done

    def installed(self) -> dict[str, str]:
        """Return a mapping from the names of the installed packages to their versions."""
        folders = (self.folder / "venv").glob("lib/python3*/site-packages/*.dist-info")
        return dict(folder.name.removesuffix(".dist-info").split("-", 1) for folder in folders)

    def uv_calls(self) -> list[list[str]]:
        """Return the arguments of every call of uv."""
        log = self.folder / "uv.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture(scope="module")
def environment_with_pip(tmp_path_factory) -> Path:
    """Create, once per module, an environment with the same pip as the current one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    with zipfile.ZipFile(write_wheel_of_pip(folder)) as wheel:
        wheel.extractall(packages := next((folder / "venv").glob("lib/python3*/site-packages")))
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(packages)], check=True)  # or every copy compiles it
    return folder / "venv"


@pytest.fixture
def machine(tmp_path, environment_with_pip):
    if not PIP_KNOWS_GROUPS:
        pytest.skip("the pip that runs here is older than 25.1, and is the one that the environment gets")
    project, wheels = tmp_path / "project", tmp_path / "index"
    shutil.copytree(ROOT / ".ci", project / ".ci")
    shutil.copytree(environment_with_pip, project / "venv", symlinks=True)
    backend = (ROOT / "tests/oracles/package_index.py").read_text("utf-8") + BUILD_EDITABLE
    for name, text in {"pyproject.toml": PYPROJECT, "backend.py": backend, "constraints.txt": CONSTRAINTS}.items():
        (project / name).write_text(text, "utf-8")
    write_wheel(wheels, "checker", "1.0")
    write_wheel(wheels, "torch", "2.14.0")  # newer than the constraint
    write_wheel(wheels, "torch", "2.13.0", ["nvidia-cublas"])
    write_wheel(wheels, "nvidia_cublas", "13.1", files={"nvidia/libcublas.so": bytes(3_000_000)})
    with package_index(wheels) as index:
        yield Machine(project, index, wheels)


def lines_about_torch(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("torch: ")]


def test_uv_takes_the_build_that_fits_and_nothing_of_cuda_is_downloaded(machine):
    write_wheel(machine.wheels, "uv", "0.13.9", files={"uv/__main__.py": UV_INSTALLS})
    done = machine.install(PIP_EXTRA_INDEX_URL=f"{machine.index.url}/more {machine.index.url}/most")
    (line,) = lines_about_torch(done)
    assert line.startswith(
        "torch: 2.13.0+cpu, which uv chose for this machine; make TORCH_CUDA=1 takes pip's, 2 packages"
    )
    assert line.endswith("make TORCH_INDEX=URL takes torch from another package index")
    assert "nvidia_cublas-13.1-py3-none-any.whl" not in machine.index.downloads
    assert machine.installed()["torch"] == "2.13.0+cpu"
    assert {"ffncli", "checker", "uv"} < set(machine.installed())
    dry, real = machine.uv_calls()
    assert dry == [*real[:-3], "--dry-run", *real[-3:]]
    assert real[-3:] == ["-c", "constraints.txt", "torch"]
    assert "--torch-backend=auto" in real
    for option, value in (("--default-index", ""), ("--index", "/more"), ("--index", "/most")):
        assert (option, machine.index.url + value) in set(pairwise(real))

    again = machine.install_torch()  # with torch there, nothing is chosen again
    assert lines_about_torch(again) == []
    assert machine.installed()["torch"] == "2.13.0+cpu"
    assert len(machine.uv_calls()) == 2


@pytest.mark.parametrize(
    ("uv", "reason"),
    [
        (None, "uv could not be installed"),
        (UV_FAILS, "uv failed: failed to lookup address"),
        (UV_FAILS_LATER, "uv stopped with exit code 2"),
        (UV_HANGS, "uv did not answer within 1 s"),
    ],
    ids=["no uv", "uv fails", "uv fails later", "uv hangs"],
)
def test_where_uv_cannot_pip_installs_its_build_and_says_the_size(machine, uv, reason):
    if uv:
        write_wheel(machine.wheels, "uv", "0.13.9", files={"uv/__main__.py": uv})
    done = machine.install_torch(UV_SECONDS="1")
    line = lines_about_torch(done)[-1]
    assert line.startswith("torch: 2.13.0 by pip with CUDA packages, 2 packages, 3.0 MB to download")
    assert f"({reason})" in line
    assert machine.installed()["torch"] == "2.13.0"
    assert machine.installed()["nvidia_cublas"] == "13.1"
    assert machine.index.downloads["nvidia_cublas-13.1-py3-none-any.whl"] > 3_000_000


def test_without_cuda_packages_pip_installs_and_uv_is_not_needed(machine):
    write_wheel(machine.wheels, "torch", "2.13.0", ["checker"])
    (line,) = lines_about_torch(machine.install_torch())
    assert line.startswith("torch: 2.13.0 by pip, without CUDA packages; make TORCH_INDEX=URL")
    assert machine.installed()["torch"] == "2.13.0"
    assert "uv" not in machine.installed()


def test_the_user_chooses(machine, tmp_path):
    (line,) = lines_about_torch(machine.install_torch(TORCH_CUDA="1"))
    assert line.startswith("torch: the build that pip chooses, as TORCH_CUDA says")
    assert machine.installed()["nvidia_cublas"] == "13.1"

    subprocess.run([machine.folder / "venv/bin/python", "-m", "pip", "uninstall", "-qy", "torch"], check=True)
    write_wheel(tmp_path / "other", "torch", "2.13.0+mine")
    with package_index(tmp_path / "other") as other:
        (line,) = lines_about_torch(machine.install_torch(TORCH_INDEX=other.url))
        assert line == f"torch: from {other.url}, as TORCH_INDEX says"
    assert machine.installed()["torch"] == "2.13.0+mine"


def test_a_pip_that_knows_no_groups_is_upgraded_first(machine):
    write_wheel_of_pip(machine.wheels)
    packages = next(machine.folder.glob("venv/lib/python3*/site-packages"))
    next(packages.glob("pip-*.dist-info")).rename(packages / "pip-25.0.dist-info")
    for file in ("pip/__init__.py", "pip-25.0.dist-info/METADATA"):
        text = (packages / file).read_text("utf-8")
        (packages / file).write_text(text.replace(version("pip"), "25.0", 1), "utf-8")
    write_wheel(machine.wheels, "torch", "2.13.0")
    lines_about_torch(machine.install())
    assert machine.installed()["pip"] == version("pip")


def test_an_index_without_torch_is_an_error(machine):
    shutil.rmtree(machine.wheels / "torch")
    done = machine.install()
    assert done.returncode == 1
    assert "ERROR: Cannot install torch" in done.stderr
    assert "ffncli" not in machine.installed()


def test_the_extra_test_is_the_group_test():
    assert PROJECT["project"]["optional-dependencies"]["test"] == PROJECT["dependency-groups"]["test"]


def test_what_is_pinned_is_what_is_installed_or_asked_for():
    """Every name in constraints.txt is a package that something installs; any other would pin nothing."""
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    wanted = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["dependency-groups"]["test"],
        *PROJECT["dependency-groups"]["docs"],
        "pip",
        "uv",
    ]
    assert set(pinned) <= {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}
