"""Inventory: all tensors of a checkpoint by name, shape and bytes, small even for 90,000 of them.

Tensors that differ only in their expert's number are one entry, `…experts.#.up_proj.weight`, with a count; headers are
read one after the other. Memory grows with the number of layers. Experts of image tokens (`image_experts`) are entries
of their own.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ffncli.dataclass import dataclass
from ffncli.models.files.headers import Columns, TensorInfo
from ffncli.models.files.image_experts import first_numbers, set_apart

if TYPE_CHECKING:  # it imports names from this file
    from ffncli.models.files.checkpoint import Checkpoint

_EXPERT = re.compile(r"experts\.(?:expert_)?\d+\.")  # experts.17.up_proj, experts.expert_17.wi
UNSEEN = TensorInfo("", (), 0)


@dataclass(frozen=True)
class Inventory:
    """`tensors` describes one tensor of each entry, `counts` says how many there are.

    `missing` files are in the index but not on disk; a tensor that only they have has no dtype, shape or bytes.
    """

    where: str
    tensors: Mapping[str, TensorInfo]
    counts: Mapping[str, int]
    missing: tuple[str, ...] = ()
    files: int = 1


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Read every header of a checkpoint, once. Raises FFNError for a header that is wrong."""
    missing: list[str] = []
    files = 0

    def present() -> Iterator[Columns]:
        nonlocal files
        for file, columns in checkpoint.shards():
            files += 1
            if columns is None:
                missing.append(file)
            else:
                yield columns

    of_images = first_numbers(checkpoint.files)
    tensors, counts = collect(present(), of_images)
    gone = set(missing)
    absent = [name for name, file in checkpoint.files.items() if file in gone] if gone else []
    for name in _shared_names(set_apart(absent, of_images)):
        tensors.setdefault(name, UNSEEN)
        counts[name] = counts.get(name, 0) + 1
    return Inventory(checkpoint.where, tensors, counts, tuple(missing), files)


def collect(
    headers: Iterable[Columns], of_images: Mapping[str, int] | None = None
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """The entries of some headers: (name with `#` for an expert's number → one tensor, name → how many).

    `of_images`: where experts of image tokens start, from the names of the whole checkpoint.
    """
    entries: dict[str, list[Any]] = {}
    with _no_garbage_collection():
        for columns in headers:
            names = set_apart(columns.names, of_images or {})
            rows = zip(_shared_names(names), columns.dtypes, columns.shapes, columns.bytes, names, strict=True)
            for shared, dtype, shape, size, name in rows:
                entry = entries.get(shared)
                if entry is None:
                    entries[shared] = [1, dtype, shape, size]
                elif entry[1] == dtype and entry[2] == shape:
                    entry[0] += 1
                else:  # an expert that differs from the others keeps its number
                    entries[name] = [1, dtype, shape, size]
    tensors = {name: TensorInfo(dtype, shape, size) for name, (_, dtype, shape, size) in entries.items()}
    return tensors, {name: count for name, (count, *_) in entries.items()}


def shared_name(name: str) -> str:
    """The name with `#` in the place of its expert's number."""
    return _EXPERT.sub("experts.#.", name)


def _shared_names(names: Sequence[str]) -> Iterable[str]:
    """Every name with `#` in the place of its expert's number, in one pass over all of them."""
    if not names:
        return ()
    text = "\n".join(names)
    shared = _EXPERT.sub("experts.#.", text).split("\n")
    return shared if len(shared) == len(names) else map(shared_name, names)  # a name with a newline


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Parsed headers are many small objects without cycles: looking for cycles took a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
