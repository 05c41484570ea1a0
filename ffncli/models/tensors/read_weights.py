"""Read one layer's weights in canonical form: only their bytes, each byte once, a few MB at a time.

A stored tensor arrives in blocks of rows (`dequantize.py`). Each block is copied directly into the canonical
parameters; gate and up of a fused matrix are filled together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import prod
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.dequantize import integers, shaped, stored
from ffncli.models.files.rows import OpenFiles, StoredTensor
from ffncli.models.tensors.layout import Located, squeezed, wrong_shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK = 1 << 20  # values: 4 MB of float32 stay in a processor's cache between reading and conversion
_MOST_WORKERS = 4  # one thread each, since torch's own threads synchronise after every block
_WORTH_WORKERS = 64 << 20  # bytes
_Work: TypeAlias = "list[tuple[StoredTensor, tuple[int, int, int], list[_Destination]]]"
_Rows: TypeAlias = "tuple[StoredTensor, list[_Destination], tuple[int, int, tuple[int, int]]]"


def read_weights(
    checkpoint: Checkpoint,
    located: tuple[Located, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    quantization: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Read the located parameters in canonical form, contiguous, in `dtype` on `device`; other tensors are not read.

    Packed tensors are dequantized; `quantization` is the config's quantization_config. Raises FFNError for a tensor
    that is missing, truncated or packed in an unsupported way, or that has another shape.
    """
    import torch

    tensors: dict[str, StoredTensor] = {}
    wanted: dict[str, list[tuple[Located, int]]] = defaultdict(list)
    listed = [item for item in located if item.is_table]
    located = tuple(item for item in located if not item.is_table)
    for item in located:
        expected = item.stored_shape()
        for expert, name in enumerate(item.names):
            tensor = tensors.get(name) or stored(checkpoint, name, quantization)
            if squeezed(tensor.shape) != squeezed(expected):
                raise wrong_shape(tensor.place.path, name, tensor.shape, item)
            tensors[name] = tensor if tensor.shape == expected else shaped(tensor, expected)
            wanted[name].append((item, expert))
    out = {
        item.parameter: torch.empty([axis.size for axis in item.axes], dtype=dtype, device=device) for item in located
    }
    work: _Work = []
    for name in sorted(wanted, key=lambda name: tensors[name].place[:2]):  # in the order on disk
        targets = [_destination(out[item.parameter], item, expert) for item, expert in wanted[name]]
        work.append((tensors[name], _matrices(wanted[name][0][0]), targets))
    _fill(work, sum(tensor.nbytes for tensor in out.values()))
    return out | {item.parameter: _table(checkpoint, item).to(device) for item in listed}


def read_matrices(
    checkpoint: Checkpoint,
    located: Sequence[Located],
    expert: int = 0,
    quantization: Mapping[str, Any] | None = None,
    first: int | None = None,
) -> list[Tensor]:
    """Read matrices of one expert, float32 [out, in]; a parameter with fewer axes, which `expert` leaves alone, is read
    whole, in its shape.

    Rows of a fused tensor that hold none of these parameters are not read, and rows that several of them share are read
    once. `first` reads only so many stored rows, and leaves the other values 0.
    """
    import torch

    out: list[Tensor] = []
    targets: dict[str, list[_Destination]] = defaultdict(list)
    for item in located:
        one = len(item.axes) > 2
        sizes = [axis.size for axis in item.axes[one:]]
        out.append(torch.empty(sizes) if first is None else torch.zeros(sizes))
        place = out[-1].unsqueeze(0) if one else out[-1]
        for at, name in enumerate(item.names[expert : expert + 1] if one and item.slice.per_expert else item.names):
            targets[name].append(_destination(place, item, at))
    with OpenFiles() as files:
        for name, several in targets.items():
            item, expected = several[0].item, several[0].item.stored_shape()
            tensor = stored(checkpoint, name, quantization)
            if squeezed(tensor.shape) != squeezed(expected):
                raise wrong_shape(tensor.place.path, name, tensor.shape, item)
            tensor = tensor if tensor.shape == expected else shaped(tensor, expected)
            matrices, rows, columns = _matrices(item)
            chosen = expert if len(item.axes) > 2 and matrices > 1 else None
            spans = [one.rows(rows) for one in several]
            low, high = min(start for start, _ in spans), max(stop for _, stop in spans)
            high = high if first is None else min(high, low + first)
            step = max(1, _BLOCK // max(1, columns))
            for matrix in range(matrices) if chosen is None else (chosen,):
                for start in range(low, high, step):
                    stop = min(start + step, high)
                    block = tensor.decode(files, matrix * rows + start, matrix * rows + stop).view(stop - start, -1)
                    for target in several:
                        target.fill(0 if chosen is not None else matrix, start, block)
    return out


def read_apart(item: Located) -> bool:
    """Return whether a parameter has stored rows of its own, so that reading it alone reads nothing twice."""
    by_rows = (item.output_axis == -2) != item.slice.transposed
    return item.slice.parts == 1 or (by_rows and not item.slice.interleaved)


def _table(checkpoint: Checkpoint, item: Located) -> Tensor:
    """Read a table of integers, in its parameter's shape."""
    (name,) = item.names
    place = checkpoint.place(name)
    if tuple(place.info.shape) != item.stored_shape():
        raise wrong_shape(place.path, name, place.info.shape, item)
    return integers(checkpoint, name)


def values(checkpoint: Checkpoint, name: str, quantization: Mapping[str, Any] | None = None) -> Tensor:
    """Read one whole tensor by its logical name, in its logical shape: as stored, or float32 if dequantized."""
    import torch

    tensor = stored(checkpoint, name, quantization)
    with OpenFiles() as files:
        parts = [tensor.decode(files, *rows).clone() for _, _, rows in _blocks((1, 1, 1, *tensor.shape)[-3:])]
    return torch.cat(parts).view(tensor.shape) if parts else torch.empty(tensor.shape)


def _matrices(item: Located) -> tuple[int, int, int]:
    """Return a parameter's stored shape as (matrices, rows, columns); a vector is one row."""
    shape = (1, 1, *item.stored_shape())
    if item.slice.stacked:
        return item.axes[0].size, shape[-2] // item.axes[0].size, shape[-1]
    return prod(shape[:-2]), shape[-2], shape[-1]


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield (matrix, its first row, (start, stop) among all rows) for a whole tensor, in byte order."""
    matrices, rows, columns = shape
    step = max(1, _BLOCK // max(1, columns))
    for matrix in range(matrices if columns else 0):
        for start in range(0, rows, step):
            yield matrix, start, (matrix * rows + start, matrix * rows + min(start + step, rows))


# --- several at a time ------------------------------------------------------------------------------------------------


def _fill(work: _Work, size: int) -> None:
    """Read every block of these tensors into its targets, which have a total of `size` bytes."""
    import torch

    pieces = ((tensor, targets, block) for tensor, shape, targets in work for block in _blocks(shape))
    threads = torch.get_num_threads()
    workers = min(_MOST_WORKERS, threads) if size >= _WORTH_WORKERS else 1
    lock, stop = Lock(), Event()
    if workers == 1:
        return _read_pieces(pieces, lock, stop)
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = [pool.submit(_read_pieces, pieces, lock, stop) for _ in range(workers)]
        try:
            for one in as_completed(running):
                one.result()
        finally:
            stop.set()  # after an error or Ctrl-C, the other workers stop after their current block
            torch.set_num_threads(threads)  # this also sets the number of threads for later pools


def _read_pieces(pieces: Iterator[_Rows], lock: Lock, stop: Event) -> None:
    """Process blocks until no block is left; several threads share `pieces`."""
    with OpenFiles() as files:
        while not stop.is_set():
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            tensor, targets, (matrix, start, rows) = piece
            block = tensor.decode(files, *rows).view(rows[1] - rows[0], -1)
            for target in targets:
                target.fill(matrix, start, block)


# --- where a block goes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Destination:
    """A canonical parameter in the stored tensor's layout, [matrices, rows, columns], without the tensor's other parts.
    The parts share the rows (`by_rows`) or the columns."""

    place: Tensor
    item: Located
    by_rows: bool

    def rows(self, stored: int) -> tuple[int, int]:
        """Return the first of the stored rows that hold this parameter, and the row after the last one."""
        if self.item.slice.parts == 1 or self.item.slice.interleaved or not self.by_rows:
            return 0, stored
        height = self.place.shape[1]
        return self.item.slice.part * height, (self.item.slice.part + 1) * height

    def fill(self, matrix: int, start: int, block: Tensor) -> None:
        """Copy this parameter's part of some stored rows."""
        piece, place = self.item.slice, self.place[matrix]
        if piece.parts > 1 and self.by_rows:
            block, start = self._rows_of_part(start, block)
        elif piece.parts > 1:
            width = place.shape[1]
            block = (
                block[:, piece.part :: piece.parts] if piece.interleaved else block.narrow(1, piece.part * width, width)
            )
        if piece.rows > 1:
            block = block[: max(0, 1 - start)]
        place[start : start + len(block)].copy_(block)

    def _rows_of_part(self, start: int, block: Tensor) -> tuple[Tensor, int]:
        """Return the rows of `block` that belong to this parameter, and the first one's index in the parameter. `start`
        is the index of the block's first stored row."""
        piece, height = self.item.slice, self.place.shape[1]
        if piece.interleaved:
            first = (piece.part - start) % piece.parts
            return block[first :: piece.parts], (start + first) // piece.parts
        low = max(start, piece.part * height)
        high = max(low, min(start + len(block), (piece.part + 1) * height))
        return block[low - start : high - start], low - piece.part * height


def _destination(parameter: Tensor, item: Located, expert: int) -> _Destination:
    place = parameter[expert] if item.slice.per_expert else parameter
    place = place.view(-1, *(1, 1, *place.shape)[-2:])
    by_rows = item.output_axis == -2
    if item.slice.transposed:
        place, by_rows = place.transpose(-1, -2), not by_rows
    return _Destination(place, item, by_rows)
