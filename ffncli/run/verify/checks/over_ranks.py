"""The check that compares a block split over processes with the whole block in one process."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import torch
from torch import distributed

from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import AllReduce, Experts, walk
from ffncli.run.engine.execute import run
from ffncli.run.ranks.join import joined
from ffncli.run.ranks.parallel import ParallelBlock
from ffncli.run.ranks.simulate import CollectiveCall, Exchanges, in_words
from ffncli.run.ranks.store import RankGroup
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow


def over_ranks(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check the output, the gradient of the input, and the collectives on every rank; only rank 0 yields rows.

    Every rank compares its part with the whole block; each row shows the worst rank.
    """
    assert case.split is not None
    with joined(case.split.ranks, case.device, case.split.patience) as group:
        every: list[list[CheckRow]] = [[] for _ in range(group.ranks.world_size)]
        distributed.all_gather_object(every, _of_this_rank(case, group))
    if group.rank == 0:
        yield from (_worst(rows) for rows in zip(*every, strict=True))


def _of_this_rank(case: CheckedBlock, group: RankGroup) -> list[CheckRow]:
    judge, place = case.judge("ranks"), group.ranks.place(group.rank)[0]
    inputs = {name: tensor.tensor_split(group.ranks.ep)[place] for name, tensor in case.inputs.items()}
    block = ParallelBlock(case.steps, case.weights, group)
    with torch.enable_grad():
        entered = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
        with Exchanges() as forward:
            out = block(*entered.values())
        upstream = torch.randn(out.shape, generator=case.generator(), dtype=torch.float64).to(out)
        with Exchanges() as backward:
            out.backward(upstream)
        whole_inputs = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
        whole = run(case.steps, case.weights, whole_inputs)
        whole.backward(upstream)  # type: ignore[no-untyped-call]
    rows = [judge.equal(f"{group.ranks}, output", out.detach(), whole.detach(), _parts(case, block))]
    for name, tensor in entered.items():
        right = whole_inputs[name].grad
        assert tensor.grad is not None
        assert right is not None
        rows.append(judge.equal(f"{group.ranks}, gradient of {name}", tensor.grad, right, in_words(backward.done)))
    return [*rows, _collectives(case, group, forward.done)]


def _parts(case: CheckedBlock, block: ParallelBlock) -> str:
    """Return text such as `a rank has 24,576 of 49,152 parameters`."""
    here = sum(tensor.numel() for tensor in block.local_weights.values())
    whole = sum(tensor.numel() for tensor in case.weights.values())
    return f"a rank has {here:,} of {whole:,} parameters"


def _collectives(case: CheckedBlock, group: RankGroup, done: list[CollectiveCall]) -> CheckRow:
    """Check that the forward pass ran exactly the collectives in the steps."""
    needed = expected_collectives(case, group.ranks)
    counts = Counter(one.name for one in done)
    row = CheckRow("ranks", f"{group.ranks}, collectives", passed=counts == needed, note=in_words(done))
    if row.passed:
        return row
    return replace(row, note=f"{row.note}; expected {', '.join(f'{n} {name}' for name, n in needed.items()) or 'none'}")


def expected_collectives(case: CheckedBlock, ranks: Ranks) -> Counter[str]:
    """Return one all-reduce per AllReduce step and, for experts on other ranks, two all-to-alls and an all-gather."""
    program = rank_steps(case.steps, 0, ranks)
    sent = sum(isinstance(s.op, Experts) and not s.op.always for s in program) if ranks.ep > 1 else 0
    reduced = sum(isinstance(step.op, AllReduce) for _, step in walk(program))
    return +Counter({"all-reduce": reduced, "all-to-all": 2 * sent, "all-gather": sent})


def _worst(rows: tuple[CheckRow, ...]) -> CheckRow:
    """Return the failed row among the ranks' rows, or else the row with the largest error."""
    return max(rows, key=lambda row: (row.passed is False, _size(row.relative_error)))


def _size(error: float | None) -> float:
    return -1.0 if error is None else inf if error != error else error
