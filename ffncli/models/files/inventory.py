"""List all tensors of a checkpoint by name, shape and bytes; the list stays small even for 90,000 tensors.

Tensors whose names differ only in the expert's number share one entry, `…experts.#.up_proj.weight`, with a count.
Headers are read one after another, so memory use grows only with the number of layers.

ERNIE 4.5 VL's files number the experts for image tokens together with those for text tokens, as the second half. A
layer with such experts has a second router, `gate.weight_1`. As in transformers, these experts are assigned to a module
`vision_moe`, so that they have entries of their own.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffncli.models.files.headers import Columns, TensorInfo

if TYPE_CHECKING:
    from ffncli.models.files.checkpoint import Checkpoint


_EXPERT = re.compile(r"experts\.(?:expert_)?\d+\.")  # experts.17.up_proj, experts.expert_17.wi
_LISTS = re.compile(r"experts\.(gate_up_proj|gate_proj|up_proj|down_proj)s\.\d+\.")  # a list of each matrix
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.(weight|bias)\d+(?![\w.])")  # Megatron-core's grouped experts
_OLD_GGUF = re.compile(r"(?<=\.)(ffn_(?:gate|up|down))\.\d+\.(?=weight|scale|bias)")  # before experts were one tensor
UNSEEN = TensorInfo("", (), 0)


@dataclass(frozen=True)
class Inventory:
    """The entries of a checkpoint: `tensors` describes one tensor of each entry, `counts` is the number of tensors in
    it.

    `missing` lists files that are in the index but not on disk; their tensors have no dtype, shape or bytes.
    """

    where: str
    tensors: Mapping[str, TensorInfo]
    counts: Mapping[str, int]
    missing: tuple[str, ...] = ()
    files: int = 1


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Read every header of a checkpoint once."""
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
    """Return two mappings from the names in some headers, with `#` for the expert's number: to one tensor, and to the
    number of tensors.

    `of_images` maps modules to their first expert for image tokens (`first_numbers` of the whole checkpoint).
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
    """Replace the expert's number in a name by `#`."""
    name = _EXPERT.sub("experts.#.", name)
    if "_projs." in name:
        name = _LISTS.sub(r"experts.#.\1.", name)
    if "experts.linear_fc" in name:
        name = _GROUPED.sub(r"experts.#.\1.\2", name)
    return _OLD_GGUF.sub(r"experts.#.\1.", name) if ".ffn_" in name else name


def _shared_names(names: Sequence[str]) -> Iterable[str]:
    """Apply `shared_name` to all names in one pass."""
    if not names:
        return ()
    text = "\n".join(names)
    shared = shared_name(text).split("\n")
    return shared if len(shared) == len(names) else map(shared_name, names)  # one of the names contains a newline


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection. Parsed headers are many small objects without cycles, and the search for cycles took
    a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


ROUTER = "gate.weight_1"  # the router for text is `gate.weight`; both are stored as [in, out]
_ITS_END = f".{ROUTER}"
MODULE = "vision_moe."
_CORRECTIONS = "moe_statics.e_score_correction_bias"  # one row for text, one row for images
_NUMBERED = re.compile(r"(.*?\.)experts\.(\d+)\.", re.DOTALL)


def first_numbers(names: Iterable[str]) -> Mapping[str, int]:
    """Find, for each module with two routers, the number of its first expert for images."""
    every = [*names]
    experts: dict[str, set[int]] = {n.removesuffix(ROUTER): set() for n in every if n.endswith(_ITS_END)}
    for match in map(_NUMBERED.match, every) if experts else ():
        if match and match[1] in experts:
            experts[match[1]].add(int(match[2]))
    return {module: (len(numbers) + 1) // 2 for module, numbers in experts.items()}


def set_apart(names: Sequence[str], first: Mapping[str, int]) -> Sequence[str]:
    """Insert `vision_moe` into the names of experts for images."""
    return [_renamed(name, first) for name in names] if first else names


def _renamed(name: str, first: Mapping[str, int]) -> str:
    match = _NUMBERED.match(name)
    if match is None or int(match[2]) < first.get(match[1], int(match[2]) + 1):
        return name
    return match[1] + MODULE + name.removeprefix(match[1])


def corrections(name: str, stored: Iterable[str], shape: tuple[int, ...]) -> str:
    """Return the name for images of a tensor with a row for text and a row for images; empty for any other tensor."""
    module = name.removesuffix(_CORRECTIONS)
    both = module != name and module + ROUTER in stored and len(shape) == 2 and shape[0] == 2
    return f"{module}{MODULE}{_CORRECTIONS}" if both else ""
