"""The collectives that a program runs, counted by torch, with the tensor that each takes from this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor.debug import CommDebugMode

from ffncli.dataclass import dataclass
from ffncli.show.text import bytes_text, plural

_NAMES = {"all_reduce": "all-reduce", "all_to_all_single": "all-to-all", "all_gather_into_tensor": "all-gather"}


@dataclass(frozen=True)
class CollectiveCall:
    """One collective on one rank: its name, the shape and dtype of the tensor that the rank gives, how many ranks do.

    `kept_bytes` of an all-to-all are the rows that the rank keeps.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int = 1
    kept_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The size of that tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tensor(self) -> str:
        """`[16, 64] float32, 4.096 KB`."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}, {bytes_text(self.bytes)}"


class Exchanges(CommDebugMode):  # type: ignore[no-untyped-call]
    """Within it, torch's count of the collectives, each with its tensor in `done`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[CollectiveCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch count, and note what it has counted."""
        before = self.get_total_counts()
        out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self.get_total_counts() > before:
            self.done.append(_exchange(func.overloadpacket.__name__, args))
        return out


def _exchange(name: str, args: Sequence[Any]) -> CollectiveCall:
    """The exchange of a call to an operator, whose last argument is the name of its group."""
    tensor, group = args[0], _resolve_process_group(args[-1])
    kept = args[2][group.rank()] * prod(tensor.shape[1:]) * tensor.itemsize if name == "all_to_all_single" else 0
    return CollectiveCall(_NAMES.get(name, name), tuple(tensor.shape), tensor.dtype, group.size(), kept)


def in_words(exchanges: list[CollectiveCall]) -> str:
    """`1 all-reduce of [16, 64] float32, 4.096 KB`; without any, `no collective`."""
    counts = Counter(exchanges)
    texts = [f"{count} {plural(one.name, count)} of {one.tensor}" for one, count in counts.items()]
    return "; ".join(texts) or "no collective"
