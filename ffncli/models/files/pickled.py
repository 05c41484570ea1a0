"""`.pt`, `.pth` and `.bin`: the tensors of a file that torch.save wrote, and where their bytes are.

torch reads the pickle with `weights_only=True`, without any fallback, and without its tensors' values: only names,
shapes and the places of the bytes in the file, which are then read as those of a safetensors file.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.headers import Columns
from ffncli.system.files import open_to_read

if TYPE_CHECKING:
    from torch import Tensor

_CODES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "net")  # where a training script puts the weights
_RESAVE = "save it again with torch.save(model.state_dict(), FILE), or as safetensors"


def read_pickled(path: Path) -> Columns:
    """The tensors of a file that torch.save wrote: a dictionary of tensors, itself or under `state_dict` or the like.

    Raises FFNError for a file of an old format or with compressed parts, for one that holds anything but tensors and
    plain values, and for tensors that do not lie in the file as they are.
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
        code, start = _CODES.get(str(tensor.dtype).removeprefix("torch.")), _start(tensor)
        length = tensor.numel() * tensor.element_size()
        if code is None:
            continue
        if start is None or not tensor.is_contiguous() or start + length > size:
            raise FFNError(f"{where}: tensor {shown(name, 120)} does not lie in the file as it is", _RESAVE)
        for column, value in zip(columns[:5], (name, code, tuple(tensor.shape), length, start), strict=True):
            column.append(value)  # type: ignore[attr-defined]
    return columns


def _unpickled(path: Path, where: str) -> Any:
    """What the file holds, its tensors without values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():  # then torch.load notes where a storage's bytes are, and reads none
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle can raise anything
        first = str(error).partition("\n")[0].partition(" This file can still")[0]
        what = "it holds more than tensors, which is not loaded" if "Weights only" in first else first[:200]
        raise FFNError(f"{where} cannot be read: {what}", _RESAVE) from None


def _tensors(value: Any, where: str) -> Mapping[str, Tensor]:
    """The dictionary of tensors: `value` itself, or the value of one of its usual keys."""
    import torch

    for candidate in (value, *(value.get(key) for key in _INSIDE)) if isinstance(value, Mapping) else ():
        if isinstance(candidate, Mapping):
            tensors = {k: v for k, v in candidate.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}
            if tensors:
                return tensors
    raise FFNError(f"{where} holds no dictionary of tensors", _RESAVE)


def _start(tensor: Tensor) -> int | None:
    """The byte of the file where the tensor begins."""
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return None if start is None else int(start) + int(tensor.storage_offset()) * tensor.element_size()
