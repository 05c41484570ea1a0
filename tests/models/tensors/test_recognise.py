"""FFNs found by names and shapes: every way of naming them, in layers put together by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.models.tensors.ffns import NAMINGS, Item, Naming, looked_for
from ffncli.models.tensors.recognise import recognise
from tests.oracles.layers import IDS, NORM, D, F, Shapes, check_ffn, dense, layers_of, one, suffix

# --- dense ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", ["mlp.", "", "block.feed_forward."])
@pytest.mark.parametrize("way", NAMINGS, ids=IDS)
def test_every_way_of_naming_a_dense_ffn(way: Naming, parent: str):
    shapes = dense(way, parent)
    check_ffn(one(shapes | NORM), shapes, gated=bool(way.gate), fused=False, tensor=next(iter(shapes)))


@pytest.mark.parametrize("way", [way for way in NAMINGS if not way.gate], ids=lambda way: "/".join(way.names))
def test_gate_and_up_in_one_matrix(way: Naming):
    shapes = dense(way, fused=True)
    check_ffn(one(shapes), shapes, gated=True, fused=True)  # no norm is needed to see how it lies


@pytest.mark.parametrize("way", NAMINGS, ids=IDS)
def test_biases(way: Naming):
    shapes = dict(dense(way))
    for leaf in way.names:
        shapes[f"mlp.{leaf}{'.bias' if suffix(way) else '_bias'}"] = (D if leaf == way.down else F,)
    check_ffn(one(shapes), shapes, gated=bool(way.gate), bias=True)


def turned(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shape[::-1] for name, shape in shapes.items()}


@pytest.mark.parametrize("way", NAMINGS, ids=IDS)
def test_matrices_the_other_way_round(way: Naming):
    """A convolution's [in, out], as GPT-2 has it: the bias tells, else the norms, else the config."""
    shapes = turned(dense(way))
    check_ffn(one(shapes | NORM), shapes, gated=bool(way.gate))
    check_ffn(one(shapes | NORM, d_model=F), shapes, gated=bool(way.gate))  # a config that is wrong changes nothing
    check_ffn(one(shapes, d_model=D), shapes, gated=bool(way.gate))
    bias = {f"mlp.{way.up}{'.bias' if suffix(way) else '_bias'}": (F,)}
    check_ffn(one(shapes | bias, d_model=F), shapes | bias, gated=bool(way.gate), bias=True)


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
    ((found,),) = recognise(items, D)["l"].values()
    assert (found.shows["gated"], found.whole, found.shows["d_model"], found.params) == (True, False, D, 0)
    assert "d_ff" not in found.shows
    plain = {f"l.0.mlp.{name}.weight": Item(None, 0, 0) for name in ("fc1", "fc2")}
    ((found,),) = recognise(plain, D)["l"].values()
    assert "gated" not in found.shows  # one matrix may hold both: only its shape would tell


SIZES = st.integers(1, 50)


@given(st.sampled_from(NAMINGS), SIZES, SIZES, st.booleans(), st.integers(1, 3))
def test_numbers_are_what_was_put_in(way: Naming, d: int, f: int, fused: bool, layers: int):
    shapes = dense(way, fused=fused and not way.gate, d=d, f=f) | {"input_layernorm.weight": (d,)}
    found = layers_of({f"l.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()})
    assert list(found["l"]) == list(range(layers))
    for (one_of_them,) in found["l"].values():
        assert one_of_them.params == (3 if way.gate or fused else 2) * d * f
        assert [one_of_them.shows[name] for name in ("d_model", "d_ff", "gated")] == [d, f, bool(way.gate) or fused]
