"""A checkpoint on disk: which file has which tensor, and one layer's weights with torch, nothing more.

Values come through the safetensors library, tensor by tensor, memory-mapped.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncli.errors import ExitCode, FFNError, shown
from ffncli.models.headers import MOST_HEADER_BYTES, Columns, TensorInfo, named, read_columns
from ffncli.models.layout import Located, canonical
from ffncli.models.strict_json import parse_index, shown_path

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_READABLE = {"F64", "F32", "BF16", "F16"}


@dataclass
class Checkpoint:
    """The tensors of a file or directory: which file has which name. Headers are read when first asked for.

    Of a `remote` one only the headers were fetched.
    """

    where: str
    folder: Path
    files: Mapping[str, str]
    remote: bool = False
    _columns: dict[str, Columns] = field(default_factory=dict)
    _headers: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """The file that has a tensor. Raises FFNError where it was not fetched."""
        if self.remote:
            raise FFNError(
                f"{self.where}: only headers are fetched, not weights", "download the model and give its path"
            )
        return self.folder / self.files[name]

    def info(self, name: str) -> TensorInfo:
        """A tensor's dtype and shape. Raises FFNError where its file does not have what the index promises."""
        file = self.files[name]
        if file not in self._headers:
            self._headers[file] = named(self._columns.get(file) or read_columns(self.folder / file))
        header = self._headers[file]
        if name not in header:
            raise _not_there(self.folder / file, name)
        return header[name]

    def shards(self) -> Iterator[tuple[str, Columns | None]]:
        """Every file with its header, one after the other so that one is in memory; None for a file that is not there.

        Raises FFNError where a file does not have what the index promises.
        """
        promised: dict[str, list[str]] = defaultdict(list)
        for name, file in self.files.items():
            promised[file].append(name)
        for file, names in promised.items():
            path = self.folder / file
            if file not in self._columns and not os.path.exists(path):
                yield file, None  # what it should have is not asked for
                continue
            columns = self._columns.get(file) or read_columns(path)
            if names != columns.names and (lacking := {*names}.difference(columns.names)):
                raise _not_there(path, next(name for name in names if name in lacking))
            yield file, columns


def _not_there(path: Path, name: str) -> FFNError:
    return FFNError(f"{shown_path(path)}: tensor {shown(name, 120)} is in the index and not in this file")


def open_checkpoint(location: Path) -> Checkpoint | None:
    """The tensors at a directory, a `.safetensors` file or an index; None for a directory without any."""
    if location.is_file():
        return _indexed(location) if location.suffix == ".json" else _together(location, [location])
    if (location / INDEX).exists():
        return _indexed(location / INDEX)
    if (location / "model.safetensors").exists():
        return _together(location / "model.safetensors", [location / "model.safetensors"])
    paths = sorted(location.glob("*.safetensors"))
    return _together(location, paths) if paths else None


def _together(where: Path, paths: list[Path]) -> Checkpoint:
    """Files without an index."""
    columns = {path.name: read_columns(path) for path in paths}
    return Checkpoint(shown_path(where), paths[0].parent, _named_once(columns, shown_path(where)), False, columns)


def remote_checkpoint(where: str, columns: dict[str, Columns]) -> Checkpoint:
    """Headers that were fetched: file name → columns."""
    return Checkpoint(where, Path(), _named_once(columns, where), True, columns)


def _named_once(columns: Mapping[str, Columns], where: str) -> dict[str, str]:
    """Tensor → file. Raises FFNError for one that is in two."""
    files: dict[str, str] = {}
    for file, held in columns.items():
        for name in held.names:
            if name in files:
                raise FFNError(f"{where}: tensor {shown(name)} is in two files", f"there is no {INDEX}")
            files[name] = file
    return files


def _indexed(path: Path) -> Checkpoint:
    """A sharded checkpoint. Shard names must be plain file names: one that leaves the directory is refused."""
    where = shown_path(path)
    files = parse_index(path, MOST_HEADER_BYTES)
    if {*map(type, files.values())} != {str}:
        name, shard = next((n, s) for n, s in files.items() if not isinstance(s, str))
        raise FFNError(f"{where}: the shard of tensor {shown(name, 120)} is {shown(shard)}, not a file name")
    for shard in set(files.values()):
        check_shard_name(shard, where)
    return Checkpoint(where, path.parent, files)


def check_shard_name(shard: str, where: str) -> None:
    """FFNError for a shard name that is no plain file name."""
    if not re.fullmatch(r"[\w\-.+=@ ]+", shard) or shard.startswith("."):
        raise FFNError(f"{where}: shard name {shown(shard)} leaves the directory", "it must be a plain file name")


# --- values -----------------------------------------------------------------------------------------------------------


def check_shapes(checkpoint: Checkpoint, located: tuple[Located, ...]) -> None:
    """Raises FFNError where a stored shape is not what the config's widths make of it; shards not here are passed over.

    Tensors of packed formats are passed over too: their shapes say nothing plain.
    """
    for item in located:
        expected = item.stored_shape()
        for name in item.names:
            path = checkpoint.path(name)
            if not os.path.exists(path):
                continue
            info = checkpoint.info(name)
            if info.dtype in _READABLE and _wide(info.shape) != _wide(expected):
                label = f"{shown_path(path)}: tensor {shown(name, 120)}"
                sizes = ", ".join(f"{axis.name} = {axis.size}" for axis in item.axes)
                raise FFNError(f"{label} has shape {list(info.shape)}, expected {list(expected)} ({sizes})")


def _wide(shape: Iterable[int]) -> list[int]:
    """A shape without its axes of one: a correction may be [1, experts], a convolution [out, in, 1]."""
    return [size for size in shape if size != 1]


def check_readable(checkpoint: Checkpoint, located: tuple[Located, ...]) -> None:
    """Raises FFNError for a tensor whose shard is missing or whose dtype is not a plain float."""
    for item in located:
        for name in item.names:
            if name not in checkpoint.files:
                base = name.removesuffix(".weight")
                packed = next((n for n in checkpoint.files if n.startswith(base) and n != f"{base}_bias"), name)
                problem = f"{checkpoint.where}: {shown(packed, 120)} is packed (quantized)"
                raise FFNError(problem, "only unquantized weights are read")
            info = checkpoint.info(name)
            if info.dtype not in _READABLE:
                label = f"{shown_path(checkpoint.path(name))}: tensor {shown(name, 120)}"
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
        stored = canonical(_values(checkpoint.path(item.names[0]), item.names[0]), item)
        if stored.dtype == dtype and stored.is_contiguous() and device == "cpu":
            return stored
        return torch.empty(shape, dtype=dtype, device=device).copy_(stored)
    out = torch.empty(shape, dtype=dtype, device=device)
    for e, name in enumerate(item.names):
        out[e].copy_(canonical(_values(checkpoint.path(name), name), item))
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
