"""Read the metadata and tensors of GGUF files from the header alone.

The `gguf` library provides the tensor formats and their block sizes. Our own code reads and checks the header:
`GGUFReader` creates two arrays per token (9 s and 700 MB for Llama 3), and hangs on 45 bytes that claim to contain 2^40
numbers.
"""

import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.models.files.strict_json import Fields
from ffncli.options.accept import MAX_SIZE
from ffncli.system.files import open_to_read
from ffncli.system.packages import extra_command

MOST_HEADER_BYTES = 100_000_000  # a vocabulary of 260,000 tokens with its merges needs 25 MB
MOST_TENSORS = 1_000_000
MOST_KEYS = 100_000
_MOST_TEXT = 1_000_000  # a chat template needs 10 kB
_MOST_ENTRIES = 100_000
_MOST_DIMS = 4  # ggml's own limit
_LEAST_TENSOR, _LEAST_KEY = 24, 13  # bytes of the shortest tensor info, and of the shortest key with its value

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LEFT_OUT: Any = object()  # a value that is not needed, such as a vocabulary or a very long string


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: torch's shape (the reverse of GGML's: ffn_gate is [d_ff, d_model]), a format such as `Q4_0`, and
    bytes in the file.

    `start` is the offset of its first byte in the file `path`.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    params: int
    bytes: int
    path: Path = field(default=Path(), compare=False)
    start: int = field(default=0, compare=False)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file, or all shards of a set. `metadata` excludes vocabularies and very long arrays and strings."""

    where: str
    architecture: str
    metadata: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata and tensors of a GGUF file, or of all shards if `path` is a shard."""
    formats = _formats()
    paths = _shards(path)
    files = [_read_file(shard, formats) for shard in paths]
    metadata = files[0].metadata if len(files) == 1 else _joined_metadata(path, files)
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    twice = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
    if twice:
        raise FFNError(f"{shown_path(path)}: tensor {shown(twice[0], 120)} is duplicated")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", architecture):
        raise FFNError(
            f"{shown_path(path)}: general.architecture must be a name such as 'llama', got {shown(architecture)}"
        )
    return GGUFFile(shown_path(path), architecture, metadata, tensors)


# --- shards -----------------------------------------------------------------------------------------------------------


def _shards(path: Path) -> list[Path]:
    """Return all files of the set that `path` belongs to, in order; only `path` if its name is not a shard's name."""
    match = _SHARD.fullmatch(path.name)
    if not match or int(match["count"]) < 2:
        return [path]
    out = []
    for number in range(1, int(match["count"]) + 1):
        shard = path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf")
        if not shard.exists():
            hint = f"all {int(match['count'])} shards are needed; is the download complete?"
            raise FFNError(f"{shown_path(shard)} is missing", hint)
        out.append(shard)
    return out


def _joined_metadata(path: Path, files: list[GGUFFile]) -> Mapping[str, Any]:
    """Return the first shard's metadata, which describe the model. Raises FFNError if the shards are not one set."""
    for number, file in enumerate(files):
        for key, expected in (("split.no", number), ("split.count", len(files))):
            if file.metadata.get(key, expected) != expected:
                raise FFNError(f"{file.where}: {key} is {shown(file.metadata[key])}, but the file name says {expected}")
    count = sum(len(file.tensors) for file in files)
    promised = files[0].metadata.get("split.tensors.count", count)
    if promised != count:
        raise FFNError(
            f"{shown_path(path)}: the shards have {count} tensors, but split.tensors.count is {shown(promised)}"
        )
    return files[0].metadata


# --- one file ---------------------------------------------------------------------------------------------------------


# GGML's tensor formats by their codes: the name, the values in a block, and the bytes of a block.
_Formats: TypeAlias = Mapping[int, tuple[str, int, int]]


def _formats() -> _Formats:
    """Return GGML's tensor formats, from the gguf library."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise FFNError("GGUF files need the gguf library", extra_command("models"), ExitCode.ENVIRONMENT) from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _read_file(path: Path, formats: _Formats) -> GGUFFile:
    where = shown_path(path)
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise FFNError(f"{where} is empty", "it should be a GGUF file")
            return _parsed(_Cursor(file, size, where, path), formats)
    except OSError as error:
        raise FFNError(f"cannot read {where}: {error.strerror or error}") from None


@dataclass
class _Cursor:
    """A position in the first bytes of a file of `size` bytes. It never reads or skips past the end."""

    file: BinaryIO
    size: int
    where: str
    path: Path
    at: int = 0
    data: bytearray = field(default_factory=bytearray)  # a memory map of a truncated file may crash

    def step(self, count: int) -> int:
        """Advance by `count` bytes, and return the previous position."""
        if self.at + count > len(self.data):
            self.load(self.at + count)
        self.at += count
        return self.at - count

    def load(self, end: int) -> None:
        """Read at least up to byte `end`. Raises FFNError if the file or the maximum header size ends earlier."""
        limit = min(self.size, MOST_HEADER_BYTES)
        if end > limit < self.size:
            raise FFNError(f"{self.where}: a header of more than {MOST_HEADER_BYTES:,} bytes is not supported")
        while len(self.data) < min(end, limit):
            piece = self.file.read(min(1 << 20, limit - len(self.data)))
            if not piece:  # truncated since it was opened
                self.size = limit = len(self.data)
            self.data += piece
        if end > limit:
            raise FFNError(f"{self.where} is truncated: its header does not end within its {self.size} bytes")

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        """Read `count` little-endian numbers, with struct's format code."""
        start = self.step(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def number(self, code: str) -> Any:
        """Read one number."""
        return self.numbers(code)[0]

    def text(self) -> bytes:
        """Read a string, stored as its length and its bytes."""
        start = self.step(self.number("Q"))
        return bytes(self.data[start : self.at])

    def skip_texts(self, count: int) -> None:
        """Skip `count` strings. A vocabulary has hundreds of thousands of strings, so this loop does nothing else."""
        unpack, data, at, last = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data) - 8
        for _ in range(count):
            if at > last:
                self.load(at + 8)
                last = len(data) - 8
            at += 8 + unpack(data, at)[0]
        self.step(at - self.at)

    def name(self, kind: str) -> str:
        """Read a string that must be UTF-8, such as a key or a tensor's name."""
        raw = self.text()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise FFNError(f"{self.where}: the name of a {kind}, {shown(raw)}, is not UTF-8 text") from None


def _parsed(cursor: _Cursor, formats: _Formats) -> GGUFFile:
    tensor_count, key_count = _counts(cursor)
    metadata: dict[str, Any] = {}
    keys: set[str] = set()
    for _ in range(key_count):
        key = cursor.name("metadata key")
        if key in keys:
            raise FFNError(f"{cursor.where}: the metadata key {shown(key, 120)} is duplicated")
        keys.add(key)
        value = _value(cursor, key)
        if value is not _LEFT_OUT:
            metadata[key] = value
    tensors = tuple(_tensors(cursor, tensor_count, metadata.get("general.alignment", 32), formats))
    return GGUFFile(cursor.where, "", metadata, tensors)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the header's counts of tensors and of metadata keys. Raises FFNError if the file is too small for them."""
    where, size = cursor.where, cursor.size
    start = bytes(cursor.data[cursor.step(min(4, size)) : 4])
    if start != b"GGUF"[:size]:
        raise FFNError(f"{where} is not a GGUF file: it starts with {shown(start)}, not with 'GGUF'")
    cursor.step(4 - len(start))
    version = cursor.number("I")
    if version & 0xFFFF == 0 and version:
        raise FFNError(f"{where} is a big-endian GGUF file", "only little-endian files are supported; convert it")
    if version not in (2, 3):
        raise FFNError(
            f"{where}: GGUF version {version} is not supported", "versions 2 and 3 are supported; convert it again"
        )
    tensors, keys = cursor.numbers("Q", 2)
    for kind, count, most, least in (
        ("tensors", tensors, MOST_TENSORS, _LEAST_TENSOR),
        ("metadata keys", keys, MOST_KEYS, _LEAST_KEY),
    ):
        if count > most or count * least > size:
            raise FFNError(f"{where}: {count} {kind} cannot be in a file of {size} bytes", "the file is damaged")
    return tensors, keys


def _value(cursor: _Cursor, key: str) -> Any:
    """Return a metadata value as plain Python, or _LEFT_OUT."""
    kind = cursor.number("I")
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        raw = cursor.text()
        return raw.decode("utf-8", "replace") if len(raw) <= _MOST_TEXT else _LEFT_OUT
    if kind == _ARRAY:
        return _array(cursor, key)
    raise FFNError(f"{cursor.where}: metadata key {shown(key, 120)} has the unknown type {kind}")


def _array(cursor: _Cursor, key: str) -> Any:
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind == _STRING:
        cursor.skip_texts(count)
        return _LEFT_OUT
    if kind not in _SCALARS:
        raise FFNError(f"{cursor.where}: metadata key {shown(key, 120)} is an array of the unknown type {kind}")
    if key.startswith("tokenizer.") or count >= _MOST_ENTRIES:
        cursor.step(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        return _LEFT_OUT
    return list(cursor.numbers(_SCALARS[kind], count))


# --- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(cursor: _Cursor, count: int, alignment: Any, formats: _Formats) -> list[GGUFTensor]:
    """Return the tensors. Raises FFNError unless their data is contiguous except for alignment, as ggml requires."""
    where = cursor.where
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise FFNError(f"{where}: general.alignment must be a power of two, got {shown(alignment)}")
    tensors = [_tensor(cursor, formats) for _ in range(count)]
    start, expected = _aligned(cursor.at, alignment), 0
    for tensor, offset in tensors:
        label = f"{where}: tensor {shown(tensor.name, 120)}"
        if offset != expected:
            raise FFNError(f"{label} starts at {offset} in the data, expected {expected}", "the file is damaged")
        if start + offset + tensor.bytes > cursor.size:
            raise FFNError(
                f"{label} ends at {start + offset + tensor.bytes}, past the file's {cursor.size} bytes; truncated"
            )
        expected = _aligned(offset + tensor.bytes, alignment)
    return [replace(tensor, path=cursor.path, start=start + offset) for tensor, offset in tensors]


def _tensor(cursor: _Cursor, formats: _Formats) -> tuple[GGUFTensor, int]:
    """Return one tensor and the offset of its data according to the header."""
    name = cursor.name("tensor")
    label = f"{cursor.where}: tensor {shown(name, 120)}"
    dims = cursor.number("I")
    if dims > _MOST_DIMS:
        raise FFNError(f"{label} has {dims} dimensions, but ggml supports at most {_MOST_DIMS}")
    sizes = cursor.numbers("Q", dims)
    code, offset = cursor.number("I"), cursor.number("Q")
    if code not in formats:
        raise FFNError(
            f"{label} has the unknown format {code}", "a newer gguf library may support it: pip install -U gguf"
        )
    (form, values, size), params, row = formats[code], prod(sizes), sizes[0] if sizes else 1
    if params >= 2**63:
        raise FFNError(f"{label} has the shape {shown(list(reversed(sizes)))}, more than any file holds")
    if row % values:
        raise FFNError(f"{label}: {form} needs rows of whole blocks of {values} values, got rows of {row}")
    return GGUFTensor(name, tuple(reversed(sizes)), form, params, params // values * size), offset


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


# --- as a config ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """A metadata key without its architecture prefix, its minimum, and whether it may have a value per layer."""

    key: str
    low: int = 1
    per_layer: bool = False


CONFIG_KEYS = {
    "d_model": _Key("embedding_length"),
    "d_ff": _Key("feed_forward_length", 0, True),
    "layers": _Key("block_count"),
    "experts": _Key("expert_count", 0),
    "top_k": _Key("expert_used_count", 0),
    "expert_d_ff": _Key("expert_feed_forward_length", 0),
    "shared_experts": _Key("expert_shared_count", 0),
    "shared_d_ff": _Key("expert_shared_feed_forward_length", 0),
    "leading_dense": _Key("leading_dense_block_count", 0),
    "heads": _Key("attention.head_count", 0, True),
    "kv_heads": _Key("attention.head_count_kv", 0, True),
    "head_dim": _Key("attention.key_length"),
    "value_dim": _Key("attention.value_length"),
    "vocab": _Key("vocab_size"),
}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Read the model's shape from the metadata, under our names (`CONFIG_KEYS`); absent keys are left out.

    All values are whole numbers; d_ff, heads and kv_heads may be a tuple with one value per layer. A key may have the
    architecture as prefix or, from some writers, no prefix.
    """
    fields = Fields(file.metadata, file.where)
    out: dict[str, Any] = {}
    for name, row in CONFIG_KEYS.items():
        names = f"{file.architecture}.{row.key}|{row.key}"
        values = fields.get(names, None)
        if isinstance(values, list) and row.per_layer:
            if any(type(value) is not int or not row.low <= value <= MAX_SIZE for value in values):
                raise fields.wrong(names, values, f"whole numbers from {row.low} to {MAX_SIZE}, one per layer")
            out[name] = tuple(values)
        elif (value := fields.integer(names, None, row.low)) is not None:
            out[name] = value
    embedding = next((t for t in file.tensors if t.name == "token_embd.weight" and len(t.shape) == 2), None)
    if embedding and "vocab" not in out:
        out["vocab"] = embedding.shape[0]
    _check_layers(out, fields, file.architecture)
    return out


def _check_layers(config: Mapping[str, Any], fields: Fields, architecture: str) -> None:
    """Raise FFNError if a list with one value per layer has the wrong length."""
    layers = config.get("layers")
    for name, value in config.items():
        if isinstance(value, tuple) and layers is not None and len(value) != layers:
            wanted = f"one number for each of the {layers} layers"
            raise fields.wrong(f"{architecture}.{CONFIG_KEYS[name].key}|{CONFIG_KEYS[name].key}", list(value), wanted)
