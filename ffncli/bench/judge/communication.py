"""What a case over ranks sends: the sizes of its collectives, and the bytes of these in closed form."""

from __future__ import annotations

from ffncli.bench.records import Case
from ffncli.block.dtypes import dtype
from ffncli.block.recipe import steps as steps_of
from ffncli.block.shard import rank_steps
from ffncli.dataclass import dataclass
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.counting.expert_parallel import all_to_all_bytes, exchanged
from ffncli.models.counting.tensor_parallel import reduced_bytes, ring_all_reduce_bytes


@dataclass(frozen=True)
class Sent:
    """How many numbers a rank puts into each all-reduce, and into each all-to-all, of one call.

    Those of an all-to-all are a multiple of the ranks, each of which gets as many: every expert is equally likely.
    """

    all_reduced: tuple[int, ...]
    exchanged: tuple[int, ...]


def sent_by_rank(case: Case) -> Sent:
    """The collectives of one call of what a rank is given of the case."""
    ranks, kind, tokens = case.ranks, dtype(case.dtype), case.of_rank.tokens
    steps = kernel_steps(steps_of(case.spec))
    reduced = reduced_bytes(rank_steps(steps, 0, ranks), kind) if ranks.tp > 1 else []
    numbers = [tokens * values for values in exchanged(steps)] if ranks.ep > 1 else []
    return Sent(
        tuple(round(tokens * size / kind.block_bytes) for size in reduced),
        tuple(max(1, count // ranks.ep) * ranks.ep for count in numbers),
    )


def communication_bytes(case: Case) -> float:
    """The bytes that a rank sends for one call: mean over ranks, and where every expert is equally likely."""
    kind, tokens, steps = dtype(case.dtype), case.of_rank.tokens, kernel_steps(steps_of(case.spec))
    reduced = sum(sent_by_rank(case).all_reduced) * kind.block_bytes
    bytes_sent = ring_all_reduce_bytes(int(reduced), case.ranks.tp)
    if case.ranks.ep > 1:
        sizes = (tokens * values * kind.block_bytes for values in exchanged(steps))
        bytes_sent += sum(all_to_all_bytes(int(size), case.ranks.ep) for size in sizes)
    return bytes_sent
