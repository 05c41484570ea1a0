"""A block over ranks in one process, against slices that torch cuts and sums by hand."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

import ffncli
from ffncli.errors import FFNError
from ffncli.run.trace.session import Session
from tests.models.files.test_gguf import write as gguf_file
from tests.oracles.checkpoints import LLAMA, folder, tensors


def partial_sums(session: Session, ranks: int) -> list[Tensor]:
    """Every rank's `down` of a gated block without biases: rows of W1 and W3, the same columns of W2."""
    weights, x = session.prepared.weights, session["norm"] if "norm" in _names(session) else session["x"]
    gates, ups = (weights[f"{name}.weight"].chunk(ranks) for name in ("gate", "up"))
    downs = weights["down.weight"].chunk(ranks, 1)
    return [
        linear(silu(linear(x, gate)) * linear(x, up), down) for gate, up, down in zip(gates, ups, downs, strict=True)
    ]


def _names(session: Session) -> set[str]:
    return {step.name for step in session.steps}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_partial_sums_are_those_of_slices_by_hand(ranks):
    session = ffncli.trace("16x64:swiglu", tokens=3, tp=ranks, show=None)
    found, by_hand = session.over_ranks, partial_sums(session, ranks)
    if ranks == 1:
        assert (found.collectives, found.all_reduces, found.wire) == ((), 0, ())
        return
    (one,) = found.collectives
    assert (one.kind, one.step, one.output, len(one.parts)) == ("all-reduce", "down", "down.sum", ranks)
    for part, expected in zip(one.parts, by_hand, strict=True):
        torch.testing.assert_close(torch.tensor(part.values), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(one.values), torch.stack(by_hand).sum(0), rtol=1e-5, atol=1e-6)
    apart = (torch.tensor(one.values) - session["down"]).abs().max().item()
    assert one.agreement.max_error == pytest.approx(apart, abs=1e-12)
    assert one.agreement.relative_error == pytest.approx(apart / session["down"].abs().max().item(), abs=1e-12)
    assert found.agreement == one.agreement
    assert found.agreement.relative_error < 1e-6
    assert (found.all_reduces, found.all_to_alls) == (1, 0)


def test_the_engines_slices_and_bytes():
    """4096 × 11008 over 4 nodes, one token: [4096, 2752] and [2752, 4096], the figures of a calculation by hand."""
    found = ffncli.trace("4096x11008:swiglu", tokens=1, tp=4, dtype="bf16", show=2).over_ranks
    weights = {one.symbol: one for step in found.steps for one in step.weights}
    assert {name: (one.shape, one.place) for name, one in weights.items()} == {
        "W1": ((4096, 2752), "column"), "W3": ((4096, 2752), "column"), "W2": ((2752, 4096), "row"),
    }  # fmt: skip
    assert weights["W2"].whole_shape == (11008, 4096)
    assert found.reduced_bytes == 4096 * 2
    assert {share.ring_all_reduce_bytes for share in found.shares} == {2 * 3 * 4096 * 2 // 4}
    assert [(n.ranks, n.ring_all_reduce_bytes, n.gather_and_sum_bytes) for n in found.wire] == [
        (2, 8192, 8192), (4, 12288, 24576), (8, 14336, 57344), (16, 15360, 122880),
    ]  # fmt: skip
    assert found.unneeded_all_gather_bytes == 3 * 2752 * 2
    assert [step.formula for step in found.steps if step.partial] == ["hidden · W2"]
    assert sum(share.params for share in found.shares) == 3 * 4096 * 11008


def test_biases_and_the_residual_are_in_the_sum_once():
    session = ffncli.trace("8x16:gelu", bias=True, residual=True, norm="rmsnorm", tp=4, show=None)
    weights, x = session.prepared.weights, session["norm"]
    parts = []
    for rank in range(4):
        cut = slice(4 * rank, 4 * rank + 4)
        up = linear(x, weights["up.weight"][cut], weights["up.bias"][cut])
        bias = weights["down.bias"] if rank == 0 else None
        parts.append(linear(torch.nn.functional.gelu(up), weights["down.weight"][:, cut], bias))
    (one,) = session.over_ranks.collectives
    torch.testing.assert_close(torch.tensor([p.values for p in one.parts]), torch.stack(parts), rtol=1e-5, atol=1e-6)
    assert session.over_ranks.output == "out"
    assert session.over_ranks.agreement.relative_error < 1e-6
    assert [share.params for share in session.over_ranks.shares] == [(2 * 8 * 4 + 4) + 8, *[2 * 8 * 4 + 4] * 3]
    (bias,) = [w for step in session.over_ranks.steps for w in step.weights if w.name == "down.bias"]
    assert (bias.place, bias.symbol) == ("rank 0", "b2")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tokens", [2, 5])
def test_experts_over_ranks(tp, tokens):
    """Rows, bytes and results of every rank's experts from the route alone, one choice after the other."""
    ep, own = 4, 2
    session = ffncli.trace("8x16:swiglu", experts=8, top_k=3, tokens=tokens, tp=tp, ep=ep, show=None)
    found, route, weights = session.over_ranks, session["route"], session.prepared.weights
    parts = torch.zeros(ep, tp, tokens, 8)
    rows, dispatched, combined = [0] * ep, [0] * ep, [0] * ep
    home = [
        place for place, size in enumerate([len(c) for c in torch.arange(tokens).tensor_split(ep)]) for _ in range(size)
    ]
    for token, expert in route.nonzero().tolist():
        at, x = expert // own, session["x"][token]
        rows[at] += 1
        dispatched[home[token]] += at != home[token]
        combined[at] += at != home[token]
        gate, up = (weights[f"{name}.weight"][expert].chunk(tp) for name in ("gate", "up"))
        down = weights["down.weight"][expert].chunk(tp, 1)
        for t in range(tp):
            parts[at, t, token] += route[token, expert] * linear(silu(linear(x, gate[t])) * linear(x, up[t]), down[t])
    assert [share.rows for share in found.shares[::tp]] == rows
    assert [share.experts for share in found.shares[::tp]] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [share.dispatch_bytes for share in found.shares[::tp]] == [n * 8 * 4 for n in dispatched]
    assert [share.combine_bytes for share in found.shares[::tp]] == [n * 8 * 4 for n in combined]
    assert sum(share.tokens for share in found.shares[::tp]) == tokens
    exchange = found.collectives[0]
    assert (exchange.kind, exchange.step, found.all_to_alls, found.all_reduces) == ("all-to-all", "experts", 2, tp - 1)
    values = torch.tensor([part.values for part in exchange.parts]).reshape(ep, tp, tokens, 8)
    torch.testing.assert_close(values, parts, rtol=1e-5, atol=1e-6)
    assert all(one.agreement.relative_error < 1e-6 for one in found.collectives)
    assert found.agreement.relative_error < 1e-6
    assert found.expected_dispatch_bytes == pytest.approx(tokens / ep * 3 * 8 * 4 * 3 / 4)


def test_a_sum_inside_experts_is_one_collective_of_their_rows():
    """Muse-Spark normalises what every expert gives: the only all-reduce is in the experts' program."""
    from ffncli.block.recipe import FFNSpec, MoE, steps
    from ffncli.block.shard import Ranks
    from ffncli.run.engine.execute import execute
    from ffncli.run.engine.weights import random_weights
    from ffncli.run.ranks.one_process import compared_steps, rank_trace

    block = steps(FFNSpec(6, 8, "silu", gated=True, moe=MoE(4, 2, expert_norm=True), norm="rmsnorm"))
    generator = torch.Generator().manual_seed(0)
    weights, x = random_weights(block, generator), torch.randn(5, 6, generator=generator)
    whole = {event.name: event.tensor for event in execute(block, weights, {"x": x}, keep=None)}
    for ep in (1, 2):
        assert compared_steps(block, Ranks(2, ep)) == {"experts"}
        found = rank_trace(block, weights, {"x": x}, Ranks(2, ep), whole)
        assert (found.all_reduces, found.all_to_alls) == (1, 2 * (ep - 1))
        rows = (whole["route"] != 0).sum(0)
        assert found.reduced_bytes == int(rows[: 4 // ep].sum()) * 6 * 4
        assert found.agreement.relative_error < 1e-6


def test_a_checkpoint(tmp_path):
    path = folder(tmp_path, LLAMA, tensors("llama"))
    session = ffncli.trace(path, layer=1, tp=2, show=None)
    torch.testing.assert_close(
        torch.tensor([part.values for part in session.over_ranks.collectives[0].parts]),
        torch.stack(partial_sums(session, 2)), rtol=1e-5, atol=1e-6,
    )  # fmt: skip
    assert session.over_ranks.agreement.relative_error < 1e-6


def test_files_are_cut_between_blocks(tmp_path):
    """d_ff 96 is three blocks of 32 weights in each row of the down projection."""
    path = str(gguf_file(tmp_path / "model.gguf"))
    with pytest.raises(
        FFNError, match=r"96 over 2 ranks is 48 per rank, not a multiple of .* block size 32; nearest: 1 and 3"
    ):
        ffncli.trace(path, layer=0, tp=2)
    session = ffncli.trace(path, layer=0, tp=3)
    assert session.over_ranks.agreement.relative_error < 1e-6


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("llama-2-7b", {"tp": 3}, "d_ff = 11008 does not divide over 3 ranks; nearest: 2 and 4"),
        ("mixtral-8x7b", {"ep": 3}, "experts = 8 does not divide over 3 ranks; nearest: 2 and 4"),
        ("gpt2", {"ep": 2}, "gpt2 has no experts to split over 2 ranks; tp splits its d_ff"),
        ("deepseek-v3", {"ep": 2, "layer": 0}, "no experts to split"),
        ("8x16", {"tp": 2, "train": True}, "train=True contradicts tp"),
        (None, {"tp": 2, "example": "notebook"}, "example='notebook' contradicts tp"),
        ("8x16", {"tp": 0}, "tp must be a whole number from 1"),
    ],
)
def test_refusals_before_anything_runs(source, options, message):
    with pytest.raises(FFNError, match=message) as refused:
        ffncli.trace(source, **options)
    assert refused.value.code == 2


def test_one_layer_is_asked_what_it_can_do():
    """DeepSeek-V3's dense layers are 18,432 wide, its experts 2,048."""
    found = ffncli.trace("deepseek-v3", layer=0, d_model=8, d_ff=18, tp=9, tokens=1).over_ranks
    assert found.agreement.relative_error < 1e-6
    with pytest.raises(FFNError, match="nearest: 8 and 16"):
        ffncli.trace("deepseek-v3", layer=5, d_model=8, d_ff=16, tp=9)
