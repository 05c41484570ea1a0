"""config.json against the tensors beside it: what differs is named as the config names it, and the answer stands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ffncli.errors import FFNError
from ffncli.models.counting.count import count
from ffncli.models.source import load
from tests.oracles.checkpoints import GPT2, LLAMA, MIXTRAL, T5, expect_difference, expect_refusal, folder, tensors

D, F, E, S = 4, 6, 3, 10  # d_model, d_ff, experts, width of the shared experts
QWEN = {
    "model_type": "qwen2_moe", "hidden_size": D, "intermediate_size": 16, "moe_intermediate_size": F,
    "num_hidden_layers": 2, "num_experts": E, "num_experts_per_tok": 2, "shared_expert_intermediate_size": S,
    "hidden_act": "silu",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": D, "intermediate_size": 16, "moe_intermediate_size": F,
    "num_hidden_layers": 3, "n_routed_experts": E, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
}  # fmt: skip


def mlp(stem: str, width: int, d: int = D) -> dict[str, torch.Tensor]:
    """gate_proj, up_proj and down_proj."""
    out = {f"{stem}{n}_proj.weight": torch.zeros(width, d) for n in ("gate", "up")}
    return {**out, f"{stem}down_proj.weight": torch.zeros(d, width)}


def moe(stem: str, shared: str, experts: int = E) -> dict[str, torch.Tensor]:
    """A router, its experts and the shared one."""
    out = {f"{stem}gate.weight": torch.zeros(experts, D)}
    for e in range(experts):
        out |= mlp(f"{stem}experts.{e}.", F)
    return out | mlp(f"{stem}{shared}.", S if shared == "shared_expert" else F)


def qwen() -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for i in range(2):
        stem = f"model.layers.{i}."
        stored |= moe(f"{stem}mlp.", "shared_expert")
        stored[f"{stem}mlp.shared_expert_gate.weight"] = torch.zeros(1, D)
        stored[f"{stem}post_attention_layernorm.weight"] = torch.zeros(D)
    return stored


def deepseek(layers: int = 3) -> dict[str, torch.Tensor]:
    stored = mlp("model.layers.0.mlp.", 16)
    for i in range(1, layers):
        stem = f"model.layers.{i}.mlp."
        stored |= moe(stem, "shared_experts")
        stored[f"{stem}gate.e_score_correction_bias"] = torch.zeros(E)
    return stored | {f"model.layers.{i}.post_attention_layernorm.weight": torch.zeros(D) for i in range(layers)}


def ffn_numbers(stored: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for name, tensor in stored.items() if "norm" not in name and "ln_" not in name)


@pytest.mark.parametrize(
    ("config", "stored"),
    [(LLAMA, tensors("llama")), (GPT2, tensors("gpt2")), (MIXTRAL, tensors("mixtral")), (QWEN, qwen()),
     (DEEPSEEK, deepseek())],
    ids=lambda v: v.get("model_type", ""),
)  # fmt: skip
def test_they_agree(config: dict[str, Any], stored: dict[str, torch.Tensor], json_of, tmp_path: Path):
    (row,) = json_of("params", folder(tmp_path, config, stored))["rows"]
    assert row["differences"] == []
    assert row["ffn_params_total"] == row["ffn_params_stored"] == ffn_numbers(stored)
    assert row["stored_params"] == sum(tensor.numel() for tensor in stored.values())
    assert row["stored_bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert (row["bits_per_weight"], row["ffn_bits_per_weight"]) == (32, 32)


def without(stored: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in stored.items() if part not in name}


def biased(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a bias beside every matrix of the FFN."""
    more = {n.replace(".weight", ".bias"): torch.zeros(len(t)) for n, t in stored.items() if ".mlp." in n}
    return {**stored, **more}


# what differs → config, tensors, the line that says so, a part of the tensor's name
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str, str]] = {
    "d_model": ({**LLAMA, "hidden_size": 8}, tensors("llama"), "hidden_size: the config says 8, the tensors 4", "gate"),
    "d_model of gpt2": ({**GPT2, "n_embd": 8}, tensors("gpt2"), "n_embd: the config says 8, the tensors 4", "c_fc"),
    "d_ff": (
        {**LLAMA, "intermediate_size": 8}, tensors("llama"),
        "intermediate_size: the config says 8, the tensors 6", "gate_proj",
    ),
    "d_ff of experts": (
        {**QWEN, "moe_intermediate_size": 8}, qwen(),
        "moe_intermediate_size: the config says 8, the tensors 6", "experts.0.gate_proj",
    ),
    "d_ff of the dense layers": (
        {**DEEPSEEK, "intermediate_size": 8}, deepseek(), "intermediate_size: the config says 8, the tensors 16",
        "layers.0.mlp.gate_proj",
    ),
    "gated": (
        LLAMA, without(tensors("llama"), "gate_proj"),
        "gated (by model_type llama): the config says True, the tensors False", "up_proj",
    ),
    "bias": (LLAMA, biased(tensors("llama")), "mlp_bias: the config says False, the tensors True", "gate_proj"),
    "experts": (
        {**MIXTRAL, "num_local_experts": 8}, tensors("mixtral"),
        "num_local_experts: the config says 8, the tensors 4", "experts.0.w1",
    ),
    "experts of qwen": (
        {**QWEN, "num_experts": 8}, qwen(), "num_experts: the config says 8, the tensors 3", "experts.0",
    ),
    "experts of deepseek": (
        {**DEEPSEEK, "n_routed_experts": 8}, deepseek(),
        "n_routed_experts: the config says 8, the tensors 3", "layers.1",
    ),
    "shared_d_ff": (
        {**QWEN, "shared_expert_intermediate_size": 12}, qwen(),
        "shared_d_ff (by model_type qwen2_moe): the config says 12, the tensors 10", "experts.0",
    ),
    "router_bias": (
        MIXTRAL,
        tensors("mixtral") | {f"model.layers.{i}.block_sparse_moe.gate.bias": torch.zeros(4) for i in range(2)},
        "router_bias (by model_type mixtral): the config says False, the tensors True", "experts.0",
    ),
    "correction": (
        DEEPSEEK, without(deepseek(), "correction"),
        "correction (by model_type deepseek_v3): the config says True, the tensors False", "layers.1.mlp.experts.0",
    ),
    "shared_gate": (
        QWEN, without(qwen(), "shared_expert_gate"),
        "shared_gate (by model_type qwen2_moe): the config says True, the tensors False", "layers.0.mlp.experts.0",
    ),
    "too many layers": (
        {**LLAMA, "num_hidden_layers": 7}, tensors("llama"),
        "num_hidden_layers: the config says 7, the tensors 2", "model.layers.2 has no FFN",
    ),
    "too few layers": (
        {**GPT2, "n_layer": 1}, tensors("gpt2"), "n_layer: the config says 1, the tensors 2",
        "transformer.h.1 has an FFN",
    ),
    "a tensor of no role": (
        LLAMA, {**tensors("llama"), "model.layers.1.mlp.extra.weight": torch.zeros(5)},
        "parameters per layer: the config says 72, the tensors 77", "model.layers.1.mlp.extra",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_named_as_the_config_names_it(name: str, call, tmp_path: Path):
    config, stored, says, tensor = DIFFERENT[name]
    source = folder(tmp_path, config, stored)
    out = expect_difference(call("params", source), says, tensor)
    lines = out.splitlines()
    heading = lines.index("what disagrees")
    assert says in lines[heading + 1]
    (row,) = json.loads(expect_difference(call("params", source, "--json"), says))["rows"]
    assert row["differences"][0].startswith(says)


def test_the_tensors_decide_gate_and_biases_and_the_config_all_else(call, tmp_path: Path):
    stored = biased(without(tensors("llama"), "gate_proj"))
    out = expect_difference(call("params", folder(tmp_path, LLAMA, stored), "--json"), "and 1 more, which --json lists")
    (row,) = json.loads(out)["rows"]
    assert (row["gated"], row["bias"], row["ffn_params_total"]) == (False, True, ffn_numbers(stored))
    assert len(row["differences"]) == 2
    config = {**LLAMA, "intermediate_size": 8, "num_hidden_layers": 3}
    out = expect_difference(call("params", folder(tmp_path / "b", config, tensors("llama")), "--json"))
    (row,) = json.loads(out)["rows"]
    assert (row["d_ff"], row["layers"], row["ffn_params_total"]) == (8, 3, 3 * 3 * D * 8)
    assert row["ffn_params_stored"] == ffn_numbers(tensors("llama"))
    assert [line.split(":")[0] for line in row["differences"]] == ["num_hidden_layers", "intermediate_size"]


@pytest.mark.parametrize("extra", [1, 2])
def test_layers_that_predict_further_tokens_are_noted_and_not_counted(extra: int, call, tmp_path: Path):
    stored = deepseek(3 + extra)
    source = folder(tmp_path, {**DEEPSEEK, "num_nextn_predict_layers": extra}, stored)
    code, out, err = call("params", source, "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["differences"], row["layers"]) == (0, [], 3)
    assert [("multi-token prediction" in line, f"model.layers.{3 + i}" in line) for i, line in
            enumerate(err.splitlines())] == [(True, True)] * extra  # fmt: skip
    assert row["ffn_params_total"] == row["ffn_params_stored"] == ffn_numbers(deepseek())
    assert row["stored_params"] == sum(tensor.numel() for tensor in stored.values())
    lone = folder(tmp_path / "unsaid", DEEPSEEK, stored)
    expect_difference(call("params", lone), f"num_hidden_layers: the config says 3, the tensors {3 + extra}")


@pytest.mark.parametrize("there", ["encoder", "decoder"])
def test_a_model_of_two_stacks_with_one_absent(there: str, call, tmp_path: Path):
    stored = {}
    for i in range(2):
        stem = f"{there}.block.{i}.layer.{1 if there == 'encoder' else 2}.DenseReluDense."
        stored |= {f"{stem}wi.weight": torch.zeros(F, D), f"{stem}wo.weight": torch.zeros(D, F)}
    code, out, err = call("params", folder(tmp_path, T5, stored), "--json")
    (row,) = json.loads(out)["rows"]
    absent = "decoder" if there == "encoder" else "encoder"
    assert (code, f"no {absent} tensors" in err, len(err.splitlines())) == (0, True, 1)
    assert {group["stack"] for group in row["groups"]} == {there}
    assert row["ffn_params_total"] == row["ffn_params_stored"] == ffn_numbers(stored)


@pytest.mark.parametrize(
    ("config", "family", "says"),
    [(GPT2, "llama", "gated (by model_type gpt2): the config says False, the tensors True"),
     (MIXTRAL, "llama", "num_local_experts: the config says 4, the tensors 0"),
     (LLAMA, "mixtral", "experts (by model_type llama): the config says 0, the tensors 4")],
    ids=["gpt2-llama", "mixtral-llama", "llama-mixtral"],
)  # fmt: skip
def test_a_config_of_one_model_with_the_tensors_of_another(
    config: dict[str, Any], family: str, says: str, call, tmp_path: Path
):
    expect_difference(call("params", folder(tmp_path, config, tensors(family))), says, "model.layers.0.")


def test_several_sources_are_all_shown_and_the_first_that_disagrees_is_named(call, tmp_path: Path):
    good = folder(tmp_path / "good", LLAMA, tensors("llama"))
    bad = folder(tmp_path / "bad", {**LLAMA, "intermediate_size": 8}, tensors("llama"))
    out = expect_difference(call("params", good, bad), "error: bad: intermediate_size")
    assert out.splitlines()[0].split() == ["quantity", "good", "bad"]


@pytest.mark.parametrize("gone", [1, 2])
def test_shards_that_are_not_here_are_taken_from_the_config(gone: int, call, tmp_path: Path):
    from safetensors.torch import save_file

    stored, source = tensors("llama"), folder(tmp_path, LLAMA)
    files = {name: f"model-0000{1 + ('.1.' in name)}-of-00002.safetensors" for name in stored}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if gone == 1:
        save_file({n: t for n, t in stored.items() if ".0." in n}, tmp_path / "model-00001-of-00002.safetensors")
    code, out, err = call("params", source, "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["ffn_params_total"], row["differences"]) == (0, ffn_numbers(stored), [])
    assert f"{gone} of 2 files are missing (model-0000{3 - gone}-of-00002" in err
    assert len(err.splitlines()) == 1
    assert (row["ffn_params_stored"], row["stored_bytes"]) == (None, None)


def test_evidence_has_one_line_for_each_kind_of_layer(tmp_path: Path):
    model = load(folder(tmp_path, DEEPSEEK, deepseek()))
    assert [line for line in model.evidence if line.startswith("gated: tensor")] == [
        "gated: tensor 'model.layers.0.mlp.gate_proj.weight'",
        "gated: tensor 'model.layers.1.mlp.experts.0.gate_proj.weight'",
    ]


# --- which layers, which experts, which shapes ------------------------------------------------------------------------


def relayered(numbers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Llama's two layers, and copies of the second, under other numbers."""
    layer = {n.removeprefix("model.layers.1."): t for n, t in tensors("llama").items() if ".1." in n}
    return {f"model.layers.{i}.{name}": tensor.clone() for i in numbers for name, tensor in layer.items()}


@pytest.mark.parametrize(
    ("config", "stored", "says", "where"),
    [({**DEEPSEEK, "num_nextn_predict_layers": 1}, without(deepseek(4), ".layers.2."),
      "num_hidden_layers: the config says 3, the tensors 2", "model.layers.2 has no FFN"),
     ({**LLAMA, "num_hidden_layers": 4}, relayered((0, 2, 3, 4)),
      "num_hidden_layers: the config says 4, the tensors 3", "model.layers.1 has no FFN"),
     ({**LLAMA, "num_hidden_layers": 1}, relayered((5,)),
      "num_hidden_layers: the config says 1, the tensors 0", "model.layers.0 has no FFN")],
    ids=["beside a further layer", "numbered past it", "the only one"],
)  # fmt: skip
def test_a_layer_that_is_missing_is_not_made_up_by_another(
    config: dict[str, Any], stored: dict[str, torch.Tensor], says: str, where: str, call, tmp_path: Path
):
    expect_difference(call("params", folder(tmp_path, config, stored)), says, where)


@pytest.mark.parametrize(
    ("kind", "matrix", "shape"),
    [("llama", "down_proj", (F, D)), ("llama", "up_proj", (D // 2, 2 * F)), ("llama", "gate_proj", (D, F)),
     ("granite", "down_proj", (F, D)), ("granite", "up_proj", (3, 8))],
)  # fmt: skip
def test_a_shape_that_fits_no_other_is_named(kind: str, matrix: str, shape: tuple[int, int], call, tmp_path: Path):
    name = f"model.layers.1.mlp.{matrix}.weight"
    stored = {**tensors("llama"), name: torch.zeros(shape)}
    source = folder(tmp_path, {**LLAMA, "model_type": kind}, stored)
    says = f"shape: the config says d_model {D}, d_ff {F}, the tensors {list(shape)}"
    expect_difference(call("params", source), says, name)


def test_a_shared_experts_matrix_of_another_shape_is_named(call, tmp_path: Path):
    name = "model.layers.0.mlp.shared_expert.down_proj.weight"
    source = folder(tmp_path, QWEN, {**qwen(), name: torch.zeros(S, D)})
    expect_difference(call("params", source), "shared_d_ff", "the config says 10, the tensors 0")
    (line,) = [line for line in call("params", source)[1].splitlines() if line.strip().startswith("shape")]
    assert name in line
    assert str([S, D]) in line


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_an_expert_without_one_of_its_matrices(kind: str, call, tmp_path: Path):
    stored = deepseek()
    del stored["model.layers.2.mlp.experts.1.up_proj.weight"]
    source = folder(tmp_path, {**DEEPSEEK, "model_type": kind}, stored)
    expect_refusal(call("params", source), "model.layers.2", "experts.1.up_proj.weight' is missing")
    stored = {n: t for n, t in deepseek().items() if "layers.2.mlp.experts" not in n or "up_proj" not in n}
    none = call("params", folder(tmp_path / "none", {**DEEPSEEK, "model_type": kind}, stored))
    expect_refusal(none, "model.layers.2.mlp.experts.0.up_proj.weight' is missing")


def test_an_expert_of_another_shape_is_named(call, tmp_path: Path):
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    source = folder(tmp_path, {**DEEPSEEK, "model_type": "glm4_moe"}, {**deepseek(), name: torch.zeros(F, D + 1)})
    expect_refusal(call("params", source), name, f"has shape {[F, D + 1]}, expected {[F, D]}")


def test_ffns_beside_the_model_are_noted_few_or_many(call, tmp_path: Path):
    stored = tensors("llama")
    two = {f"{name}.layers.0.{n}": t for name in ("mtp", "draft") for n, t in mlp("mlp.", F).items()}
    err = call("params", folder(tmp_path / "two", LLAMA, {**stored, **two}))[2]
    assert sorted(line.split(": ", 2)[2] for line in err.splitlines()) == [
        f"FFNs in '{name}.layers', {3 * D * F} parameters: they are in no layer of the model"
        for name in ("draft", "mtp")
    ]
    many = {f"p{i}.layers.0.{n}": t for i in range(50) for n, t in mlp("mlp.", F).items()}
    (line,) = call("params", folder(tmp_path / "many", LLAMA, {**stored, **many}))[2].splitlines()
    assert "FFNs under 50 prefixes" in line
    assert f"{50 * 3 * D * F:,} parameters" in line
    assert len(line) < 200


def test_further_text_beside_a_language_model_is_noted(call, tmp_path: Path):
    config = {"model_type": "llava", "text_config": LLAMA}
    stored = {f"language_{name}": tensor for name, tensor in tensors("llama").items()}
    stored |= {f"mtp.layers.0.{n}": t for n, t in mlp("mlp.", F).items()}
    stored |= {"vision_tower.layers.0.mlp.fc1.weight": torch.zeros(8, 2),
               "vision_tower.layers.0.mlp.fc2.weight": torch.zeros(2, 8)}  # fmt: skip
    for name, said in (("known", config), ("none", None)):
        code, out, err = call("params", folder(tmp_path / name, said, stored), "--json")
        (row,) = json.loads(out)["rows"]
        assert (code, row["ffn_params_total"]) == (0, ffn_numbers(tensors("llama")))
        assert f"not counted: FFNs in 'mtp.layers', {3 * D * F} parameters" in err
        assert "vision" not in err


def test_an_activation_whose_parameters_are_stored(call, tmp_path: Path):
    stored = without(tensors("llama"), "gate_proj")
    stored |= {f"model.layers.{i}.mlp.act_fn.alpha_{sign}": torch.zeros(1) for i in range(2) for sign in "pn"}
    apertus = {**LLAMA, "model_type": "apertus", "hidden_act": "xielu"}
    code, out, _ = call("params", folder(tmp_path, apertus, stored), "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["ffn_params_total"], row["differences"]) == (0, ffn_numbers(stored), [])
    said = folder(tmp_path / "other", {**apertus, "hidden_act": "relu2"}, stored)
    expect_difference(call("params", said), "hidden_act: the config says 'relu2', the tensors 'xielu'", "up_proj")


def test_biases_that_gptq_writers_left_are_no_difference(call, tmp_path: Path):
    """Old GPTQ files have a zero bias in every module, of a model that has none: loaders skip them."""
    stored = {name: tensor for name, tensor in tensors("llama").items() if ".mlp." not in name}
    for layer in range(2):
        for name, (rows, columns) in {"gate": (32, 16), "up": (32, 16), "down": (16, 32)}.items():
            at = f"model.layers.{layer}.mlp.{name}_proj"
            stored |= {
                f"{at}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
                f"{at}.qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
                f"{at}.scales": torch.ones(1, rows, dtype=torch.float16),
                f"{at}.g_idx": torch.zeros(columns, dtype=torch.int32),
                f"{at}.bias": torch.zeros(rows, dtype=torch.float16),
            }
    widths = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}}
    kept = {name: tensor for name, tensor in stored.items() if ".mlp." in name}
    code, out, err = call("params", folder(tmp_path, {**LLAMA, **widths, **quantized}, kept), "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["differences"], row["bias"]) == (0, [], False)
    assert row["ffn_params_total"] == row["ffn_params_stored"] == 2 * 3 * 16 * 32
    assert "biases stored with GPTQ's matrices" in err


def test_matrices_of_identity_experts_are_left_out(tmp_path: Path) -> None:
    """transformers allocates gate and up for LongCat's identity experts too, never reads them, and saves them."""
    config = AutoConfig.for_model(
        "longcat_flash", hidden_size=32, ffn_hidden_size=48, expert_ffn_hidden_size=16, num_layers=2, vocab_size=64,
        num_hidden_layers=4, n_routed_experts=4, zero_expert_num=2, moe_topk=2, num_attention_heads=4, kv_lora_rank=8,
        q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    resolved = load(str(tmp_path))
    ffns = sum(tensor.numel() for name, tensor in model.state_dict().items() if ".mlp" in name)
    unused = 2 * 2 * (2 * 16 * 32)  # layers × identity experts × gate and up
    found = count(resolved)
    assert found.ffn_params_total == found.ffn_params_stored == ffns - unused
    assert resolved.differences == ()
    assert any("matrices of identity experts are left out" in note for note in resolved.notes)
    # a real expert without its last matrix is still named
    tensors = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if ".3.down_proj" not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FFNError, match=r"experts\.3\.down_proj\.weight' is missing"):
        load(str(tmp_path))
