"""Recipes: what a block is, what its parameters weigh, which steps show hidden units, other versions of it."""

from dataclasses import replace

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.activations import NO_LIMITS, Limits, hard_limits
from ffncli.block.analysis.flow import flow
from ffncli.block.cost import cost
from ffncli.block.dtypes import STORED, TABLE, activation_dtype, dtype, find, storage, weight_bytes
from ffncli.block.recipe import FFNSpec, MoE, final_layer, merged_first, steps, with_biases, without_nonlinearity
from ffncli.block.shard import shard
from ffncli.block.steps import (
    OPS,
    Activation,
    Experts,
    Linear,
    block_inputs,
    ffn_span,
    input_shapes,
    parameters,
    shapes,
    walk,
)
from ffncli.block.symbols import right_hand_side
from ffncli.block.value import unit_steps
from ffncli.errors import FFNError
from tests.oracles import modules


def names(**choices) -> list[str]:
    return [s.output for s in steps(FFNSpec(4, 8, **choices))]


def test_norm_positions():
    norm = {"norm": "rmsnorm", "residual": True}
    assert names(**norm) == ["norm", "up", "act", "down", "out"]
    assert names(**norm, norm_position="post") == ["up", "act", "down", "out", "post_norm"]
    assert names(**norm, norm_position="branch") == ["up", "act", "down", "post_norm", "out"]
    assert names(**norm, norm_position="pre+branch") == ["norm", "up", "act", "down", "post_norm", "out"]


def test_variants():
    assert names(dropout=0.1) == ["up", "act", "dropout", "down"]
    assert names(gated=True, sub_norm=True) == ["gate", "up", "act", "hidden", "sub_norm", "down"]
    assert names(gated=True, limits=hard_limits(7.0, 1.0)) == ["gate", "up", "act", "lift", "hidden", "down"]
    assert names(gated=True, moe=MoE(4, 2, 2, shared_gate=True))[3:] == [
        *(f"shared.{n}" for n in ("gate", "up", "act", "hidden", "down")),
        *("shared_gate", "shared_score", "shared", "moe"),
    ]


def test_defaults_follow_the_gate():
    assert FFNSpec(4, 8).bias is True
    assert FFNSpec(4, 8, "swiglu").bias is False
    assert FFNSpec(4, 8, "swiglu") == FFNSpec(4, 8, "silu", gated=True)
    assert FFNSpec(4, 8, "gelu_new").activation == "gelu_tanh"
    assert FFNSpec(4, 8, norm="layernorm").norm_bias is True
    assert FFNSpec(4, 8, norm="rmsnorm").norm_bias is False


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"d_model": 0}, "d_model must be a whole number from 1 to"),
        ({"d_ff": -8}, "d_ff must be a whole number from 1 to"),
        ({"d_ff": 10**30}, "d_ff must be a whole number from 1 to"),
        ({"d_ff": 2**31}, "d_ff must be a whole number from 1 to"),
        ({"residual_scale": True}, "residual_scale must be a number"),
        ({"moe": MoE(8, 2, groups=2, top_groups=3)}, "cannot be chosen"),
        ({"d_model": 4.0}, "d_model must be a whole number"),
        ({"d_model": True}, "d_model must be a whole number"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"norm_eps": float("nan")}, "norm eps"),
        ({"limits": hard_limits(0.0)}, "the limit of the gate must be positive"),
        ({"limits": Limits(up_cap=-1.0)}, "the soft cap of up must be positive"),
        ({"shared_limits": Limits(act_high=float("nan"))}, "activated gate must be a number"),
        ({"activation": "gelu", "limits": Limits(gate_cap=4.0)}, "which gelu does not have"),
        ({"activation": "gelo"}, "unknown activation"),
        ({"activation": "swiglu", "gated": False}, "cannot be plain"),
        ({"moe": MoE(4, 5)}, "top_k"),
        ({"moe": MoE(0, 1)}, "experts must be"),
        ({"moe": MoE(6, 2, groups=4)}, "do not divide"),
        ({"moe": MoE(8, 4, groups=4, top_groups=1)}, "cannot be chosen"),
        ({"moe": MoE(8, 4, shared_experts=-1)}, "shared_experts"),
        ({"moe": MoE(8, 4, shared_scale=float("nan"))}, "shared_scale must be a number"),
        ({"moe": MoE(8, 4, identity_experts=-1)}, "identity_experts must be"),
        ({"moe": MoE(8, 4, identity_experts=2, groups=2, top_groups=2)}, "combined with groups"),
    ],
)
def test_impossible_specs_are_refused(choices, message):
    with pytest.raises(FFNError, match=message):
        FFNSpec(**{"d_model": 4, "d_ff": 8, **choices})


def test_values_at_the_edge_are_taken():
    assert FFNSpec(4, 2**31 - 1, norm="rmsnorm", norm_eps=0.0).d_ff == 2**31 - 1


def test_shared_experts_have_one_width_together():
    assert FFNSpec(4, 8, moe=MoE(4, 2, 3)).shared_width == 24
    assert FFNSpec(4, 8, moe=MoE(4, 2, 3, shared_d_ff=10)).shared_width == 10


def test_details_of_the_recipe():
    by_name = {
        s.output: s for s in steps(FFNSpec(4, 8, gated=True, sub_norm=True, dropout=0.1, limits=Limits(up_plus=1.0)))
    }
    assert by_name["hidden"].inputs == ("act", "lift")
    assert by_name["sub_norm"].op.kind == "rmsnorm"
    assert (by_name["dropout"].inputs, by_name["down"].inputs) == (("sub_norm",), ("dropout",))
    assert steps(FFNSpec(4, 8, parallel=True))[-1].inputs == ("x", "attention", "down")
    clamped = {s.output: s.op for s in steps(FFNSpec(4, 8, gated=True, limits=hard_limits(7.0)))}
    assert (clamped["act"].low, clamped["act"].high) == (None, 7.0)  # gpt-oss: the gate has no lower limit
    assert (clamped["lift"].low, clamped["lift"].high) == (-7.0, 7.0)


specs = st.builds(
    FFNSpec,
    d_model=st.integers(1, 40),
    d_ff=st.integers(1, 40),
    activation=st.sampled_from(["relu", "gelu", "silu", "xielu", "identity"]),
    gated=st.booleans(),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]),
    norm=st.sampled_from(["none", "layernorm", "rmsnorm"]),
    norm_position=st.sampled_from(["pre", "post", "branch", "pre+branch"]),
    norm_weight=st.sampled_from(["none", "plain", "one_plus"]),
    residual=st.booleans(),
    parallel=st.booleans(),
    sub_norm=st.booleans(),
    limits=st.sampled_from([NO_LIMITS, hard_limits(7.0), Limits(act_high=7.0, up_limit=7.0, up_plus=1.0, up_cap=3.0)]),
    moe=st.sampled_from([None, MoE(4, 2), MoE(6, 3, 2, shared_gate=True, correction=True, groups=3, top_groups=2)]),
)


@given(spec=specs, tokens=st.integers(1, 5))
def test_every_recipe_is_a_well_formed_block(spec, tokens):
    block = steps(spec)
    known = shapes(block, input_shapes(block, (tokens,)))
    assert known[block[-1].output] == (tokens, spec.d_model)
    assert block_inputs(block) == (("x", "attention") if spec.parallel else ("x",))
    assert len({s.output for s in block}) == len(block)


@pytest.mark.parametrize(
    ("spec", "units"),
    [
        (FFNSpec(8, 16, "relu"), {"act": "down"}),
        (FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True), {"act": None, "hidden": "down"}),
        (FFNSpec(8, 16, "relu", dropout=0.1), {"act": None, "dropout": "down"}),
        (FFNSpec(8, 16, "identity"), {}),
        (FFNSpec(8, 8, "relu"), {"act": "down"}),  # d_ff by its name, not by its size
        (FFNSpec(8, 16, "quick_gelu", gated=True, limits=hard_limits(7.0, 1.0)), {"act": None, "hidden": "down"}),
        (FFNSpec(8, 16, "swiglu", moe=MoE(4, 2, 1)), {"shared.act": None, "shared.hidden": "shared.down"}),
    ],
)
def test_units_are_read_off_the_steps(spec, units):
    assert unit_steps(steps(spec)) == units


def test_experts_have_them_in_their_program():
    (experts,) = [s.op for s in steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 2))) if isinstance(s.op, Experts)]
    assert unit_steps(experts.program) == {"act": None, "hidden": "down"}


def test_a_rank_has_its_part_of_the_units():
    assert unit_steps(shard(steps(FFNSpec(8, 16, "swiglu")), 0, 2)) == {"act": None, "hidden": "down"}


GATED = FFNSpec(8, 16, "silu", gated=True, limits=hard_limits(7.0))


def test_without_a_nonlinearity_limits_go_too() -> None:
    block = steps(GATED)
    linear = without_nonlinearity(block)
    assert [s.op for s in linear if isinstance(s.op, Activation)] == [Activation("identity")] * 2
    assert [s.output for s in linear] == [s.output for s in block]
    assert [s for s in linear if not isinstance(s.op, Activation)] == [
        s for s in block if not isinstance(s.op, Activation)
    ]


def test_biases_everywhere_or_nowhere_inside_experts_too() -> None:
    for spec in (GATED, replace(GATED, moe=MoE(4, 2))):
        for bias in (True, False):
            changed = with_biases(steps(spec), bias)
            found = {name: s.op.bias for name, s in walk(changed) if isinstance(s.op, Linear)}
            assert set(found.values()) == {bias}
            assert any("[e]" in name for name in found) == any(isinstance(s.op, Experts) for s in changed)
            assert with_biases(with_biases(changed, not bias), bias) == changed


def test_a_final_layer_is_a_linear_and_a_softmax():
    layer = final_layer("x", 512, 32_000, True)
    assert [right_hand_side(step, layer) for step in layer] == ["x · W + b", "softmax(logits)"]
    assert right_hand_side(final_layer("x", 8, 9, False)[0], layer) == "x · W"
    sizes = {name: tuple(axis.size for axis in axes) for name, axes in parameters(layer).items()}
    assert sizes == {"logits.weight": (32_000, 512), "logits.bias": (32_000,)}
    assert shapes(layer, input_shapes(layer, (2, 3)))["probs"] == (2, 3, 32_000)
    assert ffn_span(layer) == ("x", "logits")
    # 2·512 per logit, 1 for the bias and 1 for the softmax's score.
    assert cost(layer, 3).flops == 3 * 32_000 * (2 * 512 + 2)


@pytest.mark.parametrize("size", [0, -1, 2**31, True])
def test_a_vocabulary_is_a_size(size):
    with pytest.raises(FFNError, match="vocab must be"):
        final_layer("x", 8, size, True)


def test_a_block_with_a_final_layer_keeps_its_span():
    block = steps(FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True))
    whole = (*block, *final_layer(block[-1].output, 8, 30, False))
    assert ffn_span(whole) == ffn_span(block) == ("norm", "down")
    assert right_hand_side(whole[-2], whole) == "out · W"
    assert [s.output for s in shard(whole, 0, 2)].count("down.sum") == 1
    assert parameters(shard(whole, 0, 2))["logits.weight"][0].size == 30


def test_choosing_some_still_prints_what_is_chosen():
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 4)))
    assert right_hand_side(block[1], block) == "normalise(top4(softmax(router)))"
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 2, renormalise=False)))
    assert right_hand_side(block[1], block) == "top2(softmax(router))"


def test_the_merge_add_has_two_inputs():
    block = merged_first(steps(FFNSpec(8, 16, "swiglu", norm="rmsnorm")))
    assert block_inputs(block) == ("x", "attention")
    assert right_hand_side(block[0], block) == "x + attention"
    assert right_hand_side(block[1], block) == "rmsnorm(merged)"
    assert ffn_span(block) == ("norm", "down")


def test_a_plain_block_flows_in_one_line():
    assert flow(steps(FFNSpec(512, 2048, "gelu"))) == (
        "x 512 ──W1──▶ up 2048 ──gelu──▶ act 2048 ──W2──▶ down 512",
    )  # fmt: skip


def test_branches_begin_lines():
    block = merged_first(steps(FFNSpec(4096, 11008, "swiglu", norm="rmsnorm")))
    assert flow(block, {"gate": "D", "up": "L", "hidden": "H", "down": "Y"}) == (
        "x 4096, attention 4096 ──+──▶ merged 4096 ──rmsnorm──▶ norm 4096",
        "norm ──W1──▶ gate (D) 11008 ──silu──▶ act 11008",
        "norm ──W3──▶ up (L) 11008",
        "act, up ──⊙──▶ hidden (H) 11008 ──W2──▶ down (Y) 4096",
    )
    residual = steps(FFNSpec(8, 16, "relu", norm="layernorm", norm_position="post", residual=True, dropout=0.1))
    assert flow((*residual, *final_layer("post_norm", 8, 30, True))) == (
        "x 8 ──W1──▶ up 16 ──relu──▶ act 16 ──dropout 0.1──▶ dropout 16 ──W2──▶ down 8",
        "x, down ──+──▶ out 8 ──layernorm──▶ post_norm 8 ──W──▶ logits 30 ──softmax──▶ probs 30",
    )


@pytest.mark.parametrize(
    ("unit", "gate", "up"),
    [
        ("swiglu_oai", "min 7, quick_gelu", "clip -7 to 7, + 1"),
        ("deepseek_v4", "min 10, silu", "clip -10 to 10"),
        ("swiglustep", "silu, min 7", "clip -7 to 7"),
        ("situ", "silu, soft cap 4", "soft cap 25"),
    ],
)
def test_limits_are_on_the_arrows_in_their_order(unit, gate, up):
    assert flow(steps(FFNSpec(8, 16, unit))) == (
        f"x 8 ──W1──▶ gate 16 ──{gate}──▶ act 16",
        f"x ──W3──▶ up 16 ──{up}──▶ lift 16",
        "act, lift ──⊙──▶ hidden 16 ──W2──▶ down 8",
    )


def test_every_op_flows():
    moe = FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True, residual_scale=0.5, gate_scale=2.0, dropout=0.1,
                  moe=MoE(4, 2, shared_experts=1, shared_gate=True))  # fmt: skip
    block = shard(steps(moe), 0, 2)
    assert {type(step.op) for _, step in walk(block)} == set(OPS)
    text = "\n".join(flow(block))
    for step in block:
        assert step.output in text
    for label in ("softmax, top 2", "4 experts", "all_reduce 2", "+ 0.5·", "sigmoid"):
        assert f"──{label}──▶" in text, text


GGML = [row for row in STORED if row.other_bytes == 4]


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("fp64", "fp64 float64 torch.float64 F64 double"),
        ("fp32", "fp32 float32 torch.float32 F32 float single"),
        ("bf16", "bf16 bfloat16 torch.bfloat16 BF16"),
        ("fp16", "fp16 float16 torch.float16 F16 half"),
    ],
)
def test_spellings(name, spellings):
    assert {dtype(text).name for text in (*spellings.split(), f" {name.upper()}\n")} == {name}
    assert {storage(text).name for text in spellings.split()} == {name}
    assert getattr(torch, dtype(name).torch).itemsize == dtype(name).bytes


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("fp8", "fp8 FP8_E4M3 torch.float8_e4m3fn F8_E4M3"),
        ("fp8_e5m2", "e5m2 float8_e5m2 F8_E5M2"),
        ("int8", "int8 torch.int8 I8"),
        ("q4_0", "q4_0 Q4_0 Q40"),
        ("q6_k", "Q6_K q6k"),
        ("nf4", "nf4"),
    ],
)
def test_spellings_of_stored_formats(name, spellings):
    assert {storage(text).name for text in spellings.split()} == {name}
    assert not storage(name).computable
    if attribute := storage(name).torch:
        assert getattr(torch, attribute).itemsize == storage(name).bytes


def test_no_name_means_two_formats():
    names = [
        n for row in (*TABLE, *STORED) for n in {row.name, row.torch, row.safetensors.lower(), *row.aliases} - {""}
    ]
    assert len(names) == len(set(names))


def test_an_unknown_one_is_named():
    assert [row.name for row in TABLE] == ["fp64", "fp32", "bf16", "fp16"]
    with pytest.raises(FFNError, match=r"dtype: unknown dtype 'int9'; use one of fp64, fp32, bf16, fp16$"):
        dtype("int9", "dtype")
    with pytest.raises(FFNError, match="--dtype: unknown dtype 'q4_k_m'; did you mean 'q4_k'"):
        storage("q4_k_m")
    with pytest.raises(FFNError, match=r"unknown dtype 'xyz'; use one of fp64, fp32, .*, fp8, .*, q4_0, "):
        storage("xyz")


@pytest.mark.parametrize("row", STORED, ids=lambda row: row.name)
def test_a_stored_format_is_refused_where_something_is_computed(row):
    assert find(row.name) is None
    with pytest.raises(FFNError) as refused:
        dtype(row.name)
    assert str(refused.value) == f"--dtype {row.name} is for counting bytes; compute in one of fp64, fp32, bf16, fp16"
    assert activation_dtype(row).name == "bf16"


def test_plain_weights_go_with_activations_of_their_own():
    assert [activation_dtype(row) for row in TABLE] == list(TABLE)


@pytest.mark.parametrize("row", GGML, ids=lambda row: row.name)
def test_block_sizes_are_ggmls(row):
    assert (row.block, row.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[row.name.upper()]]


def test_mxfp4_and_nvfp4_take_the_bits_that_ggml_gives_them():
    for name in ("mxfp4", "nvfp4"):
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
        assert storage(name).bits_per_weight == 8 * size / block


@pytest.mark.parametrize(
    ("name", "bits"),
    [  # bits of a weight, and of its share of a scale
        ("fp32", 32), ("fp8", 8), ("int8", 8), ("int4", 4), ("mxfp8", 8 + 8 / 32), ("mxfp6", 6 + 8 / 32),
        ("mxfp4", 4 + 8 / 32), ("nvfp4", 4 + 8 / 16), ("nf4", 4 + 32 / 64), ("q4_0", 4 + 16 / 32),
        ("q8_0", 8 + 16 / 32), ("q4_k", 4 + (2 * 16 + 8 * 12) / 256), ("q6_k", 6 + (16 + 16 * 8) / 256),
    ],
)  # fmt: skip
def test_bits_per_weight_from_their_parts(name, bits):
    assert storage(name).bits_per_weight == bits
    assert storage(name).bytes == bits / 8


@given(
    row=st.sampled_from((*TABLE, *STORED)), stack=st.integers(1, 5), rows=st.integers(1, 9), blocks=st.integers(1, 9)
)
def test_whole_blocks_take_whole_bytes(row, stack, rows, blocks):
    assert row.matrix_bytes((stack, rows, blocks * row.block)) == stack * rows * blocks * row.block_bytes


def test_rows_that_are_no_whole_number_of_blocks():
    with pytest.raises(FFNError, match="q4_0 stores 32 weights in a block; a row of 33 is not a whole number of"):
        storage("q4_0").matrix_bytes((4, 33))
    assert storage("nf4").matrix_bytes((3, 33)) == 2 * 36  # 99 weights, over the ends of rows: two blocks
    assert storage("int4").matrix_bytes((3, 3)) == 5


sizes = st.integers(1, 300)


@given(d_model=sizes, d_ff=sizes, gated=st.booleans(), bias=st.booleans(), row=st.sampled_from(TABLE))
def test_plain_formats_take_the_bytes_of_torchs_tensors(d_model, d_ff, gated, bias, row):
    with torch.device("meta"):
        module = (modules.Gated if gated else modules.Plain)(d_model, d_ff, bias).to(getattr(torch, row.torch))
    block = steps(FFNSpec(d_model, d_ff, gated=gated, bias=bias, norm="layernorm"))
    assert weight_bytes(block, row) == sum(p.nbytes for p in module.parameters())
    assert weight_bytes(block, row) == cost(block).params * row.bytes


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs"])
def test_ggml_packs_the_matrices_and_keeps_vectors_in_fp32(name):
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    row = {512: 512 // block * size, 1024: 1024 // block * size}
    dense = 1024 * row[512] + 512 * row[1024] + 4 * (1024 + 512)
    assert weight_bytes(steps(FFNSpec(512, 1024, "relu")), storage(name)) == dense


def test_only_matrices_between_d_model_and_d_ff_are_packed():
    moe = MoE(8, 2, 1, shared_gate=True, router_bias=True, correction=True)
    block = steps(FFNSpec(64, 96, "swiglu", bias=True, norm="rmsnorm", sub_norm=True, moe=moe))
    packed = 9 * 3 * 64 * 96
    kept = 9 * (2 * 96 + 64) + (8 * 64 + 8) + 8 + 64  # biases, router, correction, the shared experts' gate
    for name, width, other in (("q4_0", 18 / 32, 4), ("mxfp4", 17 / 32, 2), ("fp8", 1, 2), ("nf4", 36 / 64, 2)):
        assert weight_bytes(block, storage(name)) == packed * width + kept * other
    xielu = steps(FFNSpec(64, 96, "xielu", bias=False))
    assert weight_bytes(xielu, storage("q8_0")) == 2 * 64 * 96 * 34 // 32 + 2 * 4


def test_the_tensor_that_does_not_fit_is_named():
    with pytest.raises(
        FFNError, match=r"^up.weight: q4_0 stores 32 weights .* a row of 48 .*; choose another --dtype$"
    ):
        weight_bytes(steps(FFNSpec(48, 64)), storage("q4_0"))
    with pytest.raises(FFNError, match=r"^down.weight: q4_k stores 256 .* a row of 640"):
        weight_bytes(steps(FFNSpec(256, 640, moe=MoE(4, 2))), storage("q4_k"))


@pytest.mark.parametrize("tied", ["weight", ["weight"], ("up",), (1,), 3])
def test_tied_parameters_are_names_of_down(tied):
    with pytest.raises(FFNError, match="tied must be"):
        FFNSpec(4, 8, "relu", tied=tied)
