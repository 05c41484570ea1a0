"""config.json against transformers' own classes: the same widths and routing; published, changed and new ones. Whatever
cannot be a model is refused in one line naming file, field and value."""

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from docs.blocks import blocks
from ffncli.block.activations import hard_limits
from ffncli.errors import FFNError
from ffncli.models.config import families
from ffncli.models.config.read import FAMILIES, from_config, quantization_of
from ffncli.models.config.unread import UnknownField
from ffncli.models.counting.count import count
from ffncli.models.dimensions import Dimensions
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import Resolved
from ffncli.models.source import load
from tests import ROOT
from tests.fuzz.configs import judge, specimens
from tests.fuzz.formats import run_case
from tests.oracles.checkpoints import GPT2, LLAMA, MIXTRAL, T5, expect_refusal, folder, harmful, refusal, with_token

# What a family's default config leaves null although its models have it, or where the default is refused.
GIVEN = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "n_routed_experts": 64},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * 35},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 24},
    "sam3_lite_text_text_model": {"use_repmixer_blocks": False},
    "squeezebert": {"intermediate_groups": 1, "output_groups": 1},
}


def specs(values: dict) -> list:
    model: Resolved = from_config(values, "config.json", "config.json")
    return [(group.stack, group.layers, group.spec) for group in model.model.groups]


def specs_or_refusal(values: dict) -> list | str:
    try:
        return specs(values)
    except FFNError as error:
        return error.message


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & {*CONFIG_MAPPING}))
def test_a_field_left_out_means_what_transformers_means(family):
    """Every field of the family's default config is dropped in turn: the same blocks come out, or a refusal.

    Where they differ, they are those of the config that transformers makes of what is left (HRM).
    """
    whole = written(family, GIVEN.get(family, {}))
    expected = specs(whole)
    for name in set(whole) - {"model_type"}:
        rest = {key: value for key, value in whole.items() if key != name}
        found = specs_or_refusal(rest)
        if found != expected and not (isinstance(found, str) and "missing" in found):
            assert found == specs_or_refusal(written(family, rest)), name


def written(family: str, values: dict) -> dict:
    """The config.json that transformers writes for these values."""
    from transformers import AutoConfig

    given = {name: value for name, value in values.items() if name != "model_type"}
    return json.loads(AutoConfig.for_model(family, **given).to_json_string(use_diff=False))


def test_a_multimodal_config_lends_its_dtype_to_the_text_tower():
    inner = {"model_type": "gemma3_text", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    model = from_config({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": inner}, "c", "c")
    assert (model.model.dtype, model.model.main.spec.d_ff) == ("bf16", 16)


def kinds(name: str, **said) -> list[tuple]:
    groups = load(name, Dimensions(**said)).model.groups
    return [(bool(g.spec.moe), g.spec.d_ff, g.spec.moe.top_k if g.spec.moe else 0) for g in groups]


def test_options_change_the_layers_of_the_main_kind_where_kinds_mix():
    assert kinds("deepseek-v3") == [(False, 18432, 0), (True, 2048, 8)]
    assert kinds("deepseek-v3", top_k=4) == [(False, 18432, 0), (True, 2048, 4)]
    assert kinds("deepseek-v3", d_ff="1024") == [(False, 18432, 0), (True, 1024, 8)]
    assert kinds("deepseek-v3", d_model="1024") == [(False, 18432, 0), (True, 2048, 8)]
    assert "in the MoE layers only" in load("deepseek-v3", Dimensions(top_k=4)).notes[-1]
    assert load("deepseek-v3", Dimensions(activation="gelu")).notes == ()
    assert kinds("gpt2", experts=4) == [(True, 3072, 2)]


def test_shared_experts_are_as_wide_as_routed_ones_when_they_are_asked_for():
    spec = load("deepseek-v3", Dimensions(shared_experts=2)).model.main.spec
    assert spec.shared_width == 2 * 2048


@pytest.mark.parametrize(
    "choices",
    [{"norm": "batchnorm"}, {"norm_position": "mid"}, {"residual_scale": float("nan")}, {"dropout": "x"},
     {"limits": hard_limits("7")}],
)  # fmt: skip
def test_a_choice_that_is_none_is_refused(choices):
    from ffncli.block.recipe import FFNSpec

    with pytest.raises(FFNError):
        FFNSpec(4, 8, **choices)


def test_a_routing_that_is_none_is_refused():
    from ffncli.block.recipe import FFNSpec, MoE

    with pytest.raises(FFNError, match="score: unknown choice 'entmax'"):
        FFNSpec(4, 8, moe=MoE(4, 2, score="entmax"))


@pytest.mark.parametrize("nest", [lambda c: c, lambda c: {"text_config": c}])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantization_config_may_be_nested(nest: Any, key: str):
    gptq = {"quant_method": "gptq", "bits": 4}
    assert quantization_of(Fields(nest({key: gptq, "hidden_size": 4}), "c")) == gptq
    assert quantization_of(Fields(nest({key: None}), "c")) is None
    assert quantization_of(Fields(nest({key: [gptq]}), "c")) is None


_M2 = {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_local_experts": 256, "num_experts_per_tok": 8, "hidden_act": "silu", "scoring_func": "sigmoid",
    "use_routing_bias": True, "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3,
}  # fmt: skip
_M3 = {
    "model_type": "minimax_m3_vl_text", "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60,
    "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_act": "swigluoai", "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "n_shared_experts": 1, "scoring_func": "sigmoid", "use_routing_bias": True,
    "moe_layer_freq": [0] * 3 + [1] * 57, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "routed_scaling_factor": 2.0,
}  # fmt: skip
_MIMO = {
    "model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "moe_layer_freq": [0] + [1] * 47, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": None,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "routed_scaling_factor": None, "hidden_act": "silu",
}  # fmt: skip
_GLM = {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_router_dtype": "float32", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "hidden_act": "silu", "routed_scaling_factor": 2.5,
}  # fmt: skip
_TRINITY = {
    "model_type": "afmoe", "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 256,
    "num_hidden_layers": 56, "num_dense_layers": 2, "num_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu",
    "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1,
    "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid",
}  # fmt: skip
_VL = {
    "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
}  # fmt: skip
_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "hidden_act": "silu",
    "swiglu_limit": 7.0,
}  # fmt: skip
_QWEN = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "hidden_act": "silu", "attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": [],
}  # fmt: skip
# Router, its correction, routed experts, shared expert: d (E + 3 E w + 3 s) + E; dense: 3 d w.
CASES = {
    "MiniMax-M2.5": (_M2, 62 * (256 * (3072 + 1 + 3 * 3072 * 1536))),
    "MiniMax-M3": (_M3, 57 * (128 * (6144 + 1 + 3 * 6144 * 3072) + 3 * 6144 * 3072) + 3 * 3 * 6144 * 12288),
    "MiMo-V2-Flash": (_MIMO, 47 * 256 * (4096 + 1 + 3 * 4096 * 2048) + 3 * 4096 * 16384),
    "GLM-5.2": (_GLM, 75 * (256 * (6144 + 1 + 3 * 6144 * 2048) + 3 * 6144 * 2048) + 3 * 3 * 6144 * 12288),
    "Trinity-Nano": (_TRINITY, 54 * (128 * (1024 + 1 + 3 * 1024 * 256) + 3 * 1024 * 256) + 2 * 3 * 1024 * 3072),
    "Qwen3-VL-30B-A3B": (_VL, 48 * 128 * (2048 + 3 * 2048 * 768)),
    "gpt-oss-20b": (_OSS, 24 * 32 * (2880 + 1 + 3 * 2880 * 2880 + 3 * 2880)),
    "Qwen3.6-27B": (_QWEN, 64 * 3 * 5120 * 17408),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_config_is_read(name):
    config, params = CASES[name]
    assert count(from_config(config, name, "config.json")).ffn_params_total == params


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (_MIMO, "moe_layer_freq", [0, 0] + [1] * 46), (_GLM, "moe_router_dtype", "bfloat16"),
        (_TRINITY, "score_func", "softmax"), (_TRINITY, "topk_group", 4),
    ],
)  # fmt: skip
def test_a_value_that_the_family_does_not_compute_is_refused(config: Mapping[str, Any], field: str, value: object):
    assert field in refusal({**config, field: value})


@pytest.mark.filterwarnings("ignore")
def test_drawn_changes_give_the_right_number_a_note_or_a_line() -> None:
    results: Counter[str] = Counter()
    for number in range(60):
        change, given = run_case("families", number)
        assert not given.wrong, f"python -m tests.fuzz --only families/{number}: {change}: {given.wrong}"
        results[given.text] += 1
    assert results["counted"] > 10
    assert results["refused"] > 10


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """A family's tiny config with these fields; None takes one away."""
    values = {**copy.deepcopy(specimens()[name][1]), **fields}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(("name", "usual", "other"), [
    ("llama", "num_hidden_layers", "n_layers"), ("gpt2", "n_layer", "num_layers"),
    ("qwen3_moe", "num_local_experts", "moe_num_experts"), ("deepseek_v3", "n_routed_experts", "moe_num_experts"),
])  # fmt: skip
def test_a_name_that_the_familys_code_does_not_read_is_noted(name: str, usual: str, other: str) -> None:
    value = specimens()[name][1][usual]
    found = from_config(changed(name, **{usual: None, other: value}), name, "c")
    assert found.model.groups == from_config(specimens()[name][1], name, "c").model.groups
    assert found.notes[0].startswith(f"{other} = {value}: {name}'s code ignores this and uses the default for ")
    assert usual in found.notes[0]
    assert judge(name, changed(name, **{usual: None, other: value})) == ("noted", "")


@pytest.mark.parametrize(("name", "field", "value"), [
    ("marian", "hidden_size", 48), ("pix2struct_text_model", "num_hidden_layers", 9), ("xlstm", "num_blocks", 9),
])  # fmt: skip
def test_a_second_spelling_with_another_value_is_refused(name: str, field: str, value: int) -> None:
    with pytest.raises(UnknownField, match=f"{field} = {value}"):
        from_config(changed(name, **{field: value}), name, "c")


@pytest.mark.parametrize("bottleneck", [True, False])
def test_mobilebert_is_as_wide_as_its_code_reads(bottleneck: bool) -> None:
    values = changed("mobilebert", use_bottleneck=bottleneck, true_hidden_size=32)
    assert judge("mobilebert", values) == ("counted", "")
    assert count(from_config(values, "m", "c")).d_model == 32


PAGE = blocks((ROOT / "docs" / "sources.md").read_text("utf-8"))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's config, with the page's row in place."""
    (code,) = (block.body for block in PAGE if block.notes.get("file") == "families/tomorrow.py")
    (text,) = (block.body for block in PAGE if block.notes.get("file") == "tomorrow/config.json")
    values: dict[str, Any] = json.loads(text)
    with pytest.raises(FFNError, match="model_type 'tomorrow' is not known"):
        from_config(values, "c", "c")
    named: dict[str, Any] = {}
    exec(code, named)
    monkeypatch.setitem(families.FAMILIES, "tomorrow", named["ROWS"]["tomorrow"])  # type: ignore[arg-type]
    monkeypatch.setitem(families.BY_TYPE, "tomorrow", "tomorrow")  # type: ignore[arg-type]
    return values


def test_the_pages_row_counts_what_a_module_has(config: dict[str, Any], tmp_path: Path) -> None:
    d, f = config["width"], config["mlp_width"]
    layer = torch.nn.ModuleDict(
        {name: torch.nn.Linear(*sizes, bias=False) for name, sizes in
         {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}.items()}
    )  # fmt: skip
    held = sum(p.numel() for p in layer.parameters()) * config["depth"]
    assert count(from_config(config, "c", "c")).ffn_params_total == held
    stored = {f"model.layers.{i}.mlp.{n}": p.detach().clone() for i in range(4) for n, p in layer.named_parameters()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load(str(tmp_path))
    assert (found.differences, count(found).ffn_params_total) == ((), held)
    assert found.model.main.spec.activation == "silu"


def test_a_field_that_the_pages_row_does_not_read_is_refused(config: dict[str, Any]) -> None:
    assert "mlp_clip = 3.0: unknown for model_type tomorrow" in refusal({**config, "mlp_clip": 3.0})


# JSON token → how the error shows the value
NO_SIZE = {
    "0": "0", "-4": "-4", "1" + "0" * 30: "1" + "0" * 30, '"32"': "'32'", '""': "''", "4.5": "4.5", "1e3": "1000.0",
    "1e999": "", "true": "True", "[32]": "[32]", "{}": "{}", "null": "null", "1" * 5000: "digits", "-0": "0",
}  # fmt: skip
NO_OBJECT = {
    "empty": b"",
    "white space": b" \n ",
    "not JSON": b"model_type: llama",
    "a list": b"[]",
    "cut off": b'{"model_type": "llama", "hidden_size": 4',
    "a key twice": b'{"hidden_size": 4, "hidden_size": 8}',
    "NaN": b'{"hidden_size": NaN}',
    "-Infinity": b'{"hidden_size": -Infinity}',
    "100,000 levels": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not UTF-8": b'{"model_type": "\xff"}',
    "too large": b" " * 10_000_001,
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00",
    "an empty object": b"{}",
}
HOSTILE = ["\x1b[31mred", "[/x]", "a\nb", "\x9b2J", "a\u202eb", "x" * 100_000, '__import__("os").system("id")']


@pytest.fixture
def refused(call, tmp_path: Path):
    """A function that checks that `ffn params` refuses a config in one line with these parts."""
    return lambda config, *parts: expect_refusal(call("params", folder(tmp_path, config)), "config.json", *parts)


@pytest.mark.parametrize("raw", NO_OBJECT.values(), ids=NO_OBJECT)
def test_a_file_that_holds_no_config(raw: bytes, refused):
    refused(raw)


def test_a_config_that_is_not_there_or_is_a_directory(call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, None)), tmp_path / "config.json", "is missing")
    (tmp_path / "config.json").mkdir()
    expect_refusal(call("params", str(tmp_path)), tmp_path / "config.json", "directory")
    expect_refusal(call("params", str(tmp_path / "config.json")), tmp_path / "config.json", "directory")


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers"])
@pytest.mark.parametrize("token", NO_SIZE, ids=lambda t: t[:12])
def test_a_size_that_cannot_be(field: str, token: str, refused):
    where = () if len(token) > 4000 else (field,)  # Python's parser does not say where so long a number stood
    refused(with_token(LLAMA, field, token), *where, NO_SIZE[token])


@pytest.mark.parametrize("field", [*LLAMA, "num_local_experts", "num_experts_per_tok"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_a_value_that_no_family_default_replaces(field: str, how: str, call, tmp_path: Path):
    left = {k: v for k, v in MIXTRAL.items() if k != field} | ({field: None} if how == "null" else {})
    result = call("params", folder(tmp_path, left))
    if field == "hidden_act":
        assert result[0] == 0  # silu is every Llama's
    else:
        expect_refusal(result, "config.json", field, how)


@pytest.mark.parametrize("config", [{**GPT2, "n_inner": None}, {k: v for k, v in GPT2.items() if k != "n_inner"}])
def test_a_value_that_the_family_has_a_default_for(config: dict[str, object], call, json_of, tmp_path: Path):
    assert json_of("params", folder(tmp_path, config), notes=True)["rows"][0]["d_ff"] == 4 * 4
    expect_refusal(call("params", folder(tmp_path, {**GPT2, "n_inner": 0})), "config.json", "n_inner", "0")


def test_a_default_that_becomes_too_large(refused):
    refused({**GPT2, "n_inner": None, "n_embd": 2**31 - 1}, "d_ff")


@pytest.mark.parametrize("layers", [100_001, 2**31 - 1, 10**18])
def test_more_layers_than_any_model_has(layers: int, refused):
    refused({**LLAMA, "num_hidden_layers": layers}, "num_hidden_layers", layers)


@pytest.mark.parametrize(
    ("value", "says"),
    [("lama", "did you mean 'llama'"), ("foo", "give the model's tensors"), ("", "''"), (5, "a string, got 5"),
     ([], "got []"), (True, "got True"), ("\x1b[31m", r"\x1b[31m")],
)  # fmt: skip
def test_a_family_that_is_not_known(value: object, says: str, refused):
    refused({**LLAMA, "model_type": value}, "model_type", says)


@pytest.mark.parametrize(
    ("config", "field"),
    [(LLAMA, "hidden_act"), (GPT2, "activation_function"), (T5, "feed_forward_proj"),
     ({**LLAMA, "model_type": "gemma"}, "hidden_activation"), ({**LLAMA, "model_type": "falcon"}, "activation")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("value", "says"),
    [("sliu", "did you mean 'silu'"), ('__import__("os")', "unknown activation"), ("", "''"), (5, "a string, got 5"),
     ("\x1b]0;x\x07", r"\x1b]0;x\x07")],
)  # fmt: skip
def test_an_activation_that_is_not_known(config: dict[str, object], field: str, value: object, says: str, refused):
    refused({**config, field: value}, field, says)


@pytest.mark.parametrize("value", [5, "x", [], True, 0.5])
def test_a_text_config_that_is_no_object(value: object, refused):
    refused({**LLAMA, "text_config": value}, "text_config", "object")


def test_a_wrong_value_inside_text_config_is_placed_there(refused):
    config = {"model_type": "llama", "text_config": {**LLAMA, "hidden_size": 0}}
    refused(config, "text_config", "hidden_size", "got 0")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_local_experts": 0}, ["num_local_experts", "got 0"]),
        ({"num_local_experts": 2**31}, ["num_local_experts", 2**31]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok", "got 0"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok", "5", "4"]),
        ({"num_experts_per_tok": "2"}, ["num_experts_per_tok", "'2'"]),
        ({"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 0}, ["moe_intermediate_size", "got 0"]),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 6, "decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 6, "mlp_only_layers": [0.5]}, ["mlp_only_layers", "0.5"]),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 6, "norm_topk_prob": "yes"}, ["norm_topk_prob", "yes"]),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, ["config.json", "limit of the gate"]),
        (
            {"model_type": "deepseek_v3", "moe_intermediate_size": 6, "n_group": 3, "first_k_dense_replace": 0},
            ["groups", "3"],
        ),
    ],
)
def test_experts_that_cannot_be(changes: dict[str, object], parts: list[object], refused):
    refused({**MIXTRAL, **changes}, *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [({"rms_norm_eps": 5}, ["eps", "5"]), ({"rms_norm_eps": -1e-5}, ["eps", "-1e-05"]),
     ({"rms_norm_eps": "small"}, ["rms_norm_eps", "'small'"]), ({"mlp_bias": "yes"}, ["mlp_bias", "'yes'"]),
     ({"mlp_bias": 1}, ["mlp_bias", "got 1"])],
)  # fmt: skip
def test_other_fields_are_read_as_strictly(changes: dict[str, object], parts: list[object], refused):
    refused({**LLAMA, **changes}, *parts)


# --- text that would act on a terminal --------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["table", "json"])
@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:15])
@pytest.mark.parametrize("field", [*LLAMA, "torch_dtype", "text_config", "_name_or_path", "\x1b[31m"])
def test_no_value_reaches_the_terminal_raw(style: str, value: str, field: str, call, tmp_path: Path):
    code, out, err = call("params", folder(tmp_path, {**LLAMA, field: value}), "--format", style)
    assert code in (0, 2)
    _harmless(out + err, value)
    assert len(err.splitlines()) == 1
    assert len(err) < 700


# Values that a family reads past: a second spelling of a width, a dense width where every layer has experts, an
# activation that the family's code does not use.
UNREAD = [
    (GPT2, "hidden_size"),
    ({**MIXTRAL, "model_type": "qwen3_moe", "moe_intermediate_size": 6}, "intermediate_size"),
    ({**MIXTRAL, "model_type": "gpt_oss"}, "hidden_act"),
]


@pytest.mark.parametrize("command", ["params", "trace"])
@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:15])
@pytest.mark.parametrize(("config", "field"), UNREAD)
def test_nor_one_that_is_not_used(config: dict, field: str, value: str, command: str, call, tmp_path: Path):
    code, out, err = call(command, folder(tmp_path, {**config, field: value}))
    assert code in (0, 2)
    _harmless(out + err, value)
    assert max(map(len, out.splitlines()), default=0) < 1000


@pytest.mark.parametrize("style", ["table", "md", "csv", "json"])
@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "\x9b2J", "a\u202eb", os.fsdecode(b"bad\xff"), "[x]", "=cmd"])
def test_nor_the_name_of_a_directory(name: str, style: str, call, tmp_path: Path):
    source = folder(tmp_path / name, LLAMA)
    code, out, err = call("params", source, "--format", style)
    assert code == 0
    _harmless(out + err, name)
    code, out, err = call("params", source, "--format", style, "-o", str(tmp_path / "out"))
    assert (code, out) == (0, "")
    _harmless(err + (tmp_path / "out").read_text("utf-8"), name)


def _harmless(text: str, value: str) -> None:
    assert harmful(text) == []
    assert "\n" not in value or value not in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "falcon_h1", "num_attention_heads": 2, "mlp_multipliers": [10**400, 1]}, "gate_scale must be"),
        ({"model_type": "pegasus", "encoder_layers": 2, "decoder_layers": 2, "d_model": 4,
          "activation_function": "relu"}, "encoder_ffn_dim is missing"),
    ],
)  # fmt: skip
def test_the_fields_of_another_family(changes: dict[str, object], says: str, refused):
    refused(json.dumps(LLAMA | changes), says)


def test_a_list_where_a_flag_belongs(call, tmp_path: Path):
    """Whether the embeddings are tied is then not known."""
    code, out, err = call("params", folder(tmp_path, json.dumps(LLAMA | {"tie_word_embeddings": [False]})), "--json")
    assert (code, json.loads(out)["rows"][0]["d_ff"]) == (0, 6), err
