"""safetensors on disk: headers without torch, and one layer's weights with it, nothing more.

The header reader is our own (opening a file through the library imports numpy or torch) and refuses all that the
library refuses, and duplicate keys besides. Values come through the library, tensor by tensor, memory-mapped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncli.errors import ExitCode, FFNError, shown
from ffncli.models.layout import Located
from ffncli.models.strict_json import parse_object, read_object, shown_path

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
_READABLE = {"F64", "F32", "BF16", "F16"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its header describes it: safetensors' dtype code, shape, bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass
class Checkpoint:
    """The tensors of a file or directory: which file has which name. Headers are read when first asked for."""

    where: str
    files: Mapping[str, Path]
    _headers: dict[Path, dict[str, TensorInfo]] = field(default_factory=dict)

    def info(self, name: str) -> TensorInfo:
        """A tensor's dtype and shape. Raises FFNError where its file does not have what the index promises."""
        path = self.files[name]
        if path not in self._headers:
            self._headers[path] = read_header(path)
        header = self._headers[path]
        if name not in header:
            raise FFNError(f"{shown_path(path)}: tensor {shown(name, 120)} is in the index and not in this file")
        return header[name]


def open_checkpoint(location: Path) -> Checkpoint | None:
    """The tensors at a directory, a `.safetensors` file or an index; None for a directory without any."""
    if location.is_file():
        return _indexed(location) if location.suffix == ".json" else _single(location)
    if (location / INDEX).exists():
        return _indexed(location / INDEX)
    if (location / "model.safetensors").exists():
        return _single(location / "model.safetensors")
    files: dict[str, Path] = {}
    headers = {path: read_header(path) for path in sorted(location.glob("*.safetensors"))}
    for path, header in headers.items():
        for name in header:
            if name in files:
                raise FFNError(f"{shown_path(location)}: tensor {shown(name)} is in two files", f"there is no {INDEX}")
            files[name] = path
    return Checkpoint(shown_path(location), files, headers) if files else None


def _single(path: Path) -> Checkpoint:
    header = read_header(path)
    return Checkpoint(shown_path(path), dict.fromkeys(header, path), {path: header})


def _indexed(path: Path) -> Checkpoint:
    """A sharded checkpoint. Shard names must be plain file names: one that leaves the directory is refused."""
    where = shown_path(path)
    shards = read_object(path, MOST_HEADER_BYTES).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise FFNError(f"{where}: weight_map is missing", "it should map tensor names to shard files")
    checked: dict[str, Path] = {}
    for name, shard in shards.items():
        if not isinstance(shard, str):
            raise FFNError(f"{where}: the shard of tensor {shown(name, 120)} is {shown(shard)}, not a file name")
        if shard in checked:
            continue
        if not re.fullmatch(r"[\w\-.+=@ ]+", shard) or shard.startswith("."):
            raise FFNError(f"{where}: shard name {shown(shard)} leaves the directory", "it must be a plain file name")
        checked[shard] = path.parent / shard
    return Checkpoint(where, {name: checked[shard] for name, shard in shards.items()})


# --- headers ----------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Name → dtype and shape of every tensor in a safetensors file, without reading any data.

    Raises FFNError, naming the file and what is wrong, for whatever safetensors itself refuses: a header past the end
    of the file, bytes that no tensor or two tensors claim, a shape that does not fit its bytes.
    """
    where = shown_path(path)
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > total - 8:
                raise FFNError(f"{where} is truncated or no safetensors file: {total} bytes, header of {length}")
            if length > MOST_HEADER_BYTES:
                raise FFNError(f"{where}: a header of {length:,} bytes is more than safetensors allows")
            raw = file.read(length)
    except OSError as error:
        raise FFNError(f"cannot read {where}: {error.strerror or error}", _missing(path)) from None
    header = parse_object(raw, f"{where}: header")
    _check_metadata(header.pop("__metadata__", {}), where)
    spans = [(name, *_entry(name, entry, where)) for name, entry in header.items()]
    _check_coverage(spans, total - 8 - length, where)
    return {name: info for name, info, _, _ in spans}


def _missing(path: Path) -> str:
    return "" if os.path.exists(path) else "the file is not there; is the download complete?"


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise FFNError(f"{where}: __metadata__ must map strings to strings")


def _entry(name: str, entry: Any, where: str) -> tuple[TensorInfo, int, int]:
    """A header entry checked: (info, start, end)."""
    label = f"{where}: tensor {shown(name, 120)}"
    if not isinstance(entry, dict):
        raise FFNError(f"{label} has no description")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise FFNError(f"{label} has the unknown dtype {shown(dtype)}")
    if not _counts(shape):
        raise FFNError(f"{label} has the shape {shown(shape)}, which is no list of sizes")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise FFNError(f"{label} has the data_offsets {shown(span)}")
    if any(_refused(value) for key, value in entry.items() if key not in ("dtype", "shape", "data_offsets")):
        raise FFNError(f"{label} has a field that nests too deeply or holds a number without end")
    bits = _BITS[dtype]
    for size in shape:  # step by step, as safetensors does: an overflow counts even where a zero follows
        bits = bits * size if bits < 2**64 else bits
    if bits >= 2**64 or bits != 8 * (span[1] - span[0]):
        raise FFNError(f"{label}: shape {list(shape)} of {dtype} does not fit its {span[1] - span[0]} bytes")
    return TensorInfo(dtype, tuple(shape), span[1] - span[0]), span[0], span[1]


def _refused(value: Any, most: int = 120) -> bool:
    """What safetensors' parser refuses even where it is not used: 128 levels, numbers beyond a double."""
    level = [value]
    for _ in range(most):
        if any(isinstance(v, (int, float)) and not abs(v) <= sys.float_info.max for v in level):
            return True
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (list, dict))]
        level = [v for values in inner for v in values]
        if not level:
            return False
    return True


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_coverage(spans: list[tuple[str, TensorInfo, int, int]], size: int, where: str) -> None:
    """The tensors cover the data exactly once, in some order."""
    at = 0
    for name, _, start, end in sorted(spans, key=lambda span: span[2:]):
        if start != at:
            kind = "overlaps another" if start < at else "leaves a hole before it"
            raise FFNError(f"{where}: tensor {shown(name, 120)} {kind} (starts at {start}, expected {at})")
        at = end
    if at != size:
        state = "is truncated" if at > size else "has bytes that no tensor claims"
        raise FFNError(f"{where} {state}: tensors need {at} bytes of data, the file has {size}")


# --- values -----------------------------------------------------------------------------------------------------------


def check_shapes(checkpoint: Checkpoint, located: tuple[Located, ...]) -> None:
    """Raises FFNError where a stored shape is not what the config's widths make of it; shards not here are passed over.

    Tensors of packed formats are passed over too: their shapes say nothing plain.
    """
    for item in located:
        expected = item.stored_shape()
        for name in item.names:
            path = checkpoint.files[name]
            if not os.path.exists(path):
                continue
            info = checkpoint.info(name)
            if info.dtype in _READABLE and info.shape != expected:
                label = f"{shown_path(path)}: tensor {shown(name, 120)}"
                sizes = ", ".join(f"{axis.name} = {axis.size}" for axis in item.axes)
                raise FFNError(f"{label} has shape {list(info.shape)}, expected {list(expected)} ({sizes})")


def check_readable(checkpoint: Checkpoint, located: tuple[Located, ...]) -> None:
    """Raises FFNError for a tensor whose shard is missing or whose dtype is not a plain float."""
    for item in located:
        for name in item.names:
            info = checkpoint.info(name)
            if info.dtype not in _READABLE:
                label = f"{shown_path(checkpoint.files[name])}: tensor {shown(name, 120)}"
                raise FFNError(f"{label} is stored as {info.dtype}", "only unquantized weights can be traced")


def read_weights(
    checkpoint: Checkpoint, located: tuple[Located, ...], dtype: torch.dtype, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The located parameters in canonical form, contiguous, in `dtype` on `device`; no other tensor is touched.

    A matrix stored as asked stays a view of the mapped file; any other is copied once into its place.
    """
    check_readable(checkpoint, located)
    check_shapes(checkpoint, located)
    return {item.parameter: _read(checkpoint, item, dtype, device) for item in located}


def _read(checkpoint: Checkpoint, item: Located, dtype: torch.dtype, device: str) -> torch.Tensor:
    import torch

    shape = tuple(axis.size for axis in item.axes)
    if not item.piece.per_expert:
        stored = _select(_values(checkpoint.files[item.names[0]], item.names[0]), item)
        if stored.dtype == dtype and stored.is_contiguous() and device == "cpu":
            return stored
        return torch.empty(shape, dtype=dtype, device=device).copy_(stored)
    out = torch.empty(shape, dtype=dtype, device=device)
    for e, name in enumerate(item.names):
        out[e].copy_(_select(_values(checkpoint.files[name], name), item))
    return out


def _values(path: Path, name: str) -> torch.Tensor:
    from safetensors import SafetensorError, safe_open

    opened: Callable[..., Any] = safe_open
    try:
        with opened(path, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise FFNError(f"cannot read {shown_path(path)}: {error}", code=ExitCode.ENVIRONMENT) from None


def _select(stored: torch.Tensor, item: Located) -> torch.Tensor:
    """The canonical view of a stored tensor: orientation first, then this parameter's share of the output axis."""
    piece = item.piece
    if piece.transposed:
        stored = stored.transpose(-1, -2)
    if piece.parts == 1:
        return stored
    axis = item.output_axis
    if piece.interleaved:
        index = [slice(None)] * stored.dim()
        index[axis] = slice(piece.part, None, piece.parts)
        return stored[tuple(index)]
    width = stored.shape[axis] // piece.parts
    return stored.narrow(axis, piece.part * width, width)
