"""safetensors headers: both ways through one refuse what the library refuses, and read the rest as it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.models.headers import read_header
from tests.oracles.checkpoints import GPT2, LLAMA, MIXTRAL, entry, expect_refusal, folder, raw_safetensors, tensors
from tests.oracles.headers import BROKEN, A, files, theirs

CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}
HOSTILE = "\x1b[31m[/x]\n\x9b2J"

# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused(raw: bytes, call, tmp_path: Path):
    path = Path(folder(tmp_path, LLAMA)) / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(FFNError) as error:
        read_header(path)
    assert expect_refusal(call("params", str(tmp_path)), path) == f"error: {error.value}\n"
    assert expect_refusal(call("params", str(path)), path) == f"error: {error.value}\n"


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({HOSTILE: entry("F128")}, 8, "F128"), ({HOSTILE: entry(shape=(3,))}, 8, "fit"),
        ({HOSTILE: entry(shape=(-1,))}, 8, "[-1]"), ({HOSTILE: entry(offsets=(8, 0))}, 8, "[8, 0]"),
        ({HOSTILE: A, "a": A}, 8, "overlaps"), ({HOSTILE: entry(offsets=(8, 16))}, 16, "hole"),
        ({"a": entry(HOSTILE)}, 8, r"\x1b"), ({"a": entry(shape=[HOSTILE])}, 8, r"\x1b"),
        ({HOSTILE: None}, 8, "description"), ({"x" * 10**5: None}, 8, "…"),
    ],
)  # fmt: skip
def test_the_error_names_the_tensor_and_what_is_wrong(header: Any, data: int, says: str, call, tmp_path: Path):
    path = Path(folder(tmp_path, LLAMA)) / "model.safetensors"
    path.write_bytes(raw_safetensors(header, data))
    error = expect_refusal(call("params", str(tmp_path)), path, "tensor ", says)
    assert len(error) < 700


@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_cut_anywhere_is_refused(family: str, call, tmp_path: Path):
    source = folder(tmp_path, CONFIGS[family], tensors(family))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        expect_refusal(call("params", source), path, "truncated")
    path.write_bytes(whole + b"\0")
    expect_refusal(call("trace", source), path)


def test_a_header_longer_than_the_library_allows(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)  # sparse
    with pytest.raises(FFNError, match="header of 100,000,001 bytes"):
        read_header(path)


# --- the same as the library's ----------------------------------------------------------------------------------------


def ours(raw: bytes, path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """The same as read by `read_header`, whose refusals must be printable and name the file."""
    path.write_bytes(raw)
    try:
        return {name: (info.dtype, info.shape) for name, info in read_header(path).items()}
    except FFNError as error:
        said = str(error)
    assert str(path) in said
    assert said.isprintable()
    return None


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers") / "a.safetensors"


@pytest.mark.parametrize("name", BROKEN)
def test_the_library_refuses_the_same(name: str):
    stricter = name in ("a tensor twice", "a length of zero")  # of two tensors with one name the library takes the last
    assert stricter or theirs(BROKEN[name]) is None


@pytest.mark.parametrize(
    "name", ["float64", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "int8", "complex64", "bool"]
)
def test_dtypes_as_torch_stores_them(name: str, scratch: Path):
    raw = safetensors.torch.save({"a": torch.zeros(4).to(getattr(torch, name)), "b": torch.zeros(())})
    assert ours(raw, scratch) == theirs(raw)
    assert ours(raw, scratch) is not None


@given(files())
@settings(max_examples=2000)
def test_what_the_library_refuses_is_refused_and_the_rest_reads_the_same(scratch: Path, raw: bytes):
    said = ours(raw, scratch)
    assert said is None or said == theirs(raw)


@given(st.binary(max_size=40))
def test_any_bytes_at_all(scratch: Path, raw: bytes):
    for file in (raw, raw_safetensors(raw)):
        said = ours(file, scratch)
        assert said is None or said == theirs(file)
