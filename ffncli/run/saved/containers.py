"""Write and read files that contain named tensors and a record: .safetensors, .npz or .json. Tensors are processed one
by one.

No tensor is copied in full while it is written, unless the file cannot store its dtype (bf16 in .npz and .json becomes
float32, which is exact). Files are checked before they are read: sizes are checked before anything is allocated;
pickles and compressed data are refused.
"""

import io
import json
import math
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch
from torch import Tensor

from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.headers import MOST_HEADER_BYTES, read_header
from ffncli.models.files.rows import named_tensor
from ffncli.models.files.strict_json import parse_object, read_object
from ffncli.system.files import TENSOR_SUFFIXES, open_to_read

MOST_JSON_VALUES = 10_000_000
_MOST_JSON_BYTES = 40 * MOST_JSON_VALUES
_RECORD = "ffn_trace"  # the record's key in every format
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
}  # fmt: skip
_INFINITIES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PIECE = 2**20
_MOST_DIMS, _MOST_VALUES = 16, 2**48
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, OverflowError, RuntimeError, struct.error)
_NUMPY_KINDS = {"f8", "f4", "f2", "i8"}


class Container(Protocol):
    """An open file: its record, the shape of every tensor, and each tensor's values on demand."""

    record: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def tensor(self, name: str) -> Tensor:
        """Return the values; bf16 stored in .npz or .json is returned as float32."""
        ...


def write(file: BinaryIO, suffix: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write everything into an open file; refuse too many values for a JSON file."""
    {".safetensors": _write_safetensors, ".npz": _write_npz, ".json": _write_json}[suffix](file, tensors, record)


def open_container(path: Path, suffix: str | None = None) -> Container:
    """Open a file that `write` wrote, in the format of `suffix` (default: the file's suffix); refuse anything else."""
    suffix = path.suffix if suffix is None else suffix
    if suffix not in TENSOR_SUFFIXES:
        raise FFNError(f"{shown_path(path)} is not a saved trace", f"supported: {', '.join(TENSOR_SUFFIXES)}")
    try:
        openers: dict[str, Callable[[Path], Container]] = {
            ".safetensors": _open_safetensors, ".npz": _Npz, ".json": _open_json,
        }  # fmt: skip
        container = openers[suffix](path)
    except OSError as error:
        raise FFNError(f"cannot read {shown_path(path)}: {error.strerror or error}") from None
    # A size of 0 makes a tensor empty, so its number of bytes would not reveal a wrong size elsewhere in the shape.
    for name, shape in container.shapes.items():
        if len(shape) > _MOST_DIMS or math.prod(n or 1 for n in shape) > _MOST_VALUES:
            raise FFNError(f"{shown_path(path)}: {shown(name, 120)} has the impossible shape {shown(list(shape))}")
    return container


def _no_trace(path: Path) -> FFNError:
    return FFNError(f"{shown_path(path)} is not a saved trace", "make one with ffn trace --save FILE")


def _bytes(tensor: Tensor) -> Any:
    """Return a tensor's bytes in order, without a copy if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


# --- .safetensors -----------------------------------------------------------------------------------------------------


def _write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write a .safetensors file by its specification: length, JSON header padded to 8 bytes, then the data without
    gaps.

    The library's own writer copies all tensors to bytes at once, which doubles the memory.
    """
    header: dict[str, Any] = {"__metadata__": {_RECORD: json.dumps(record)}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(_bytes(tensor))


@dataclass
class _Safetensors:
    path: Path
    record: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def tensor(self, name: str) -> Tensor:
        return named_tensor(self.path, name)


def _open_safetensors(path: Path) -> _Safetensors:
    infos = read_header(path)
    if any(info.dtype not in _CODES.values() for info in infos.values()):
        raise _no_trace(path)
    with open_to_read(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(min(length, MOST_HEADER_BYTES)), shown_path(path))
    text = header.get("__metadata__", {}).get(_RECORD)
    if text is None:
        raise _no_trace(path)
    record = parse_object(text.encode(), f"{shown_path(path)}: {_RECORD}")
    return _Safetensors(path, record, {name: info.shape for name, info in infos.items()})


# --- .npz -------------------------------------------------------------------------------------------------------------


def _write_npz(file: BinaryIO, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write a zip of uncompressed .npy files; the record is an array of one string."""
    import numpy

    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        buffer = io.BytesIO()
        numpy.lib.format.write_array(buffer, numpy.array(json.dumps(record)), allow_pickle=False)
        archive.writestr(f"{_RECORD}.npy", buffer.getvalue())
        for name, tensor in tensors.items():
            exact = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            descr = numpy.lib.format.dtype_to_descr(numpy.dtype(str(exact.dtype).removeprefix("torch.")))
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                numpy.lib.format.write_array_header_1_0(
                    member, {"descr": descr, "fortran_order": False, "shape": tuple(exact.shape)}
                )
                member.write(_bytes(exact))


class _Npz:
    """A zip of arrays; the size of each array in the zip must match its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.archive = zipfile.ZipFile(open_to_read(path))
        except (*_ZIP_ERRORS, ValueError) as error:
            raise FFNError(f"{shown_path(path)} is not a .npz file: {str(error)[:60]}") from None
        self.members = _members(self.archive, path)
        if _RECORD not in self.members:
            raise _no_trace(path)
        text = self._read(_RECORD, lambda kind: kind.startswith("U"))
        self.record = parse_object(str(text).encode("utf-8", "replace"), f"{shown_path(path)}: {_RECORD}")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in self.members:
            with self._opened(name) as member:
                self.shapes[name] = self._header(name, member)[0]
        del self.shapes[_RECORD]

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self._read(name, _NUMPY_KINDS.__contains__))

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        try:
            with self.archive.open(self.members[name]) as member:
                yield cast(BinaryIO, member)
        except (*_ZIP_ERRORS, OSError, ValueError) as error:
            raise self._broken(name, f"is damaged: {str(error)[:60]}") from None

    def _header(self, name: str, member: BinaryIO) -> tuple[tuple[int, ...], Any, int]:
        """Return (shape, numpy's dtype, bytes of data) from the array's header."""
        import numpy

        readers = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
        try:
            with warnings.catch_warnings(action="ignore"):
                shape, fortran, dtype = readers[numpy.lib.format.read_magic(member)](member)
        except _ZIP_ERRORS:
            raise
        except Exception as error:  # numpy raises a dozen kinds of exceptions for a malformed header
            raise self._broken(name, f"is not an array: {str(error)[:60]}") from None
        size = self.members[name].file_size - member.tell()
        possible = all(type(n) is int and n >= 0 for n in shape) and dtype.itemsize > 0
        if fortran or dtype.hasobject or not possible or math.prod(shape) * dtype.itemsize != size:
            raise self._broken(name, f"has {size} bytes of data, which do not fit {dtype} {shown(list(shape))}")
        return shape, dtype, size

    def _read(self, name: str, allowed: Callable[[str], bool]) -> Any:
        import numpy

        with self._opened(name) as member:
            shape, dtype, size = self._header(name, member)
            if not allowed(dtype.str.lstrip("<|")):
                raise self._broken(name, f"holds {dtype}, which no trace uses")
            data, at = bytearray(size), 0
            # reading the whole array at once would hold it in memory twice
            while at < size and (piece := member.read(_PIECE)):
                data[at : at + len(piece)] = piece
                at += len(piece)
        return numpy.frombuffer(data, dtype).reshape(shape) if data else numpy.zeros(shape, dtype)

    def _broken(self, name: str, what: str) -> FFNError:
        return FFNError(f"{shown_path(self.path)}: array {shown(name, 120)} {what}")


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return a mapping from names to arrays; refuse duplicate names, and compressed arrays, which could be huge."""
    total = path.stat().st_size
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        where = f"{shown_path(path)}: array {shown(name, 120)}"
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > total or member.flag_bits & 1:
            raise FFNError(f"{where} is compressed or encrypted", "ffn trace --save stores arrays uncompressed")
        if name in members:
            raise FFNError(f"{where} is duplicated")
        members[name] = member
    return members


# --- .json ------------------------------------------------------------------------------------------------------------


def _write_json(file: BinaryIO, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Write `{"ffn_trace": ..., "tensors": {name: {"dtype", "shape", "values": nested lists}}}`, in full precision.

    JSON has no NaN and no infinities: they become the strings "NaN", "Infinity" and "-Infinity".
    """
    count = sum(tensor.numel() for tensor in tensors.values())
    if count > MOST_JSON_VALUES:
        advice = "save as .safetensors or .npz"
        raise FFNError(f"{count:,} values are too many for a .json (the limit is {MOST_JSON_VALUES:,})", advice)
    file.write(f'{{"{_RECORD}": {json.dumps(record)},\n"tensors": {{'.encode())
    for at, (name, tensor) in enumerate(tensors.items()):
        head = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        file.write(f'{"," if at else ""}\n{json.dumps(name)}: {json.dumps(head)[:-1]}, "values": '.encode())
        for piece in _nested(tensor):
            file.write(piece.encode())
        file.write(b"}")
    file.write(b"\n}}\n")


def _nested(tensor: Tensor) -> Iterator[str]:
    """Yield the values as nested lists, a row at a time."""
    if tensor.dim() <= 1:
        values = tensor.tolist() if tensor.dtype == torch.int64 else tensor.double().tolist()
        yield json.dumps([v if math.isfinite(v) else _spelled(v) for v in values] if tensor.dim() else values)
        return
    for at, row in enumerate(tensor):
        yield ",\n" if at else "["
        yield from _nested(row)
    yield "]" if len(tensor) else "[]"


def _spelled(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@dataclass
class _Json:
    path: Path
    record: dict[str, Any]
    tensors: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def tensor(self, name: str) -> Tensor:
        entry = self.tensors[name]
        flat = list(_flat(entry["values"], self.shapes[name]))
        integer = entry["dtype"] == "int64"
        wanted = (int,) if integer else (int, float)
        if len(flat) != math.prod(self.shapes[name]) or not all(type(v) in wanted for v in flat):
            raise FFNError(f"{shown_path(self.path)}: the values of {shown(name, 120)} do not fill its shape")
        kind = torch.int64 if integer else torch.float64
        try:
            values = torch.tensor(flat, dtype=kind).reshape(self.shapes[name])
        except (OverflowError, RuntimeError, ValueError):  # integers in JSON have no limit
            raise FFNError(f"{shown_path(self.path)}: a value of {shown(name, 120)} is too large for {kind}") from None
        return values if integer else values.to(getattr(torch, entry["dtype"]))


def _open_json(path: Path) -> _Json:
    whole = read_object(path, _MOST_JSON_BYTES)
    record, tensors = whole.get(_RECORD), whole.get("tensors")
    if not isinstance(record, dict) or not isinstance(tensors, dict):
        raise _no_trace(path)
    shapes = {}
    for name, entry in tensors.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape) or "values" not in entry:
            raise FFNError(f"{shown_path(path)}: tensor {shown(name, 120)} has no shape or no values")
        if entry.get("dtype") not in [str(dtype).removeprefix("torch.") for dtype in _CODES]:  # dtype may be unhashable
            raise FFNError(f"{shown_path(path)}: tensor {shown(name, 120)} has dtype {shown(entry.get('dtype'))}")
        shapes[name] = tuple(shape)
    return _Json(path, record, tensors, shapes)


def _flat(values: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    """Yield the values of nested lists of that shape; yield None if the shape differs."""
    if not shape:
        yield _INFINITIES.get(values, values) if isinstance(values, str) else values
    elif isinstance(values, list) and len(values) == shape[0]:
        for value in values:
            yield from _flat(value, shape[1:])
    else:
        yield None
