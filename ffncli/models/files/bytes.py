"""Bytes of files, only the requested ones: positional reads into one buffer, and a clear error for a short file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ffncli.errors import ExitCode, FFNError, shown_path
from ffncli.system.files import open_to_read

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

MOST_AT_ONCE = 16 << 20  # bytes: Ctrl-C takes effect between two reads


def named_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a .safetensors file, by the library. Raises FFNError, naming the file, if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    opened: Callable[..., Any] = safe_open
    try:
        with opened(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise FFNError(f"cannot read {shown_path(path)}: {error}") from None
    except OSError as error:
        raise FFNError(f"cannot read {shown_path(path)}: {error.strerror or error}") from None
    return tensor


class OpenFiles:
    """Open files and a read buffer; a context manager that closes them."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}
        self._buffer: Tensor | None = None
        self._bytes: Any = None

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def read(self, path: Path, start: int, count: int, times: int = 1, pitch: int = 0) -> Tensor:
        """`count` bytes from byte `start` on, as uint8; so many `times`, `pitch` bytes apart. The next read overwrites
        them.

        Raises FFNError if the file ends too early (exit 2) or cannot be read (exit 3).
        """
        import torch

        if count == pitch:
            count, times = count * times, 1
        total = count * times
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.uint8)
            data: Any = self._buffer.numpy()
            self._bytes = memoryview(data)
        try:
            if path not in self._open:
                self._open[path] = open_to_read(path)
            for at in range(times):
                self._fill(path, start + at * pitch, self._bytes[at * count : (at + 1) * count])
        except FileNotFoundError:
            raise FFNError(f"cannot read {shown_path(path)}: the file does not exist") from None
        except OSError as error:
            what = f"cannot read {shown_path(path)}: {error.strerror or error}"
            raise FFNError(what, code=ExitCode.ENVIRONMENT) from None
        return self._buffer[:total]

    def _fill(self, path: Path, start: int, into: memoryview) -> None:
        at = 0
        while at < len(into):
            got = os.preadv(self._open[path].fileno(), [into[at : at + MOST_AT_ONCE]], start + at)
            if not got:
                need = f"{shown_path(path)} is truncated: its tensors extend to byte {start + len(into)}"
                raise FFNError(f"{need}, the file ends at {start + at}", "is the download complete?")
            at += got
