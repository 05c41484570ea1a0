"""A file as a commit has it: bytes and hashes as git itself gives them, and one line for whatever is not there."""

from __future__ import annotations

import hashlib

import pytest

from ffncli.errors import ExitCode, FFNError
from ffncli.system.git import file_at
from tests.oracles.repository import Repository


@pytest.fixture
def repository(tmp_path):
    made = Repository(tmp_path / "repo")
    made.commit({"kernels/mlp.py": b"old = 1\r\n"}, tag="v1")
    made.commit({"kernels/mlp.py": b"new = 2\n", "other.py": b""})
    return made


def blob(data: bytes) -> str:
    """What git calls these bytes: sha1 of `blob SIZE\\0` and them."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def test_the_file_of_each_ref_and_the_working_tree_stays_as_it_is(repository):
    path = repository.path / "kernels" / "mlp.py"
    path.write_bytes(b"not committed")
    for ref, data in (
        ("main", b"new = 2\n"),
        ("v1", b"old = 1\r\n"),
        ("HEAD~1", b"old = 1\r\n"),
        ("HEAD", b"new = 2\n"),
    ):
        found = file_at(ref, path, "--kernel")
        assert found.data == data
        assert repository.git("rev-parse", f"{found.commit}:kernels/mlp.py") == blob(data)
        assert file_at(found.commit, path, "--kernel") == found
    assert path.read_bytes() == b"not committed"


def test_a_file_that_is_gone_with_its_folder(repository):
    repository.git("rm", "-q", "-r", "kernels")
    path = repository.path / "kernels" / "mlp.py"
    assert not path.parent.exists()
    assert file_at("main", path, "--kernel").data == b"new = 2\n"


@pytest.mark.parametrize(
    ("ref", "name", "parts"),
    [
        ("mian", "other.py", ["git has no commit 'mian'", "did you mean 'main'"]),
        ("v1", "other.py", ["other.py is not a file at 'v1' (commit "]),
        ("main", "kernels", ["kernels is not a file at 'main'"]),
        ("--all", "other.py", ["git has no commit '--all'"]),
        ("a\0b", "other.py", ["NUL"]),
        ("main:other.py", "other.py", ["git has no commit"]),
    ],
)
def test_what_is_not_there_is_one_line(repository, ref, name, parts):
    with pytest.raises(FFNError) as caught:
        file_at(ref, repository.path / name, "--kernel")
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value
    assert (caught.value.code, "\n" in str(caught.value)) == (ExitCode.USAGE, False)


def test_outside_of_a_repository_and_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(FFNError, match=r"mlp.py at 'main': not a git repository"):
        file_at("main", tmp_path / "mlp.py", "--kernel")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FFNError, match="cannot run git: it is not installed") as caught:
        file_at("main", tmp_path / "mlp.py", "--kernel")
    assert caught.value.code == ExitCode.ENVIRONMENT
