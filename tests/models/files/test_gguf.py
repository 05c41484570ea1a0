"""GGUF files: what is read is what the library wrote and reads itself; what is broken is refused, at once."""

import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from ffncli.errors import ExitCode, FFNError
from ffncli.models.files.gguf import GGUFFile, gguf_config, read_gguf
from tests.oracles.checkpoints import harmful
from tests.oracles.gguf_files import finish

D_MODEL, D_FF, EXPERTS, VOCAB = 64, 96, 4, 40
SHAPES = {
    "token_embd.weight": (Q.F16, (VOCAB, D_MODEL)),
    "blk.0.ffn_norm.weight": (Q.F32, (D_MODEL,)),
    "blk.0.ffn_gate.weight": (Q.Q4_0, (D_FF, D_MODEL)),
    "blk.0.ffn_up.weight": (Q.Q8_0, (D_FF, D_MODEL)),
    "blk.0.ffn_down.weight": (Q.Q5_1, (D_MODEL, D_FF)),
    "blk.1.ffn_gate_exps.weight": (Q.BF16, (EXPERTS, D_FF, D_MODEL)),
    "blk.1.ffn_down_exps.weight": (Q.Q4_0, (EXPERTS, D_MODEL, D_FF)),
}
BITS = {"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8.5, "Q4_0": 4.5, "Q5_1": 6}  # a scale (and a minimum) for each 32


def write(path: Path, fill: Callable[[Any], None] = lambda writer: None, shapes: Any = None, **options: Any) -> Path:
    """A GGUF file by the library: a two-layer Mixture of Experts, and whatever `fill` adds."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_embedding_length(D_MODEL)
    writer.add_feed_forward_length([D_FF, 0])
    writer.add_block_count(2)
    writer.add_token_list([f"token {i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    fill(writer)
    rng = np.random.default_rng(0)
    for name, (kind, shape) in (SHAPES if shapes is None else shapes).items():
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def expect_refusal(path: Path, *says: str) -> FFNError:
    """The file is refused in one line that names it."""
    with pytest.raises(FFNError) as error:
        read_gguf(path)
    text = str(error.value)
    assert error.value.code == ExitCode.USAGE
    assert path.name in text
    assert all(word in text for word in says), text
    assert not harmful(text)
    assert "\n" not in text
    assert len(text) < 600
    return error.value


# --- what is there ----------------------------------------------------------------------------------------------------


def test_tensors_are_those_that_were_written(whole: Path):
    file = read_gguf(whole)
    assert {t.name: (t.format, t.shape) for t in file.tensors} == {n: (k.name, s) for n, (k, s) in SHAPES.items()}
    for tensor in file.tensors:
        elements = np.zeros(tensor.shape).size
        assert tensor.params == elements
        assert tensor.bytes == elements * BITS[tensor.format] / 8


def test_the_library_reads_the_same(whole: Path):
    file, reader = read_gguf(whole), gguf.GGUFReader(whole)
    assert [t.name for t in file.tensors] == [t.name for t in reader.tensors]
    for ours, theirs in zip(file.tensors, reader.tensors, strict=True):
        assert ours.format == theirs.tensor_type.name
        assert ours.shape == tuple(reversed(theirs.shape.tolist())) == dequantize(theirs.data, theirs.tensor_type).shape
        assert (ours.params, ours.bytes) == (theirs.n_elements, theirs.n_bytes) == (ours.params, theirs.data.nbytes)
    assert file.architecture == "llama"
    for key, value in file.metadata.items():
        assert value == reader.get_field(key).contents()


@pytest.mark.parametrize("kind", gguf.GGML_QUANT_SIZES, ids=lambda kind: kind.name)
def test_every_format_of_the_library_has_its_size(kind: Q, tmp_path: Path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("a", np.zeros((3, 2 * size), np.uint8), raw_shape=(3, 2 * size), raw_dtype=kind)
    finish(writer)
    (tensor,) = read_gguf(tmp_path / "a.gguf").tensors
    assert (tensor.format, tensor.shape, tensor.bytes) == (kind.name, (3, 2 * block), 6 * size)


def test_metadata_are_plain_values_without_the_vocabulary(tmp_path: Path):
    def fill(writer: Any) -> None:
        for bits in (8, 16, 32):
            getattr(writer, f"add_uint{bits}")(f"a.u{bits}", 2**bits - 1)
            getattr(writer, f"add_int{bits}")(f"a.i{bits}", -(2 ** (bits - 1)))
        writer.add_int64("a.i64", -(2**63))
        writer.add_uint64("a.u64", 2**64 - 1)
        writer.add_float32("a.f32", 0.5)
        writer.add_float64("a.f64", 1e300)
        writer.add_bool("a.yes", True)
        writer.add_string("a.text", "µ\n")
        writer.add_array("a.words", ["x", "yy"])
        writer.add_array("a.flags", [True, False])
        writer.add_array("a.long", [7] * 100_000)
        writer.add_string("a.book", "x" * 1_000_001)

    file = read_gguf(write(tmp_path / "a.gguf", fill))
    assert file.metadata == {
        "general.architecture": "llama", "llama.embedding_length": 64, "llama.feed_forward_length": [96, 0],
        "llama.block_count": 2, "a.u8": 255, "a.i8": -128,
        "a.u16": 65_535, "a.i16": -32_768, "a.u32": 2**32 - 1, "a.i32": -(2**31),
        "a.i64": -(2**63), "a.u64": 2**64 - 1, "a.f32": 0.5, "a.f64": 1e300,
        "a.yes": True, "a.text": "µ\n", "a.flags": [True, False],
    }  # fmt: skip
    assert type(file.metadata["a.yes"]) is bool
    assert len(file.tensors) == len(SHAPES)


@pytest.mark.parametrize("alignment", [1, 2, 256])
def test_an_alignment_of_its_own(alignment: int, tmp_path: Path):
    path = write(tmp_path / "a.gguf", lambda writer: writer.add_custom_alignment(alignment))
    assert [t.bytes for t in read_gguf(path).tensors] == [t.n_bytes for t in gguf.GGUFReader(path).tensors]


def test_reading_needs_no_reader_of_the_library(whole: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("GGUFReader takes 9 s for a vocabulary")

    monkeypatch.setattr(gguf.GGUFReader, "__init__", refuse)
    assert read_gguf(whole).architecture == "llama"


def test_without_the_library_one_line_says_what_to_install(whole: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FFNError) as error:
        read_gguf(whole)
    assert error.value.code == ExitCode.ENVIRONMENT
    assert "in a clone of ffn: pip install -e '.[models]'" in str(error.value)


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    write(tmp_path / "m.gguf", split_max_tensors=3)
    return sorted(tmp_path.glob("*.gguf"))


def test_any_shard_stands_for_its_set(shards: list[Path], whole: Path):
    assert [path.name for path in shards] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in shards:
        file = read_gguf(path)
        assert file.tensors == read_gguf(whole).tensors
        assert gguf_config(file)["d_model"] == D_MODEL


def test_a_set_of_two_is_a_set(tmp_path: Path, whole: Path):
    write(tmp_path / "m.gguf", split_max_tensors=4)
    assert read_gguf(tmp_path / "m-00002-of-00002.gguf").tensors == read_gguf(whole).tensors


def test_a_set_without_one_of_its_shards_is_refused(shards: list[Path]):
    shards[1].unlink()
    with pytest.raises(FFNError, match=r"m-00002-of-00003\.gguf is missing; all 3 shards"):
        read_gguf(shards[0])


def test_shards_of_different_sets_are_refused(shards: list[Path]):
    shards[1].write_bytes(shards[2].read_bytes())
    expect_refusal(shards[1], "split.no", "is 2", "says 1")
    write(shards[1], lambda writer: None)
    with pytest.raises(FFNError, match="the shards have"):
        read_gguf(shards[0])


def test_a_tensor_in_two_shards_is_refused(shards: list[Path]):
    for number, path in enumerate(shards):
        path.unlink()
        write(path, shapes={"a": (Q.F32, (number + 1,))})
    expect_refusal(shards[0], "'a' is duplicated")


# --- what a config reader needs ---------------------------------------------------------------------------------------


def described(metadata: dict[str, Any]) -> GGUFFile:
    return GGUFFile("x.gguf", "qwen3moe", metadata, ())


def test_config_of_a_mixture_of_experts(tmp_path: Path):
    def fill(writer: Any) -> None:
        writer.add_head_count(8)
        writer.add_head_count_kv([2, 4])
        writer.add_key_length(16)
        writer.add_value_length(24)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(D_FF)
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(48)
        writer.add_leading_dense_block_count(1)

    assert gguf_config(read_gguf(write(tmp_path / "a.gguf", fill))) == {
        "d_model": 64, "d_ff": (96, 0), "layers": 2, "experts": 4, "top_k": 2, "expert_d_ff": 96, "shared_experts": 1,
        "shared_d_ff": 48, "leading_dense": 1, "heads": 8, "kv_heads": (2, 4), "head_dim": 16, "value_dim": 24,
        "vocab": 40,
    }  # fmt: skip


def test_config_has_only_what_is_there():
    assert gguf_config(described({})) == {}
    assert gguf_config(described({"qwen3moe.vocab_size": 7})) == {"vocab": 7}
    assert gguf_config(described({"llama.embedding_length": 7})) == {}


def test_config_reads_keys_without_their_prefix():
    assert gguf_config(described({"expert_count": 4, "expert_used_count": 2})) == {"experts": 4, "top_k": 2}
    assert gguf_config(described({"expert_count": 4, "qwen3moe.expert_count": 8})) == {"experts": 8}


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "64", 2**63, [64], [[64]]])
def test_config_refuses_a_width_that_is_none(value: Any):
    with pytest.raises(FFNError, match=r"x\.gguf: qwen3moe\.embedding_length must be a whole number"):
        gguf_config(described({"qwen3moe.embedding_length": value}))


@pytest.mark.parametrize("value", [-1, "8", True, [8, -1], [8, True], [8, 2**40], [8, 8.0], [8], [], [8, 8, 8]])
def test_config_refuses_widths_that_are_not_one_for_each_layer(value: Any):
    with pytest.raises(FFNError, match=r"x\.gguf: qwen3moe\.feed_forward_length must be"):
        gguf_config(described({"qwen3moe.block_count": 2, "qwen3moe.feed_forward_length": value}))


# --- what is refused --------------------------------------------------------------------------------------------------


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def header(keys: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return text("a") + struct.pack("<IIQ", 9, kind, count) + body


def tensor(
    name: bytes | str = "a", dims: tuple[int, ...] = (2,), code: int = 0, offset: int = 0, data: int = 8
) -> bytes:
    """A file with an architecture and one tensor."""
    info = text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)
    start = header(1, 1) + text("general.architecture") + struct.pack("<I", 8) + text("llama") + info
    return start + bytes(-len(start) % 32 + data)


ONE_DIM = struct.pack("<IQ", 1, 2)
BROKEN: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "empty"),
    "half a magic": (b"GG", "truncated"),
    "a magic alone": (b"GGUF", "truncated"),
    "an older format": (b"GGJT" + bytes(40), "is not a GGUF file"),
    "a harmful start": (b"\x1b[2J" + bytes(40), r"\x1b[2J"),
    "version 0": (header(version=0) + bytes(40), "version 0"),
    "version 1": (header(version=1) + bytes(40), "version 1"),
    "version 4": (header(version=4) + bytes(40), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "big-endian"),
    "counts cut short": (header()[:-1], "truncated"),
    "2^64 - 1 tensors": (header(tensors=2**64 - 1) + bytes(40), "tensors cannot be"),
    "2^64 - 1 keys": (header(keys=2**64 - 1) + bytes(40), "keys cannot be"),
    "more tensors than bytes": (header(tensors=3) + bytes(40), "3 tensors cannot be"),
    "more keys than bytes": (header(keys=5) + bytes(40), "5 metadata keys cannot be"),
    "no architecture": (header(), "general.architecture"),
    "a vocabulary of one empty text, and no architecture": (header(1) + array(8, 1, text("")), "general.architecture"),
    "an architecture that is a number": (
        header(1) + text("general.architecture") + struct.pack("<II", 4, 7), "general.architecture",
    ),
    "an architecture that is no name": (
        header(1) + text("general.architecture") + struct.pack("<I", 8) + text("a|b\x1b"), r"a|b\x1b",
    ),
    "a key of 2^63 bytes": (header(1) + struct.pack("<Q", 2**63) + bytes(40), "truncated"),
    "a text of 2^64 - 1 bytes": (header(1) + text("a") + struct.pack("<IQ", 8, 2**64 - 1), "truncated"),
    "an unknown type": (header(1) + text("a\x1b") + struct.pack("<IQ", 13, 0), "unknown type 13"),
    "a key that is no text": (header(1) + text(b"\xff\x1b") + struct.pack("<IQ", 4, 0), r"b'\xff\x1b', is not UTF-8"),
    "a key twice": (header(2) + (text("a\x1b") + struct.pack("<II", 4, 0)) * 2, r"'a\x1b' is duplicated"),
    "2^40 numbers": (header(1) + array(0, 2**40), "truncated"),
    "2^63 texts": (header(1) + array(8, 2**63), "truncated"),
    "a text without end in a vocabulary": (header(1) + array(8, 2, struct.pack("<Q", 2**64 - 1)), "truncated"),
    "a vocabulary cut short": (header(1) + array(8, 3, text("x") * 2), "truncated"),
    "an array of arrays": (header(1) + array(9, 1, bytes(12)), "array of the unknown type 9"),
    "an alignment of zero": (header(1) + text("general.alignment") + struct.pack("<II", 4, 0), "power of two"),
    "an alignment of 48": (header(1) + text("general.alignment") + struct.pack("<II", 4, 48), "power of two"),
    "an alignment of -32": (header(1) + text("general.alignment") + struct.pack("<Ii", 5, -32), "power of two"),
    "a name that is no text": (tensor(b"\xff"), "UTF-8"),
    "five dimensions": (tensor(dims=(1, 1, 1, 1, 2)), "5 dimensions"),
    "2^32 - 1 dimensions": (tensor().replace(ONE_DIM, b"\xff" * 4 + ONE_DIM[4:]), "4294967295 dimensions"),
    "a size of 2^63": (tensor(dims=(2**63,)), "more than any file"),
    "sizes that overflow to little": (tensor(dims=(2**32, 2**32)), "more than any file"),
    "a size beyond the file": (tensor(dims=(3,)), "past the file"),
    "an unknown format": (tensor(code=4), "unknown format 4"),
    "an unknown format far off": (tensor(code=2**32 - 1), "unknown format"),
    "half a block": (tensor(dims=(48, 2), code=2), "blocks of 32"),
    "data that starts late": (tensor(offset=32, data=80), "starts at 32"),
    "data that starts before it": (tensor(offset=2**64 - 32, data=80), "starts at"),
    "data cut short": (tensor(data=7), "truncated"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused(raw: bytes, says: str, tmp_path: Path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    expect_refusal(path, says)


def test_what_the_broken_files_are_made_of_is_whole(tmp_path: Path):
    path = tmp_path / "a.gguf"
    for raw in (tensor(), tensor(dims=()), tensor(dims=(2, 1, 1, 1)), tensor(dims=(32,), code=2, data=18)):
        path.write_bytes(raw)
        assert [t.name for t in read_gguf(path).tensors] == ["a"]
        assert read_gguf(path).tensors[0].params == gguf.GGUFReader(path).tensors[0].n_elements


def test_tensors_that_overlap_are_refused(whole: Path, tmp_path: Path):
    raw, path = whole.read_bytes(), tmp_path / "a.gguf"
    offset = gguf.GGUFReader(whole).tensors[2].field.parts[-1]
    at = raw.index(b"blk.0.ffn_gate.weight") + len("blk.0.ffn_gate.weight") + 4 + 16 + 4
    assert raw[at : at + 8] == offset.tobytes()
    path.write_bytes(raw[:at] + struct.pack("<Q", 0) + raw[at + 8 :])
    expect_refusal(path, "ffn_gate", "starts at 0")


def test_version_2_is_version_3_in_little_endian(whole: Path, tmp_path: Path):
    path = tmp_path / "a.gguf"
    path.write_bytes(whole.read_bytes().replace(b"GGUF\x03", b"GGUF\x02", 1))
    assert read_gguf(path).tensors == read_gguf(whole).tensors


def test_a_directory_and_a_missing_file_are_refused(tmp_path: Path):
    expect_refusal(tmp_path, "cannot read")
    expect_refusal(tmp_path / "no.gguf", "cannot read")


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (header(1) + text("a") + struct.pack("<IQ", 8, 10**9), "100,000,000"),
        (header(1) + array(8, 2, struct.pack("<Q", 10**9)), "100,000,000"),
        (header(tensors=1_000_001), "1000001 tensors"),
        (header(keys=100_001), "100001 metadata keys"),
    ],
)
def test_a_header_without_end_is_not_read(start: bytes, says: str, tmp_path: Path):
    path = tmp_path / "a.gguf"
    path.write_bytes(start)
    with path.open("r+b") as file:
        file.truncate(10**10)  # sparse: no block of it is on the disk
    expect_refusal(path, says)


def test_a_file_cut_anywhere_is_refused(whole: Path, tmp_path: Path):
    raw, path = whole.read_bytes(), tmp_path / "cut.gguf"
    end = gguf.GGUFReader(whole).data_offset
    sizes = sorted(
        {*range(0, end, 13), *range(end - 40, end + 40), *range(end, len(raw), 4999), len(raw) - 32 * 18 - 33}
    )
    for size in sizes:
        path.write_bytes(raw[:size])
        expect_refusal(path)


def test_nothing_but_a_refusal_comes_of_changed_bytes(whole: Path, tmp_path: Path):
    """A thousand files with a few bytes of the header changed: read, or refused in one line."""
    raw, path, rng = whole.read_bytes(), tmp_path / "changed.gguf", random.Random(0)
    end = gguf.GGUFReader(whole).data_offset
    outcomes = []
    for _ in range(1000):
        changed = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(end)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(changed)
        outcomes.append(_outcome(path))
    assert all(path.name in error and not harmful(error) for error in outcomes if error)
    assert 100 < outcomes.count(None) < 900


def _outcome(path: Path) -> str | None:
    """The error for a file, None where it is read."""
    try:
        file = read_gguf(path)
        gguf_config(file)
    except FFNError as error:
        return str(error)
    assert sum(t.bytes for t in file.tensors) <= path.stat().st_size
    return None
