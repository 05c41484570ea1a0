"""One rank of a split block without the others: torch's fake process group, and tensors that have shapes alone.

The collectives are those that the program itself calls, so that they are a second way to what `models/counting` derives
from the steps. Nothing is computed: a layer of any size, over thousands of ranks, takes a second and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ffncli.block.ranks import Ranks
from ffncli.block.shard import rank_steps
from ffncli.block.steps import Step, experts_per_token, id_inputs, input_shapes, parameters, tables
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.models.counting.tensor_parallel import all_gather_bytes, ring_all_reduce_bytes
from ffncli.run.ranks.exchanges import CollectiveCall, Exchanges
from ffncli.run.ranks.experts import Choices, Dispatch, gathered
from ffncli.run.ranks.group import RankGroup
from ffncli.run.ranks.parallel import ParallelBlock


@dataclass(frozen=True)
class Simulated:
    """What one rank exchanges in a forward pass of one block: collectives, bytes that enter them, bytes that it sends.

    Each of the `ep` places enters `tokens` tokens. An all-reduce is sent around a ring; of an all-to-all, rows for the
    rank's experts stay. The all-gather has the counts of rows, not activations.
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
    """Rank 0 of `ranks`, with a routing that gives all experts the same number of rows, as nearly as it can.

    Raises FFNError for a block that cannot be split so, and in a process that is already one of several ranks.
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
    """A routing by the numbers of tokens alone: every expert gets as many rows as any other, or one more."""

    def __init__(self, per_token: Mapping[str, int]) -> None:
        self.per_token = per_token  # by the name of a step, how many of its experts a token goes to

    def choices(self, step: Step, route: Tensor) -> Choices:
        """Rows without values: only their number counts."""
        rows = _shape([route.shape[0] * self.per_token[step.output]], torch.int64)
        return Choices(rows, rows)

    def counts(self, choices: Choices, experts: int, ep: DeviceMesh | None) -> Tensor:
        """The same on every rank; what the all-gather brings is not read."""
        each, more = divmod(len(choices.tokens), experts)
        rows = torch.full((experts,), each) + (torch.arange(experts) < more)
        if ep is None:
            return rows[None]
        gathered(rows.to("meta"), ep)
        return rows.expand(ep.size(), -1)


@contextmanager
def _fake_ranks(ranks: Ranks) -> Iterator[RankGroup]:
    if distributed.is_initialized():
        raise FFNError("ranks are simulated in a process of their own, not in one of several ranks")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    distributed.init_process_group("fake", rank=0, world_size=ranks.world_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (ranks.ep, ranks.tp), mesh_dim_names=("ep", "tp"))
        yield RankGroup(ranks, 0, torch.device("meta"), mesh)
    finally:
        distributed.destroy_process_group()


def _simulated(ranks: Ranks, tokens: int, dtype: torch.dtype, done: Sequence[CollectiveCall]) -> Simulated:
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
