"""config.json from anywhere: whatever cannot be a model is refused in one line naming file, field and value."""

import json
import os
from pathlib import Path

import pytest

from tests.oracles.checkpoints import GPT2, LLAMA, MIXTRAL, T5, expect_refusal, folder, harmful, with_token

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


@pytest.mark.parametrize("raw", NO_OBJECT.values(), ids=NO_OBJECT)
def test_a_file_that_holds_no_config(raw: bytes, call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, raw)), tmp_path / "config.json")


def test_a_config_that_is_not_there_or_is_a_directory(call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, None)), tmp_path / "config.json", "is missing")
    (tmp_path / "config.json").mkdir()
    expect_refusal(call("params", str(tmp_path)), tmp_path / "config.json", "directory")
    expect_refusal(call("params", str(tmp_path / "config.json")), tmp_path / "config.json", "directory")


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers"])
@pytest.mark.parametrize("token", NO_SIZE, ids=lambda t: t[:12])
def test_a_size_that_cannot_be(field: str, token: str, call, tmp_path: Path):
    where = () if len(token) > 4000 else (field,)  # Python's parser does not say where so long a number stood
    expect_refusal(
        call("params", folder(tmp_path, with_token(LLAMA, field, token))), "config.json", *where, NO_SIZE[token]
    )


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
def test_a_value_that_the_family_has_a_default_for(config: dict[str, object], call, tmp_path: Path):
    code, out, _ = call("params", folder(tmp_path, config), "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["d_ff"] == 4 * 4
    expect_refusal(call("params", folder(tmp_path, {**GPT2, "n_inner": 0})), "config.json", "n_inner", "0")


def test_a_default_that_becomes_too_large(call, tmp_path: Path):
    expect_refusal(
        call("params", folder(tmp_path, {**GPT2, "n_inner": None, "n_embd": 2**31 - 1})), "config.json", "d_ff"
    )


@pytest.mark.parametrize("layers", [100_001, 2**31 - 1, 10**18])
def test_more_layers_than_any_model_has(layers: int, call, tmp_path: Path):
    expect_refusal(
        call("params", folder(tmp_path, {**LLAMA, "num_hidden_layers": layers})), "num_hidden_layers", layers
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [("lama", "did you mean 'llama'"), ("foo", "give the model's tensors"), ("", "''"), (5, "a string, got 5"),
     ([], "got []"), (True, "got True"), ("\x1b[31m", r"\x1b[31m")],
)  # fmt: skip
def test_a_family_that_is_not_known(value: object, says: str, call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, {**LLAMA, "model_type": value})), "config.json", "model_type", says)


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
def test_an_activation_that_is_not_known(
    config: dict[str, object], field: str, value: object, says: str, call, tmp_path: Path
):
    expect_refusal(call("params", folder(tmp_path, {**config, field: value})), "config.json", field, says)


@pytest.mark.parametrize("value", [5, "x", [], True, 0.5])
def test_a_text_config_that_is_no_object(value: object, call, tmp_path: Path):
    expect_refusal(
        call("params", folder(tmp_path, {**LLAMA, "text_config": value})), "config.json", "text_config", "object"
    )


def test_a_wrong_value_inside_text_config_is_placed_there(call, tmp_path: Path):
    config = {"model_type": "llama", "text_config": {**LLAMA, "hidden_size": 0}}
    expect_refusal(call("params", folder(tmp_path, config)), "config.json", "text_config", "hidden_size", "got 0")


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
        ({"model_type": "gpt_oss", "swiglu_alpha": 2}, ["swiglu_alpha", "2"]),
        (
            {"model_type": "deepseek_v3", "moe_intermediate_size": 6, "n_group": 3, "first_k_dense_replace": 0},
            ["groups", "3"],
        ),
    ],
)  # fmt: skip
def test_experts_that_cannot_be(changes: dict[str, object], parts: list[object], call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, {**MIXTRAL, **changes})), "config.json", *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [({"rms_norm_eps": 5}, ["eps", "5"]), ({"rms_norm_eps": -1e-5}, ["eps", "-1e-05"]),
     ({"rms_norm_eps": "small"}, ["rms_norm_eps", "'small'"]), ({"mlp_bias": "yes"}, ["mlp_bias", "'yes'"]),
     ({"mlp_bias": 1}, ["mlp_bias", "got 1"])],
)  # fmt: skip
def test_other_fields_are_read_as_strictly(changes: dict[str, object], parts: list[object], call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, {**LLAMA, **changes})), "config.json", *parts)


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
# activation that the family's code does not run.
UNREAD = [
    (GPT2, "hidden_size"),
    ({**MIXTRAL, "model_type": "qwen3_moe", "moe_intermediate_size": 6}, "intermediate_size"),
    ({**MIXTRAL, "model_type": "gpt_oss"}, "hidden_act"),
]


@pytest.mark.parametrize("command", ["params", "trace"])
@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:15])
@pytest.mark.parametrize(("config", "field"), UNREAD)
def test_nor_one_that_is_not_used(
    config: dict[str, object], field: str, value: str, command: str, call, tmp_path: Path
):
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
def test_the_fields_of_another_family(changes: dict[str, object], says: str, call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, json.dumps(LLAMA | changes))), "config.json", says)


def test_a_list_where_a_flag_belongs(call, tmp_path: Path):
    """Whether the embeddings are tied is then not known."""
    code, out, err = call("params", folder(tmp_path, json.dumps(LLAMA | {"tie_word_embeddings": [False]})), "--json")
    assert (code, json.loads(out)["rows"][0]["d_ff"]) == (0, 6), err
