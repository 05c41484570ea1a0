"""Blocks over ranks, real and simulated, compute the whole with the collectives that they should need."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, distributed, nn

from ffncli.block.dtypes import storage
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import AllReduce, Axis, Experts, parameters, walk
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.parallel import exchange, split
from ffncli.models.model import Group, Model
from ffncli.run.engine.execute import run
from ffncli.run.ranks.parallel import ParallelBlock
from ffncli.run.ranks.simulate import Simulated, simulate
from ffncli.run.ranks.store import RankGroup
from tests.oracles.modules import relative_error
from tests.ranks.cases import CASES, DENSE, Answer, RankCase

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


BF16 = storage("bf16")


def layers_of(name: str) -> tuple[Model, list[Group]]:
    resolved = catalog.find(name)
    assert resolved is not None
    return resolved.model, list(resolved.model.groups)


def tensor_parallel(name: str, tp: int, tokens: int) -> int:
    """Every kind of layer of a model: the simulated rank, the closed form, and the sums on paper. How many they are."""
    model, layers = layers_of(name)
    for group, expected in zip(layers, split(model, tp, BF16).groups, strict=True):
        found = simulate(group.steps, Ranks(tp), tokens)
        assert found.all_reduces == expected.all_reduces == 1
        assert (found.all_to_alls, found.all_gathers) == (0, 0)
        assert found.all_reduce_bytes == expected.reduced_bytes * tokens == 2 * group.spec.d_model * tokens
        assert found.ring_all_reduce_bytes == pytest.approx(expected.ring_all_reduce_bytes * tokens, rel=1e-14)
        assert found.ring_all_reduce_bytes == 2 * (tp - 1) * 2 * group.spec.d_model * tokens / tp
    return len(layers)


def expert_parallel(name: str, ranks: Ranks, tokens: int) -> int:
    """Every kind of layer with experts, likewise."""
    model, layers = layers_of(name)
    mixtures = [group for group in layers if group.spec.moe]
    for group, expected in zip(mixtures, exchange(model, ranks.ep, BF16, tokens).groups, strict=True):
        found = simulate(group.steps, ranks, tokens)
        moe = group.spec.moe
        assert moe is not None
        assert (found.all_to_alls, found.all_gathers, found.all_reduces) == (2, 1, int(ranks.tp > 1))
        rows = 2 * tokens * moe.top_k * (moe.latent or group.spec.d_model)
        assert found.all_to_all_bytes == 2 * rows
        assert found.sent_all_to_all_bytes == 2 * rows * (ranks.ep - 1) // ranks.ep
        sent = (expected.dispatch_bytes + expected.combine_bytes) * tokens
        assert found.sent_all_to_all_bytes == pytest.approx(sent, rel=1e-14)
        assert found.all_gather_bytes == 8 * moe.experts
    return len(mixtures)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-405b", "gpt3-175b", "mixtral-8x7b"])
def test_tensor_parallel_is_the_closed_form(name, ranks):
    assert tensor_parallel(name, ranks, 192) == 1


@pytest.mark.parametrize(
    "ranks", [Ranks(1, 2), Ranks(1, 8), Ranks(1, 64), Ranks(2, 4), Ranks(8, 8), Ranks(4, 16)], ids=str
)
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b"])
def test_expert_parallel_is_the_closed_form(name, ranks):
    assert expert_parallel(name, ranks, 256) == 1


def test_1024_ranks():
    """Llama 3.1 405B's layer needs no memory; DeepSeek-V3's experts over 256 places, each of four ranks."""
    assert tensor_parallel("llama-3.1-405b", 1024, 65536) == 1
    assert expert_parallel("deepseek-v3", Ranks(4, 256), 4096) == 1


def test_one_rank_exchanges_nothing_and_the_process_group_is_left():
    for spec in (FFNSpec(6, 8, "swiglu"), FFNSpec(6, 8, "swiglu", moe=MoE(4, 2))):
        alone = simulate(steps(spec), Ranks(), 5, torch.float32)
        assert alone == Simulated(Ranks(), 5, torch.float32, *([0] * 9))
        assert not distributed.is_initialized()


@pytest.mark.parametrize("key", [key for key in CASES if "mixture-one-busy" not in key])
def test_the_simulated_rank_calls_what_real_ranks_call(answers, key):
    """As many collectives with as many bytes, but for the experts' rows: a real routing is not balanced."""
    case, ranks = of_ranks(answers, key)
    found = simulate(case.steps, case.ranks, case.tokens[0], case.upstream.dtype)
    calls = ranks[0].calls
    reduced = sum(call.bytes for call in calls if call.name == "all-reduce")
    counted = sum(call.bytes for call in calls if call.name == "all-gather")
    assert found.all_reduces == sum(call.name == "all-reduce" for call in calls)
    assert found.all_to_alls == sum(call.name == "all-to-all" for call in calls)
    assert (found.all_gathers, found.all_gather_bytes) == (sum(call.name == "all-gather" for call in calls), counted)
    if not (case.ranks.ep > 1 and case.name.startswith("mixture-normed")):
        assert found.all_reduce_bytes == reduced  # inside experts, what is reduced are rows too
    for call in calls:
        assert call.ranks == (case.ranks.tp if call.name == "all-reduce" else case.ranks.ep)


def test_token_ids_that_choose_are_whole_numbers():
    """DeepSeek-V4's first layers: a table lists the experts of each token id."""
    block = steps(FFNSpec(6, 8, "swiglu", moe=MoE(4, 2, lookup=5)))
    assert simulate(block, Ranks(1, 2), 8).all_to_all_bytes == 2 * 8 * 2 * 6 * 2


def test_rows_that_do_not_divide_differ_by_one():
    """7 tokens of 2 rows over 4 experts: 4, 4, 3, 3 rows; a rank of two keeps 8 of its 14."""
    found = simulate(steps(FFNSpec(6, 8, "swiglu", moe=MoE(4, 2))), Ranks(1, 2), 7, torch.float32)
    assert found.all_to_all_bytes - found.sent_all_to_all_bytes == (8 + 8) * 6 * 4


@pytest.mark.parametrize(
    ("spec", "ranks", "message"),
    [
        (FFNSpec(6, 9), Ranks(2), "d_ff = 9 does not divide over 2 ranks"),
        (FFNSpec(6, 8, sub_norm=True), Ranks(2), "normalises over d_ff"),
        (FFNSpec(6, 8), Ranks(1, 2), "no experts to split"),
        (FFNSpec(6, 8, moe=MoE(4, 2)), Ranks(1, 3), "experts = 4 does not divide over 3 ranks"),
    ],
)
def test_refusals_are_those_of_the_steps(spec, ranks, message):
    with pytest.raises(FFNError, match=message):
        simulate(steps(spec), ranks, 4)
    assert not distributed.is_initialized()


KEYS = [key for key in CASES if key.split(":")[1].startswith(("mixtral/", "deepseek/")) and key.endswith("/32")]


def mixtral(case: RankCase) -> nn.Module:
    code = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    d_model, d_ff = case.weights["down.weight"].shape[1:]
    config = code.MixtralConfig(hidden_size=d_model, intermediate_size=d_ff, num_local_experts=8, num_experts_per_tok=2)
    module = code.MixtralSparseMoeBlock(config)
    module.load_state_dict(experts_of(case) | {"gate.weight": case.weights["router.weight"]})
    return module


def deepseek(case: RankCase) -> nn.Module:
    code = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    d_model, d_ff = case.weights["down.weight"].shape[1:]
    config = code.DeepseekV3Config(
        hidden_size=d_model, moe_intermediate_size=d_ff, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    module = code.DeepseekV3MoE(config)
    shared = {f"shared_experts.{n}_proj.weight": case.weights[f"shared.{n}.weight"] for n in ("gate", "up", "down")}
    router = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "route.correction"}
    module.load_state_dict(experts_of(case) | shared | {name: case.weights[ours] for name, ours in router.items()})
    return module


def experts_of(case: RankCase) -> dict[str, torch.Tensor]:
    gate_up = torch.cat([case.weights["gate.weight"], case.weights["up.weight"]], 1)
    return {"experts.gate_up_proj": gate_up, "experts.down_proj": case.weights["down.weight"]}


@pytest.mark.parametrize("key", KEYS)
def test_the_ranks_compute_transformers_module(answers: dict[int, list[dict[str, Answer]]], key: str):
    case, ranks = of_ranks(answers, key)
    module = (mixtral if "mixtral" in key else deepseek)(case).eval()
    x = case.inputs["x"].clone().requires_grad_()
    output = module(x[None])[0]
    output.backward(case.upstream)
    assert x.grad is not None
    assert relative_error(together(case, ranks, "output"), output) <= 1e-6
    assert relative_error(together(case, ranks, "input_gradient"), x.grad) <= 4e-6


def test_the_keys():
    assert len(KEYS) == 2 * 5  # tp2, ep2, tp4, ep4, tp2-ep2
