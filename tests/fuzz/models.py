"""Cases whose source is a model: its config, safetensors headers, an index of shards, a GGUF file."""

import io
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from ffncli.models.config.families import BY_TYPE
from tests.fuzz import changes
from tests.oracles.checkpoints import GPT2, INDEX, LLAMA, MIXTRAL, T5, raw_safetensors, tensors

DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4,
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "vocab_size": 32, "first_k_dense_replace": 1, "hidden_act": "silu", "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
QUANTIZED = {
    **LLAMA,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "gptq", "bits": 4, "modules_to_not_convert": ["lm_head"]},
}
NESTED = {
    "model_type": "gemma3",
    "text_config": {**LLAMA, "model_type": "gemma3_text"},
    "vision_config": {"hidden_size": 8},
}
PAIR = {"model_type": "encoder-decoder", "encoder": {**GPT2}, "decoder": {**GPT2}}
CONFIGS: list[dict[str, Any]] = [LLAMA, GPT2, MIXTRAL, T5, DEEPSEEK, QUANTIZED, NESTED, PAIR]
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}
_WIDE = {"hidden_size": 64, "intermediate_size": 96}
_INTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
PACKED: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, torch.Tensor]]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda rows, columns: {
            "qweight": torch.ones(columns // 8, rows).int(), "qzeros": torch.ones(columns // 32, rows // 8).int(),
            "scales": torch.ones(columns // 32, rows).half(), "g_idx": torch.arange(columns).int() // 32,
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda rows, columns: {
            "qweight": torch.ones(columns, rows // 8).int(), "qzeros": torch.ones(columns // 32, rows // 8).int(),
            "scales": torch.ones(columns // 32, rows).half(),
        },
    ),
    "int4": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": _INTS}}},
        lambda rows, columns: {
            "weight_packed": torch.ones(rows, columns // 8).int(), "weight_scale": torch.ones(rows, columns // 32),
            "weight_zero_point": torch.ones(rows // 8, columns // 32).int(),
            "weight_shape": torch.tensor((rows, columns)),
        },
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda rows, columns: {
            "weight": torch.ones(rows, columns // 2).byte(), "weight_scale_2": torch.ones(()),
            "weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn), "input_scale": torch.ones(()),
        },
    ),
    "mxfp8": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        lambda rows, columns: {
            "weight": torch.ones(rows, columns).to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.full((rows, columns // 32), 127).byte(),
        },
    ),
    "int8": (
        {"quant_method": "compressed-tensors", "config_groups": {}},
        lambda rows, columns: {
            "weight": torch.ones(rows, columns).to(torch.int8), "weight_scale": torch.ones(rows, 1),
            "weight_zero_point": torch.ones(rows, 1).to(torch.int8),
        },
    ),
}  # fmt: skip
VIEWS = [[], ["--json"], ["--csv"], ["--tp", "2"], ["--dtype", "int4"], ["--tokens", "3"], ["--layers"]]


def config(draw: Random, folder: Path) -> list[str]:
    """A config of any family, often with the fields of another one."""
    whole: dict[str, Any] = dict(draw.choice(CONFIGS))
    if draw.random() < 0.5:
        whole |= draw.choice(CONFIGS) | {"model_type": draw.choice(list(BY_TYPE))}
    text = changes.of_json(whole, draw)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return ["params", str(folder), *draw.choice(VIEWS)]


def safetensors(draw: Random, folder: Path) -> list[str]:
    """A header whose JSON or bytes were changed, beside a config that is right."""
    family = draw.choice(list(FAMILIES))
    raw = _stored(family)
    length = 8 + int.from_bytes(raw[:8], "little")
    if draw.random() < 0.5:
        header = changes.of_json(json.loads(raw[8:length]), draw).encode("utf-8", "surrogatepass")
        raw = raw_safetensors(header, raw[length:])
    else:
        raw = changes.of_bytes(raw, draw, 0, length)
    (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
    (folder / "model.safetensors").write_bytes(raw)
    command = draw.choice((["params"], ["params"], ["trace", "--layer", "1"]))
    return [*command, str(folder if draw.random() < 0.8 else folder / "model.safetensors")]


def index(draw: Random, folder: Path) -> list[str]:
    """Two shards with an index that was changed, or a shard that was."""
    names = sorted(tensors("llama"))
    shards = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    for shard in set(shards.values()):
        stored = {name: tensor for name, tensor in tensors("llama").items() if shards[name] == shard}
        raw = save(stored)
        (folder / shard).write_bytes(changes.of_bytes(raw, draw) if draw.random() < 0.1 else raw)
    whole = {"metadata": {"total_size": 1000}, "weight_map": shards}
    (folder / INDEX).write_bytes(changes.of_json(whole, draw).encode("utf-8", "surrogatepass"))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return ["params", str(folder if draw.random() < 0.7 else folder / INDEX)]


def checkpoint(draw: Random, folder: Path) -> list[str]:
    """A torch.save file: tensors of torch's unusual kinds, contents of other kinds, or changed bytes."""
    stored: Any = dict(tensors(family := draw.choice(list(FAMILIES))))
    for name in draw.sample(sorted(stored), draw.choice((0, 1, 1, 2))):
        stored[name] = _unusual(stored[name], draw)
    whole = draw.choice((stored, stored, {"model": stored}, {"state_dict": stored, "epoch": 3}, [stored], {}))
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what it writes here
        torch.save(whole, out, _use_new_zipfile_serialization=draw.random() < 0.7)
    raw = out.getvalue() if draw.random() < 0.7 else changes.of_bytes(out.getvalue(), draw)
    path = folder / draw.choice(("pytorch_model.bin", "m.pt", "m.ckpt"))
    path.write_bytes(raw)
    (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
    return [*draw.choice((["params"], ["params", "--json"], ["plan"], ["trace"])), str(path)]


def _unusual(tensor: torch.Tensor, draw: Random) -> Any:
    """The tensor as torch also stores it, or something in its place."""
    match draw.randrange(9):
        case 0:
            return torch.quantize_per_tensor(tensor.float(), 0.1, 0, draw.choice((torch.qint8, torch.quint8)))
        case 1:
            return tensor.to_sparse()
        case 2:
            return torch.nn.Parameter(tensor)
        case 3:
            return tensor.T
        case 4:
            return tensor.to(draw.choice((torch.complex64, torch.bool, torch.float8_e4m3fn)))
        case 5:
            return tensor.storage()
        case 6:
            return tensor.to("meta")
        case 7:
            return changes.value(draw)
        case _:
            return altered(tensor, draw)


def gguf(draw: Random, folder: Path) -> list[str]:
    """A GGUF file with changed bytes, mostly in its header."""
    raw = _gguf()
    path = folder / "model.gguf"
    path.write_bytes(changes.of_bytes(raw, draw, 0, 1200 if draw.random() < 0.9 else len(raw)))
    return [*draw.choice((["params"], ["params", "--json"], ["trace"])), str(path)]


def packed(draw: Random, folder: Path) -> list[str]:
    """A packed model: some tensors have another shape or dtype or are missing, or its config was changed."""
    form = draw.choice(list(PACKED))
    config, pieces = PACKED[form]
    stored = _packed_tensors(pieces)
    for name in draw.sample(sorted(stored), draw.choice((0, 1, 1, 2))):
        if draw.random() < 0.25:
            del stored[name]
        else:
            stored[name] = altered(stored[name], draw)
    (folder / "model.safetensors").write_bytes(save(stored))
    whole = {**LLAMA, **_WIDE, "quantization_config": config}
    text = changes.of_json(whole, draw) if draw.random() < 0.5 else json.dumps(whole)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return [*draw.choice((["params"], ["trace"], ["trace", "--layer", "1"], ["trace", "--dtype", "bf16"])), str(folder)]


def altered(tensor: torch.Tensor, draw: Random) -> torch.Tensor:
    """Another shape, dtype or values."""
    match draw.randrange(5):
        case 0 if tensor.dim():
            axis = draw.randrange(tensor.dim())
            sizes = [draw.choice((0, 1, n - 1, n + 1, 2 * n)) if at == axis else n for at, n in enumerate(tensor.shape)]
            return torch.zeros([max(0, n) for n in sizes], dtype=tensor.dtype)
        case 1:
            return tensor.flatten() if draw.random() < 0.5 else tensor[None].contiguous()
        case 2:
            return tensor.to(
                draw.choice((torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bool))
            )
        case 3:
            return torch.full_like(tensor.float(), draw.choice((0, -1, 127))).to(tensor.dtype)
        case _:
            sizes = [draw.randrange(70) for _ in range(draw.randrange(4))]
            return torch.zeros(sizes, dtype=tensor.dtype)


def _packed_tensors(pieces: Callable[[int, int], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A Llama of two layers: `pieces` are those of a matrix [out, in]."""
    stored: dict[str, torch.Tensor] = {}
    for layer in range(2):
        stem = f"model.layers.{layer}."
        stored[f"{stem}post_attention_layernorm.weight"] = torch.ones(64)
        for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            stored |= {f"{stem}mlp.{name}_proj.{piece}": tensor for piece, tensor in pieces(*shape).items()}
    return stored


@cache
def _stored(family: str) -> bytes:
    return save(tensors(family))


@cache
def _gguf() -> bytes:
    import tempfile

    from tests.models.files.test_gguf import write

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder) / "model.gguf").read_bytes()
