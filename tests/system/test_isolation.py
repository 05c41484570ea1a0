"""What a process without rights can still do, tried by a program; and that the same program can do it all with them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ffncli.errors import ExitCode, FFNError
from ffncli.system import isolation
from ffncli.system.isolation import LANDLOCK, NOBODY, isolated, isolated_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux isolates a process")

# Prints the deeds that the system allowed. The arguments are a process, and a file in a folder, both of the same user.
TRIES = """
import json, os, subprocess, sys, tempfile
process, file = int(sys.argv[1]), sys.argv[2]
deeds = {
    "read the file": lambda: open(file).close(),
    "write to its own folder": lambda: tempfile.TemporaryFile().close(),
    "discard": lambda: open("/dev/null", "w").close(),
    "start a program": lambda: subprocess.run(["true"], check=True),
    "change the file": lambda: open(file, "r+").close(),
    "make a file": lambda: open(file + "2", "w").close(),
    "replace the file": lambda: os.replace(file + "2", file),
    "make a file in a program": lambda: subprocess.run(["touch", file + "3"], check=True, stderr=subprocess.DEVNULL),
    "make a file for all": lambda: os.remove(tempfile.mkstemp(dir="/tmp")[1]),
    "signal": lambda: os.kill(process, 0),
    "read its memory": lambda: open(f"/proc/{process}/mem", "rb").close(),
}

def allowed(deed):
    try:
        deed()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True

print(json.dumps([name for name, deed in deeds.items() if allowed(deed)]))
"""
HARMLESS = ["read the file", "write to its own folder", "discard", "start a program"]


@dataclass
class Place:
    """A user, as arguments of subprocess, with a process and a file in a folder that is closed to others."""

    user: dict[str, int]
    process: int
    file: Path

    def allowed(self, *before: str) -> list[str]:
        """What the system allows the program that is started with these words before it."""
        done = subprocess.run(
            [*before, sys.executable, "-c", TRIES, str(self.process), str(self.file)],
            capture_output=True, text=True, cwd="/", check=False, **self.user,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def folder(self, stack: Path) -> str:
        """A folder of this user's."""
        stack.mkdir()
        os.chown(stack, self.user.get("user", -1), -1)
        return str(stack)


def starts_python(user: dict[str, int]) -> bool:
    try:
        return subprocess.run([sys.executable, "-c", ""], check=False, capture_output=True, **user).returncode == 0
    except PermissionError:
        return False


@pytest.fixture(params=["root", "another user"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    user: dict[str, int] = {}
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("this is not root")
    if request.param != "root" and os.geteuid() == 0:
        user = {"user": 12345}
        if not starts_python(user):
            pytest.skip("another user cannot start this Python")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to the other user
        file = Path(folder, "mine", "file")
        file.parent.mkdir(mode=0o700)
        file.touch()
        for path in (folder, file.parent, file):
            os.chown(path, user.get("user", -1), -1)
        with subprocess.Popen(["sleep", "60"], **user) as process:
            yield Place(user, process.pid, file)
            process.kill()


def test_a_process_that_is_not_isolated_can_do_it_all(place: Place):
    assert len(place.allowed()) == 11


def test_an_isolated_process_reads_and_writes_to_its_own_folder_and_does_nothing_else(place: Place):
    folder = place.folder(place.file.parent.parent / "own")
    kinds = subprocess.run(isolated_in(folder), capture_output=True, text=True, check=False, **place.user).stdout
    if LANDLOCK not in kinds:
        pytest.skip("this system has no Landlock")
    assert kinds.startswith(NOBODY) is not (bool(place.user) or os.geteuid() != 0)
    assert place.allowed(*isolated_in(folder)) == HARMLESS
    assert place.file.read_text() == ""
    assert [path.name for path in place.file.parent.iterdir()] == ["file"]


def test_landlock_alone_does_that_too(place: Place):
    """As in a container whose root cannot become another user."""
    folder = place.folder(place.file.parent.parent / "own")
    alone = f"""
import runpy, sys
one = runpy.run_path({isolation.__file__!r})
one["main"].__globals__["_become_nobody"] = lambda libc, folder: False
sys.exit(one["main"](sys.argv[1], sys.argv[2:]))
"""
    before = [sys.executable, "-I", "-c", alone, folder]
    kinds = subprocess.run(before, capture_output=True, text=True, check=False, **place.user).stdout
    if LANDLOCK not in kinds:
        pytest.skip("this system has no Landlock")
    assert kinds == f"{LANDLOCK}\n"
    assert place.allowed(*before) == HARMLESS


def test_its_folder_has_its_caches_and_is_removed(tmp_path: Path):
    isolation.isolation()
    names = "print(*(os.environ[name] for name in ('TMPDIR', 'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')))"
    with isolated(True) as before:
        command = [*before, sys.executable, "-c", f"import os, tempfile; tempfile.mkdtemp(); {names}"]
        folders = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert all(Path(folder).is_relative_to(before[-1]) and Path(folder).is_dir() for folder in folders)
        assert any(Path(folders[0]).iterdir())
    assert not Path(before[-1]).exists()
    with isolated(False) as before:
        assert before == ()


def test_it_imports_nothing_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of the user's with the name of one of Python's would have all rights."""
    (tmp_path / "glob.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert isolation.isolation()


@pytest.mark.parametrize("says", ["", "user root", "user nobody\nmore"])
def test_a_system_that_takes_no_rights_is_named(monkeypatch: pytest.MonkeyPatch, says: str):
    monkeypatch.setattr(isolation, "isolated_in", lambda folder: ("echo", says))
    with pytest.raises(FFNError, match="isolate: this system can take no rights from a process") as error:
        isolation.isolation()
    assert error.value.code == ExitCode.ENVIRONMENT


def test_without_rights_to_take_the_command_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in ("_become_nobody", "_restrict"):
        monkeypatch.setattr(isolation, step, lambda libc, folder: False)
    monkeypatch.setattr(isolation.ctypes, "CDLL", lambda name, use_errno: type("C", (), {"prctl": print}))
    monkeypatch.setattr(os, "execvpe", lambda *words: pytest.fail("it ran"))
    assert isolation.main(str(tmp_path), ["true"]) == ExitCode.ENVIRONMENT
