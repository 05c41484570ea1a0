"""Blocks of equal size: against Llama's rule as its code states it, published widths, and torch's modules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.iso_params import counterpart, counterparts, iso_params
from ffncli.models.model import Group, Model, Resolved
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
