"""The ranks together compute the whole block, and its gradients, with the collectives that they should need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import AllReduce, Axis, Experts, parameters, walk
from ffncli.errors import FFNError
from ffncli.run.engine.execute import run
from ffncli.run.ranks.parallel import ParallelBlock
from ffncli.run.ranks.store import RankGroup
from tests.oracles.modules import relative_error
from tests.ranks.cases import CASES, DENSE
from tests.ranks.records import Answer, RankCase

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}


@dataclass(frozen=True)
class Whole:
    """The block on one rank, by the reference reader."""

    output: Tensor
    input_gradient: Tensor
    gradients: Mapping[str, Tensor]


def whole(case: RankCase) -> Whole:
    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in case.weights.items()}
    x = case.inputs["x"].clone().requires_grad_()
    output = run(case.steps, leaves, {**case.inputs, "x": x})
    output.backward(case.upstream)
    gradients = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items() if t.requires_grad}
    assert x.grad is not None
    return Whole(output.detach(), x.grad, gradients)


def together(case: RankCase, ranks: list[Answer], what: str) -> Tensor:
    """The ranks' tensors along `ep`, one after the other; those along `tp` are equal."""
    rows = [ranks[e * case.ranks.tp : (e + 1) * case.ranks.tp] for e in range(case.ranks.ep)]
    for row in rows:
        for one in row[1:]:
            assert torch.equal(getattr(row[0], what), getattr(one, what))
    return torch.cat([getattr(row[0], what) for row in rows])


def assembled(case: RankCase, name: str, parts: Mapping[int, Tensor], summed: bool) -> Tensor:
    """A weight, or its gradient, from the parts of the ranks that have any; copies along `ep` are equal, or summed."""
    axes = parameters(case.steps)[name]
    columns = []
    for e in range(case.ranks.ep):
        row = [parts[rank] for rank in range(e * case.ranks.tp, (e + 1) * case.ranks.tp) if rank in parts]
        split = [at for at, axis in enumerate(axes) if axis.name == "d_ff" and row[0].shape[at] < axis.size]
        assert split or all(torch.equal(part, row[0]) for part in row)
        columns.append(torch.cat(row, split[0]) if split else row[0])
    if columns[0].shape[0] < axes[0].size:
        return torch.cat(columns)
    return torch.stack(columns).sum(0) if summed else columns[0]


def of_ranks(answers: Mapping[int, list[dict[str, Answer]]], key: str) -> tuple[RankCase, list[Answer]]:
    world, case = CASES[key]
    ranks = [by_name.get(case.name, Answer("an earlier case failed")) for by_name in answers[world]]
    assert [one.error for one in ranks] == [""] * world
    return case, ranks


@pytest.mark.parametrize("key", CASES)
def test_the_ranks_compute_the_whole(answers, key):
    case, ranks = of_ranks(answers, key)
    expected, limit = whole(case), LIMITS[case.upstream.dtype]
    assert relative_error(together(case, ranks, "output"), expected.output) <= limit
    assert relative_error(together(case, ranks, "input_gradient"), expected.input_gradient) <= 8 * limit
    for name, gradient in expected.gradients.items():
        parts = {rank: one.gradients[name] for rank, one in enumerate(ranks) if name in one.gradients}
        found = assembled(case, name, parts, summed=True)
        assert (found - gradient).abs().max() <= 8 * limit * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("key", CASES)
def test_each_rank_has_the_parts_that_the_steps_say(answers, key):
    case, ranks = of_ranks(answers, key)
    for rank, one in enumerate(ranks):
        axes = parameters(rank_steps(case.steps, rank, case.ranks))
        assert {name: tuple(part.shape) for name, part in one.weights.items()} == {
            n: _sizes(a) for n, a in axes.items()
        }
    for name in parameters(case.steps):
        parts = {rank: one.weights[name] for rank, one in enumerate(ranks) if name in one.weights}
        assert torch.equal(assembled(case, name, parts, summed=False), case.weights[name])


@pytest.mark.parametrize("key", CASES)
def test_the_collectives_of_a_forward(answers, key):
    """One all-reduce over tp; over ep two all-to-alls, after the all-gather of how many rows each expert gets.

    Two where a norm reads the experts' sum, or each expert's output, and shared experts are added after it.
    """
    case, ranks = of_ranks(answers, key)
    normed = case.name.startswith(("mixture-latent", "mixture-normed"))
    expected = {"all_reduce": 1 + normed} if case.ranks.tp > 1 else {}
    if case.ranks.ep > 1:
        expected |= {"all_gather_into_tensor": 1, "all_to_all_single": 2}
    assert [one.forward for one in ranks] == [expected] * len(ranks)
    reduced = [step for _, step in walk(rank_steps(case.steps, 0, case.ranks)) if isinstance(step.op, AllReduce)]
    assert len(reduced) == expected.get("all_reduce", 0)


@pytest.mark.parametrize("name", [name for name in DENSE if name not in ("learned-activation", "scaled")])
def test_a_dense_block_s_backward_has_one_all_reduce_more(answers, name):
    """Of the input's gradient: gate and up read the same tensor, so that theirs is summed once."""
    _, ranks = of_ranks(answers, f"4:{name}/tp4/64")
    assert ranks[0].both == {"all_reduce": 2}


@pytest.mark.parametrize(
    ("spec", "ranks", "message"),
    [
        (FFNSpec(6, 9), Ranks(2), "d_ff = 9 does not divide over 2 ranks; nearest: 1 and 3"),
        (FFNSpec(6, 8, sub_norm=True), Ranks(2), "step 'sub_norm' normalises over d_ff"),
        (FFNSpec(6, 8), Ranks(1, 2), "the block has no experts to split"),
        (FFNSpec(6, 8, moe=MoE(8, 2)), Ranks(1, 3), "experts = 8 does not divide over 3 ranks; nearest: 2 and 4"),
    ],
)
def test_a_block_that_cannot_be_split_is_refused_before_anything_is_sent(spec, ranks, message):
    """By the words of `block/shard.py`; there is no process group here."""
    nobody = RankGroup(ranks, 0, torch.device("cpu"), mesh=None)  # type: ignore[arg-type]
    with pytest.raises(FFNError) as error:
        ParallelBlock(steps(spec), {}, nobody)
    assert str(error.value).startswith(message)


def test_the_cases_have_what_they_should():
    """Experts in all splits, ranks without tokens, and one whose experts get no rows."""
    layouts = {str(case.ranks) for _, case in CASES.values() if any(isinstance(s.op, Experts) for s in case.steps)}
    assert layouts == {"tp2", "ep2", "tp4", "ep4", "tp2-ep2"}
    assert any(0 in case.tokens for _, case in CASES.values())


def _sizes(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)
