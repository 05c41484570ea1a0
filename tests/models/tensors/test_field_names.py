"""Names and containers of the field's checkpoints, each a tiny file: what is counted in it, by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ffncli.errors import FFNError
from ffncli.models.counting.count import count
from ffncli.models.source import load

D, F, E, LAYERS = 16, 24, 4, 2
GATED, PLAIN = 3 * D * F, 2 * D * F
Shapes = dict[str, tuple[int, ...]]


def layers(prefix: str, shapes: Shapes) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{i}.{name}": torch.randn(shape) for i in range(LAYERS) for name, shape in shapes.items()}


EXPERTS = {f"mlp.experts.gate_up_projs.{e}.weight": (2 * F, D) for e in range(E)} | {
    f"mlp.experts.down_projs.{e}.weight": (D, F) for e in range(E)
}
# name → (a layer's tensors under a prefix, the parameters of a layer's FFN)
NAMES: dict[str, tuple[str, Shapes, int]] = {
    "EXAONE 3": (
        "transformer.h", {"mlp.c_fc_0.weight": (F, D), "mlp.c_fc_1.weight": (F, D), "mlp.c_proj.weight": (D, F)}, GATED
    ),
    "a list of experts for each matrix, with biases": (
        "model.layers",
        {"mlp.router.weight": (E, D), "mlp.router.bias": (E,), **EXPERTS,
         **{f"mlp.experts.gate_up_projs.{e}.bias": (2 * F,) for e in range(E)},
         **{f"mlp.experts.down_projs.{e}.bias": (D,) for e in range(E)}},
        E * (GATED + 2 * F + D + D + 1),
    ),
    "MLX's experts": (
        "model.layers",
        {"mlp.gate.weight": (E, D), "mlp.switch_mlp.gate_proj.weight": (E, F, D),
         "mlp.switch_mlp.up_proj.weight": (E, F, D), "mlp.switch_mlp.down_proj.weight": (E, D, F)},
        E * (GATED + D),
    ),
    "Megatron-core": (
        "decoder.layers", {"mlp.linear_fc1.weight": (2 * F, D), "mlp.linear_fc2.weight": (D, F)}, GATED
    ),
    "Megatron-core's experts": (
        "decoder.layers",
        {"mlp.router.weight": (E, D),
         **{f"mlp.experts.local_experts.{e}.linear_fc1.weight": (2 * F, D) for e in range(E)},
         **{f"mlp.experts.local_experts.{e}.linear_fc2.weight": (D, F) for e in range(E)}},
        E * (GATED + D),
    ),
    "Megatron-core's grouped experts": (
        "decoder.layers",
        {"mlp.router.weight": (E, D),
         **{f"mlp.experts.linear_fc1.weight{e}": (2 * F, D) for e in range(E)},
         **{f"mlp.experts.linear_fc2.weight{e}": (D, F) for e in range(E)}},
        E * (GATED + D),
    ),
    "TransformerLens": (
        "blocks", {"mlp.W_in": (D, F), "mlp.b_in": (F,), "mlp.W_out": (F, D), "mlp.b_out": (D,), "ln2.w": (D,),
                   "ln2.b": (D,)}, PLAIN + F + D,
    ),
    "TransformerLens with a gate": (
        "blocks", {"mlp.W_in": (D, F), "mlp.W_gate": (D, F), "mlp.W_out": (F, D)}, GATED,
    ),
    "diffusers": (
        "transformer_blocks", {"ff.net.0.proj.weight": (2 * F, D), "ff.net.0.proj.bias": (2 * F,),
                               "ff.net.2.weight": (D, F), "ff.net.2.bias": (D,)}, GATED + 2 * F + D,
    ),
    "diffusers without a gate": (
        "transformer_blocks", {"ff.net.0.proj.weight": (F, D), "ff.net.2.weight": (D, F)}, PLAIN,
    ),
    "a book's sequence": (
        "trf_blocks", {"ff.layers.0.weight": (F, D), "ff.layers.0.bias": (F,), "ff.layers.2.weight": (D, F),
                       "ff.layers.2.bias": (D,)}, PLAIN + F + D,
    ),
    "nn.Sequential with dropout": ("blocks", {"ffwd.net.0.weight": (F, D), "ffwd.net.3.weight": (D, F)}, PLAIN),
    "LLaDA": (
        "model.transformer.blocks",
        {"ff_proj.weight": (F, D), "up_proj.weight": (F, D), "ff_out.weight": (D, F), "attn_out.weight": (D, D)}, GATED
    ),
    "Jais, whose matrices are transposed": (
        "transformer.h", {"mlp.c_fc.weight": (D, F), "mlp.c_fc2.weight": (D, F), "mlp.c_proj.weight": (F, D),
                          "mlp.c_fc.bias": (F,), "mlp.c_fc2.bias": (F,), "mlp.c_proj.bias": (D,)}, GATED + 2 * F + D
    ),
    "LitGPT": (
        "transformer.h", {"mlp.fc_1.weight": (F, D), "mlp.fc_2.weight": (F, D), "mlp.proj.weight": (D, F)}, GATED
    ),
    "LitGPT without a gate": ("transformer.h", {"mlp.fc.weight": (F, D), "mlp.proj.weight": (D, F)}, PLAIN),
    "timm": ("blocks", {"mlp.fc1_g.weight": (F, D), "mlp.fc1_x.weight": (F, D), "mlp.fc2.weight": (D, F)}, GATED),
    "DINOv2": (
        "blocks",
        {"mlp.w12.weight": (2 * F, D), "mlp.w12.bias": (2 * F,), "mlp.w3.weight": (D, F), "mlp.w3.bias": (D,)},
        GATED + 2 * F + D,
    ),
    "ESPnet": (
        "encoder.encoders", {"feed_forward.w_1.weight": (F, D), "feed_forward.w_2.weight": (D, F)}, PLAIN
    ),
    "OpenAI's gpt-oss, with biases": (
        "block",
        {"mlp.gate.weight": (E, D), "mlp.gate.bias": (E,), "mlp.mlp1_weight": (E, 2 * F, D),
         "mlp.mlp1_bias": (E, 2 * F), "mlp.mlp2_weight": (E, D, F), "mlp.mlp2_bias": (E, D)},
        E * (GATED + 2 * F + D + D + 1),
    ),
    "compiled": ("_orig_mod.transformer.h", {"mlp.c_fc.weight": (F, D), "mlp.c_proj.weight": (D, F)}, PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, tmp_path: Path) -> None:
    prefix, shapes, params = NAMES[name]
    save_file(layers(prefix, shapes), tmp_path / "model.safetensors")
    assert count(load(str(tmp_path / "model.safetensors"))).ffn_params_total == LAYERS * params


def test_mlxs_experts_beside_a_config_are_the_familys(tmp_path: Path) -> None:
    prefix, shapes, params = NAMES["MLX's experts"]
    save_file(layers(prefix, shapes), tmp_path / "model.safetensors")
    config = {
        "model_type": "qwen3_moe", "hidden_size": D, "moe_intermediate_size": F, "intermediate_size": 40,
        "num_hidden_layers": LAYERS, "num_experts": E, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    read = load(str(tmp_path))
    assert (count(read).ffn_params_total, read.differences) == (LAYERS * params, ())


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_mlxs_words(bits: int, tmp_path: Path) -> None:
    """`bits` per value and two bfloat16 per group: 4 bits in groups of 32 take 5 bits a weight."""
    d, f, group = 32, 64, 32

    def packed(rows: int, columns: int, name: str) -> dict[str, torch.Tensor]:
        words = torch.zeros(rows, columns * bits // 32, dtype=torch.int32).view(torch.uint32)
        scales = torch.ones(rows, columns // group, dtype=torch.bfloat16)
        return {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": scales.clone()}

    tensors: dict[str, torch.Tensor] = {}
    for at in range(LAYERS):
        for leaf, rows, columns in (("gate_proj", f, d), ("up_proj", f, d), ("down_proj", d, f)):
            tensors |= packed(rows, columns, f"model.layers.{at}.mlp.{leaf}")
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "model_type": "qwen3", "hidden_size": d, "intermediate_size": f, "num_hidden_layers": LAYERS,
        "quantization": {"bits": bits, "group_size": group},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    stored = count(load(str(tmp_path)))
    params = LAYERS * 3 * d * f
    assert (stored.ffn_params_stored, stored.ffn_stored_bytes) == (params, params * (bits + 1) // 8)
    assert stored.ffn_stored_bytes == sum(t.nbytes for t in tensors.values())
    (tmp_path / "model.safetensors").unlink()
    assert count(load(str(tmp_path))).weight_bytes == stored.ffn_stored_bytes  # from the config alone


NANO = {f"_orig_mod.transformer.h.{i}.mlp.{leaf}.weight": (4 * D, D) if leaf == "c_fc" else (D, 4 * D)
        for i in range(LAYERS) for leaf in ("c_fc", "c_proj")}  # fmt: skip


def values(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


CONTAINERS: dict[str, tuple[str, Any]] = {
    "nanoGPT, whose best loss is a tensor": (
        "ckpt.pt", {"model": values(NANO), "best_val_loss": torch.tensor(1.0), "iter_num": 5, "config": {"n_layer": 2}},
    ),
    "Lightning": (
        "epoch.ckpt", {"state_dict": {f"model.{n}": t for n, t in values(NANO).items()}, "epoch": 3,
                       "pytorch-lightning_version": "2.4", "optimizer_states": [{"state": {}}]},
    ),
    "a module's state": ("model.pth", values(NANO)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("folder", [False, True])
def test_containers(name: str, folder: bool, tmp_path: Path) -> None:
    file, content = CONTAINERS[name]
    torch.save(content, tmp_path / file)
    (tmp_path / "notes.txt").write_text("x")
    source = tmp_path if folder else tmp_path / file
    assert count(load(str(source))).ffn_params_total == LAYERS * 2 * 4 * D * D


def test_an_index_of_pickled_files_names_the_models_config_and_files(tmp_path: Path) -> None:
    prefix, shapes, params = "model.layers", {"mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D),
                                              "mlp.down_proj.weight": (D, F)}, GATED  # fmt: skip
    tensors = layers(prefix, shapes)
    files = {name: f"pytorch_model-0000{1 + ('layers.1' in name)}-of-00002.bin" for name in tensors}
    for file in set(files.values()):
        torch.save({name: t for name, t in tensors.items() if files[name] == file}, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")
    assert count(load(str(index))).ffn_params_total == LAYERS * params
    config = {"model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    read = load(str(index))
    assert (count(read).ffn_params_total, count(read).ffn_params_stored) == (LAYERS * params, LAYERS * params)


def test_layers_that_predict_more_tokens_are_not_the_models(tmp_path: Path) -> None:
    shapes = {"mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F)}
    more = {f"model.mtp_layers.0.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file({**layers("model.layers", shapes), **more}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-no-family"}), "utf-8")
    read = load(str(tmp_path))
    assert count(read).ffn_params_total == LAYERS * GATED
    assert any("'model.mtp_layers', 1,152 parameters" in note for note in read.notes)
    save_file(more, tmp_path / "model.safetensors")
    assert count(load(str(tmp_path))).ffn_params_total == GATED  # there is nothing else


def test_an_adapter_is_called_an_adapter(tmp_path: Path) -> None:
    at = "base_model.model.model.layers.0.mlp.experts"
    save_file({f"{at}.base_layer.lora_A.weight": torch.ones(8, D), f"{at}.lora_B.weight": torch.ones(D, 8)},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(FFNError, match="is an adapter, without the matrices that it changes"):
        load(str(tmp_path))


@pytest.mark.parametrize("merged", [True, False])
def test_gguf_experts_of_other_converters(merged: bool, tmp_path: Path) -> None:
    """Gate and up in one tensor, or (before llama.cpp merged them) a tensor for every expert."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_expert_count(E)
    writer.add_expert_used_count(2)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, torch.randn(shape).half().numpy())

    for i in range(LAYERS):
        add(f"blk.{i}.ffn_norm.weight", D)
        add(f"blk.{i}.ffn_gate_inp.weight", E, D)
        if merged:
            add(f"blk.{i}.ffn_gate_up_exps.weight", E, 2 * F, D)
            add(f"blk.{i}.ffn_down_exps.weight", E, D, F)
        for e in range(0 if merged else E):
            add(f"blk.{i}.ffn_gate.{e}.weight", F, D)
            add(f"blk.{i}.ffn_up.{e}.weight", F, D)
            add(f"blk.{i}.ffn_down.{e}.weight", D, F)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = count(load(str(path)))
    assert read.ffn_params_total == LAYERS * E * (GATED + D)
    assert read.ffn_stored_bytes == 2 * read.ffn_params_total
