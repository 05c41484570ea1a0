"""The traffic of a split block, counted in two ways: from its steps, and by running it on simulated ranks.

A simulated rank runs without other ranks, in torch's fake process group and with tensors that have only shapes. The
program itself calls the collectives, so they are an independent check of the counts that `models/counting` derives from
the steps. Nothing is computed: a layer of any size, over thousands of ranks, takes a second and no memory.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor.debug import CommDebugMode

from ffncli.block.dtypes import activation_dtype
from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import Step, experts_per_token, id_inputs, input_shapes, parameters, tables
from ffncli.errors import FFNError
from ffncli.models.counting.parallel import all_gather_bytes, ring_all_reduce_bytes
from ffncli.models.counting.plan import Collectives, Planner
from ffncli.models.model import Group
from ffncli.run.ranks.parallel import Choices, Dispatch, ParallelBlock, gathered
from ffncli.run.ranks.store import RankGroup
from ffncli.show.text import bytes_text, plural


@dataclass(frozen=True)
class CollectiveCheck:
    """The collectives of one layer on a rank with `entered` tokens; all `layers` have the same collectives.

    `counted` is the closed form; `simulated` is the count of the collectives that the program called. Both assume the
    same number of tokens for every expert.
    """

    stack: str
    layers: tuple[int, ...]
    dtype: str
    tp: int
    ep: int
    entered: int
    counted: Collectives
    simulated: Collectives

    @property
    def same(self) -> bool:
        """Whether both counts agree, to the byte."""
        return self.counted == self.simulated


def collective_checks(planner: Planner, splits: Sequence[Ranks], tokens: Sequence[int]) -> Iterator[CollectiveCheck]:
    """Yield a check for every kind of layer, every split and every number of tokens."""
    kind = activation_dtype(planner.weights)
    for group in planner.model.groups:
        for ranks in splits:
            over = ranks if group.spec.moe else Ranks(ranks.tp)
            for number in tokens:
                entered = even_tokens(group, ranks, -(-number // ranks.ep))
                run = simulate(group.steps, over, entered, getattr(torch, kind.torch))
                reduces = (run.all_reduces, run.all_reduce_bytes, run.ring_all_reduce_bytes)
                simulated = Collectives(*reduces, run.all_to_alls, run.all_to_all_bytes)
                counted = planner.collectives(group, ranks, entered * ranks.ep)
                place = (group.stack, group.layers, kind.name, ranks.tp, ranks.ep)
                yield CollectiveCheck(*place, entered, counted, simulated)


def even_tokens(group: Group, ranks: Ranks, entered: int) -> int:
    """Return the number of tokens, rounded up to divide evenly over experts that are split over ranks."""
    moe = group.spec.moe
    if moe is None or ranks.ep == 1:
        return entered
    step = moe.experts // gcd(moe.experts, moe.top_k)
    return -(-entered // step) * step


@dataclass(frozen=True)
class Simulated:
    """The traffic of one rank in a forward pass of one block: its collectives, the bytes that enter them, the bytes
    that it sends.

    Each expert-parallel rank has `tokens` tokens. An all-reduce is sent around a ring; in an all-to-all, rows for the
    rank's own experts are not sent. The all-gather transfers row counts, not activations.
    """

    ranks: Ranks
    tokens: int
    dtype: torch.dtype
    all_reduces: int
    all_to_alls: int
    all_gathers: int
    all_reduce_bytes: int
    all_to_all_bytes: int
    all_gather_bytes: int
    ring_all_reduce_bytes: float
    sent_all_to_all_bytes: int
    sent_all_gather_bytes: int


def simulate(steps: Sequence[Step], ranks: Ranks, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Simulated:
    """Run rank 0 of `ranks`, with a routing that gives all experts the same number of rows, or one row more.

    Raises FFNError if the block cannot be split over `ranks`, or if this process is already one of several ranks.
    """
    rank_steps(steps, 0, ranks)
    with _fake_ranks(ranks) as group, torch.no_grad():
        weights = {name: _shape([axis.size for axis in axes], dtype) for name, axes in parameters(steps).items()}
        weights |= {name: _shape([axis.size for axis in axes], torch.int64) for name, axes in tables(steps).items()}
        block = ParallelBlock(steps, weights, group, _Balanced(experts_per_token(steps)))
        ids, entering = id_inputs(steps), input_shapes(steps, (tokens,))
        inputs = [_shape(shape, torch.int64 if name in ids else dtype) for name, shape in entering.items()]
        with Exchanges() as exchanges:
            block(*inputs)
    return _simulated(ranks, tokens, dtype, exchanges.done)


class _Balanced(Dispatch):
    """A routing that depends only on the number of tokens: all experts get the same number of rows, or one row more."""

    def __init__(self, per_token: Mapping[str, int]) -> None:
        self.per_token = per_token  # maps a step's name to the number of experts per token

    def choices(self, step: Step, route: Tensor) -> Choices:
        """Return rows without values, because only the number of rows matters."""
        rows = _shape([route.shape[0] * self.per_token[step.output]], torch.int64)
        return Choices(rows, rows)

    def counts(self, choices: Choices, experts: int, ep: DeviceMesh | None) -> Tensor:
        """Return the same counts for every rank; the gathered values are not used."""
        each, more = divmod(len(choices.tokens), experts)
        rows = torch.full((experts,), each) + (torch.arange(experts) < more)
        if ep is None:
            return rows[None]
        gathered(rows.to("meta"), ep)  # only for the call, which is counted; the meta device transfers no values
        return rows.expand(ep.size(), -1)


@contextmanager
def _fake_ranks(ranks: Ranks) -> Iterator[RankGroup]:
    if distributed.is_initialized():
        raise FFNError("ranks cannot be simulated in a process that is one of several ranks")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend

    distributed.init_process_group("fake", rank=0, world_size=ranks.world_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (ranks.ep, ranks.tp), mesh_dim_names=("ep", "tp"))
        yield RankGroup(ranks, 0, torch.device("meta"), mesh)
    finally:
        distributed.destroy_process_group()


def _simulated(ranks: Ranks, tokens: int, dtype: torch.dtype, done: "Sequence[CollectiveCall]") -> Simulated:
    reduced, exchanged, counted = (
        [one for one in done if one.name == name] for name in ("all-reduce", "all-to-all", "all-gather")
    )
    return Simulated(
        ranks=ranks,
        tokens=tokens,
        dtype=dtype,
        all_reduces=len(reduced),
        all_to_alls=len(exchanged),
        all_gathers=len(counted),
        all_reduce_bytes=sum(one.bytes for one in reduced),
        all_to_all_bytes=sum(one.bytes for one in exchanged),
        all_gather_bytes=sum(one.bytes for one in counted),
        ring_all_reduce_bytes=sum(ring_all_reduce_bytes(one.bytes, one.ranks) for one in reduced),
        sent_all_to_all_bytes=sum(one.bytes - one.kept_bytes for one in exchanged),
        sent_all_gather_bytes=sum(all_gather_bytes(one.bytes, one.ranks) for one in counted),
    )


def _shape(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(sizes), dtype=dtype, device="meta")


_NAMES = {"all_reduce": "all-reduce", "all_to_all_single": "all-to-all", "all_gather_into_tensor": "all-gather"}


@dataclass(frozen=True)
class CollectiveCall:
    """A call of a collective on one rank: its name, the shape and dtype of the rank's tensor, the number of ranks.

    `kept_bytes` is the size of the rows that the rank keeps in an all-to-all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int = 1
    kept_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The size of the rank's tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tensor(self) -> str:
        """The tensor in words: `[16, 64] float32, 4.096 KB`."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}, {bytes_text(self.bytes)}"


class Exchanges(CommDebugMode):  # type: ignore[no-untyped-call]
    """A context in which torch counts collectives, and every call is recorded in `done`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[CollectiveCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch count the call, and record it if it was counted as a collective."""
        before = self.get_total_counts()
        out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self.get_total_counts() > before:
            self.done.append(_exchange(func.overloadpacket.__name__, args))
        return out


def _exchange(name: str, args: Sequence[Any]) -> CollectiveCall:
    """Describe the call of a collective operator; its last argument is the name of the process group."""
    tensor, group = args[0], _resolve_process_group(args[-1])
    kept = args[2][group.rank()] * prod(tensor.shape[1:]) * tensor.itemsize if name == "all_to_all_single" else 0
    return CollectiveCall(_NAMES.get(name, name), tuple(tensor.shape), tensor.dtype, group.size(), kept)


def in_words(exchanges: list[CollectiveCall]) -> str:
    """Return text such as `1 all-reduce of [16, 64] float32, 4.096 KB`, or `no collective` if the list is empty."""
    counts = Counter(exchanges)
    texts = [f"{count} {plural(one.name, count)} of {one.tensor}" for one, count in counts.items()]
    return "; ".join(texts) or "no collective"
