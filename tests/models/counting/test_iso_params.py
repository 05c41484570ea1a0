"""Blocks of equal size, against published widths, torch's modules and the shapes; sweeps."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.analysis.gated import UNITS
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.models import catalog, source
from ffncli.models.counting.count import count
from ffncli.models.counting.iso_params import counterpart, counterparts, iso_params, iso_unit
from ffncli.models.counting.sweep import MAX_ROWS, points, swept
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Group, Model, Resolved
from ffncli.models.source import load
from tests.oracles import modules


def llamas_rule(d_model: int, multiple_of: int) -> int:
    """hidden_dim = int(2 · 4 · dim / 3), then multiple_of · ⌈hidden_dim / multiple_of⌉."""
    hidden = int(2 * (4 * d_model) / 3)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


@given(d_model=st.integers(1, 4096).map(lambda n: 8 * n), multiple_of=st.sampled_from([8, 64, 128, 256]))
def test_llamas_rule(d_model, multiple_of):
    assert counterpart(FFNSpec(d_model, 4 * d_model, "silu"), multiple_of).d_ff == llamas_rule(d_model, multiple_of)


@pytest.mark.parametrize(
    ("d_model", "d_ff", "multiple_of", "published"),
    [(4096, 16384, 256, 11008), (5120, 20480, 256, 13824), (8192, 32768, 256, 22016), (768, 3072, 1, 2048)],
)  # Llama 7B, 13B, 65B; T5 v1.1 base
def test_published_widths(d_model, d_ff, multiple_of, published):
    assert counterpart(FFNSpec(d_model, d_ff), multiple_of).d_ff == published


def test_bert_by_hand():
    found = iso_params(catalog.find("bert-base").model.main.spec)
    assert (found.plain_d_ff, found.gated_d_ff) == (3072, 2048)
    assert found.plain_params == 2 * 768 * 3072 + 3072 + 768
    assert found.gated_params == 3 * 768 * 2048 + 2 * 2048 + 768
    assert found.difference == 2 * 2048 - 3072
    assert found.difference_percent == pytest.approx(100 * 1024 / 4_722_432)


@given(
    d_model=st.integers(1, 300), d_ff=st.integers(1, 3000), gated=st.booleans(), bias=st.booleans(),
    multiple_of=st.integers(1, 300),
)  # fmt: skip
def test_sizes_are_torchs_and_as_near_as_the_multiple_lets_them(d_model, d_ff, gated, bias, multiple_of):
    found = iso_params(FFNSpec(d_model, d_ff, "silu", gated=gated, bias=bias), multiple_of)
    with torch.device("meta"):
        plain = modules.Plain(d_model, found.plain_d_ff, bias)
        many = modules.Gated(d_model, found.gated_d_ff, bias)
    assert found.plain_params == sum(p.numel() for p in plain.parameters())
    assert found.gated_params == sum(p.numel() for p in many.parameters())
    assert found.difference == found.gated_params - found.plain_params
    given_width, made = (found.gated_d_ff, found.plain_d_ff) if gated else (found.plain_d_ff, found.gated_d_ff)
    exact = d_ff * 3 / 2 if gated else d_ff * 2 / 3
    assert given_width == d_ff
    assert made % multiple_of == 0
    assert -0.5 <= made - exact <= max(0.5, multiple_of) or made == multiple_of


@given(d_ff=st.integers(1, 10**6))
def test_there_and_back(d_ff):
    spec = FFNSpec(4, 3 * d_ff, "silu", bias=True)
    assert counterpart(counterpart(spec)) == spec


def test_experts_and_shared_experts():
    spec = FFNSpec(64, 96, "swiglu", moe=MoE(8, 2, 2, shared_d_ff=48))
    other = counterpart(spec)
    assert (other.d_ff, other.shared_width, other.gated, other.bias) == (144, 72, False, False)
    assert cost(steps(other)).params == cost(steps(spec)).params
    assert counterpart(FFNSpec(64, 96, "swiglu", moe=MoE(8, 2, 2))).shared_width == 2 * 144


def test_every_layer_of_a_model():
    groups = (Group("decoder", (0,), FFNSpec(64, 768, "swiglu")), Group("decoder", (1, 2), FFNSpec(64, 96, "swiglu")))
    other = counterparts(Resolved(Model("m", groups), "m"))
    groups_of_other = [(g.layers, g.spec.d_ff, g.spec.gated) for g in other.model.groups]
    assert groups_of_other == [((0,), 1152, False), ((1, 2), 144, False)]
    assert other.model.name == "m (plain)"
    assert counterparts(other).model.name.endswith("(gated)")


def test_refusals():
    for multiple in (0, -1, 2**31):
        with pytest.raises(FFNError, match="multiple_of must be a whole number from 1 to"):
            counterpart(FFNSpec(4, 8), multiple)
    with pytest.raises(FFNError, match="d_ff must be a whole number from 1"):
        counterpart(FFNSpec(4, 2**31 - 1, "swiglu"))


@pytest.mark.parametrize(
    ("name", "plain_operations", "gated_operations", "gated_flops"),
    [
        ("swiglu", 2, 3, 2),  # σ, ×; and the product with up
        ("geglu", 5, 6, 2),
        ("reglu", 2, 3, 2),
        ("bilinear", 0, 1, 2),
        ("swiglu_oai", 5, 11, 3),  # min is two, clip four, then + 1: the lift is a step of its own
    ],
)
def test_by_hand(name, plain_operations, gated_operations, gated_flops):
    found = iso_unit(UNITS[name], 512, 2048)
    widths = found.widths
    assert (found.d_model, widths.plain_d_ff, widths.gated_d_ff) == (512, 2048, 1365)
    assert (widths.plain_params, widths.gated_params) == (2 * 512 * 2048, 3 * 512 * 1365)
    assert widths.difference_percent == pytest.approx(100 * (3 * 1365 - 2 * 2048) / (2 * 2048))
    assert found.plain_elementwise_flops_per_token == 2048
    assert found.gated_elementwise_flops_per_token == gated_flops * 1365
    assert found.plain_operations_per_token == plain_operations * 2048
    assert found.gated_operations_per_token == gated_operations * 1365


def test_llamas_own_width():
    """Its code: two thirds of 4 × 4096, then the next multiple of 256."""
    assert iso_unit(UNITS["swiglu"], 4096, 4 * 4096, 256).widths.gated_d_ff == 11008


@pytest.mark.parametrize(("d_model", "d_ff", "multiple"), [(0, 8, 1), (8, 0, 1), (8, 2**31, 1), (8, 8, 0)])
def test_sizes_that_are_none(d_model, d_ff, multiple):
    with pytest.raises(FFNError):
        iso_unit(UNITS["swiglu"], d_model, d_ff, multiple)


def blocks(origin: str | None, *sweeps: str, **said) -> list[tuple[int, int, str, bool, bool]]:
    found = swept(origin, Dimensions(**said), points(sweeps))
    specs = [model.model.main.spec for _, model in found]
    return [(s.d_model, s.d_ff, s.activation, bool(s.gated), bool(s.bias)) for s in specs]


@given(st.lists(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_combination_in_order(values):
    names = ["d_model", "experts", "top_k", "tokens"][: len(values)]
    found = points([f"{name}={','.join(map(str, numbers))}" for name, numbers in zip(names, values, strict=True)])
    assert [tuple(int(text) for _, text in point.values) for point in found] == list(product(*values))
    assert all([name for name, _ in point.values] == names for point in found)


def test_a_point_says_what_it_sets():
    first, second = points(["d-ff=4x", "--gated=YES", "tokens=1,32"])
    assert first.label == "d_ff=4x gated=YES tokens=1"
    assert first.dimensions == second.dimensions == Dimensions(d_ff="4x", gated=True)
    assert (first.tokens, second.tokens) == (1, 32)
    (every,) = points(
        ["bias=no", "residual=true", "norm=rmsnorm", "norm_position=post", "dropout=0.1", "shared_experts=0",
         "experts=8", "top_k=2", "activation=swiglu", "d_model=512"]
    )  # fmt: skip
    assert every.dimensions == Dimensions(
        d_model="512", bias=False, norm="rmsnorm", norm_position="post", residual=True, dropout=0.1, shared_experts=0,
        experts=8, top_k=2, activation="swiglu",
    )  # fmt: skip
    assert every.tokens is None


def test_ranges_include_their_end():
    assert [point.dimensions.d_model for point in points(["d_model=512:2048:512,4096"])] == [
        "512", "1024", "1536", "2048", "4096",
    ]  # fmt: skip
    assert [point.tokens for point in points(["tokens=1:6:2"])] == [1, 3, 5]


def test_a_block_of_numbers_is_made_anew():
    assert blocks("512x2048:gelu", "d_ff=1x,4x", "activation=relu,swiglu") == [
        (512, 512, "relu", False, True), (512, 512, "silu", True, False),
        (512, 2048, "relu", False, True), (512, 2048, "silu", True, False),
    ]  # fmt: skip
    assert blocks(None, "d_model=4,8", d_ff="2x") == [(4, 8, "relu", False, True), (8, 16, "relu", False, True)]


def test_a_sweep_is_over_the_options_and_both_over_the_model():
    found = blocks("llama-2-7b", "d_model=512,1024", d_ff="2x", bias=True)
    assert found == [(512, 1024, "silu", True, True), (1024, 2048, "silu", True, True)]
    assert blocks("llama-2-7b", "d_ff=64", d_ff="2x") == [(4096, 64, "silu", True, False)]


def test_counts_are_those_of_the_options():
    for point, model in swept("mixtral-8x7b", Dimensions(), points(["experts=4,8", "top_k=1,2"])):
        experts, top_k = (int(text) for _, text in point.values)
        expert, router = 3 * 4096 * 14336, 4096 * experts
        assert count(model).ffn_params_total == 32 * (experts * expert + router)
        assert count(model).ffn_params_active == 32 * (top_k * expert + router)


def test_a_model_is_read_once(monkeypatch):
    read = []
    monkeypatch.setattr(source, "resolve", lambda text, inner=source.resolve: read.append(text) or inner(text))
    assert len(blocks("llama-2-7b", "d_ff=1x,2x,3x")) == 3
    assert read == ["llama-2-7b"]
    assert load("llama-2-7b").model.main.spec.d_ff == 11008


@pytest.mark.parametrize(
    ("sweeps", "message"),
    [
        (["dff=1,2"], "sweep: unknown dimension 'dff'; did you mean 'd_ff'?"),
        (["zzz=1"], "sweep: unknown dimension 'zzz'; use one of d_model, d_ff, activation, "),
        (["d_ff"], "sweep 'd_ff' has no '='; write it as d_ff=1x,2x,4x"),
        (["d_ff=1x,,2x"], "sweep d_ff: an empty value; write it as d_ff=1x,2x,4x"),
        (["d_ff="], "sweep d_ff: an empty value"),
        (["d_ff=1x", "d-ff=2x"], "sweep: d_ff is swept twice; give all its values at once"),
        (["d_model=4x"], "sweep d_model must be a whole number, got '4x'"),
        (["experts=0"], "sweep='experts=0': experts must be a whole number from 1, got '0'"),
        (["tokens=1.5"], "sweep tokens must be a whole number, got '1.5'"),
        (["gated=maybe"], "sweep gated must be yes or no, got 'maybe'"),
        (["activation=gelo"], "sweep activation: unknown activation 'gelo'; did you mean 'gelu'"),
        (["norm=layer"], "sweep norm: unknown choice 'layer'; did you mean 'layernorm'"),
        (["dropout=half"], "sweep='dropout=half': dropout must be a number from 0 and below 1, got 'half'"),
        (["d_model=8:4:1"], "sweep d_model: 8:4:1 is an empty range; write it as FROM:TO:STEP"),
        (["d_model=4:8:0"], "sweep d_model: 4:8:0 is an empty range"),
        ([f"d_model=1:{MAX_ROWS + 1}:1"], f"sweep needs {MAX_ROWS + 1} rows or more, but the limit is {MAX_ROWS}"),
        (["d_model=1:9999999999:1"], "sweep needs 9999999999 rows or more"),
        (["d_model=1:101:1", "tokens=1:100:1"], "sweep needs 10100 rows or more, but the limit is 10000; sweep fewer"),
        ([f"tokens={'1:6000:1,' * 50}1"], "sweep needs 12000 rows or more"),
    ],
)
def test_sweeps_that_are_refused(sweeps, message):
    with pytest.raises(FFNError) as refused:
        points(sweeps)
    assert str(refused.value).startswith(message)
    assert refused.value.code == 2


def test_the_limit_itself_is_taken():
    assert len(points(["d_model=1:100:1", "tokens=1:100:1"])) == MAX_ROWS


def test_an_impossible_combination_is_named():
    with pytest.raises(FFNError) as refused:
        blocks("8x32", "activation=relu,swiglu", "gated=no")
    assert str(refused.value).startswith("sweep='activation=swiglu gated=no': activation='swiglu' is gated")
    with pytest.raises(FFNError, match=r"sweep='dropout=1.5': dropout must be a number from 0 and below 1"):
        blocks("8x32", "dropout=0.5,1.5")
    with pytest.raises(FFNError, match=r"d_ff=0.3x': .* is 2.4, not a whole number"):
        blocks("8x32", "d_ff=0.3x")
