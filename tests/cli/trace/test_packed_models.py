"""A model whose files compressed-tensors packed: its trace is that of the weights that the library makes of them, and
transformers, running the same files, agrees with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import preset_name_to_scheme
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from tests.oracles.checkpoints import folder
from tests.oracles.packed import UP, by_library

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
FORMS = {  # a preset of the library: its format, what is shown for it
    "NVFP4A16": ("nvfp4-pack-quantized", "nvfp4"), "MXFP8A16": ("mxfp8-quantized", "mxfp8"),
    "MXFP4A16": ("mxfp4-pack-quantized", "mxfp4"), "W4A16": ("pack-quantized", "compressed-int4"),
    "W4A16_ASYM": ("pack-quantized", "compressed-int4"), "W8A8": ("int-quantized", "compressed-int8"),
    "FP8_DYNAMIC": ("float-quantized", "fp8"),
}  # fmt: skip


def group_size(scheme: Any) -> int | None:
    """How many inputs share a scale: the preset's number, at most the model's width."""
    return scheme.weights.group_size and min(scheme.weights.group_size, 64)


def packed(name: str, weight: Tensor, preset: str) -> tuple[dict[str, Tensor], Tensor]:
    """(the tensors of a packed weight, the weight that the library makes of them)."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    size, more = group_size(scheme), {}
    most = weight.float().unflatten(1, (-1, size or weight.shape[1])).abs().amax(-1)
    if preset == "NVFP4A16":
        more["weight_global_scale"] = torch.tensor([500.0])
        scale = (most / 6 * 500).to(torch.float8_e4m3fn).bfloat16()
    elif preset.startswith("MX"):
        scale = torch.exp2(most.log2().floor() - (8 if "8" in preset else 2)).bfloat16()
    else:
        scale = (most / (448 if "FP8" in preset else 127 if "8" in preset else 7)).bfloat16()
    if "ASYM" in preset:
        more["weight_zero_point"] = torch.arange(scale.numel()).view(scale.shape).remainder(7).sub(3).to(torch.int8)
    weights = scheme.weights.model_dump() | {"group_size": size}
    tensors, theirs = by_library(FORMS[preset][0], weight, scale, weights, **more)
    return {key.replace(UP, name): tensor.contiguous() for key, tensor in tensors.items()}, theirs


def models(path: Path, preset: str, moe: bool) -> tuple[str, str]:
    """Directories of a tiny model: packed by the library, and as the library unpacks it, in bfloat16."""
    config = (MixtralConfig(**SIZES, num_local_experts=3) if moe else LlamaConfig(**SIZES)).to_dict()
    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.0.self_attn.{name}_proj": (64, 64) for name in "qkvo"}
    mlp = [f"block_sparse_moe.experts.{e}.{w}" for e in range(3) for w in ("w1", "w3", "w2")]
    for name in mlp if moe else ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]:
        shapes[f"model.layers.0.{name}"] = (64, 128) if name.endswith(("w2", "down_proj")) else (128, 64)
    plain = {f"model.layers.0.{norm}_layernorm.weight": torch.ones(64) for norm in ("input", "post_attention")}
    plain |= {
        "model.norm.weight": torch.ones(64),
        "model.embed_tokens.weight": torch.randn(64, 64, generator=generator),
    }
    plain |= {"lm_head.weight": torch.randn(64, 64, generator=generator)}
    plain |= {"model.layers.0.block_sparse_moe.gate.weight": torch.randn(3, 64, generator=generator)} if moe else {}
    small, full = dict(plain), dict(plain)
    for name, shape in shapes.items():
        tensors, theirs = packed(name, torch.randn(shape, generator=generator).bfloat16() / 8, preset)
        small |= tensors
        full[f"{name}.weight"] = theirs.bfloat16()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    group = json.loads(scheme.model_dump_json()) | {"input_activations": None}
    group["weights"]["group_size"] = group_size(scheme)
    quantization = {
        "quant_method": "compressed-tensors", "format": FORMS[preset][0], "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*moe.gate$"],
    }  # fmt: skip
    source = folder(path / "packed", {**config, "quantization_config": quantization}, small)
    return source, folder(path / "plain", config, full)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("preset", FORMS)
def test_a_trace_in_bfloat16_is_that_of_the_librarys_weights(preset: str, moe: bool, call, tmp_path: Path):
    """Bit for bit: the library's weights are bfloat16, to which `--dtype bf16` rounds ours."""
    expert = ["--expert", "all"] if moe else []
    found, wanted = (
        call("trace", source, "--dtype", "bf16", "--show", "all", *expert, "--json")
        for source in models(tmp_path, preset, moe)
    )
    assert (found[0], wanted[0]) == (0, 0), found[2] + wanted[2]
    answer, other = json.loads(found[1]), json.loads(wanted[1])
    assert answer["steps"] == other["steps"]
    assert answer["block"]["weights"].endswith(f", unpacked from {FORMS[preset][1]}")


@pytest.mark.parametrize("moe", [False, True])
def test_codes_have_no_gradient_but_their_inputs_have(moe: bool, call, json_of, tmp_path: Path):
    """What passes through the packed matrices is the same as through the plain ones."""
    small, full = models(tmp_path, "W4A16", moe)
    arguments = ("--dtype", "bf16", "--backward", "--show", "all")
    code, out, err = call("trace", small, *arguments, "--json")
    assert code == 0
    assert "codes of compressed-int4 have no gradient" in err
    ours = {one["name"]: one for one in json.loads(out)["gradients"]}
    theirs = {one["name"]: one for one in json_of("trace", full, *arguments, notes=True)["gradients"]}
    assert {*theirs} - {*ours} == {"gate.weight", "up.weight", "down.weight"}
    for name, one in ours.items():
        assert one["values"] == theirs[name]["values"], name
    code, _, err = call("trace", small, "--backward", "--lr", "0.1")
    assert code == 2
    assert "a step cannot change codes; leave out --lr" in err


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP8A16", "W4A16_ASYM", "W8A8"])
def test_transformers_running_the_same_files_agrees(preset: str, json_of, tmp_path: Path):
    """To 1e-6 in float32, once NVFP4's and the integers' weights are rounded to bfloat16 as there: the row says so."""
    source, plain = models(tmp_path, preset, moe=False)
    rows = json_of("verify", source, "--check", "layout")["rows"]
    (row,) = [row for row in rows if row["subject"] == "as read = transformers' llama"]
    assert row["relative_error"] < 1e-6
    assert row["note"].endswith("are rounded to bfloat16") == (preset != "MXFP8A16")
    error = json_of("trace", source, "--input-ids", "3,9,27")["model_run"]["agreement"]["relative_error"]
    assert error < (1e-6 if preset == "MXFP8A16" else 2**-7)  # a weight is rounded by 2^-9 at most
    transformers.logging.disable_progress_bar()
    module = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32)
    theirs: list[Tensor] = []
    module.model.layers[0].mlp.register_forward_hook(lambda _, x, y: theirs.append(y))
    module(torch.tensor([[3, 9, 27]]))
    steps = json_of("trace", source, "--input-ids", "3,9,27", "--show", "all")["steps"]
    (down,) = [step for step in steps if step["name"] == "down"]
    shown = torch.tensor(down["values"]).view(3, 64)
    assert (shown - theirs[0][0]).abs().max() <= max(1e-6, 2 * error) * theirs[0].abs().max()
