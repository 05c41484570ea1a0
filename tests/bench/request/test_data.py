"""routing and --input: what each block can have, refused in one line before anything runs."""

import hashlib
import json
import os
import struct

import pytest
import torch

from ffncli.bench.request import data as case_data
from ffncli.bench.request.grid import Grid, cases
from ffncli.errors import FFNError
from tests.bench.referee.test_prescribed_routing import saved_trace

MIXTURE = "64x8:swiglu"


def grid(source=MIXTURE, experts=8, top_k=2, **more) -> Grid:

    return Grid(source, experts=experts, top_k=top_k, tokens=24, device=("cpu",), threads=(1,), **more)


def stored(path, header, data: bytes = b"") -> str:
    """A .safetensors file written by hand."""
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return str(path)


def rows_file(path, rows: torch.Tensor, name: str = "x") -> str:
    """A file with these rows."""
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64", torch.int32: "I32"}
    data = bytes(rows.contiguous().flatten().view(torch.uint8).numpy())
    header = {name: {"dtype": kinds[rows.dtype], "shape": list(rows.shape), "data_offsets": [0, len(data)]}}
    return stored(path, header, data)


def test_every_routing_is_a_case_and_the_plain_case_has_the_name_that_it_had(tmp_path):
    (plain,) = cases(grid())
    assert plain.key == "64x8:swiglu+experts=8+top_k=2, 24 tokens, fp32, forward, warm, cpu, 1 thread"
    two = cases(grid(routing=("uniform", "zipf:1.2", "uniform", "zipf:1.20")))
    assert [case.key.removeprefix(plain.key) for case in two] == [", routing uniform", ", routing zipf:1.2"]
    name = rows_file(tmp_path / "x.safetensors", torch.ones(3, 64))
    (real,) = cases(grid(input=name))
    assert real.key == f"{plain.key}, input {name}"
    assert real.input_sha256 == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unifrom", "did you mean 'uniform'"),
        ("zipf", "needs an exponent"),
        ("zipf:-1", "needs an exponent, a number from 0 to 20"),
        ("zipf:nan", "needs an exponent"),
        ("zipf:99", "needs an exponent"),
        ("", "unknown value ''"),
        ("none.safetensors", "cannot read none.safetensors: No such file"),
        ("trace.gguf", "unknown value 'trace.gguf'"),
        ("./routes", r"^routing: (\./)?routes is not a file of tensors; use uniform, "),
        ("/tmp/routes.npy", "^routing: /tmp/routes.npy is not a file of tensors; use uniform, "),
    ],
)
def test_a_routing_that_is_none(text, words):
    with pytest.raises(FFNError, match=words) as caught:
        cases(grid(routing=(text,)))
    assert caught.value.code == 2


def test_what_a_block_cannot_have(tmp_path):
    with pytest.raises(FFNError, match="routing needs a mixture of experts, and 512x2048:swiglu is not one"):
        cases(Grid("512x2048:swiglu", device=("cpu",), routing=("uniform",)))
    with pytest.raises(FFNError, match="every token goes to all 4 experts"):
        cases(grid(experts=4, top_k=4, routing=("uniform",)))
    path = str(tmp_path / "t.safetensors")
    saved_trace(path, 6)
    assert len(cases(grid(routing=(path,)))) == 1
    with pytest.raises(FFNError, match="has routes to 8 experts, but the block has 4"):
        cases(grid(experts=4, routing=(path,)))
    with pytest.raises(FFNError, match="token 0 goes to 2 experts, but the block chooses 3"):
        cases(grid(top_k=3, routing=(path,)))
    rows = rows_file(tmp_path / "x.safetensors", torch.ones(3, 64))
    with pytest.raises(FFNError, match="is not a saved trace"):
        cases(grid(routing=(rows,)))


def test_a_file_with_another_number_of_tokens_is_noted(tmp_path):
    path, notes = str(tmp_path / "t.safetensors"), []
    saved_trace(path, 24)
    cases(grid(routing=(path,)), notes.append)
    saved_trace(tmp_path / "u.safetensors", 6)
    cases(grid(routing=(str(tmp_path / "u.safetensors"),)), notes.append)
    assert len(notes) == 1
    assert notes[0].endswith("u.safetensors has the routes of 6 tokens: the routes of 24 tokens are drawn from these")


@pytest.mark.parametrize(
    ("rows", "name", "words"),
    [
        (torch.ones(3, 32), "x", r"x has shape \[3, 32\], expected \[rows, 64\]"),
        (torch.ones(64), "x", "x has shape"),
        (torch.ones(0, 64), "x", "x has shape"),
        (torch.ones(3, 64), "y", "has no tensor x"),
        (torch.ones(3, 64, dtype=torch.int32), "x", "x holds I32"),
        (torch.ones(3, 64).fill_(float("nan")), "x", "x holds NaN or Inf"),
        (torch.zeros(3, 64), "x", "x is zero throughout"),
        (torch.ones(3, 64).index_fill(0, torch.tensor([1]), float("inf")), "x", "x holds NaN or Inf"),
    ],
)
def test_a_file_without_rows_for_this_block(tmp_path, rows, name, words):
    with pytest.raises(FFNError, match=words) as caught:
        cases(grid(input=rows_file(tmp_path / "x.safetensors", rows, name)))
    assert caught.value.code == 2


def test_a_file_that_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    for name, words in (
        ("none.safetensors", "input: cannot read none.safetensors: No such file"),
        ("pipe.safetensors", "it is a pipe, not a file"),
        (".", "input: cannot read"),
        ("text.safetensors", "text.safetensors"),
        ("x.npy", "cannot read"),
        ("a\0b", "not a file name"),
    ):
        with pytest.raises(FFNError, match=words) as caught:
            cases(grid(input=name))
        assert caught.value.code == 2
    (tmp_path / "x.npy").write_text("no")
    with pytest.raises(FFNError, match=r"is not a \.safetensors file"):
        cases(grid(input="x.npy"))


def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path):
    name = rows_file(tmp_path / "x.safetensors", torch.full((2, 64), 65_000.0))
    assert len(cases(grid(input=name, dtype=("fp32", "bf16")))) == 2
    with pytest.raises(FFNError, match=r"x holds 6\.5e\+04, which is too large for fp16"):
        cases(grid(input=name, dtype=("fp32", "fp16")))


def test_leading_axes_are_rows(tmp_path):
    name = rows_file(tmp_path / "x.safetensors", torch.arange(2.0 * 3 * 64).reshape(2, 3, 64))
    assert case_data.input_rows(name, 64).shape == (6, 64)
