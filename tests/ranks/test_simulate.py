"""Collectives counted from the program, on torch's fake process group, against closed forms and against real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from ffncli.block.dtypes import storage
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.expert_parallel import exchange
from ffncli.models.counting.tensor_parallel import split
from ffncli.models.model import Group, Model
from ffncli.run.ranks.simulate import Simulated, simulate
from tests.ranks.cases import CASES
from tests.ranks.test_parallel import of_ranks

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
