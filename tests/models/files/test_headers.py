"""safetensors headers: both ways through one, and slow ones."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.models.counting.count import count
from ffncli.models.files import headers
from ffncli.models.files.headers import Columns, parse_header, read_header
from ffncli.models.source import load
from ffncli.models.tensors.recognise import MOST_FFNS
from tests.oracles.checkpoints import (
    GPT2,
    INDEX,
    LLAMA,
    MIXTRAL,
    entry,
    expect_refusal,
    folder,
    raw_safetensors,
    tensors,
)
from tests.oracles.headers import BROKEN, A, files, theirs

pytestmark = pytest.mark.fuzz
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
        ({HOSTILE: A, "a": A}, 8, "overlaps"), ({HOSTILE: entry(offsets=(8, 16))}, 16, "gap"),
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


# --- two ways through a header ----------------------------------------------------------------------------------------


def way(raw: bytes, careful: bool) -> Columns | None:
    """A file's columns by the quick way or by the careful one alone; None where that way does not accept it."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 + length:
        return None
    other = "_quick_columns" if careful else "_careful_columns"
    with patch.object(headers, other, return_value=None):
        try:
            return parse_header(raw[8 : 8 + length], len(raw) - 8 - length, "a file")
        except FFNError:
            return None


def check_quick(raw: bytes) -> Columns | None:
    """What the quick way accepts, which must be what the careful way accepts, column by column."""
    quick = way(raw, careful=False)
    assert quick is None or quick == way(raw, careful=True)
    return quick


@pytest.mark.parametrize("name", BROKEN)
def test_neither_way_accepts_a_broken_file(name: str):
    assert check_quick(BROKEN[name]) is None


@given(files())
@settings(max_examples=1500)
def test_the_quick_way_accepts_only_what_the_careful_way_does(raw: bytes):
    check_quick(raw)


@st.composite
def good(draw: st.DrawFn) -> bytes:
    """A file as the library writes one: any names, metadata or none, tensors in any order of their data."""
    text = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",), exclude_characters='"\\-'), max_size=8)
    names = draw(st.lists(text.filter(lambda name: name != "__metadata__"), unique=True, min_size=1, max_size=5))
    tensors = {
        name: torch.zeros(draw(st.lists(st.integers(1, 4), max_size=3)), dtype=draw(st.sampled_from(DTYPES)))
        for name in names
    }
    metadata = draw(st.none() | st.dictionaries(text, text, min_size=1, max_size=2))  # {} it writes as no JSON
    return safetensors.torch.save(tensors, metadata)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.float8_e4m3fn]


@given(good())
@settings(max_examples=300)
def test_the_quick_way_takes_what_the_library_writes_and_reads_it_the_same(raw: bytes):
    quick = check_quick(raw)
    assert quick is not None
    stored = safetensors.torch.load(raw)
    assert {n: tuple(shape) for n, shape in zip(quick.names, quick.shapes, strict=True)} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert dict(zip(quick.names, quick.bytes, strict=True)) == {n: t.nbytes for n, t in stored.items()}
    dtypes = {name: dtype for name, (dtype, _) in (theirs(raw) or {}).items()}
    assert dict(zip(quick.names, quick.dtypes, strict=True)) == dtypes


def text_of(**changes: Any) -> bytes:
    """The header of one tensor `a`, some of its fields' JSON replaced."""
    fields = {"dtype": '"F32"', "shape": "[2]", "data_offsets": "[0,8]", **changes}
    return ('{"a":{' + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}}").encode()


# header → whether the careful way accepts it; the quick way must leave all of them to it
ODD: dict[str, tuple[bytes, bool]] = {
    "a tensor twice": (text_of()[:-1] + b"," + text_of()[1:], False),
    "a field twice": (text_of().replace(b'"dtype"', b'"dtype":"F32","dtype"'), False),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{},' + text_of()[1:], False),
    "metadata with a key twice": (b'{"__metadata__":{"k":"v","k":"v"},' + text_of()[1:], False),
    "metadata that is null": (b'{"__metadata__":null,' + text_of()[1:], False),
    "metadata with a number": (b'{"__metadata__":{"k":1},' + text_of()[1:], False),
    "minus zero": (text_of(data_offsets="[-0,8]"), False),
    "NaN": (text_of(shape="[NaN]"), False),
    "NaN in another field": (text_of(more="NaN"), False),
    "Infinity": (text_of(data_offsets="[0,Infinity]"), False),
    "a size of true": (text_of(shape="[true,2]"), False),
    "an offset of false": (text_of(data_offsets="[false,8]"), False),
    "sizes in an object": (text_of(shape='{"2":2}'), False),
    "no sizes in an object": (text_of(dtype='"F64"', shape="{}"), False),
    "offsets in an object": (text_of(data_offsets='{"0":0,"8":8}'), False),
    "sizes in a string": (text_of(shape='"2"'), False),
    "offsets in a string": (text_of(data_offsets='"08"'), False),
    "a float": (text_of(shape="[2.0]"), False),
    "a list for a dtype": (text_of(dtype='["F32"]'), False),
    "an object for a dtype": (text_of(dtype='{"F32":8}'), False),
    "a fourth field": (text_of(more="1"), True),
    "a name with a backslash": (text_of().replace(b'"a"', b'"\\u0061"'), True),
    "a tensor of no numbers": (text_of(shape="[0]", data_offsets="[0,0]")[:-1] + b',"b":' + text_of()[5:], True),
}


@pytest.mark.parametrize("name", ODD)
def test_anything_odd_is_left_to_the_careful_way(name: str):
    text, accepted = ODD[name]
    raw = raw_safetensors(text)
    assert way(raw, careful=False) is None
    assert (way(raw, careful=True) is not None) == accepted
    assert not accepted or theirs(raw) is not None


Named = Iterator[tuple[str, tuple[int, ...]]]
MOST = 9  # times the work, for four times the tensors: 4 is in step, 16 is each with each
MANY_LAYERS = {**LLAMA, "num_hidden_layers": 9999}


def mlp(stem: str, width: int = 6) -> Named:
    """A gated FFN."""
    for name in ("gate", "up"):
        yield f"{stem}{name}_proj.weight", (width, 4)
    yield f"{stem}down_proj.weight", (4, width)


def unlike_experts(n: int) -> Named:
    for e in range(n // 3):
        yield from mlp(f"model.layers.0.mlp.experts.{e}.", 3 + e)


def places_in_one_layer(n: int) -> Named:
    for place in range(n // 3):
        yield from mlp(f"model.layers.0.place_{place}.")


def unlike_layers(n: int) -> Named:
    for i in range(n // 3):
        yield from mlp(f"model.layers.{i}.mlp.", 3 + i)


def loose_tensors(n: int) -> Named:
    """As many FFNs as a layer may have, and what fits no role."""
    for place in range(200):
        yield from mlp(f"model.layers.0.place_{place}.")
    for i in range(n - 600):
        yield f"model.layers.0.place_{i % 200}.x{i}", (1,)


def unlike_loose_tensors(n: int) -> Named:
    for i in range(n // 4):
        yield from mlp(f"model.layers.{i}.mlp.")
        yield f"model.layers.{i}.mlp.x", (1 + i,)


def prefixes(n: int) -> Named:
    yield from mlp("model.layers.0.mlp.")
    for i in range(n // 3):
        yield from mlp(f"prefix_{i}.layers.0.mlp.")


def norms(n: int) -> Named:
    yield from mlp("model.layers.0.mlp.")
    for i in range(n):
        yield f"model.layers.0.x{i}.norm.weight", (2 + i,)


def deep_names(n: int) -> Named:
    yield from mlp("model.layers.0." + "a." * n)
    for i in range(n):
        yield f"model.layers.0.{'a.' * (i % 500)}x{i}", (1,)


def write(path: Path, named: Named, config: dict[str, Any] | None) -> str:
    """A model directory whose data are a hole in the file."""
    path.mkdir(parents=True)
    header, at = {}, 0
    for name, shape in named:
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * prod(shape)]}
        at += 4 * prod(shape)
    text = json.dumps(header, separators=(",", ":")).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def work(source: str) -> float:
    """Processor time of counting a model."""
    start = process_time()
    with suppress(FFNError):  # a refusal takes its time too
        count(load(source))
    return process_time() - start


def in_step(less: str, more: str) -> bool:
    """Whether the work for `more`, four times `less`, is in step, in any of three measurements."""
    bound = MOST * max(min(work(less) for _ in range(2)), 0.01)
    return any(work(more) < bound for _ in range(3))


@pytest.mark.parametrize("config", [None, LLAMA, MANY_LAYERS], ids=["none", "known", "many-layers"])
@pytest.mark.parametrize(
    "make",
    [unlike_experts, places_in_one_layer, unlike_layers, loose_tensors, unlike_loose_tensors, prefixes, norms,
     deep_names],
)  # fmt: skip
def test_the_work_grows_with_the_tensors(make: Callable[[int], Named], config: dict[str, Any] | None, tmp_path: Path):
    assert in_step(*(write(tmp_path / str(n), make(n), config) for n in (1000, 4000)))


@pytest.mark.parametrize("config", [None, LLAMA, MANY_LAYERS], ids=["none", "known", "many-layers"])
def test_the_work_grows_with_an_indexs_missing_files(config: dict[str, Any] | None, tmp_path: Path):
    sources = []
    for n in (1000, 4000):
        source = write(tmp_path / str(n), iter(()), config)
        (tmp_path / str(n) / "model.safetensors").unlink()
        names = (name for name, _ in unlike_layers(n))
        index = {"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(names)}}
        (tmp_path / str(n) / INDEX).write_text(json.dumps(index))
        sources.append(source)
    assert in_step(*sources)


@pytest.mark.parametrize("over", [0, 1])
def test_a_layer_has_so_many_ffns_and_no_more(over: int, tmp_path: Path):
    source = write(tmp_path / "model", places_in_one_layer(3 * (MOST_FFNS + over)), None)
    if over:
        with pytest.raises(FFNError, match=f"'model.layers', layer 0 has more than {MOST_FFNS} FFNs"):
            load(source)
    else:
        assert load(source).model.layer_count == MOST_FFNS
