"""What a case over ranks sends, in closed form: the ring's all-reduces, and the all-to-alls of its experts."""

from __future__ import annotations

from ffncli.bench.records import Case
from ffncli.block.dtypes import dtype
from ffncli.block.recipe import steps as steps_of
from ffncli.block.shard import rank_steps
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.counting.expert_parallel import all_to_all_bytes, exchanged
from ffncli.models.counting.tensor_parallel import reduced_bytes, ring_all_reduce_bytes


def communication_bytes(case: Case) -> float:
    """The bytes that a rank sends for one call: mean over ranks, and where every expert is equally likely."""
    ranks, kind, tokens = case.ranks, dtype(case.dtype), case.of_rank.tokens
    steps = kernel_steps(steps_of(case.spec))
    reduced = tokens * sum(reduced_bytes(rank_steps(steps, 0, ranks), kind))
    sent = ring_all_reduce_bytes(reduced, ranks.tp)
    if ranks.ep > 1:
        sent += sum(all_to_all_bytes(tokens * values * kind.block_bytes, ranks.ep) for values in exchanged(steps))
    return sent
