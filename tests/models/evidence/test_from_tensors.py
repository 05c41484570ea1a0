"""Models from their tensors alone: an unknown model_type, no config.json, GGUF. What nothing says is null."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

from ffncli.models.tensors.matching import stacks_of
from tests.oracles.checkpoints import INDEX, LLAMA, expect_difference, expect_refusal, folder, harmful, tensors
from tests.oracles.gguf_files import finish

UNKNOWN = {**LLAMA, "model_type": "brand_new"}
D, F, E, LAYERS = 64, 96, 4, 2


def row_of(result: tuple[int, str, str], *says: str) -> dict[str, Any]:
    """The only row of an answer that has no error, whose notes hold `says`."""
    code, out, err = result
    assert code == 0, err
    assert [part for part in says if part not in err] == []
    assert harmful(out + err) == []
    (row,) = json.loads(out)["rows"]
    return row


def ffn_numbers(stored: dict[str, Any]) -> int:
    return sum(tensor.numel() for name, tensor in stored.items() if "norm" not in name and "ln_" not in name)


# --- safetensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("config", [UNKNOWN, None], ids=["unknown", "none"])
def test_what_is_recognised_is_counted(config: dict[str, Any] | None, family: str, call, tmp_path: Path):
    stored = tensors(family)
    source = folder(tmp_path, config, stored)
    row = row_of(call("params", source, "--json"), "norms and residuals")
    assert (row["d_model"], row["d_ff"], row["layers"], row["gated"]) == (4, 6, 2, family != "gpt2")
    assert (row["bias"], row["experts"]) == (family == "gpt2", 4 if family == "mixtral" else 0)
    assert row["ffn_params_total"] == row["ffn_params_stored"] == ffn_numbers(stored)
    assert row["stored_params"] == sum(tensor.numel() for tensor in stored.values())
    said = "model_type 'brand_new' is not known" if config else "no config.json"
    assert any(said in line for line in row["evidence"])
    assert row["activation"] == ("silu" if config else None)
    assert (row["norm_params_per_layer"], row["elementwise_flops_per_token"]) == (None, None)
    assert (row["model_params_total"], row["attention_params_per_layer"]) == (row["stored_params"], None)  # has none


def test_a_file_by_itself(call, tmp_path: Path):
    folder(tmp_path, None, tensors("llama"))
    row = row_of(call("params", str(tmp_path / "model.safetensors"), "--json"), "the activation")
    assert row["ffn_params_total"] == ffn_numbers(tensors("llama"))
    assert "activation not known" in call("params", str(tmp_path / "model.safetensors"))[1]


@pytest.mark.parametrize("top_k", [None, 1, 3])
def test_what_is_active_needs_top_k(top_k: int | None, call, tmp_path: Path):
    config = {"model_type": "brand_new", "num_experts_per_tok": top_k}
    source = folder(tmp_path, config, tensors("mixtral"))
    row = row_of(
        call("params", source, "--json"), *(["top_k (and with it the active parameters)"] if top_k is None else [])
    )
    router, expert = 4 * 4, 3 * 4 * 6
    active = None if top_k is None else 2 * (router + top_k * expert)
    assert (row["top_k"], row["ffn_params_active"]) == (top_k, active)
    assert row["matmul_flops_per_token"] == (None if active is None else active)  # two layers, two FLOPs: 2 / 2
    assert bool(row["costs"]) == (top_k is not None)
    assert row["ffn_params_total"] == 2 * (router + 4 * expert)
    text = call("params", source)[1]
    assert ("top_k not known" in text) == (top_k is None)


@pytest.mark.parametrize("words", [["--tokens", "1,8"], ["--ridge", "10"], ["--csv"], ["--format", "md"]])
def test_what_is_not_known_is_shown_as_such_everywhere(words: list[str], call, tmp_path: Path):
    source = folder(tmp_path, None, tensors("mixtral"))
    code, out, err = call("params", source, *words)
    assert (code, bool(out), len(err.splitlines())) == (0, True, 1)


@pytest.mark.parametrize("field", ["num_experts_per_tok", "hidden_act", "hidden_size"])
@pytest.mark.parametrize("value", [0, -1, "x", "\x1b[31m", [], {}, True, 1e9, None])
def test_a_field_that_says_nothing_usable_is_passed_over(field: str, value: Any, call, tmp_path: Path):
    source = folder(tmp_path, {"model_type": "brand_new", field: value}, tensors("mixtral"))
    row = row_of(call("params", source, "--json"))
    assert row["ffn_params_total"] == ffn_numbers(tensors("mixtral"))
    assert (row["activation"], row["top_k"]) == (None, None)


def test_a_nested_config_of_an_unknown_model(call, tmp_path: Path):
    config = {"model_type": "brand_new", "text_config": {"model_type": "brand_new_text", "hidden_act": "gelu"}}
    stored = {f"language_{name}": tensor for name, tensor in tensors("llama").items()}
    stored |= {"vision_tower.layers.0.mlp.fc1.weight": torch.zeros(8, 2),
               "vision_tower.layers.0.mlp.fc2.weight": torch.zeros(2, 8)}  # fmt: skip
    row = row_of(call("params", folder(tmp_path, config, stored), "--json"))
    assert (row["activation"], row["ffn_params_total"]) == ("gelu", ffn_numbers(tensors("llama")))


@pytest.mark.parametrize("config", [UNKNOWN, None, LLAMA], ids=["unknown", "none", "known"])
def test_nothing_that_is_recognised(config: dict[str, Any] | None, call, tmp_path: Path):
    source = folder(tmp_path, config, {"encoder.weight": torch.zeros(2, 2), "layers.0.attn.weight": torch.zeros(1)})
    expect_refusal(call("params", source), "no FFN among 2 tensor names", "looked for gate_proj/up_proj/down_proj")


def test_no_tensors_and_no_config(call, tmp_path: Path):
    expect_refusal(call("params", folder(tmp_path, None)), "config.json is missing")
    expect_refusal(call("params", folder(tmp_path, UNKNOWN)), "model_type 'brand_new' is not known")


def test_without_an_activation_it_cannot_be_run_and_an_option_says_it(call, tmp_path: Path):
    config = {name: value for name, value in UNKNOWN.items() if name != "hidden_act"}
    for case, said in (("none", None), ("unsaid", config)):
        source = folder(tmp_path / case, said, tensors("llama"))
        expect_refusal(call("trace", source), "does not specify its activation", "--activation silu")
        code, out, err = call("trace", source, "--activation", "silu", "--layer", "1", "--json")
        answer = json.loads(out)
        assert (code, answer["ffn_input"], answer["steps"][-1]["name"]) == (0, "x", "down")
        assert answer["block"]["weights"] == "weights of decoder layer 1"
        assert err == "note: unknown from this source, so not counted: norms and residuals\n"


def test_a_norm_that_an_option_names_is_read(call, tmp_path: Path):
    source = folder(tmp_path, UNKNOWN, tensors("llama"))
    code, out, err = call("trace", source, "--norm", "rmsnorm", "--json")
    steps = [step["name"] for step in json.loads(out)["steps"]]
    assert (code, steps[:2], err) == (0, ["x", "norm"], "")


def test_experts_of_an_unknown_model_need_their_top_k(call, tmp_path: Path):
    config = {name: value for name, value in UNKNOWN.items() if "tok" not in name}
    source = folder(tmp_path, config, tensors("mixtral"))
    expect_refusal(call("trace", source), "does not specify its top_k", "--top-k 2")
    code, _, err = call("trace", source, "--top-k", "3")
    assert (code, "assumed, because the files do not say: softmax over all experts" in err) == (0, True)


def test_top_k_is_said_of_the_experts_where_dense_layers_are_more(call, tmp_path: Path):
    stored = {n.replace("layers.1", "layers.2"): t for n, t in tensors("mixtral").items() if "layers.1" in n}
    stored |= tensors("llama")
    source = folder(tmp_path, None, stored)
    code, out, err = call("trace", source, "--activation", "silu", "--top-k", "3", "--layer", "2", "--json")
    assert (code, "widths and experts are changed" in err) == (0, False)
    assert "top3" in next(step["formula"] for step in json.loads(out)["steps"] if step["name"] == "route")


def test_a_bias_of_the_down_projection_alone(call, tmp_path: Path):
    stored = {**tensors("llama"), **{f"model.layers.{i}.mlp.down_proj.bias": torch.ones(4) for i in range(2)}}
    source = folder(tmp_path, None, stored)
    row = row_of(call("params", source, "--json"))
    assert (row["bias"], row["differences"], row["ffn_params_total"]) == (False, [], ffn_numbers(stored))


@pytest.mark.parametrize(("prefixes", "named"), [
    (["model.layers"], ["decoder"]), (["encoder.block", "decoder.block"], ["encoder", "decoder"]),
    (["decoder.bert.encoder.layer", "encoder.encoder.layer"], ["decoder", "encoder"]),
    (["model.L_module.layers", "model.H_module.layers"], ["L_module", "H_module"]),
    (["a.layers", "a.b.layers"], ["decoder0", "b"]), (["x\x1b[31m.layers", "y.layers"], ["decoder0", "y"]),
])  # fmt: skip
def test_stacks_are_named_by_what_tells_their_prefixes_apart(prefixes: list[str], named: list[str]):
    assert [*stacks_of(prefixes).values()] == named


def test_a_gguf_file_of_an_unknown_architecture_needs_its_activation(call, tmp_path: Path):
    written(tmp_path / "model.gguf", architecture="brand-new")
    expect_refusal(call("trace", str(tmp_path / "model.gguf")), "does not specify its activation", "--activation silu")


def test_what_follows_from_layers_of_two_kinds(call, tmp_path: Path):
    stored = {n: t for n, t in tensors("llama").items() if "layers.0." in n}
    stored |= {n: t for n, t in tensors("mixtral").items() if "layers.1." in n}
    row = row_of(call("params", folder(tmp_path, UNKNOWN, stored), "--json"))
    assert [(group["kind"], group["layers"]) for group in row["groups"]] == [("dense", [0]), ("moe", [1])]
    assert (row["uniform"], row["ffn_params_total"]) == (False, ffn_numbers(stored))


# --- what the block does not hold, what the config says otherwise -----------------------------------------------------


@pytest.mark.parametrize("config", [UNKNOWN, None], ids=["unknown", "none"])
def test_a_tensor_of_no_role_is_a_difference(config: dict[str, Any] | None, call, tmp_path: Path):
    extra = {f"model.layers.{i}.mlp.bias": torch.zeros(4) for i in range(2)}
    source = folder(tmp_path, config, tensors("llama") | extra)
    out = expect_difference(
        call("params", source, "--json"), "parameters per layer: the block has 72, the tensors 76",
        "model.layers.0.mlp.bias and 1 more",
    )  # fmt: skip
    (row,) = json.loads(out)["rows"]
    assert row["ffn_params_total"] + 8 == row["ffn_params_stored"]


@pytest.mark.parametrize(
    ("learned", "activation"),
    [(("act_fn.alpha_p", "act_fn.alpha_n"), "xielu"), (("act_fn.alpha_p",), None), (("x.alpha_p", "x.alpha_n"), None)],
)
def test_learned_parameters_of_an_activation(learned: tuple[str, ...], activation: str | None, call, tmp_path: Path):
    stored = {n: t for n, t in tensors("llama").items() if "gate_proj" not in n}
    stored |= {f"model.layers.{i}.mlp.{name}": torch.zeros(1) for i in range(2) for name in learned}
    code, out, _ = call("params", folder(tmp_path, None, stored), "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["activation"]) == ((0, "xielu") if activation else (1, None))
    assert (row["ffn_params_total"] == row["ffn_params_stored"] == ffn_numbers(stored)) == (activation is not None)


def nested(name: str) -> dict[str, Any]:
    """Llama's tensors with one matrix the other way round."""
    stored = tensors("llama")
    return stored | {f"model.layers.1.mlp.{name}.weight": stored[f"model.layers.1.mlp.{name}.weight"].T.contiguous()}


def test_matrices_that_do_not_fit_each_other(call, tmp_path: Path):
    expect_refusal(
        call("params", folder(tmp_path, None, nested("down_proj"))),
        "model.layers.1", "'mlp.up_proj.weight' [6, 4] and 'mlp.down_proj.weight' [6, 4] do not fit together",
    )  # fmt: skip
    source = folder(tmp_path / "gate", None, nested("gate_proj"))
    expect_difference(call("params", source), "shape: the block has d_model 4, d_ff 6", "model.layers.1.mlp.gate_proj")


def test_an_expert_that_lacks_a_matrix(call, tmp_path: Path):
    stored = tensors("mixtral")
    del stored["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    expect_refusal(call("params", folder(tmp_path, None, stored)), "model.layers.1 has w3 for 3 of 4 experts")


SAYS_OTHERWISE = [
    ("llama", {"hidden_size": 8}, "hidden_size: the config says 8, the tensors 4"),
    ("llama", {"num_hidden_layers": 3}, "num_hidden_layers: the config says 3, the tensors 2"),
    ("llama", {"num_hidden_layers": 1}, "num_hidden_layers: the config says 1, the tensors 2"),
    ("llama", {"intermediate_size": 7}, "intermediate_size: the config says 7, the tensors 6"),
    ("llama", {"num_local_experts": 4}, "num_local_experts: the config says 4, the tensors 0"),
    ("mixtral", {"num_experts": 8}, "num_experts: the config says 8, the tensors 4"),
    ("mixtral", {"n_routed_experts": 3}, "n_routed_experts: the config says 3, the tensors 4"),
]
SAYS_THE_SAME = [
    ("llama", {"intermediate_size": 12}), ("llama", {"intermediate_size": 3}), ("llama", {"num_experts": 1}),
    ("llama", {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}), ("mixtral", {"intermediate_size": 7}),
    ("mixtral", {"num_experts": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "said", "says"), SAYS_OTHERWISE)
def test_a_config_of_an_unknown_model_that_says_otherwise(
    family: str, said: dict[str, Any], says: str, call, tmp_path: Path
):
    source = folder(tmp_path, {**UNKNOWN, **said}, tensors(family))
    row = row_of(call("params", source, "--json"), says, "model.layers.0.", "the tensors decide")
    assert (row["d_model"], row["d_ff"], row["layers"], row["differences"]) == (4, 6, 2, [])


@pytest.mark.parametrize(("family", "said"), SAYS_THE_SAME)
def test_a_config_of_an_unknown_model_that_may_mean_the_same(family: str, said: dict[str, Any], call, tmp_path: Path):
    assert row_of(call("params", folder(tmp_path, {**UNKNOWN, **said}, tensors(family)), "--json"))["differences"] == []


def test_layers_without_an_ffn_count_as_layers(call, tmp_path: Path):
    mixer = {"model.layers.2.mixer.in_proj.weight": torch.zeros(4, 4)}
    config = {**UNKNOWN, "num_hidden_layers": 3}
    row = row_of(call("params", folder(tmp_path, config, tensors("llama") | mixer), "--json"))
    assert (row["differences"], row["layers"]) == ([], 2)


@pytest.mark.parametrize("config", [UNKNOWN, None], ids=["unknown", "none"])
def test_files_that_are_not_here_are_named(config: dict[str, Any] | None, call, tmp_path: Path):
    from safetensors.torch import save_file

    stored, source = tensors("llama"), folder(tmp_path, config)
    files = {name: f"model-0000{1 + ('.1.' in name)}-of-00002.safetensors" for name in stored}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    save_file({n: t for n, t in stored.items() if ".0." in n}, tmp_path / "model-00001-of-00002.safetensors")
    expect_refusal(call("params", source), INDEX, "1 of 2 files are missing (model-00002-of-00002.safetensors)")
    save_file(stored, tmp_path / "model-00001-of-00002.safetensors")
    files = {**dict.fromkeys(stored, "model-00001-of-00002.safetensors"), "lm_head.weight": "head.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    row = row_of(call("params", source, "--json"), "1 of 2 files are missing (head.safetensors); they contain no FFN")
    assert (row["ffn_params_total"], row["stored_params"]) == (ffn_numbers(stored), None)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def written(path: Path, kind: Q = Q.F32, experts: int = 0, architecture: str = "llama", **metadata: Any) -> list[Any]:
    """A GGUF file by the library; returns what the FFNs' tensors are to it: (numbers, bytes)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_swiglu_clamp_exp(metadata.get("limits", [0.0] * LAYERS))
    writer.add_embedding_length(metadata.get("d_model", D))
    writer.add_feed_forward_length(metadata.get("d_ff", F))
    writer.add_block_count(metadata.get("layers", LAYERS))
    if experts:
        writer.add_expert_count(metadata.get("said_experts", experts))
        writer.add_expert_used_count(2)
    stored = []
    for i in range(LAYERS):
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            values = np.ones((experts, *shape) if experts else shape, np.float32)
            packed = quantize(values, kind)
            writer.add_tensor(f"blk.{i}.ffn_{name}{'_exps' if experts else ''}.weight", packed, raw_dtype=kind)
            stored.append((values.size, packed.nbytes))
        if experts:
            router = np.ones((experts, D), np.float32)
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
            stored.append((router.size, router.nbytes))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(D, np.float32))
    finish(writer)
    return stored


def test_limits_in_a_gguf_files_metadata_are_noted_and_it_is_not_run(call, tmp_path: Path):
    path = str(tmp_path / "model.gguf")
    stored = written(tmp_path / "model.gguf", experts=E, limits=[0.0, 7.0])
    row = row_of(
        call("params", path, "--json"), "may change what its FFN computes: llama.swiglu_clamp_exp = [0.0, 7.0]"
    )
    assert row["ffn_params_total"] == sum(numbers for numbers, _ in stored)
    expect_refusal(call("trace", path), "cannot be run: its metadata have keys", "swiglu_clamp_exp")


@pytest.mark.parametrize("experts", [0, E])
@pytest.mark.parametrize(("kind", "dtype"), [(Q.F32, "fp32"), (Q.F16, "fp16"), (Q.Q4_0, "q4_0"), (Q.Q8_0, "q8_0")])
def test_a_gguf_file(kind: Q, dtype: str, experts: int, call, json_of, tmp_path: Path):
    stored = written(tmp_path / "model.gguf", kind, experts)
    numbers, size = (sum(column) for column in zip(*stored, strict=True))
    (row,) = json_of("params", str(tmp_path / "model.gguf"))["rows"]
    assert row["norm_params_per_layer"] == D
    assert row["ffn_params_total"] == row["ffn_params_stored"] == numbers
    assert (row["ffn_stored_bytes"], row["ffn_bits_per_weight"]) == (size, 8 * size / numbers)
    assert (row["stored_params"], row["stored_bytes"]) == (numbers + LAYERS * D, size + LAYERS * D * 4)
    assert (row["name"], row["d_model"], row["d_ff"], row["layers"], row["gated"]) == ("model", D, F, LAYERS, True)
    assert (row["activation"], row["experts"], row["top_k"]) == ("silu", experts, 2 if experts else 0)
    assert (row["dtype"], row["differences"]) == (dtype, [])
    if dtype[0] == "q":
        assert row["weight_bytes"] == size
    beside = tmp_path / "Name-3.1"
    beside.mkdir()
    (tmp_path / "model.gguf").rename(beside / "model.gguf")
    other = row_of(call("params", str(beside), "--json"))  # its directory
    assert (other.pop("name"), other.pop("source"), bool(other.pop("costs"))) == ("Name-3.1", str(beside), True)
    assert other == {key: row[key] for key in other}
    written(beside / "other.gguf")
    row_of(call("params", str(beside), "--json"), "model.gguf, one of 2")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("d_ff", 100, "llama.feed_forward_length: the metadata say 100, the tensors 96"),
        ("d_model", 72, "llama.embedding_length: the metadata say 72, the tensors 64"),
        ("layers", 1, "llama.block_count: the metadata say 1, the tensors 2"),
        ("layers", 3, "llama.block_count: the metadata say 3, the tensors 2"),
    ],
)
def test_metadata_that_contradict_the_tensors(field: str, value: int, says: str, call, tmp_path: Path):
    written(tmp_path / "model.gguf", **{field: value})
    out = expect_difference(call("params", str(tmp_path / "model.gguf"), "--json"), says, "blk.0.ffn_gate.weight")
    (row,) = json.loads(out)["rows"]
    assert (row["d_model"], row["d_ff"], row["layers"]) == (D, F, LAYERS)


def test_experts_that_contradict_the_tensors(call, tmp_path: Path):
    path = tmp_path / "model.gguf"
    written(path, experts=E, said_experts=8)
    says = "llama.expert_count: the metadata say 8, the tensors 4"
    expect_difference(call("params", str(path)), says, "blk.0.ffn_gate_exps.weight")


def test_an_architecture_that_is_not_known(call, tmp_path: Path):
    written(tmp_path / "model.gguf", architecture="brand-new")
    row = row_of(call("params", str(tmp_path / "model.gguf"), "--json"), "the activation")
    assert (row["activation"], row["d_ff"]) == (None, F)


def test_a_gguf_file_beside_other_sources(stdout_of, tmp_path: Path):
    written(tmp_path / "model.gguf", Q.Q4_0)
    out = stdout_of("params", str(tmp_path / "model.gguf"), "gpt2")
    assert out.splitlines()[0].split() == ["quantity", "model", "gpt2"]


def test_a_gguf_file_without_ffn_and_one_cut_short(call, tmp_path: Path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_embedding_length(D)
    writer.add_tensor("token_embd.weight", np.ones((3, D), np.float32))
    finish(writer)
    expect_refusal(call("params", str(path)), "no FFN among 1 tensor names")
    written(path)
    path.write_bytes(path.read_bytes()[:-40_000])
    expect_refusal(call("params", str(path)), path, "truncated")
    expect_refusal(call("trace", str(path)), path, "truncated")


@pytest.mark.parametrize("tied", [True, False])
def test_attention_and_totals_of_a_gguf_file(tied: bool, call, tmp_path: Path):
    """What surrounds the FFNs is in the file too; llama.cpp ties the head where there is no output.weight."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_block_count(LAYERS)
    attention = {"attn_q": (D, D), "attn_k": (D // 2, D), "attn_v": (D // 2, D), "attn_output": (D, D)}
    block = {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F), "ffn_norm": (D,), "attn_norm": (D,), **attention}
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in block.items()}
    shapes |= {"token_embd.weight": (100, D), "output_norm.weight": (D,)} | (
        {} if tied else {"output.weight": (100, D)}
    )
    for name, shape in shapes.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    finish(writer)
    row = row_of(call("params", str(tmp_path / "a.gguf"), "--json"))
    everything = sum(math.prod(shape) for shape in shapes.values())
    assert row["attention_params_per_layer"] == sum(math.prod(shape) for shape in attention.values())
    assert (row["layer_norm_params_per_layer"], row["model_params_total"]) == (2 * D, everything)
    assert row["model_params_active_no_embedding"] == everything - (0 if tied else 100 * D)
    assert row["differences"] == []
