"""Cores that benchmarks next to each other do not share."""

import os
import sys
from pathlib import Path

import pytest

from ffncli.errors import FFNError
from ffncli.system import host
from ffncli.system.host import locked_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux restricts a process to cores")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Four cores with two hardware threads each, and the list of what this process was restricted to."""
    calls: list[list[int]] = []
    monkeypatch.setattr(host, "affinity", lambda: tuple(range(8)))
    monkeypatch.setattr(host, "one_cpu_per_core", lambda cpus: tuple(cpus)[:4])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: calls.append(list(cpus)))
    return calls


def test_two_at_once_have_different_cores(tmp_path: Path, cores: list[list[int]]):
    with locked_cores(2, tmp_path) as one, locked_cores(2, tmp_path) as two:
        assert (one, two) == ((0, 1), (2, 3))
    assert cores == [[0, 1], [2, 3], [*range(8)], [*range(8)]]


def test_too_few_free_cores_are_an_error_and_the_rest_stays_free(tmp_path: Path, cores: list[list[int]]):
    with locked_cores(3, tmp_path):
        with pytest.raises(FFNError, match="2 cores are needed and 1 are free"), locked_cores(2, tmp_path):
            pass
        with locked_cores(1, tmp_path) as last:
            assert last == (3,)
    assert cores[0] == [0, 1, 2]


def test_more_than_the_machine_has_are_all_of_them(tmp_path: Path, cores: list[list[int]]):
    with locked_cores(64, tmp_path) as all_of_them:
        assert all_of_them == (0, 1, 2, 3)


def test_the_folder_of_the_locks_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = host._folder()
    assert folder == tmp_path / f"ffn-cores-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(FFNError, match="belongs to another user"):
        host._folder()
