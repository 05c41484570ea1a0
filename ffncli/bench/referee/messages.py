"""What goes over the lines of the referee: JSON, and the bytes of tensors. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from ffncli.bench.referee.errors import CallSample

_DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)}
_PARTS = ("x", "out", "g", "gradient")  # of a CallSample


def send(connection: Connection, head: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """A message: what is in `head` as JSON, then every tensor's bytes."""
    plain = [tensor.detach().cpu().contiguous() for tensor in tensors]
    kinds = [[str(tensor.dtype), list(tensor.shape)] for tensor in plain]
    connection.send_bytes(json.dumps({**head, "tensors": kinds}).encode())
    for tensor in plain:
        if tensor.numel():
            connection.send_bytes(_bytes(tensor))


_LONGEST_HEAD = 1 << 24  # bytes; more is nothing that we have sent


def receive(connection: Connection) -> tuple[dict[str, Any], list[Tensor]]:
    """The next message."""
    head = json.loads(connection.recv_bytes(_LONGEST_HEAD))
    tensors = []
    for kind, shape in head["tensors"]:
        tensor = torch.empty(shape, dtype=_DTYPES[kind])
        if tensor.numel():
            _bytes(tensor)[:] = connection.recv_bytes()
        tensors.append(tensor)
    return head, tensors


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def packed(sample: CallSample) -> bytes:
    """A sample as one message: the length of its head, the head as JSON, the bytes of its tensors."""
    parts = {
        part: getattr(sample, part).detach().cpu().contiguous() for part in _PARTS if getattr(sample, part) is not None
    }
    kinds = {part: [str(tensor.dtype), list(tensor.shape)] for part, tensor in parts.items()}
    head = json.dumps({"kernel": sample.kernel, "block": sample.block, "parts": kinds}).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, *map(_bytes, parts.values())))


def unpacked(message: bytes) -> CallSample:
    """The sample of such a message."""
    end = 4 + int.from_bytes(message[:4], "little")
    head = json.loads(message[4:end])
    parts: dict[str, Any] = {}
    for part, (kind, shape) in head["parts"].items():
        tensor = torch.empty(shape, dtype=_DTYPES[kind])
        count = tensor.numel() * tensor.element_size()
        if count:
            _bytes(tensor)[:] = message[end : end + count]
        parts[part], end = tensor, end + count
    return CallSample(head["kernel"], **parts, block=int(head["block"]))


def about(ask: str, samples: Sequence[CallSample]) -> tuple[dict[str, Any], list[Tensor]]:
    """A question about samples, and their tensors."""
    parts = [[part for part in _PARTS if getattr(sample, part) is not None] for sample in samples]
    tensors = [getattr(s, part) for s, names in zip(samples, parts, strict=True) for part in names]
    return {"ask": ask, "kernels": [s.kernel for s in samples], "parts": parts}, tensors


def samples_of(kernels: Sequence[str], parts: Sequence[Sequence[str]], tensors: Sequence[Tensor]) -> list[CallSample]:
    """The samples of a question about them."""
    at, samples = iter(tensors), []
    for kernel, names in zip(kernels, parts, strict=True):
        given: dict[str, Any] = {name: next(at) for name in names if name in _PARTS}
        samples.append(CallSample(kernel, **given))
    return samples
