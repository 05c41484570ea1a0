"""Tensor parallelism: the sum over n ranks equals the whole."""

from __future__ import annotations

from collections.abc import Iterator

from ffncli.block.ranks import Ranks
from ffncli.block.shard import rank_steps
from ffncli.block.steps import AllReduce, walk
from ffncli.errors import FFNError
from ffncli.run.engine.execute import run
from ffncli.run.engine.sharded import summed
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow

RANKS = (2, 3, 4, 8)


def shards(case: CheckedBlock) -> Iterator[CheckRow]:
    """The block split over 2, 3, 4 and 8 ranks, where d_ff divides."""
    judge = case.judge("shards")
    whole = run(case.steps, case.weights, case.inputs)
    for ranks in RANKS:
        try:
            first = rank_steps(case.steps, 0, Ranks(ranks))
        except FFNError as error:
            yield judge.skips(f"{ranks} ranks", error.message)
            continue
        reduced = [n.removesuffix(".sum") for n, step in walk(first) if isinstance(step.op, AllReduce)]
        widths = f"d_ff {case.layer.spec.d_ff:,} → {case.layer.spec.d_ff // ranks:,}"
        note = f"collectives: {len(reduced)} (all-reduce of {', '.join(reduced)})"
        output = summed(case.steps, case.weights, case.inputs, Ranks(ranks))
        yield judge.equal(f"{ranks} ranks, {widths}", output, whole, note)
