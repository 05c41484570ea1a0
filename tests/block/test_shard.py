"""Tensor parallelism: the sum over ranks is the whole, with one AllReduce."""

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import Ranks, rank_steps, shard, shard_experts
from ffncli.block.steps import Activation, Add, AllReduce, Axis, Experts, Linear, Multiply, Step, parameters
from ffncli.errors import FFNError
from ffncli.run.engine.execute import Mode, execute, run
from ffncli.run.engine.weights import random_weights
from tests.block.test_steps import BLOCKS
from tests.oracles.modules import relative_error


def slice_of(name: str, weight: torch.Tensor, axes, part, rank: int) -> torch.Tensor:
    """This rank's share: along every axis that became smaller."""
    for at, (whole, small) in enumerate(zip(axes, part, strict=True)):
        if whole.size != small.size:
            weight = weight.narrow(at, rank * small.size, small.size)
    return weight


def sharded_sum(block: tuple[Step, ...], weights, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """What the ranks compute together, one after the other: the reduced tensor is the sum of all partial ones."""
    programs = [shard(block, rank, ranks) for rank in range(ranks)]
    shares = []
    for rank, program in enumerate(programs):
        parts, whole = parameters(program), parameters(block)
        shares.append({n: slice_of(n, weights[n], whole[n], parts[n], rank) for n in parts})
    (reduce,) = [s for s in programs[0] if isinstance(s.op, AllReduce)]
    partial = [
        next(e.tensor for e in execute(p, w, {"x": x}) if e.name == reduce.inputs[0])
        for p, w in zip(programs, shares, strict=True)
    ]
    return run(programs[0], shares[0], {"x": x}, Mode(reduce=lambda _: torch.stack(partial).sum(0)))


SPECS = (
    FFNSpec(6, 24, "gelu", residual=True),
    FFNSpec(6, 24, "swiglu", bias=True, norm="rmsnorm", residual=True),
    FFNSpec(6, 24, "swiglu", bias=True, moe=MoE(4, 2), norm="rmsnorm", residual=True),
    FFNSpec(6, 24, "swiglu", moe=MoE(4, 2, 1, shared_gate=True), residual=True),
    FFNSpec(6, 24, "swiglu", moe=MoE(4, 2, 1, shared_scale=0.5), residual=True),
    FFNSpec(6, 24, "swiglu", moe=MoE(4, 4, identity_experts=3), residual=True),
)
OPS = [block for op, block in BLOCKS.items() if op is not AllReduce]


@pytest.mark.parametrize(
    ("block", "ranks"),
    [*((steps(spec), n) for spec in SPECS for n in (1, 2, 3, 4, 8)), *((block, n) for block in OPS for n in (2, 4))],
)
def test_sum_of_shards_is_the_whole(block, ranks):
    generator = torch.Generator().manual_seed(1)
    weights = random_weights(block, generator, torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    whole = run(block, weights, {"x": x})
    if ranks == 1:
        assert shard(block, 0, 1) == block
        return
    assert relative_error(sharded_sum(block, weights, x, ranks), whole) < 1e-13


def test_one_collective_where_texts_say_two():
    block = shard(steps(FFNSpec(4096, 11008, "swiglu")), 0, 4)
    assert [s.output for s in block if isinstance(s.op, AllReduce)] == ["down.sum"]
    assert {n: tuple(a.size for a in axes) for n, axes in parameters(block).items()} == {
        "gate.weight": (2752, 4096),
        "up.weight": (2752, 4096),
        "down.weight": (4096, 2752),
    }


def test_row_split_bias_stays_on_rank_0():
    block = steps(FFNSpec(4, 8, "relu"))
    assert "down.bias" in parameters(shard(block, 0, 2))
    assert "down.bias" not in parameters(shard(block, 1, 2))
    assert "up.bias" in parameters(shard(block, 1, 2))


def test_refusals():
    with pytest.raises(FFNError, match="d_ff = 9 does not divide over 2 ranks"):
        shard(steps(FFNSpec(4, 9)), 0, 2)
    with pytest.raises(FFNError, match="normalises over d_ff"):
        shard(steps(FFNSpec(4, 8, gated=True, sub_norm=True)), 0, 2)
    with pytest.raises(FFNError, match="rank must be"):
        shard(steps(FFNSpec(4, 8)), 2, 2)
    with pytest.raises(FFNError, match="rank must be"):
        shard(steps(FFNSpec(4, 8)), -1, 2)
    alone = steps(FFNSpec(4, 8, gated=True, sub_norm=True))
    assert shard(alone, 0, 1) == alone


def test_what_does_not_divide_names_the_nearest_numbers_of_ranks():
    """12 and 18, of the routed and the shared experts, are both divided by 1, 2, 3 and 6."""
    mixture = steps(FFNSpec(4, 12, moe=MoE(6, 2, 1, shared_d_ff=18)))
    for ranks, hint in ((4, "nearest: 3 and 6"), (5, "nearest: 3 and 6"), (7, "nearest: 6")):
        with pytest.raises(FFNError, match="does not divide over") as error:
            shard(mixture, 0, ranks)
        assert error.value.hint == hint
    with pytest.raises(FFNError, match="experts = 6 does not divide over 4 ranks") as error:
        shard_experts(mixture, 0, 4)
    assert error.value.hint == "nearest: 3 and 6"


def test_each_partial_sum_is_reduced_once_and_a_product_of_two_is_none():
    d_model, d_ff = Axis("d_model", 4), Axis("d_ff", 8)
    start = [Step("up", Linear(d_model, d_ff), ("x",)), Step("a", Linear(d_ff, d_model), ("up",))]
    product = [Step("b", Linear(d_ff, d_model), ("up",)), Step("out", Multiply(), ("a", "b"))]
    assert reduced([*start, *product]) == ["a.sum", "b.sum"]
    twice = [Step("act", Activation("relu"), ("a",)), Step("out", Add(), ("a", "act"))]
    assert reduced([*start, *twice]) == ["a.sum"]


def reduced(block: list[Step]) -> list[str]:
    return [s.output for s in shard(block, 0, 2) if isinstance(s.op, AllReduce)]


MIXTURE = FFNSpec(6, 24, "swiglu", bias=True, moe=MoE(8, 2, 1), norm="rmsnorm", residual=True)


def test_each_rank_has_whole_experts_and_everything_else():
    whole = parameters(steps(MIXTURE))
    for rank in range(4):
        block = shard_experts(steps(MIXTURE), rank, 4)
        (experts,) = [step.op for step in block if isinstance(step.op, Experts)]
        assert (experts.first, experts.experts.size, experts.entries) == (2 * rank, 2, slice(2 * rank, 2 * rank + 2))
        own = parameters(block)
        assert list(own) == list(whole)
        changed = {name for name in whole if own[name] != whole[name]}
        assert changed == {f"{name}.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")}
        assert all(own[name] == (Axis("experts", 2), *whole[name][1:]) for name in changed)


def test_the_grid_splits_experts_and_their_width():
    for rank, (first, biased) in enumerate([(0, True), (0, False), (4, True), (4, False)]):
        block = rank_steps(steps(MIXTURE), rank, Ranks(tp=2, ep=2))
        sizes = {name: tuple(axis.size for axis in axes) for name, axes in parameters(block).items()}
        assert (sizes["gate.weight"], sizes["down.weight"]) == ((4, 12, 6), (4, 6, 12))
        assert (sizes["shared.up.weight"], "down.bias" in sizes) == ((12, 6), biased)
        assert [step.op.first for step in block if isinstance(step.op, Experts)] == [first]
        assert [step.output for step in block if isinstance(step.op, AllReduce)] == ["moe.sum"]


@pytest.mark.parametrize("weigh", ["output", "input"])
@pytest.mark.parametrize("moe", [{"top_k": 3}, {"top_k": 4, "identity_experts": 3}, {"top_k": 2, "skip_experts": 2}])
def test_the_results_of_all_ranks_experts_add_up(moe, weigh):
    """Each rank's experts alone, on all tokens, by the route that it copied; only one gives the identity experts'."""
    block = steps(FFNSpec(6, 12, "swiglu", moe=MoE(8, weigh=weigh, **moe)))
    generator = torch.Generator().manual_seed(3)
    weights = random_weights(block, generator, torch.float64)
    x = torch.randn(7, 6, dtype=torch.float64, generator=generator)
    total, names = torch.zeros_like(x), set()
    for rank in range(4):
        own = {n: w[2 * rank : 2 * rank + 2] if n.split(".")[0] != "router" else w for n, w in weights.items()}
        events = list(execute(shard_experts(block, rank, 4), own, {"x": x}))
        names |= {event.name for event in events if event.expert is not None}
        alone = events[-1].tensor
        if rank and "identity_experts" in moe:
            route = next(event.tensor for event in events if event.name == "route")
            alone = alone - x * route[:, 8:].sum(-1, keepdim=True)
        total += alone
    torch.testing.assert_close(total, run(block, weights, {"x": x}), rtol=1e-12, atol=1e-12)
    assert names == {e.name for e in execute(block, weights, {"x": x}) if e.expert is not None}


def test_refused_splits_of_experts():
    with pytest.raises(FFNError, match="no experts to split"):
        shard_experts(steps(FFNSpec(4, 8)), 0, 2)
    with pytest.raises(FFNError, match="experts = 8 does not divide over 3 ranks"):
        shard_experts(steps(MIXTURE), 0, 3)
    with pytest.raises(FFNError, match="rank must be from 0 to 3"):
        rank_steps(steps(MIXTURE), 4, Ranks(tp=2, ep=2))
    assert shard_experts(steps(FFNSpec(4, 8)), 0, 1) == steps(FFNSpec(4, 8))
