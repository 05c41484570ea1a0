"""Cases whose source is a model: its config, safetensors headers, an index of shards, a GGUF file."""

from __future__ import annotations

import json
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
    "model_type": "deepseek_v3",
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 32,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}
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


def gguf(draw: Random, folder: Path) -> list[str]:
    """A GGUF file with changed bytes, mostly in its header."""
    raw = _gguf()
    path = folder / "model.gguf"
    path.write_bytes(changes.of_bytes(raw, draw, 0, 1200 if draw.random() < 0.9 else len(raw)))
    return [*draw.choice((["params"], ["params", "--json"], ["trace"])), str(path)]


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
