"""Read rows of a tensor in a file: only the requested bytes, with positional reads into one buffer. Also reads the grid
of scales or zeros of a tensor's matrices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ldexp, nan, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.models.files.checkpoint import PLAIN, ByteLocation, Checkpoint
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.packing import LogicalTensor
from ffncli.models.files.strict_json import Fields
from ffncli.system.files import open_to_read

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor


FLOAT8 = {
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
POWERS = ("F8_E8M0", "U8")  # exponents without a mantissa, stored with or without a dtype of their own


class FetchedFile(type(Path())):  # type: ignore[misc]
    """The path of a file that is elsewhere: `fetch(start, stop)` returns some of its bytes."""

    fetch: Callable[[int, int], bytes]


class OpenFiles:
    """Open files and a read buffer; a context manager that closes the files."""

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
        """Read `count` bytes from byte `start` as uint8, `times` times, at intervals of `pitch` bytes. The next read
        overwrites the result."""
        import torch

        if count == pitch:
            count, times = count * times, 1
        total = count * times
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.uint8)
            data: Any = self._buffer.numpy()
            self._bytes = memoryview(data)
        try:
            if path not in self._open and not isinstance(path, FetchedFile):
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
        if isinstance(path, FetchedFile):
            into[:] = path.fetch(start, start + len(into))
            return
        at = 0
        while at < len(into):
            got = os.preadv(self._open[path].fileno(), [into[at : at + MOST_AT_ONCE]], start + at)
            if not got:
                need = f"{shown_path(path)} is truncated: its tensors extend to byte {start + len(into)}"
                raise FFNError(f"{need}, but the file ends at {start + at}", "is the download complete?")
            at += got


Decode = Callable[[OpenFiles, int, int], "Tensor"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to read: its logical shape, and `decode(files, start, stop)`, which returns some of its rows.

    The tensor counts as one matrix [..., columns]. Rows are plain floats [stop - start, columns] and valid until the
    next read; one call must stay within one matrix of the last two axes.
    """

    place: ByteLocation
    shape: tuple[int, ...]
    decode: Decode = field(repr=False)


@dataclass(frozen=True)
class Packed:
    """A packed matrix, the stored tensors that include its pieces, and the config's quantization_config."""

    checkpoint: Checkpoint
    means: LogicalTensor
    tensors: Mapping[str, TensorInfo]
    config: Fields

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape; formats with unknown shapes are not unpacked."""
        assert self.means.shape is not None
        return self.means.shape

    @property
    def base(self) -> str:
        """Return the prefix of its pieces' names."""
        return self.means.anchor.removesuffix("_packed")

    def place(self, name: str) -> ByteLocation:
        """Return the location of a required piece's bytes."""
        if name not in self.tensors:
            what = f"{shown_path(self.checkpoint.path(self.means.anchor))}: tensor {shown(name, 120)} is missing"
            raise FFNError(what, f"{shown(self.means.anchor, 120)} cannot be read without it")
        return self.checkpoint.place(name)

    def first(self, *names: str) -> str | None:
        """Return the first of these tensors that exists; None if none of them exists."""
        return next((name for name in names if name in self.tensors), None)

    def wrong(self, name: str, what: str, hint: str = "") -> FFNError:
        """Build the error for an invalid piece."""
        return FFNError(f"{shown_path(self.checkpoint.path(name))}: tensor {shown(name, 120)} {what}", hint)


# --- bytes ------------------------------------------------------------------------------------------------------------


def torch_dtype(place: ByteLocation, name: str) -> Any:
    """Return torch's dtype with this name. Raises FFNError if this torch does not have it."""
    import torch

    dtype = getattr(torch, name, None)
    if dtype is None:
        what = (
            f"{shown_path(place.path)} holds {place.info.dtype} values, which torch {torch.__version__} does not have"
        )
        raise FFNError(what, "a newer torch may: pip install -U torch", ExitCode.ENVIRONMENT)
    return dtype


def rows_of(place: ByteLocation, shape: tuple[int, ...]) -> Decode:
    """Return a reader of raw rows, uint8 [stop - start, bytes of a row], for a tensor stored as rows of `shape`."""
    total = prod(shape[:-1])
    width = place.info.bytes // total if total else 0

    def read(files: OpenFiles, start: int, stop: int) -> Tensor:
        raw = files.read(place.path, place.start + start * width, (stop - start) * width)
        return raw.view(stop - start, width)

    return read


def columns_of(place: ByteLocation, matrix: int, files: OpenFiles, start: int, stop: int) -> Tensor:
    """Read some columns of one of the tensor's matrices, over all rows: uint8 [rows, bytes]."""
    rows, columns = place.info.shape[-2:]
    item = place.info.bytes // max(1, prod(place.info.shape))
    at = place.start + (matrix * rows * columns + start) * item
    raw = files.read(place.path, at, (stop - start) * item, rows, columns * item)
    return raw.view(rows, -1)


@cache
def powers() -> Tensor:
    """Return E8M0's table: byte b is 2^(b - 127), exact in float32; 255 is NaN (OCP Microscaling 1.0, 5.4.1)."""
    import torch

    return torch.tensor([ldexp(1.0, byte - 127) for byte in range(255)] + [nan], dtype=torch.float32)


def numbers(raw: Tensor, place: ByteLocation, name: str) -> Tensor:
    """Convert scales or zeros to float32: plain floats, FP8, powers of two (E8M0), int8."""
    import torch

    kind = place.info.dtype
    if kind in POWERS:
        return powers()[raw.long()]
    if kind == "I8":
        return raw.view(torch.int8).to(torch.float32, copy=True)
    known = PLAIN | FLOAT8
    if kind not in known:
        what = f"{shown_path(place.path)}: tensor {shown(name, 120)} has scales of type {kind}"
        raise FFNError(what, "supported are plain floats, FP8 and E8M0")
    return raw.view(torch_dtype(place, known[kind])).to(torch.float32, copy=True)  # the next read overwrites `raw`


# --- one scale for many values ----------------------------------------------------------------------------------------


class ScaleGrid:
    """A scale or a zero for each block of a tensor's matrices; `blocks` is the number of rows and columns in a block.

    `stated` is the config's weight_block_size.
    """

    def __init__(self, place: ByteLocation, name: str, shape: tuple[int, ...], stated: Any = None) -> None:
        self.place, self.name = place, name
        counts = (*place.info.shape, *(1,) * (len(shape) - len(place.info.shape)))
        sizes, self.counts = (1, 1, *shape)[-2:], (1, 1, *counts)[-2:]
        self.height, self.columns = sizes
        self.lead = prod(counts[:-2])
        if self.lead not in (1, prod(shape[:-2])):
            raise self._wrong("are not one set for each matrix")
        # several block sizes may fit the scales: prefer the config's, then the usual 128, then equal blocks
        ways = [tuple(stated)] if _block_of_two(stated) else []
        ways += [(128, 128), tuple(size / (count or 1) for size, count in zip(sizes, self.counts, strict=True))]
        fits = (way for way in ways if way == tuple(map(int, way)) and all(way))
        blocks = next((way for way in fits if self.counts == _counts(sizes, way)), None)
        if blocks is None:
            raise self._wrong(f"do not divide {list(sizes)} into equal blocks, and there is no weight_block_size")
        self.blocks = int(blocks[0]), int(blocks[1])

    def _wrong(self, what: str) -> FFNError:
        label = f"{shown_path(self.place.path)}: tensor {shown(self.name, 120)}"
        return FFNError(f"{label}: scales of shape {list(self.place.info.shape)} {what}")

    def of(self, files: OpenFiles, start: int, stop: int) -> Tensor:
        """Read the scales or zeros for some rows: float32 [stop - start, values per row]."""
        import torch

        matrix, first = divmod(start, self.height)
        low, high = first // self.blocks[0], (first + stop - start - 1) // self.blocks[0] + 1
        at = (matrix if self.lead > 1 else 0) * self.counts[0]
        width = self.counts[1] * self.place.info.bytes // max(1, prod(self.place.info.shape))
        raw = files.read(self.place.path, self.place.start + (at + low) * width, (high - low) * width)
        scales = numbers(raw, self.place, self.name).view(high - low, self.counts[1])
        return scales[torch.arange(first, first + stop - start) // self.blocks[0] - low]

    def times(self, values: Tensor, factors: Tensor) -> Tensor:
        """Multiply `values` [rows, columns] in place by the factor of each block; `factors` come from `of`."""
        if values.shape[1] == self.blocks[1] * self.counts[1]:
            values.view(*factors.shape, -1).mul_(factors.unsqueeze(-1))
            return values
        return values.mul_(self.spread(factors, values.shape[1]))

    def spread(self, scales: Tensor, columns: int) -> Tensor:
        """Repeat `scales` from `of` for each column."""
        return scales.repeat_interleave(self.blocks[1], 1)[:, :columns]


def _block_of_two(stated: Any) -> bool:
    """Return whether a config's weight_block_size is [rows, columns]; other values are ignored."""
    return isinstance(stated, list) and len(stated) == 2 and all(type(n) is int and n > 0 for n in stated)


def _counts(sizes: tuple[int, ...], blocks: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(-(-size // int(block)) for size, block in zip(sizes, blocks, strict=True))


MOST_AT_ONCE = 16 << 20  # bytes per read; Ctrl-C takes effect between reads


def named_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a .safetensors file with the library."""
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
