"""A checkpoint on disk: the file and offset of each tensor; `tensors/read_weights.py` reads the values.

A file written by torch.save (`.pt`, `.pth`, `.bin`) is unpickled by torch with `weights_only=True`, without a fallback
and without the tensors' values. This gives names, shapes and offsets, so that bytes can be read as from a safetensors
file.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.headers import MOST_HEADER_BYTES, Columns, TensorInfo, named, read_columns
from ffncli.models.files.strict_json import parse_index
from ffncli.system.files import open_to_read

if TYPE_CHECKING:
    from torch import Tensor


INDEX = "model.safetensors.index.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")  # written by torch.save
PLAIN = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' code → torch's name


class ByteLocation(NamedTuple):
    """The location of a tensor's bytes: the file, the first byte, and the tensor's description."""

    path: Path
    start: int
    info: TensorInfo


@dataclass
class Checkpoint:
    """The tensors of a file or directory; `files` maps each name to its file. Headers are read on first use.

    `remote`: only the headers were fetched, those of `commit`; `fetched` then returns a file whose bytes are fetched
    when they are read. `gguf`: the tensors' dtypes are GGML's formats.
    """

    where: str
    folder: Path
    files: Mapping[str, str]
    remote: bool = False
    _columns: dict[str, Columns] = field(default_factory=dict)
    _headers: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)
    gguf: bool = False
    _starts: dict[str, dict[str, int]] = field(default_factory=dict)
    commit: str = ""
    fetched: Callable[[str], Path] | None = None

    def path(self, name: str) -> Path:
        """Return the file that contains a tensor. Raises FFNError if only headers were fetched (`remote`)."""
        if self.fetched is not None:
            return self.fetched(self.files[name])
        if self.remote:
            raise FFNError(
                f"{self.where}: only headers are fetched, not weights", "download the model and give its path"
            )
        return self.folder / self.files[name]

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's dtype and shape, from the file that contains it according to the index."""
        file = self.files[name]
        if file not in self._headers:
            columns = self._columns.get(file) or _columns_of(self.folder / file)
            self._headers[file] = named(columns)
            self._starts[file] = {
                name: columns.data + at for name, at in zip(columns.names, columns.starts, strict=True)
            }
        header = self._headers[file]
        if name not in header:
            raise _not_there(self.folder / file, name)
        return header[name]

    @cached_property
    def sorted_names(self) -> list[str]:
        """Return all names in sorted order, so that names with a common prefix are adjacent."""
        return sorted(self.files)

    def place(self, name: str) -> ByteLocation:
        """Locate a tensor's bytes."""
        path, info = self.path(name), self.info(name)
        return ByteLocation(path, self._starts[self.files[name]][name], info)

    def shards(self) -> Iterator[tuple[str, Columns | None]]:
        """Yield every file with its header (None if the file is missing), one at a time to save memory.

        Raises FFNError if a file lacks a tensor that the index lists for it.
        """
        promised: dict[str, list[str]] = defaultdict(list)
        for name, file in self.files.items():
            promised[file].append(name)
        for file, names in promised.items():
            path = self.folder / file
            if file not in self._columns and not os.path.exists(path):
                yield file, None  # its tensors are not checked
                continue
            columns = self._columns.get(file) or _columns_of(path)
            if names != columns.names and (lacking := {*names}.difference(columns.names)):
                raise _not_there(path, next(name for name in names if name in lacking))
            yield file, columns


def _not_there(path: Path, name: str) -> FFNError:
    return FFNError(f"{shown_path(path)}: tensor {shown(name, 120)} is in the index but not in this file")


def _columns_of(path: Path) -> Columns:
    return read_pickled(path) if path.suffix in PICKLED else read_columns(path)


def open_checkpoint(location: Path) -> Checkpoint | None:
    """Open the tensors of a directory, a file or an index; None if a directory has no safetensors."""
    if location.is_file():
        return _indexed(location) if location.suffix == ".json" else _together(location, [location])
    if (location / INDEX).exists():
        return _indexed(location / INDEX)
    if (location / "model.safetensors").exists():
        return _together(location / "model.safetensors", [location / "model.safetensors"])
    paths = sorted(location.glob("*.safetensors"))
    return _together(location, paths) if paths else None


def _together(where: Path, paths: list[Path]) -> Checkpoint:
    """Open files that have no index."""
    columns = {path.name: _columns_of(path) for path in paths}
    return Checkpoint(shown_path(where), paths[0].parent, _named_once(columns, shown_path(where)), False, columns)


def remote_checkpoint(where: str, columns: dict[str, Columns], commit: str = "") -> Checkpoint:
    """Build a checkpoint from fetched headers; `columns` maps each file's name to its header's columns."""
    return Checkpoint(where, Path(), _named_once(columns, where), True, columns, commit=commit)


def _named_once(columns: Mapping[str, Columns], where: str) -> dict[str, str]:
    """Map each tensor to its file. Raises FFNError if a tensor is in two files."""
    files: dict[str, str] = {}
    for file, header in columns.items():
        for name in header.names:
            if name in files:
                raise FFNError(f"{where}: tensor {shown(name)} is in two files", f"there is no {INDEX}")
            files[name] = file
    return files


def _indexed(path: Path) -> Checkpoint:
    """Open a sharded checkpoint by its index."""
    where = shown_path(path)
    files = parse_index(path, MOST_HEADER_BYTES)
    if {*map(type, files.values())} != {str}:
        name, shard = next((n, s) for n, s in files.items() if not isinstance(s, str))
        raise FFNError(f"{where}: the shard of tensor {shown(name, 120)} is {shown(shard)}, not a file name")
    for shard in set(files.values()):
        check_shard_name(shard, where)
    return Checkpoint(where, path.parent, files)


def check_shard_name(shard: str, where: str) -> None:
    """Raise FFNError if a shard name is not a plain file name, since it could refer to a file outside the directory."""
    if not re.fullmatch(r"[\w\-.+=@ ]+", shard) or shard.startswith("."):
        raise FFNError(f"{where}: shard name {shown(shard)} leaves the directory", "it must be a plain file name")


_CODES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net")  # keys used by training scripts
_RESAVE = "save it again with torch.save(model.state_dict(), FILE), or as safetensors"


def read_pickled(path: Path) -> Columns:
    """Read the header of a file written by torch.save: a dictionary of tensors, at the top level or under a key such as
    `state_dict`.

    Raises FFNError for old formats, compressed parts, anything but tensors and plain values, and tensors whose bytes
    are not contiguous in the file.
    """
    where = shown_path(path)
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                compressed = any(entry.compress_type for entry in archive.infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            raise FFNError(f"{where} is not a file of torch.save since torch 1.6", _RESAVE) from None
    if compressed:
        raise FFNError(f"{where}: its tensors are compressed", _RESAVE)
    tensors = _tensors(_unpickled(path, where), where)
    columns = Columns([], [], [], [], [], 0)
    for name, tensor in tensors.items():
        if str(tensor.layout) != "torch.strided":
            raise FFNError(f"{where}: tensor {shown(name, 120)} is sparse", "save it as tensor.to_dense()")
        code, start = _CODES.get(str(tensor.dtype).removeprefix("torch.")), _start(tensor)
        length = tensor.numel() * tensor.element_size()
        if code is None:
            continue
        if start is None or not tensor.is_contiguous() or start + length > size:
            raise FFNError(f"{where}: tensor {shown(name, 120)} is not stored contiguously in the file", _RESAVE)
        for column, value in zip(columns[:5], (name, code, tuple(tensor.shape), length, start), strict=True):
            column.append(value)  # type: ignore[attr-defined]
    return columns


def _unpickled(path: Path, where: str) -> Any:
    """Return the content of the file, with tensors that have no values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        # In this mode, torch.load records the offset of a storage's bytes without reading them.
        with FakeTensorMode(), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle can raise anything
        first = str(error).partition("\n")[0].partition(" This file can still")[0]
        what = "it contains more than tensors, and only tensors are loaded" if "Weights only" in first else first[:200]
        what = "it contains quantized tensors of torch, which are not read" if "QuantizedMeta" in first else what
        raise FFNError(f"{where} cannot be read: {what}", _RESAVE) from None


def _tensors(value: Any, where: str) -> Mapping[str, Tensor]:
    """Return the dictionary of tensors: `value` itself or the entry under one of the usual keys, whichever has more
    (training scripts also store single tensors, such as the best loss)."""
    import torch

    dictionaries: list[dict[str, Tensor]] = [{}]
    entries = (value, *(value.get(key) for key in _INSIDE)) if isinstance(value, Mapping) else ()
    dictionaries += [
        {name: v for name, v in entry.items() if isinstance(name, str) and isinstance(v, torch.Tensor)}
        for entry in entries
        if isinstance(entry, Mapping)
    ]
    if tensors := max(dictionaries, key=len):
        return tensors
    raise FFNError(f"{where} contains no dictionary of tensors", _RESAVE)


def _start(tensor: Tensor) -> int | None:
    """Return the offset of the tensor's first byte in the file."""
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return None if start is None else int(start) + int(tensor.storage_offset()) * tensor.element_size()
