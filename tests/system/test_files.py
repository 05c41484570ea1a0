"""Files: only files are opened, whatever stands at their names; nothing waits, and nothing is read without end."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from ffncli.errors import FFNError
from ffncli.models.files import gguf
from ffncli.models.files.gguf import read_gguf
from ffncli.system.files import open_to_read, read_whole, written_whole
from tests.oracles.checkpoints import INDEX, LLAMA, expect_refusal, folder, tensors

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
