"""What people type wrong, and streams that fail: one line that says what to do, the right exit code, no traceback."""

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.oracles.checkpoints import entry, expect_refusal, raw_safetensors

FFN = [sys.executable, "-m", "ffncli"]
ENV = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # which hides what happens at the last flush

# --- names ------------------------------------------------------------------------------------------------------------


def test_a_hub_without_a_network(call):
    """HF_HUB_OFFLINE is set for all tests: nothing is asked, and the way out is said."""
    expect_refusal(call("params", "hf://org/none"), "HF_HUB_OFFLINE", "'hf://org/none'", "local directory", code=3)
    expect_refusal(call("params", "org/none"), "org/none does not exist", "hf://org/none")
    expect_refusal(call("params", "hf://../none"), "hf://../none")


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_block_too_large_for_this_machine(call):
    expect_refusal(call("trace", "2147483647x2147483647"), "GB", code=3)
    expect_refusal(call("trace", "512x512", "--tokens", "2147483647"), "GB", "free", code=3)


# --- layers -----------------------------------------------------------------------------------------------------------


# --- contradictions ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:99"])
def test_a_gpu_that_is_not_there(device: str, call):
    expect_refusal(call("trace", "4x8", "--device", device), f"--device {device}", "--device cpu", code=3)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _npy(header: bytes, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def _saved(array: np.ndarray) -> bytes:
    np.save(out := io.BytesIO(), array, allow_pickle=True)
    return out.getvalue()


MINUS = b"{'descr': " + b"-" * 3000 + b"1, 'fortran_order': False, 'shape': (4,)}"
NO_INPUTS: dict[str, bytes] = {
    "empty.txt": b"", "blank.txt": b" \n", "word.txt": b"1 2 three 4", "esc.txt": b"\x1b[31m", "latin.csv": b"1,2,\xff",
    "five.csv": b"1,2,3,4,5", "five.json": b"[1, 2, 3, 4, 5]", "empty.json": b"[]", "object.json": b'{"a": 1}',
    "ragged.json": b"[[1, 2], [3]]", "deeper.json": b"[[1, 2, 3, 4], 5]", "null.json": b"[null, 1, 2, 3]",
    "text.json": b'["1", "2", "3", "4"]', "cut.json": b"[1, 2, 3, 4", "long.json": b"[1" + b"0" * 400 + b", 1, 2, 3]",
    "digits.json": b"[" + b"9" * 5000 + b", 1, 2, 3]", "open.json": b"[" * 100_000,
    "deep.json": b"[" * 100_000 + b"]" * 100_000,
    "empty.npy": b"", "text.npy": b"1,2,3,4", "zip.npy": b"PK\x03\x04 not a zip", "magic.npy": b"\x93NUMPY",
    "cut.npy": _saved(np.ones((2, 4)))[:-3], "header.npy": _saved(np.ones(4))[:40], "nothing.npy": _saved(np.ones(0)),
    "pickle.npy": _saved(np.array([{}], object)), "words.npy": _saved(np.array(["a"] * 4)),
    "fields.npy": _saved(np.zeros(4, "f4,f4")), "complex.npy": _saved(np.ones(4, complex)), "minus.npy": _npy(MINUS),
    "code.npy": _npy(b"{'descr': __import__('os').getcwd()}"), "bracket.npy": _npy(b"{'a': " + b"[" * 3000),
    "none.safetensors": raw_safetensors({}, 0), "cut.safetensors": b"\x02",
    "two.safetensors": raw_safetensors({n: entry("F32", (4,), (at, at + 16)) for n, at in (("a", 0), ("b", 16))}, 32),
    "six.safetensors": raw_safetensors({"a": entry("F6_E2M3", (4,), (0, 3))}, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_INPUTS)
def test_an_input_file_that_holds_no_input(name: str, call, tmp_path: Path):
    (tmp_path / name).write_bytes(NO_INPUTS[name])
    error = expect_refusal(call("trace", "4x8", "--input", str(tmp_path / name)))
    assert name in error or "--input" in error


def test_an_input_is_never_unpickled(call, tmp_path: Path):
    class Planted:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "planted"),)

    np.save(tmp_path / "x.npy", np.array([Planted()], object), allow_pickle=True)
    expect_refusal(call("trace", "4x8", "--input", str(tmp_path / "x.npy")), "x.npy")
    assert not (tmp_path / "planted").exists()


def test_an_input_of_complex_numbers_is_no_input(call, tmp_path: Path):
    save_file({"x": torch.ones(4, dtype=torch.complex64)}, tmp_path / "x.safetensors")
    expect_refusal(call("trace", "4x8", "--input", str(tmp_path / "x.safetensors")), "x.safetensors")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("garbage", "'garbage'"), ("arnage", "did you mean 'arange'"), ("", "''"), (" ", "--input"), (",", "0 values"),
        ("1,2", "2 values"), ("1,2,3,4,5", "5 values"), ("1,x", "'1,x'"), ("e", "'e'"), ("1,2,3,--4", "'--4'"),
        ("[", "JSON"), ("]", "']'"), ("[]", "0 values"), ("[[1,2],[3]]", "equal lengths"), ("[1,2,3", "JSON"),
        ("1," * 301, "301 values"), ("[" + "1," * 300 + "1]", "301 values"), ("9" * 5000, "1 values"),
        ("[" * 50_000, "JSON"), ("x" * 5000, "xxx"), ("/nowhere.npy", "/nowhere.npy"), (".", "'.'"),
        ("~nobody-here/x", "~nobody-here/x"), ("a\0b", r"'a\x00b'"), ("\x1b[31m", r"\x1b[31m"), ("\udcff", r"\udcff"),
    ],
    ids=lambda v: repr(v)[:20],
)  # fmt: skip
def test_an_input_that_is_no_input(text: str, says: str, call):
    expect_refusal(call("trace", "4x8", "--input", text), says)


@pytest.mark.parametrize(
    "raw", [b"", b"x", b"1,2,3", b"[1,2,3,4", b"[[1,2,3,4],[1]]", b"\x1b[31m", b"1,2,3,\xff", b"\x93NUMPY"]
)
def test_a_standard_input_that_is_no_input(raw: bytes, call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "utf-8"))
    assert "input" in expect_refusal(call("trace", "4x8", "--input", "-"))


def test_a_standard_input_that_is_closed(call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", None)
    expect_refusal(call("trace", "4x8", "--input", "-"), "standard input")


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_an_existing_file_is_not_replaced(call, tmp_path: Path):
    path = tmp_path / "mine.txt"
    path.write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    expect_refusal(call("params", "4x8", "-o", str(path)), path, "exists", "--force")
    expect_refusal(call("params", "4x8", "-o", str(tmp_path / "link")), "link", "exists")
    assert path.read_text() == "mine"
    assert call("params", "4x8", "-o", str(path), "--force")[:2] == (0, "")
    assert path.read_text().startswith("4x8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "mine.txt"]


@pytest.mark.parametrize("name", ["none/here.txt", "", ".", "file/x", "x" * 300], ids=lambda v: repr(v)[:15])
def test_a_place_that_cannot_be_written(name: str, call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    error = expect_refusal(call("params", "4x8", "-o", name), "cannot write", code=3)
    assert error.startswith("error: cannot write " + (name or "."))
    assert os.listdir() == ["file"]


def test_a_name_that_no_file_can_have(call):
    expect_refusal(call("params", "4x8", "-o", "a\0b"), r"--output: 'a\x00b' is not a file name")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/x", "there is no directory "), ("file/x", "file is not a directory"),
        ("dir", "it is a directory"), ("link", "there is no directory "), ("closed/x", "is not writable"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("option", "suffix"), [("-o", ".md"), ("--save", ".npz")])
def test_a_place_that_cannot_be_written_is_said_before_the_run(
    option: str, suffix: str, name: str, why: str, call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The block would not fit this machine, so whatever ran first would say that."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    name += suffix
    Path(f"link{suffix}").symlink_to("none/x")
    for folder in (f"dir{suffix}", "closed"):
        Path(folder).mkdir()
    granted = os.access  # to root everything is
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path) and granted(path, mode))
    words = ("trace", "2147483647x2147483647", "--force", option, name)
    expect_refusal(call(*words), f"cannot write {name}: ", why, code=3)


def test_a_full_disk(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "mine.txt"
    path.write_text("mine")
    expect_refusal(call("params", "4x8", "-o", str(path), "--force"), f"cannot write {path}", "No space left", code=3)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("mine.txt", "mine")]
    if os.path.exists("/dev/full"):
        expect_refusal(call("params", "4x8", "-o", "/dev/full"), "cannot write /dev/full", "No space left", code=3)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["models"], ["params", "gpt2", "--json"], ["trace"]])
def test_a_standard_output_that_is_full(words: list[str]):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*FFN, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=ENV, timeout=120)
    expect_refusal((done.returncode, "", done.stderr), "standard output", "No space left", code=3)


@pytest.mark.parametrize("words", ["models", "--help"])
def test_a_standard_output_that_is_closed(words: str):
    done = _shell(f"{words} >&-")
    expect_refusal((done.returncode, done.stdout, done.stderr), "standard output", code=3)


@pytest.mark.parametrize(
    ("words", "reader"),
    [("models", "head -n 1"), ("models", "true"), ("--help", "true"), ("params gpt2", "true"),
     ("trace 16x64 --tokens 64 --show all", "head -n 1")],
)  # fmt: skip
def test_a_reader_that_has_had_enough(words: str, reader: str):
    done = _shell(f"{words} | {reader}; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")


def _shell(words: str) -> subprocess.CompletedProcess[str]:
    line = f'"$PYTHON" -m ffncli {words}'
    env = {**ENV, "PYTHON": sys.executable}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, timeout=120)


# --- signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading_stdin() -> Iterator[subprocess.Popen[bytes]]:
    """A trace that has begun to read its input: more has gone into the pipe than it holds."""
    process = subprocess.Popen(
        [*FFN, "trace", "4x8", "--input", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENV,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's child would ignore it
    )  # fmt: skip
    try:
        assert process.stdin
        process.stdin.write(b"0," * 1_000_000)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.runs
def test_a_signal_ends_it_quietly(number: signal.Signals, code: int):
    with _reading_stdin() as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, b"")
    assert len(err) < 40
    assert err.splitlines() == ([b"interrupted"] if number == signal.SIGINT else [])
