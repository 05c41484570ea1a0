"""safetensors files: what the library refuses is refused, and what is read is what was stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ffncli.errors import FFNError
from ffncli.models.checkpoint import open_checkpoint
from ffncli.models.headers import read_header
from ffncli.models.source import load
from ffncli.run.weights import stored_weights
from tests.oracles.checkpoints import (
    GPT2,
    INDEX,
    LLAMA,
    MIXTRAL,
    T5,
    entry,
    expect_refusal,
    folder,
    harmful,
    raw_safetensors,
    tensors,
)

CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}
UP = "model.layers.0.mlp.up_proj.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
HOSTILE = "\x1b[31m[/x]\n\x9b2J"

# --- headers: what is refused -----------------------------------------------------------------------------------------

A, B = entry(), entry("BF16", (4,), (8, 16))
DEEP = b"[" * 200 + b"]" * 200
BROKEN: dict[str, bytes] = {
    "an empty file": b"",
    "less than a length": b"\x02\0\0",
    "a length alone": (2).to_bytes(8, "little"),
    "a length of zero": bytes(8),
    "a header past the end": raw_safetensors(b"{}", 0, 3),
    "a header of 2^64 - 1 bytes": raw_safetensors(b"{}", 0, 2**64 - 1),
    "text": b"not a safetensors file at all",
    "a pickle": b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07builtins",
    "a header that is no JSON": raw_safetensors(b"xx"),
    "a header that is a list": raw_safetensors([], 0),
    "a header of NULs": raw_safetensors(bytes(16), 0),
    "a header with NULs behind": raw_safetensors(b"{}\0\0", 0),
    "a byte order mark": raw_safetensors(b"\xef\xbb\xbf{}", 0),
    "UTF-16": raw_safetensors("{}".encode("utf-16-le"), 0),
    "not UTF-8": raw_safetensors(b'{"\xff": 1}', 0),
    "an encoded surrogate": raw_safetensors(b'{"\xed\xa0\x80": %s}' % json.dumps(A).encode()),
    "half a surrogate pair": raw_safetensors({"\ud800": A}),
    "NaN": raw_safetensors(b'{"a": NaN}'),
    "5000 digits": raw_safetensors(b'{"a": %s}' % (b"1" * 5000)),
    "100,000 levels": raw_safetensors(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "200 levels in an unknown field": raw_safetensors(
        json.dumps({"a": {**A, "x": 0}}).encode().replace(b"0}}", DEEP + b"}}")
    ),
    "1e999 in an unknown field": raw_safetensors(json.dumps({"a": {**A, "x": "@"}}).encode().replace(b'"@"', b"1e999")),
    "400 digits in an unknown field": raw_safetensors({"a": {**A, "x": 10**400}}),
    "a tensor twice": raw_safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(A).encode(),) * 2)),
    "a field twice": raw_safetensors(b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
    "metadata that is a list": raw_safetensors({"__metadata__": [], "a": A}),
    "metadata with a number": raw_safetensors({"__metadata__": {"n": 1}, "a": A}),
    "metadata with an object": raw_safetensors({"__metadata__": {"n": {}}, "a": A}),
    "a tensor that is null": raw_safetensors({"a": None}, 0),
    "a tensor that is a string": raw_safetensors({"a": "F32"}, 0),
    "no dtype": raw_safetensors({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "no shape": raw_safetensors({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "no offsets": raw_safetensors({"a": {"dtype": "F32", "shape": [2]}}),
    "an unknown dtype": raw_safetensors({"a": entry("F128", (1,))}),
    "a dtype in small letters": raw_safetensors({"a": entry("f32")}),
    "a dtype that is a number": raw_safetensors({"a": entry(32)}),
    "a negative size": raw_safetensors({"a": entry(shape=(-2,))}),
    "two negative sizes": raw_safetensors({"a": entry(shape=(-2, -1))}),
    "a size of minus zero": raw_safetensors(b'{"a": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}', 0),
    "a size that is a float": raw_safetensors({"a": entry(shape=(2.0,))}),
    "a size that is true": raw_safetensors({"a": entry(shape=(True, 2))}),
    "a size of 10^30": raw_safetensors({"a": entry(shape=(10**30,))}),
    "sizes that overflow": raw_safetensors({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}, 0),
    "sizes that overflow before a zero": raw_safetensors({"a": entry(shape=(2**62, 4, 0), offsets=(0, 0))}, 0),
    "a shape that is a number": raw_safetensors({"a": entry(shape=2)}),
    "a shape that is null": raw_safetensors({"a": entry(shape=None)}),
    "a shape that does not fit": raw_safetensors({"a": entry(shape=(3,))}),
    "half a byte": raw_safetensors({"a": entry("F4", (3,), (0, 1))}, 1),
    "offsets the wrong way round": raw_safetensors({"a": entry(offsets=(8, 0))}),
    "one offset": raw_safetensors({"a": entry(offsets=(8,))}),
    "three offsets": raw_safetensors({"a": entry(offsets=(0, 8, 8))}),
    "negative offsets": raw_safetensors({"a": entry(offsets=(-8, 0))}),
    "offsets past the end": raw_safetensors({"a": entry(offsets=(2**40, 2**40 + 8))}),
    "two tensors on one place": raw_safetensors({"a": A, "b": A}),
    "an overlap": raw_safetensors({"a": A, "b": entry(offsets=(4, 12))}, 12),
    "a hole": raw_safetensors({"a": A, "b": entry(offsets=(12, 20))}, 20),
    "a hole in front": raw_safetensors({"a": entry(offsets=(4, 12))}, 12),
    "bytes behind": raw_safetensors({"a": A}, 9),
    "data cut short": raw_safetensors({"a": A}, 7),
    "data and no tensors": raw_safetensors({}, 1),
}


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


# --- headers: the same as the library's -------------------------------------------------------------------------------


def theirs(raw: bytes) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Name → (dtype, shape) as the library reads the file; None where it refuses."""
    try:
        return {name: (info["dtype"], tuple(info["shape"])) for name, info in safetensors.deserialize(raw)}
    except safetensors.SafetensorError:
        return None


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


NAMES = [
    '"a"',
    '"b"',
    '"c"',
    '"\\u0061"',
    '""',
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    '"\\u001b[31m"',
    '"__metadata__"',
    "5",
]
TOKENS = [
    '"F32"', '"BF16"', '"U8"', '"F4"', '"F6_E2M3"', '"F8_E8M0"', '"C64"', '"F128"', '"\\ud800"', "[2]", "[0]", "[]",
    "[3]", "[2,2]", "[-0]", "[-1]", "[2.0]", "[2e0]", "[true]", "[[0]]", "[4611686018427387904,4,0]",
    "[0,4611686018427387904,4]", "[9223372036854775808,0]", "[18446744073709551616]", "[0,8]", "[8,16]", "[0,0]",
    "[8,8]", "[4,12]", "[8,0]", "[0,8,8]", "[-0,8]", "null", "true", "0", "1e999", "NaN", "{}", '{"a":"b"}', '{"a":1}',
    '{"a":"\\ud800"}', "[" * 126 + "]" * 126, "[" * 200 + "]" * 200, "1" * 400,
]  # fmt: skip
FIELDS = ['"dtype"', '"shape"', '"data_offsets"', '"extra"']


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A good file of up to three tensors; then some of its JSON tokens, its white space or its bytes are changed."""
    items, at = [], 0
    for name in draw(st.lists(st.sampled_from(NAMES[:3]), unique=True, max_size=3)):
        dtype, bytes_each = draw(st.sampled_from([('"F32"', 4), ('"BF16"', 2), ('"U8"', 1), ('"F64"', 8)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        end = at + bytes_each * torch.Size(shape).numel()
        items.append([name, {'"dtype"': dtype, '"shape"': json.dumps(shape), '"data_offsets"': f"[{at},{end}]"}])
        at = end
    items = draw(st.permutations(items))
    for kind in draw(st.lists(st.sampled_from(["name", "token", "token", "drop", "metadata", "size"]), max_size=2)):
        item = draw(st.sampled_from(items)) if items else None
        if kind == "size":
            at += draw(st.integers(-1, 1))
        elif kind == "metadata":
            items.append(['"__metadata__"', draw(st.sampled_from(TOKENS))])
        elif item and isinstance(item[1], dict):
            if kind == "name":
                item[0] = draw(st.sampled_from(NAMES))
            elif kind == "drop":
                item[1].pop(draw(st.sampled_from(FIELDS)), None)
            else:
                item[1][draw(st.sampled_from(FIELDS))] = draw(st.sampled_from(TOKENS))
    header = "{" + ",".join(f"{name}:{_joined(what)}" for name, what in items) + "}"
    before, after = (draw(st.sampled_from(["", "", "", " ", "\n", "\ufeff", "\0", ","])) for _ in range(2))
    raw = bytearray(raw_safetensors((before + header + after).encode(), max(at, 0)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        where = draw(st.integers(0, len(raw)))
        raw[where : where + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(raw)


def _joined(what: str | dict[str, str]) -> str:
    return what if isinstance(what, str) else "{" + ",".join(f"{k}:{v}" for k, v in what.items()) + "}"


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


# --- values -----------------------------------------------------------------------------------------------------------


def _layer(source: str, text: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = load(source)
    found = stored_weights(model, model.layer(text), dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16])
def test_a_layer_is_read_as_it_was_stored(stored: torch.dtype, asked: torch.dtype, tmp_path: Path):
    llama, gpt2, mixtral = (tensors(name, stored) for name in CONFIGS)
    stem = "model.layers.1.mlp."
    same = {f"{n}.weight": llama[f"{stem}{n}_proj.weight"] for n in ("gate", "up", "down")}
    _assert_equal(_layer(folder(tmp_path / "l", LLAMA, llama), "1", asked), same, asked)

    stem = "transformer.h.1.mlp."
    turned = {"up.weight": gpt2[f"{stem}c_fc.weight"].T, "down.weight": gpt2[f"{stem}c_proj.weight"].T}
    biases = {"up.bias": gpt2[f"{stem}c_fc.bias"], "down.bias": gpt2[f"{stem}c_proj.bias"]}
    _assert_equal(_layer(folder(tmp_path / "g", GPT2, gpt2), "1", asked), turned | biases, asked)

    stem = "model.layers.1.block_sparse_moe."
    stacked = {
        f"{name}.weight": torch.stack([mixtral[f"{stem}experts.{e}.{w}.weight"] for e in range(4)])
        for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    }
    found = _layer(folder(tmp_path / "m", MIXTRAL, mixtral), "1", asked)
    router = {"router.weight": mixtral[f"{stem}gate.weight"]}
    _assert_equal({n.removeprefix("experts."): t for n, t in found.items()}, stacked | router, asked)


def _assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, tensor in wanted.items():
        assert found[name].dtype == dtype
        assert found[name].is_contiguous()
        assert torch.equal(found[name], tensor.to(dtype))
    assert {name for name in found if "norm" not in name} == set(wanted)


def _shards(path: Path, config: dict[str, Any], stored: dict[str, Any], **changes: Any) -> str:
    """Layer 0 in one shard, layer 1 in another, and the index; `changes` go into the index's weight_map."""
    folder(path, config)
    names = {name: f"model-0000{1 + ('.1.' in name)}-of-00002.safetensors" for name in stored}
    for shard in set(names.values()):
        save_file({n: t for n, t in stored.items() if names[n] == shard}, path / shard)
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {**names, **changes}}))
    return str(path)


def test_only_the_shard_of_the_layer_is_opened(call, tmp_path: Path):
    stored = tensors("llama")
    source = _shards(tmp_path, LLAMA, stored)
    assert torch.equal(_layer(source, "0")["up.weight"], stored[UP])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(_layer(source, "0")["up.weight"], stored[UP])
    expect_refusal(
        call("trace", source, "--layer", "1"), "model-00002-of-00002.safetensors", "is the download complete?"
    )


def test_files_without_an_index_are_read_together(call, tmp_path: Path):
    source = _shards(tmp_path, LLAMA, tensors("llama"))
    (tmp_path / INDEX).unlink()
    assert set(_layer(source, "1")) >= {"gate.weight", "up.weight", "down.weight"}
    save_file({UP: torch.zeros(6, 4)}, tmp_path / "again.safetensors")
    expect_refusal(call("params", source), tmp_path, UP, "two files")


def test_a_directory_without_tensors_has_no_checkpoint(tmp_path: Path):
    assert open_checkpoint(tmp_path) is None


# --- checkpoints that do not hold what they should --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "weight_map"), ({"weight_map": None}, "weight_map"), ({"weight_map": []}, "weight_map"),
        ({"weight_map": {}}, "weight_map"), ({"weight_map": "model.safetensors"}, "weight_map"), ([], "array"),
        *[
            ({"weight_map": {UP: shard}}, shown)
            for shard, shown in {
                "../model.safetensors": "'../model.safetensors'", "/etc/passwd": "'/etc/passwd'", "a\\b": r"'a\\b'",
                "": "''", ".": "'.'", "..": "'..'", "sub/a.safetensors": "'sub/a.safetensors'", "C:a": "'C:a'",
                "\x1b[31m": r"'\x1b[31m'", "a\0b": r"'a\x00b'", "a\n": r"'a\n'", "~": "'~'",
            }.items()
        ],
        *[({"weight_map": {UP: shard}}, repr(shard)) for shard in (5, None, True, [])],
    ],
)  # fmt: skip
def test_an_index_that_cannot_be(index: Any, says: str, call, tmp_path: Path):
    source = folder(tmp_path / "m", LLAMA, tensors("llama"))
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "model.safetensors")  # what "../" would reach
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    expect_refusal(call("params", source), tmp_path / "m" / INDEX, says)
    expect_refusal(call("trace", source), tmp_path / "m" / INDEX, says)


def test_an_index_that_promises_too_much(call, tmp_path: Path):
    stored = tensors("llama")
    missing = stored.pop(UP)
    source = _shards(tmp_path, LLAMA, stored, **{UP: "model-00002-of-00002.safetensors"})
    expect_refusal(call("trace", source), "model-00002-of-00002.safetensors", UP, "not in this file")
    source = _shards(tmp_path / "no", LLAMA, {**stored, UP: missing}, **{UP: "x" * 300})
    expect_refusal(call("trace", source), "xxx", "too long")


@pytest.mark.parametrize(
    ("family", "tensor"),
    [("llama", UP), ("llama", "model.layers.0.mlp.down_proj.weight"), ("mixtral", EXPERT),
     ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"), ("gpt2", "transformer.h.0.mlp.c_proj.bias"),
     ("llama", "model.layers.0.post_attention_layernorm.weight")],
)  # fmt: skip
def test_a_missing_tensor_is_named(family: str, tensor: str, call, tmp_path: Path):
    stored = tensors(family)
    del stored[tensor]
    source = folder(tmp_path, CONFIGS[family], stored)
    for command in ("params", "trace"):
        expect_refusal(call(command, source), tmp_path / "model.safetensors", tensor, "missing")


def test_fewer_experts_or_layers_than_the_config_says(call, tmp_path: Path):
    source = folder(tmp_path, {**MIXTRAL, "num_local_experts": 100_000}, tensors("mixtral"))
    expect_refusal(call("params", source), "model.safetensors", "layers.0.block_sparse_moe.experts.4.", "missing")
    source = folder(tmp_path, {**LLAMA, "num_hidden_layers": 3}, tensors("llama"))
    expect_refusal(call("trace", source, "--layer", "2"), "model.safetensors", "model.layers.2.")


def test_a_file_of_another_model(call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("gpt2"))
    expect_refusal(call("params", source), "model.safetensors", "model.layers.0.", "mlp.gate_proj.weight")


@pytest.mark.parametrize(
    ("family", "changes", "tensor"),
    [
        ("llama", {"intermediate_size": 5}, "mlp.gate_proj.weight"), ("llama", {"hidden_size": 6}, "model.layers.0."),
        ("gpt2", {"n_inner": 4}, "mlp.c_fc.weight"), ("gpt2", {"n_inner": None}, "mlp.c_fc.weight"),
        ("mixtral", {"intermediate_size": 7}, "experts.0."), ("mixtral", {"num_local_experts": 3}, "moe.gate.weight"),
    ],
)  # fmt: skip
def test_shapes_that_contradict_the_config(family: str, changes: dict[str, Any], tensor: str, call, tmp_path: Path):
    source = folder(tmp_path, {**CONFIGS[family], **changes}, tensors(family))
    for command in ("trace", "params"):
        expect_refusal(call(command, source), tmp_path / "model.safetensors", tensor, "has shape", "expected")


def test_layers_that_the_config_has_and_the_file_has_not(call, tmp_path: Path):
    source = folder(tmp_path, {**LLAMA, "num_hidden_layers": 5}, tensors("llama"))
    for command in ("trace", "params"):
        expect_refusal(call(command, source), "no FFN tensors under 'model.layers.4.'")


def test_experts_asked_of_a_dense_checkpoint(call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("llama"))
    expect_refusal(call("trace", source, "--experts", "4"), "a llama checkpoint has no MoE layers")


def test_a_transposed_matrix_is_not_taken_for_the_other(call, tmp_path: Path):
    stored = tensors("llama")
    stored[UP] = stored[UP].T.contiguous()
    expect_refusal(call("trace", folder(tmp_path, LLAMA, stored)), UP, "[4, 6], expected [6, 4]")


@pytest.mark.parametrize(
    ("dtype", "code", "shape"),
    [(torch.float8_e4m3fn, "F8_E4M3", (6, 4)), (torch.uint8, "U8", (6, 4)), (torch.uint8, "U8", (12, 1)),
     (torch.int8, "I8", (6, 4)), (torch.int32, "I32", (6, 1))],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_quantized_weights_are_refused_by_name(
    family: str, dtype: torch.dtype, code: str, shape: tuple[int, int], call, tmp_path: Path
):
    name = UP if family == "llama" else EXPERT
    stored = {**tensors(family), name: torch.zeros(shape).to(dtype)}
    source = folder(tmp_path, CONFIGS[family], stored)
    expect_refusal(call("trace", source), tmp_path / "model.safetensors", name, code, "unquantized")


def test_packed_weights_are_counted_from_the_config_and_refused_by_name(call, tmp_path: Path):
    stored = {name: tensor for name, tensor in tensors("llama").items() if ".mlp." not in name}
    for n in ("gate", "up", "down"):
        stored |= {
            f"model.layers.0.mlp.{n}_proj.{part}": torch.zeros(1, dtype=torch.int32) for part in ("qweight", "scales")
        }
    source = folder(tmp_path, LLAMA, stored)
    expect_refusal(call("trace", source), "qweight", "quantized")
    code, out, err = call("params", source)
    assert (code, len(err.splitlines())) == (0, 1)
    assert "qweight is packed (quantized): taken from the config alone" in err
    assert "gate.weight  6 × 4" in out


def test_mxfp4_experts_are_refused_by_name(call, tmp_path: Path):
    config = {**MIXTRAL, "model_type": "gpt_oss"}
    stored = {"model.layers.0.mlp.router.weight": torch.zeros(4, 4), "model.layers.0.mlp.router.bias": torch.zeros(4)}
    stored["model.layers.0.mlp.experts.gate_up_proj_blocks"] = torch.zeros(1, dtype=torch.uint8)
    source = folder(tmp_path, config, stored)
    expect_refusal(call("trace", source), "gate_up_proj_blocks", "quantized")
    assert call("params", source)[0] == 0


def test_a_gated_family_without_a_gate_is_plain(call, tmp_path: Path):
    stored = {name: tensor for name, tensor in tensors("llama").items() if "gate_proj" not in name}
    code, out, _ = call("params", folder(tmp_path, LLAMA, stored))
    assert code == 0
    assert "plain: tensor 'model.layers.0.mlp.up_proj.weight'" in out
    assert "the tensors overrule model_type llama, which is gated" in out


def test_a_missing_gate_is_missing_where_another_layer_has_one(call, tmp_path: Path):
    stored = {name: tensor for name, tensor in tensors("llama").items() if "layers.0.mlp.gate" not in name}
    expect_refusal(call("params", folder(tmp_path, LLAMA, stored)), "layers.0.mlp.gate_proj.weight", "missing")


@pytest.mark.parametrize(("stored", "dtype", "size"), [(torch.bfloat16, "bf16", 2), (torch.float64, "fp64", 8)])
def test_the_dtype_is_the_stored_one(stored: torch.dtype, dtype: str, size: int, call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, {name: tensor.to(stored) for name, tensor in tensors("llama").items()})
    (row,) = json.loads(call("params", source, "--json")[1])["rows"]
    assert (row["dtype"], row["weight_bytes"]) == (dtype, size * row["ffn_params_total"])


def test_a_dtype_that_is_no_number_format_of_ours_is_named(call, tmp_path: Path):
    source = folder(
        tmp_path, LLAMA, {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors("llama").items()}
    )
    (row,) = json.loads(call("params", source, "--json")[1])["rows"]
    assert (row["dtype"], row["weight_bytes"]) == ("F8_E4M3", None)


def test_hostile_names_of_other_tensors_do_no_harm(call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, {**tensors("llama"), HOSTILE: torch.zeros(1), "[/x]": torch.zeros(1)})
    for command in ("params", "trace"):
        code, out, err = call(command, source)
        assert code == 0
        assert harmful(out + err) == []


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", ["2", "99", "-1", "x", "1.5", "", "³", "1e0", "9" * 5000, "decoder.2", "encoder.0", "."]
)
def test_a_layer_that_is_not_there(layer: str, call, tmp_path: Path):
    expect_refusal(call("trace", folder(tmp_path, LLAMA, tensors("llama")), "--layer", layer), "--layer", layer[:50])


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ("1", ["'1' is ambiguous", "encoder.1 or decoder.1"]),
        ("0", ["encoder.0", "decoder.0"]),
        ("decoder.99", ["99", "decoder", "0 to 1"]),
        ("encoder.-1", ["encoder.-1"]),
        ("middle.0", ["middle", "encoder layers 0 to 1 and decoder layers 0 to 1"]),
        ("decoder.", ["decoder."]),
    ],
)
def test_a_layer_of_two_stacks(layer: str, says: list[str], call, tmp_path: Path):
    expect_refusal(call("trace", folder(tmp_path, T5), "--layer", layer), "--layer", *says)
