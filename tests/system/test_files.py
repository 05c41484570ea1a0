"""Files: only files are opened, nothing waits and nothing is read without end; a file as a commit has it."""

import errno
import hashlib
import json
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from ffncli.errors import ExitCode, FFNError
from ffncli.models.files import gguf
from ffncli.models.files.gguf import read_gguf
from ffncli.system.files import file_at, open_to_read, read_whole, written_together, written_whole
from tests.oracles.checkpoints import INDEX, LLAMA, expect_refusal, folder, tensors
from tests.oracles.repository import Repository

needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")


@needs_fifo
def test_pipes_devices_sockets_and_folders_are_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as there:
        os.chdir(tmp_path)  # the name of a socket is short
        there.bind("socket")
        for name, words in (("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket"), ("/dev/zero", "a device")):
            with pytest.raises(OSError, match=f"it is {words}, not a file"):
                open_to_read(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_to_read(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_to_read(tmp_path / "none")


@needs_fifo
def test_a_pipe_is_read_where_it_is_allowed(tmp_path: Path):
    reading, writing = os.pipe()
    os.write(writing, b"abc")
    os.close(writing)
    assert read_whole(Path(f"/dev/fd/{reading}"), 10, pipe=True) == b"abc"
    os.close(reading)


def test_no_more_is_read_than_a_format_has(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abcd")
    assert read_whole(tmp_path / "a", 4) == b"abcd"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_whole(tmp_path / "a", 3)


def test_a_link_that_leads_back_to_itself_is_not_written(tmp_path: Path, call):
    for name in ("a.csv", "a.npz"):
        (tmp_path / name).symlink_to(name)
    with pytest.raises(FFNError, match="Too many levels"), written_whole(tmp_path / "a.npz"):
        pass
    for words in (["trace", "4x8", "--save", "a.npz"], ["bench", "4x8", "--save", "a.csv"]):
        expect_refusal(call(*words[:-1], str(tmp_path / words[-1])), "a link that leads back to itself", code=3)
    assert all(path.is_symlink() for path in tmp_path.iterdir())


@needs_fifo
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_a_shard_a_config_or_an_index_that_is_no_file(what: str, tmp_path: Path, call):
    def replace(path: Path) -> None:
        path.unlink()
        os.mkfifo(path) if what == "pipe" else path.symlink_to(what)

    source = folder(tmp_path, LLAMA, tensors("llama"))
    words = f"it is a {'pipe' if what == 'pipe' else 'device'}, not a file"
    replace(tmp_path / "model.safetensors")
    expect_refusal(call("params", source), words)
    expect_refusal(call("params", f"{source}/model.safetensors"), "is neither a file nor a directory")
    index = {"weight_map": dict.fromkeys(tensors("llama"), "model.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    expect_refusal(call("params", source), words)
    replace(tmp_path / INDEX)
    expect_refusal(call("params", source), words)
    replace(tmp_path / "config.json")
    expect_refusal(call("params", source), words)


def test_a_gguf_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.models.files.test_gguf import write

    path = write(tmp_path / "a.gguf")
    opened = gguf.open_to_read

    def cut(where: Path):
        file = opened(where)
        size = os.fstat(file.fileno()).st_size
        os.truncate(where, 700)
        monkeypatch.setattr(gguf.os, "fstat", lambda handle: os.stat_result((0,) * 6 + (size,) + (0,) * 3))
        return file

    monkeypatch.setattr(gguf, "open_to_read", cut)
    with pytest.raises(FFNError, match="is truncated: its header does not end within its 700 bytes"):
        read_gguf(path)


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


def test_files_written_together_appear_together(tmp_path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[1].write_bytes(b"old")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", Mock(side_effect=[None, OSError(errno.ENOSPC, "No space left")]))
        with pytest.raises(FFNError, match="No space left"), written_together(*paths) as (first, second):
            first.write(second.write(b"new") * b"n")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"b": b"old"}
    with written_together(*paths) as files:
        for file in files:
            file.write(b"new")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"a": b"new", "b": b"new"}
