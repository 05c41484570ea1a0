"""The data format of the referee's connections: JSON, and the bytes of tensors. Nothing is unpickled.

Plain values, tensors, lists, mappings and four records can be sent. Since a worker runs users' code, received data is
checked against annotations before it is used.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ffncli.bench.referee.problem import CallSample, Inputs
from ffncli.bench.verdict import Error, Ruling, WrongCode

_RECORDS = {kind.__name__: kind for kind in (Inputs, CallSample, Ruling, Error)}
_HINTS = {name: get_type_hints(kind) for name, kind in _RECORDS.items()}
_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)}
_LONGEST_HEAD = 1 << 24  # maximum bytes of a message
Fill = Callable[[memoryview], object]  # writes a tensor's bytes into the given memory


def send(connection: Connection, value: Any) -> None:
    """Send a value: its structure as JSON, then the bytes of every tensor in it."""
    tensors: list[Tensor] = []
    connection.send_bytes(json.dumps(_plain(value, tensors)).encode())
    for tensor in tensors:
        if tensor.numel():
            connection.send_bytes(_memory(tensor))


def receive(connection: Connection) -> Any:
    """Receive the next value."""

    def fill(memory: memoryview) -> None:
        memory[:] = connection.recv_bytes()

    return _value(json.loads(connection.recv_bytes(_LONGEST_HEAD)), fill)


def packed(value: Any) -> bytes:
    """Return a value as one message: the length of its JSON, the JSON, and the bytes of its tensors."""
    tensors: list[Tensor] = []
    head = json.dumps(_plain(value, tensors)).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, *map(_memory, tensors)))


def unpacked(message: bytes) -> Any:
    """Return the value of a message made by `packed`."""
    at = 4 + int.from_bytes(message[:4], "little")
    head = json.loads(message[4:at])

    def fill(memory: memoryview) -> None:
        nonlocal at
        memory[:] = message[at : at + len(memory)]
        at += len(memory)

    return _value(head, fill)


def require_fitting(values: Iterable[Any], hints: Iterable[Any]) -> None:
    """Raise TypeError unless the values match these annotations."""
    for value, hint in zip(values, hints, strict=True):
        if not _fits(value, hint):
            raise TypeError(f"a {type(value).__name__} where the referee expects {hint}")


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """Return the value in JSON's types; its tensors are appended to `tensors`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors.append(value.detach().cpu().contiguous())
            return {"tensor": [str(value.dtype), list(value.shape)]}
        case Mapping():
            return {"mapping": {key: _plain(one, tensors) for key, one in value.items()}}
        case list() | tuple():
            return [_plain(one, tensors) for one in value]
    name = type(value).__name__
    return {name: {one.name: _plain(getattr(value, one.name), tensors) for one in fields(_RECORDS[name])}}


def _value(plain: Any, fill: Fill) -> Any:
    """Return the value described by `plain`; `fill` gets the memory of the value's tensors, one after the other."""
    if isinstance(plain, list):
        return [_value(one, fill) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((name, content),) = plain.items()
    if name == "tensor":
        dtype, shape = content
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        if tensor.numel():
            fill(_memory(tensor))
        return tensor
    values = {key: _value(one, fill) for key, one in content.items()}
    if name == "mapping":
        return values
    kind, hints = _RECORDS[name], _HINTS[name]
    if values.get("code") is not None and kind is Ruling:
        values["code"] = WrongCode(values["code"])
    require_fitting(values.values(), [hints[key] for key in values])
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(_fits(one, args[1]) for one in value.values())
    if origin is not None and issubclass(origin, Sequence):
        return isinstance(value, list) and all(_fits(one, args[0]) for one in value)
    return isinstance(value, hint)


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, as bytes."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
