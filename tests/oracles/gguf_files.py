"""A tiny Llama as llama.cpp's converter writes it: a GGUF file with a tokenizer, and the model that it contains."""

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from torch import Tensor, nn

HEADS, KV_HEADS, LAYERS, D_MODEL, D_FF = 4, 2, 3, 64, 96
_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tokens() -> list[str]:
    """Return a byte-level vocabulary: every byte is a token, and `th` is the only longer token."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "th"]


def llama() -> nn.Module:
    """Return the model, with random weights and an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokens()), hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (0.8 if "norm" in name else 0))
    return model


def write(path: Path, model: nn.Module, kind: Q = Q.F32, architecture: str = "llama", with_tokens: bool = True) -> Path:
    """Write the model's GGUF file, whose matrices have the format `kind`; return its path."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(D_MODEL)
    writer.add_feed_forward_length(D_FF)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(D_MODEL // HEADS)
    writer.add_vocab_size(len(tokens()))
    if with_tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens())
        writer.add_token_types([3, 3] + [1] * (len(tokens()) - 2))
        writer.add_token_merges(["t h"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    for name, tensor in model.state_dict().items():
        values = _as_llama_cpp(name, tensor).numpy()
        stored = kind if values.ndim == 2 else Q.F32
        writer.add_tensor(_gguf_name(name), quantize(values, stored), raw_dtype=stored)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added to the writer, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    for theirs, ours in {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.items():
        if name == f"{theirs}.weight":
            return f"{ours}.weight"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _as_llama_cpp(name: str, tensor: Tensor) -> Tensor:
    """Reorder the rows of q and k: llama.cpp rotates neighbouring pairs, but transformers rotates halves."""
    for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        if part in name:
            return tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape).contiguous()
    return tensor
