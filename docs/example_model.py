"""`my-model` and `my-mixture`: the tiny Llama and Mixtral checkpoints with random weights that the manual reads; and
`my-tuned`, which is `my-model` with a LoRA merged into some of its layers."""

import json
from pathlib import Path

WORDS = [
    "[UNK]",
    "<s>",
    "</s>",
    "The",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "slept",
    "Paris",
    "is",
    "capital",
    "of",
]
D_MODEL, D_FF, LAYERS, HEADS = 64, 176, 4, 4
EXPERTS, EXPERT_D_FF, TOP_K = 8, 96, 2


def write_model(path: Path) -> None:
    """Write a Llama: config.json, model.safetensors and a tokenizer of whole words, the same on every machine."""
    _write(path, _shapes(), _config())


def write_mixture(path: Path) -> None:
    """Write the same files for a Mixtral, a mixture of experts."""
    experts = [(f"experts.{e}.{name}", shape) for e in range(EXPERTS) for name, shape in (
        ("w1", (EXPERT_D_FF, D_MODEL)), ("w2", (D_MODEL, EXPERT_D_FF)), ("w3", (EXPERT_D_FF, D_MODEL)))]  # fmt: skip
    moe = {f"block_sparse_moe.{name}": shape for name, shape in (("gate", (EXPERTS, D_MODEL)), *experts)}
    shapes = {name: shape for name, shape in _shapes().items() if ".mlp." not in name}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in moe.items()}
    changed = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": EXPERT_D_FF,
        "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    }  # fmt: skip
    _write(path, shapes, {**_config(), **changed})


def write_tuned(path: Path, model: Path) -> None:
    """Write `model` with a change of rank 2 in up and down of its last two layers, rounded to bf16."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, path)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for layer in (2, 3):
        for name in ("up", "down"):
            key = f"model.layers.{layer}.mlp.{name}_proj.weight"
            rows, columns = tensors[key].shape
            change = torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
            tensors[key] = tensors[key] + 0.05 * layer * tensors[key].norm() / change.norm() * change
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, path / "model.safetensors", metadata={"format": "pt"})


def _write(path: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, object]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    _write_tokenizer(path)


def _shapes() -> dict[str, tuple[int, ...]]:
    square, wide, narrow = (D_MODEL, D_MODEL), (D_FF, D_MODEL), (D_MODEL, D_FF)
    layer = {
        "input_layernorm": (D_MODEL,), "post_attention_layernorm": (D_MODEL,),
        **dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"], square),
        "mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": narrow,
    }  # fmt: skip
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    ends = dict.fromkeys(["model.embed_tokens.weight", "lm_head.weight"], (len(WORDS), D_MODEL))
    return {**layers, **ends, "model.norm.weight": (D_MODEL,)}


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D_MODEL,
        "intermediate_size": D_FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "hidden_act": "silu", "vocab_size": len(WORDS), "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _write_tokenizer(path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
