"""Experts found by names and shapes: one by one, three-dimensional, merged; routers and shared experts beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.models.tensors.ffns import NAMINGS, Item, Naming
from ffncli.models.tensors.recognise import recognise
from tests.oracles.layers import IDS, D, E, F, Shapes, check_ffn, dense, layers_of, numbers, one, suffix

S = 14  # width of the shared experts
ROUTER = {"mlp.gate.weight": (E, D)}
PLAIN = {"input_layernorm.weight": (D,)}


def stacked(shapes: Shapes, experts: int = E) -> dict[str, tuple[int, ...]]:
    """All experts in one three-dimensional parameter."""
    return {name: (experts, *shape) for name, shape in shapes.items()}


ROUTED = [pytest.param(way, id=name) for way, name in zip(NAMINGS, IDS, strict=True) if "shexp" not in way.down]


@pytest.mark.parametrize("way", ROUTED)
def test_experts_one_by_one(way: Naming):
    shapes = ROUTER | dense(way, "mlp.experts.#.")
    check_ffn(one(shapes), shapes, experts=E, gated=bool(way.gate), tensor=f"mlp.experts.#.{way.names[0]}{suffix(way)}")


@pytest.mark.parametrize("ending", ["", ".weight"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_experts_in_three_dimensions(fused: bool, turned: bool, ending: str):
    up, down = (2 * F if fused else F, D), (D, F)
    up, down = (up[::-1], down[::-1]) if turned else (up, down)
    names = ("gate_up_proj", "down_proj") if fused else ("up_proj", "down_proj")
    shapes = ROUTER | {f"mlp.experts.{n}{ending}": (E, *s) for n, s in zip(names, (up, down), strict=True)}
    check_ffn(one(shapes | PLAIN), shapes, experts=E, gated=fused, fused=fused)


def test_gpt_oss_with_every_bias():
    shapes = {
        "mlp.router.weight": (E, D), "mlp.router.bias": (E,), "mlp.experts.gate_up_proj": (E, D, 2 * F),
        "mlp.experts.gate_up_proj_bias": (E, 2 * F), "mlp.experts.down_proj": (E, F, D),
        "mlp.experts.down_proj_bias": (E, D),
    }  # fmt: skip
    check_ffn(one(shapes), shapes, experts=E, gated=True, bias=True, router_bias=True, fused=True)


def test_dbrx_whose_experts_lie_below_one_another():
    shapes = {"ffn.router.layer.weight": (E, D)} | {f"ffn.experts.mlp.{n}": (E * F, D) for n in ("w1", "v1", "w2")}
    check_ffn(one(shapes), shapes, experts=E, gated=True)


def test_mixtral_and_phimoe():
    names = {"w1": (F, D), "w3": (F, D), "w2": (D, F)}
    shapes = {"block_sparse_moe.gate.weight": (E, D)}
    shapes |= {f"block_sparse_moe.experts.#.{name}.weight": shape for name, shape in names.items()}
    check_ffn(one(shapes), shapes, experts=E, gated=True)


@pytest.mark.parametrize("name", ["shared_expert", "shared_experts", "shared_mlp"])
@pytest.mark.parametrize("gate", [False, True])
def test_shared_experts_belong_to_those_beside_them(name: str, gate: bool):
    shapes = ROUTER | dense(NAMINGS[0], "mlp.experts.#.") | dense(NAMINGS[0], f"mlp.{name}.", f=S)
    shapes |= {"mlp.shared_expert_gate.weight": (1, D)} if gate else {}
    check_ffn(one(shapes), shapes, experts=E, gated=True, shared_d_ff=S, shared_gate=gate)


def test_what_is_called_shared_beside_no_experts_is_an_ffn_like_another():
    shapes = dense(NAMINGS[0], "shared_mlp.")
    check_ffn(one(shapes), shapes, gated=True)


@pytest.mark.parametrize("name", ["mlp.gate.e_score_correction_bias", "mlp.expert_bias", "mlp.gate.bias"])
def test_a_correction_of_the_choice(name: str):
    shapes = ROUTER | dense(NAMINGS[0], "mlp.experts.#.") | {name: (E,)}
    check_ffn(one(shapes), shapes, experts=E, gated=True, correction=True)


def test_gguf_names():
    ways = {way.down: way for way in NAMINGS if way.gate and way.down.startswith("ffn_down")}
    shapes = stacked(dense(ways["ffn_down_exps"], "")) | dense(ways["ffn_down_shexp"], "", f=S)
    shapes |= {"ffn_gate_inp.weight": (E, D), "ffn_gate_inp_shexp.weight": (D,), "exp_probs_b.bias": (E,)}
    found = one(shapes | {"ffn_norm.weight": (D,), "attn_output.weight": (D, D)}, prefix="blk")
    check_ffn(found, shapes, experts=E, gated=True, shared_d_ff=S, shared_gate=True, correction=True)


def test_a_dense_ffn_beside_experts_is_a_second_one():
    """Arctic's residual MLP, LongCat's dense ones: two FFNs in a layer."""
    moe, mlp = ROUTER | dense(NAMINGS[0], "mlp.experts.#."), dense(NAMINGS[2], "residual_mlp.")
    layers = layers_of({f"l.0.{name}": shape for name, shape in (moe | mlp).items()})
    first, second = sorted(layers["l"][0], key=lambda found: -found.experts)
    check_ffn(first, moe, experts=E, gated=True)
    check_ffn(second, mlp, gated=True)


@given(st.integers(2, 30), st.integers(2, 30), st.integers(2, 40), st.integers(0, 30), st.booleans(), st.booleans())
def test_numbers_are_what_was_put_in(d: int, f: int, experts: int, shared: int, together: bool, router: bool):
    one_by_one, three = dense(NAMINGS[0], "mlp.experts.#.", d=d, f=f), dense(NAMINGS[0], "mlp.experts.", d=d, f=f)
    shapes = {n.removesuffix(".weight"): s for n, s in stacked(three, experts).items()} if together else one_by_one
    # the bias of a module called mlp.gate is a correction: DeepSeek's own files and Inkling's
    shapes |= {"mlp.router.weight": (experts, d)} | ({"mlp.router.bias": (experts,)} if router else {})
    shapes |= dense(NAMINGS[0], "mlp.shared_experts.", d=d, f=shared) if shared else {}
    named = {f"l.0.{name}": shape for name, shape in shapes.items()} | {"l.0.input_layernorm.weight": (d,)}
    ((found,),) = layers_of(named, experts=experts)["l"].values()
    assert found.params == 3 * d * (experts * f + shared) + experts * d + router * experts
    assert found.bytes == 4 * found.params
    names = ("experts", "shared_d_ff", "router_bias", "d_model", "d_ff")
    assert [found.shows[name] for name in names] == [experts, shared, router, d, f]


def test_numbers_counts_experts():
    assert numbers(ROUTER | dense(NAMINGS[0], "mlp.experts.#.")) == E * D + 3 * E * D * F


def test_an_expert_of_another_width_counts_once():
    alike, alone = ROUTER | dense(NAMINGS[0], "mlp.experts.#."), dense(NAMINGS[0], "mlp.experts.7.", f=F + 1)
    layers = layers_of({f"l.0.{name}": shape for name, shape in (alike | alone).items()})
    first, second = layers["l"][0]
    check_ffn(first, alike, experts=E, gated=True)
    check_ffn(second, alone, experts=1, gated=True, d_ff=F + 1)


def test_a_matrix_that_some_experts_lack_is_named():
    shapes = {f"mlp.experts.#.{name}_proj.weight": (F, D) for name in ("gate", "up")}
    items = {f"l.0.{name}": Item(shape, F * D, 4 * F * D * E, E, "F32") for name, shape in shapes.items()}
    items["l.0.mlp.experts.#.down_proj.weight"] = Item((D, F), F * D, 4 * F * D * (E - 1), E - 1, "F32")
    ((found,),) = recognise(items)["l"].values()
    assert (found.uneven, found.experts, found.misfit) == (f"down_proj for {E - 1} of {E} experts", E, ())


@pytest.mark.parametrize("at", ["gate_proj", "up_proj", "down_proj"])
def test_a_matrix_that_fits_no_other_is_named(at: str):
    shapes = {**dense(NAMINGS[0]), f"mlp.{at}.weight": (2, D * F // 2)}
    found = one(shapes)
    assert (f"mlp.{at}.weight", (2, D * F // 2)) in found.misfit
    assert found.params == numbers(shapes)
    assert one(dense(NAMINGS[0])).misfit == ()
