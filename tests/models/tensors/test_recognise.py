"""FFNs and experts found by names and shapes: every way of naming them, in layers put together by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.models.tensors.ffns import NAMINGS, Item, Naming, looked_for
from ffncli.models.tensors.recognise import recognise
from tests.oracles.layers import (
    EITHER,
    IDS,
    NORM,
    D,
    E,
    F,
    Shapes,
    bias,
    check_ffn,
    dense,
    layers_of,
    numbers,
    one,
    suffix,
)

# --- dense ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", ["mlp.", "", "block.feed_forward."])
@pytest.mark.parametrize("way", EITHER, ids=IDS)
def test_every_way_of_naming_a_dense_ffn(way: Naming, parent: str):
    shapes = dense(way, parent)
    check_ffn(one(shapes | NORM), shapes, gated=bool(way.gate), fused=False, tensor=next(iter(shapes)))


@pytest.mark.parametrize("way", [way for way in NAMINGS if not way.gate], ids=lambda way: "/".join(way.names))
def test_gate_and_up_in_one_matrix(way: Naming):
    shapes = dense(way, fused=True)
    check_ffn(one(shapes), shapes, gated=True, fused=True)  # no norm is needed to see how it lies


@pytest.mark.parametrize("way", EITHER, ids=IDS)
def test_biases(way: Naming):
    shapes = dict(dense(way))
    for leaf in way.names:
        shapes[bias(way, leaf)] = (D if leaf == way.down else F,)
    check_ffn(one(shapes), shapes, gated=bool(way.gate), bias=True)


def turned(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shape[::-1] for name, shape in shapes.items()}


@pytest.mark.parametrize("way", EITHER, ids=IDS)
def test_matrices_the_other_way_round(way: Naming):
    """A convolution's [in, out], as GPT-2 has it: the bias tells, else the norms, else the config."""
    shapes = turned(dense(way))
    check_ffn(one(shapes | NORM), shapes, gated=bool(way.gate))
    check_ffn(one(shapes | NORM, d_model=F), shapes, gated=bool(way.gate))  # a config that is wrong changes nothing
    check_ffn(one(shapes, d_model=D), shapes, gated=bool(way.gate))
    biased = shapes | {bias(way, way.up): (F,)}
    check_ffn(one(biased, d_model=F), biased, gated=bool(way.gate), bias=True)


def test_a_fused_matrix_the_other_way_round_needs_nothing_else():
    shapes = {"mlp.gate_up_proj.weight": (D, 2 * F), "mlp.down_proj.weight": (F, D)}
    check_ffn(one(shapes), shapes, gated=True, fused=True)


def test_norms_of_several_lengths_leave_it_to_the_config():
    shapes = dense(NAMINGS[0])
    norms = {"input_layernorm.weight": (D,), "mlp.ffn_sub_norm.weight": (F,)}
    check_ffn(one(shapes | norms, d_model=D), shapes, gated=True)
    check_ffn(one(shapes | norms), shapes, gated=True)


def test_convolutions_of_width_one():
    shapes = {"fc1.weight": (F, D, 1), "fc2.weight": (D, F, 1)}
    check_ffn(one(shapes), shapes, gated=False)


# --- what is beside an FFN and no part of it --------------------------------------------------------------------------

BERT = {"intermediate.dense.weight": (F, D), "intermediate.dense.bias": (F,), "output.dense.weight": (D, F),
        "output.dense.bias": (D,)}  # fmt: skip
GPT2 = {"mlp.c_fc.weight": (D, F), "mlp.c_fc.bias": (F,), "mlp.c_proj.weight": (F, D), "mlp.c_proj.bias": (D,)}
T5 = {"layer.1.DenseReluDense.wi_0.weight": (F, D), "layer.1.DenseReluDense.wi_1.weight": (F, D),
      "layer.1.DenseReluDense.wo.weight": (D, F)}  # fmt: skip


def test_bert_whose_attention_has_an_output_too():
    beside = {"attention.output.dense.weight": (D, D), "attention.self.query.weight": (D, D),
              "attention.output.LayerNorm.weight": (D,), "output.LayerNorm.weight": (D,)}  # fmt: skip
    check_ffn(one(BERT | beside, prefix="bert.encoder.layer"), BERT, gated=False, bias=True)


def test_gpt2_whose_attention_has_a_c_proj_too():
    beside = {"attn.c_attn.weight": (D, 3 * D), "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,),
              "attn.bias": (1, 1, 9, 9), "ln_1.weight": (D,), "ln_2.weight": (D,)}  # fmt: skip
    check_ffn(one(GPT2 | beside, prefix="h"), GPT2, gated=False, bias=True)


def test_t5_whose_numbers_come_twice():
    beside = {"layer.0.SelfAttention.o.weight": (D, D), "layer.0.layer_norm.weight": (D,),
              "layer.1.layer_norm.weight": (D,)}  # fmt: skip
    check_ffn(one(T5 | beside, prefix="encoder.block"), T5, gated=True)


@pytest.mark.parametrize("tower", ["vision_tower.layers", "model.visual.blocks", "audio_tower.layers", "image_encoder"])
def test_towers_that_are_not_text_are_left_out(tower: str):
    text = {f"language_model.layers.0.{name}": shape for name, shape in dense(NAMINGS[0]).items()}
    other = {f"{tower}.0.mlp.fc1.weight": (8, 2), f"{tower}.0.mlp.fc2.weight": (2, 8)}
    assert list(layers_of({**other, **text})) == ["language_model.layers"]
    assert list(layers_of(other)) == [tower]  # a model that is nothing else


def test_adapters_and_what_is_no_parameter_are_left_out():
    shapes = dense(NAMINGS[0])
    beside = {
        "mlp.up_proj.lora_A.weight": (2, D), "mlp.up_proj.lora_B.weight": (F, 2),
        "mlp.up_proj.lora_A.default.weight": (2, D),
        "adapter.up_proj.weight": (F, D), "adapter.down_proj.weight": (D, F),
    }  # fmt: skip
    check_ffn(one(shapes | beside), shapes, gated=True)
    base = {name.replace(".weight", ".base_layer.weight"): shape for name, shape in shapes.items()}
    check_ffn(one(base | beside), shapes, gated=True)


def test_what_else_lies_in_the_module_counts_and_is_named():
    shapes = {**dense(NAMINGS[0]), "mlp.act.alpha": (1,), "mlp.norm.weight": (F,)}
    counted = {name: shape for name, shape in shapes.items() if "norm" not in name}
    check_ffn(one(shapes | NORM), counted, gated=True, loose=("mlp.act.alpha",))


@pytest.mark.parametrize(
    "shapes",
    [
        {}, {"embed_tokens.weight": (9, D)}, {"model.layers.0.self_attn.q_proj.weight": (D, D)},
        {"model.layers.0.mlp.up_proj.weight": (F, D)}, {"model.layers.0.mlp.down_proj.weight": (D, F)},
        # in no layer of a file that has layers
        {"model.mlp.up_proj.weight": (F, D), "model.mlp.down_proj.weight": (D, F), "l.0.norm.weight": (D,)},
        {"l.0.mlp.up_proj.weight": (F, D), "l.0.mlp.down_proj.weight": (D, F + 1)},  # they do not fit each other
        {"l.0.mlp.up_proj.weight": (F,), "l.0.mlp.down_proj.weight": (F,)},
        {"l.0.mlp.up_proj.weight": (F, D), "l.1.mlp.down_proj.weight": (D, F)},
        {"l.0.mlp.up_proj.bias": (F,), "l.0.mlp.down_proj.bias": (F,)},
    ],
)  # fmt: skip
def test_no_ffn(shapes: Shapes):
    assert layers_of(shapes) == {}
    assert "gate_proj/up_proj/down_proj" in looked_for()


def test_tensors_whose_file_is_not_here_are_known_by_name():
    items = {f"l.0.{name}": Item(None, 0, 0) for name in dense(NAMINGS[0])}
    ((found,),) = recognise(items, D)[0]["l"].values()
    assert (found.shows["gated"], found.whole, found.shows["d_model"], found.params) == (True, False, D, 0)
    assert "d_ff" not in found.shows
    plain = {f"l.0.mlp.{name}.weight": Item(None, 0, 0) for name in ("fc1", "fc2")}
    ((found,),) = recognise(plain, D)[0]["l"].values()
    assert "gated" not in found.shows  # one matrix may hold both: only its shape would tell


SIZES = st.integers(1, 50)


@given(st.sampled_from(EITHER), SIZES, SIZES, st.booleans(), st.integers(1, 3))
def test_numbers_are_what_was_put_in(way: Naming, d: int, f: int, fused: bool, layers: int):
    shapes = dense(way, fused=fused and not way.gate, d=d, f=f) | {"input_layernorm.weight": (d,)}
    found = layers_of({f"l.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()})
    assert list(found["l"]) == list(range(layers))
    for (one_of_them,) in found["l"].values():
        assert one_of_them.params == (3 if way.gate or fused else 2) * d * f
        assert [one_of_them.shows[name] for name in ("d_model", "d_ff", "gated")] == [d, f, bool(way.gate) or fused]


S = 14  # width of the shared experts
ROUTER = {"mlp.gate.weight": (E, D)}
PLAIN = {"input_layernorm.weight": (D,)}


def stacked(shapes: Shapes, experts: int = E) -> dict[str, tuple[int, ...]]:
    """All experts in one three-dimensional parameter."""
    return {name: (experts, *shape) for name, shape in shapes.items()}


ROUTED = [pytest.param(way, id=name) for way, name in zip(EITHER, IDS, strict=True) if "shexp" not in way.down]


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
def test_numbers_of_experts_are_what_was_put_in(
    d: int, f: int, experts: int, shared: int, together: bool, router: bool
):
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
    ((found,),) = recognise(items)[0]["l"].values()
    assert (found.uneven, found.experts, found.misfit) == (f"down_proj for {E - 1} of {E} experts", E, ())


@pytest.mark.parametrize("at", ["gate_proj", "up_proj", "down_proj"])
def test_a_matrix_that_fits_no_other_is_named(at: str):
    shapes = {**dense(NAMINGS[0]), f"mlp.{at}.weight": (2, D * F // 2)}
    found = one(shapes)
    assert (f"mlp.{at}.weight", (2, D * F // 2)) in found.misfit
    assert found.params == numbers(shapes)
    assert one(dense(NAMINGS[0])).misfit == ()
