"""Files that only grow, a line or a few at a time: appended to on disk, looked into, and cut back after a crash."""

from __future__ import annotations

import os
from pathlib import Path

from ffncli.errors import ExitCode, FFNError, shown_path
from ffncli.system.files import open_to_read


def append(path: Path, text: str) -> tuple[int, int]:
    """Append the text to the file on disk in one write; returns the sizes before and after.

    Raises FFNError (exit 3) if not all of it could be written; the file is then unchanged.
    """
    data = text.encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            before = os.fstat(handle).st_size
            try:
                left = memoryview(data)
                while left:  # a few kilobytes take one write, unless the disk is full
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, before)
                raise
            return before, before + len(data)
        finally:
            os.close(handle)
    except OSError as error:
        raise FFNError(f"cannot write {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None


def first_bytes(path: Path, most: int) -> bytes:
    """The file's first `most` bytes; empty if there is no such file."""
    try:
        with open_to_read(path) as file:
            return file.read(most)
    except OSError:
        return b""


def cut(path: Path, size: int) -> None:
    """Cut the file to `size` bytes."""
    try:
        if path.stat().st_size > size:
            with path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
    except OSError as error:
        raise FFNError(f"cannot write {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
