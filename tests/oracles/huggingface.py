"""Tiny random models that transformers builds and saves: an independent computation of a family's FFN.

A Case says how to build a model and which of its modules are the block. `make` builds the model, gives every parameter
a random value (transformers initialises biases, routers and norms with 0 or 1) and saves it as a user would: the files
have the family's published tensor names, whatever the names of the modules in memory.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

D_MODEL, D_FF, VOCAB = 16, 40, 60  # d_ff is not 4 × d_model, so that no default can hide a field that was not read
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

Inputs = Callable[[torch.Generator], dict[str, Tensor]]


def _tokens(g: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCAB, (2, 5), generator=g)}


def _pair(g: torch.Generator) -> dict[str, Tensor]:
    return _tokens(g) | {"decoder_input_ids": torch.randint(3, VOCAB, (2, 4), generator=g)}


def _pixels(g: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8, generator=g)}


def _speech(g: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 12, generator=g), "decoder_input_ids": _pair(g)["decoder_input_ids"]}


@dataclass(frozen=True)
class Case:
    """How to build a model, and where its block is in memory.

    `at` maps each stack, named as in `--layer`, to the path of its layers; other paths are relative to a layer. `ffn`
    are the modules that make the FFN, one after the other. `norm` is the block's first module ("" if that is the FFN);
    `attention` is the other branch of a parallel block. `fp64` is the tolerance in float64, larger only if transformers
    itself is less exact; `exact_norm` says that the norm can compute in float64 (RMSNorms always use float32).
    """

    config: str
    model: str
    values: Mapping[str, Any]
    ffn: tuple[str, ...] = ("mlp",)
    norm: str = "post_attention_layernorm"
    attention: str = ""
    at: Mapping[str, str] = field(default_factory=lambda: {"decoder": "model.layers.{i}"})
    inputs: Inputs = _tokens
    fp64: float = 1e-12
    exact_norm: bool = False


_WIDTHS = {"hidden_size": D_MODEL, "intermediate_size": D_FF, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_WIDTHS, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-3}
_GEMMA = {**_LLAMA, "hidden_activation": "gelu_pytorch_tanh"}
_BERT = {**_WIDTHS, "layer_norm_eps": 1e-3, "max_position_embeddings": 32}
_GPT2 = {"n_embd": D_MODEL, "n_inner": D_FF, "n_layer": 2, "n_head": 4, "n_positions": 32, "layer_norm_epsilon": 1e-3}
_T5 = {
    "d_model": D_MODEL, "d_ff": D_FF, "d_kv": 4, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3,
    "layer_norm_epsilon": 1e-3,
}  # fmt: skip
_OPT = {
    "hidden_size": D_MODEL, "ffn_dim": D_FF, "num_hidden_layers": 2, "num_attention_heads": 4,
    "word_embed_proj_dim": D_MODEL, "max_position_embeddings": 32,
}  # fmt: skip
_FALCON = {
    "hidden_size": D_MODEL, "ffn_hidden_size": D_FF, "num_hidden_layers": 2, "num_attention_heads": 4,
    "layer_norm_epsilon": 1e-3,
}  # fmt: skip
_NEOX = {**_WIDTHS, "layer_norm_eps": 1e-3, "max_position_embeddings": 32}
_QWEN_MOE = {**_LLAMA, "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
_QWEN2_MOE = {k: v for k, v in _QWEN_MOE.items() if k != "head_dim"} | {"shared_expert_intermediate_size": 20}
_DEEPSEEK = {
    **_WIDTHS, "num_hidden_layers": 3, "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "moe_intermediate_size": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip

_FC = ("fc1", "activation_fn", "fc2")
_H = {"decoder": "transformer.h.{i}"}
_NEOX_AT = {"decoder": "gpt_neox.layers.{i}"}
_T5_AT = {"encoder": "encoder.block.{i}.layer.1", "decoder": "decoder.block.{i}.layer.2"}
_BERT_FFN = ("intermediate", "output.dense")
_BLOOM_FFN = ("mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h")


def _causal(family: str, values: Mapping[str, Any], **rest: Any) -> Case:
    return Case(f"{family}Config", f"{family}ForCausalLM", values, **rest)


def _t5(family: str, form: str) -> Case:
    return Case(
        f"{family}Config", f"{family}ForConditionalGeneration", {**_T5, "feed_forward_proj": form}, ("DenseReluDense",),
        "layer_norm", at=_T5_AT, inputs=_pair,
    )  # fmt: skip


def _falcon(norm: str, **values: Any) -> Case:
    attention = "self_attention" if values.get("parallel_attn", True) else ""
    return _causal("Falcon", {**_FALCON, **values}, norm=norm, attention=attention, at=_H, exact_norm=True)


def _neox(act: str, parallel: bool, fp64: float) -> Case:
    return _causal(
        "GPTNeoX", {**_NEOX, "hidden_act": act, "use_parallel_residual": parallel}, at=_NEOX_AT,
        attention="attention" if parallel else "", fp64=fp64, exact_norm=True,
    )  # fmt: skip


def _opt(**values: Any) -> Case:
    norm = "final_layer_norm" if values.get("do_layer_norm_before", True) else ""
    at = {"decoder": "model.decoder.layers.{i}"}
    return _causal("OPT", {**_OPT, **values}, ffn=_FC, norm=norm, at=at, exact_norm=True)


def _deepseek(family: str, **values: Any) -> Case:
    # The router casts its input and weights to float32, so it is not more exact in float64.
    return _causal(family, {**_DEEPSEEK, **values}, fp64=1e-6)


CASES: Mapping[str, Case] = {
    "gpt2": Case("GPT2Config", "GPT2LMHeadModel", _GPT2, norm="ln_2", at=_H, exact_norm=True),
    "gpt2-n_inner-null": Case(
        "GPT2Config", "GPT2Model", {**_GPT2, "n_inner": None}, norm="ln_2", at={"decoder": "h.{i}"}, exact_norm=True
    ),
    "bert": Case(
        "BertConfig", "BertForMaskedLM", _BERT, _BERT_FFN, "", at={"encoder": "bert.encoder.layer.{i}"}, exact_norm=True
    ),
    "bert-relu-no-prefix": Case(
        "BertConfig", "BertModel", {**_BERT, "hidden_act": "relu"}, _BERT_FFN, "", at={"encoder": "encoder.layer.{i}"},
        exact_norm=True,
    ),
    "roberta": Case(
        "RobertaConfig", "RobertaForMaskedLM", {**_BERT, "pad_token_id": 1}, _BERT_FFN, "",
        at={"encoder": "roberta.encoder.layer.{i}"}, exact_norm=True,
    ),
    "electra": Case(
        "ElectraConfig", "ElectraForMaskedLM", {**_BERT, "embedding_size": 8}, _BERT_FFN, "",
        at={"encoder": "electra.encoder.layer.{i}"}, exact_norm=True,
    ),
    "vit": Case(
        "ViTConfig", "ViTForImageClassification", {**_WIDTHS, "layer_norm_eps": 1e-3, "image_size": 8, "patch_size": 4},
        norm="layernorm_after", at={"encoder": "vit.layers.{i}"}, inputs=_pixels, exact_norm=True,
    ),
    "t5-relu": _t5("T5", "relu"),
    "t5-gated-gelu": _t5("T5", "gated-gelu"),
    "t5-gated-silu": _t5("T5", "gated-silu"),
    "mt5": _t5("MT5", "gated-gelu"),
    "umt5": _t5("UMT5", "gated-gelu"),
    "whisper": Case(
        "WhisperConfig", "WhisperForConditionalGeneration",
        {"d_model": D_MODEL, "encoder_ffn_dim": D_FF, "decoder_ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 6,
         "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1},
        _FC, "final_layer_norm", inputs=_speech, exact_norm=True,
        at={"encoder": "model.encoder.layers.{i}", "decoder": "model.decoder.layers.{i}"},
    ),
    "opt": _opt(),
    "opt-post-norm": _opt(do_layer_norm_before=False, word_embed_proj_dim=8),
    "opt-no-bias-no-affine": _opt(enable_bias=False, layer_norm_elementwise_affine=False),
    # its tanh-GELU writes √(2/π) as 0.79788456: 3.5e-9 off
    "bloom": _causal(
        "Bloom", {"hidden_size": D_MODEL, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-3}, ffn=_BLOOM_FFN, at=_H,
        fp64=1e-9, exact_norm=True,
    ),
    "gpt_neox": _neox("gelu", True, 1e-12),
    # gelu_fast writes √(2/π) with ten digits: 3.6e-12 off
    "gpt_neox-sequential-gelu_fast": _neox("gelu_fast", False, 1e-11),
    "falcon-7b": _falcon("input_layernorm"),
    "falcon-40b": _falcon("ln_mlp", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": _falcon("input_layernorm", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon-sequential-bias": _falcon("post_attention_layernorm", parallel_attn=False, bias=True, multi_query=False),
    "phi": _causal(
        "Phi", {**_WIDTHS, "layer_norm_eps": 1e-3}, norm="input_layernorm", attention="self_attn", exact_norm=True
    ),
    "llama": _causal("Llama", _LLAMA),
    "llama-no-prefix": Case("LlamaConfig", "LlamaModel", _LLAMA, at={"decoder": "layers.{i}"}),
    "llama-mlp_bias": _causal("Llama", {**_LLAMA, "mlp_bias": True}),
    "mistral": _causal("Mistral", _LLAMA),
    "qwen2": _causal("Qwen2", {k: v for k, v in _LLAMA.items() if k != "head_dim"}),
    "qwen3": _causal("Qwen3", _LLAMA),
    "phi3": _causal("Phi3", {**_LLAMA, "pad_token_id": 0, "original_max_position_embeddings": 32,
                             "max_position_embeddings": 32}),
    "olmo2": _causal("Olmo2", {k: v for k, v in _LLAMA.items() if k != "head_dim"}, norm=""),
    "gemma": _causal("Gemma", {**_LLAMA, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": _causal("Gemma2", _GEMMA, norm="pre_feedforward_layernorm"),
    "gemma3_text": Case("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA, norm="pre_feedforward_layernorm"),
    "gemma3-multimodal": Case(
        "Gemma3Config", "Gemma3ForConditionalGeneration",
        {"text_config": {**_GEMMA, "vocab_size": VOCAB, "model_type": "gemma3_text"},
         "vision_config": {**_WIDTHS, "hidden_size": 8, "intermediate_size": 12, "image_size": 8, "patch_size": 4,
                           "model_type": "siglip_vision_model"}},
        norm="pre_feedforward_layernorm", at={"decoder": "model.language_model.layers.{i}"},
    ),
    "mixtral": _causal("Mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": _causal("Qwen2Moe", {**_QWEN2_MOE, "norm_topk_prob": True}),
    "qwen2_moe-not-renormalised": _causal(
        "Qwen2Moe", {**_QWEN2_MOE, "decoder_sparse_step": 2, "norm_topk_prob": False}
    ),
    "qwen3_moe": _causal("Qwen3Moe", {**_QWEN_MOE, "norm_topk_prob": True}),
    "qwen3_moe-not-renormalised": _causal("Qwen3Moe", {**_QWEN_MOE, "norm_topk_prob": False}),
    "qwen3_moe-layer-1-dense": _causal("Qwen3Moe", {**_QWEN_MOE, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe-every-second": _causal("Qwen3Moe", {**_QWEN_MOE, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "deepseek_v2": _deepseek("DeepseekV2", topk_method="group_limited_greedy"),
    "deepseek_v2-greedy": _deepseek("DeepseekV2", n_group=None, topk_group=None),
    "deepseek_v3": _deepseek("DeepseekV3", norm_topk_prob=True),
    "deepseek_v3-not-renormalised": _deepseek("DeepseekV3", norm_topk_prob=False),
    "axk1": _deepseek("AXK1", norm_topk_prob=True),  # a norm inside the experts' module
    # with a limit that values pass
    "gpt_oss": _causal("GptOss", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.75}),
}  # fmt: skip


@dataclass(frozen=True)
class Capture:
    """The tensors of a block in transformers' own forward pass; `attention` is None for a sequential block."""

    x: Tensor
    attention: Tensor | None
    ffn_input: Tensor
    ffn_output: Tensor
    out: Tensor


@dataclass(frozen=True)
class Made:
    """A model on disk and in memory."""

    case: Case
    path: Path
    model: nn.Module

    @cached_property
    def _wide(self) -> nn.Module:
        return copy.deepcopy(self.model).double()

    def layer(self, stack: str, index: int, dtype: str = "fp32") -> nn.Module:
        """Return the module of a layer, with its parameters in `dtype`."""
        model = self._wide if dtype == "fp64" else self.model
        return model.get_submodule(self.case.at[stack].format(i=index))

    def layer_count(self, stack: str) -> int:
        """Return the number of layers of a stack in memory."""
        return len(list(self.model.get_submodule(self.case.at[stack].partition(".{i}")[0]).children()))

    def ffn(self, stack: str, index: int, x: Tensor) -> Tensor:
        """Compute transformers' FFN of a layer for `x` [..., d_model], in x's dtype."""
        layer = self.layer(stack, index, "fp64" if x.dtype == torch.float64 else "fp32")
        batch = x.reshape(1, -1, x.shape[-1])  # the MoE modules want three axes
        with torch.no_grad():
            for name in self.case.ffn:
                batch = _first(layer.get_submodule(name)(batch))
        return batch.reshape(x.shape)

    def ffn_params(self, stack: str, index: int) -> int:
        """Return the parameter count of a layer's FFN, with the router and without norms."""
        layer = self.layer(stack, index)
        modules = [layer.get_submodule(name) for name in self.case.ffn]
        tensors = [pair for module in modules for pair in (*module.named_parameters(), *module.named_buffers())]
        return sum(tensor.numel() for name, tensor in tensors if "norm" not in name)

    def capture(self, stack: str, index: int, dtype: str) -> Capture:
        """Run the whole model, and record the tensors of one layer's block."""
        layer, case = self.layer(stack, index, dtype), self.case
        start, end = layer.get_submodule(case.ffn[0]), layer.get_submodule(case.ffn[-1])
        seen: dict[str, Tensor] = {}

        def before(name: str) -> Callable[..., None]:
            def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[name] = _first((*args, *kwargs.values())).clone()

            return note

        def after(name: str) -> Callable[..., None]:
            def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                seen[name] = _first(output).clone()

            return note

        entry = layer.get_submodule(case.norm) if case.norm else start
        hooks = [
            entry.register_forward_pre_hook(before("x"), with_kwargs=True),
            start.register_forward_pre_hook(before("ffn_input"), with_kwargs=True),
            end.register_forward_hook(after("ffn_output")),
            layer.register_forward_hook(after("out")),
        ]
        if case.attention:
            hooks.append(layer.get_submodule(case.attention).register_forward_hook(after("attention")))
        model = self._wide if dtype == "fp64" else self.model
        given = case.inputs(torch.Generator().manual_seed(7))
        try:
            with torch.no_grad():
                model(**{k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in given.items()})
        finally:
            for hook in hooks:
                hook.remove()
        shape = seen["out"].shape  # some layers flatten tokens for their FFN
        return Capture(**{"attention": None, **{name: tensor.reshape(shape) for name, tensor in seen.items()}})


def make(name: str, path: Path) -> Made:
    """Build the model of a case, randomise its parameters, and save it in `path`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    case = CASES[name]
    config = getattr(transformers, case.config)(
        **({} if "text_config" in case.values else {"vocab_size": VOCAB}), **case.values,
        attn_implementation="eager", experts_implementation="eager",  # the fused experts refuse float64
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(config).eval()
    _randomise(model, torch.Generator().manual_seed(1))
    model.save_pretrained(path)
    return Made(case, path, model)


def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Set random values everywhere; routers get multiples of 1/64, so that logits are exact in float32, too."""
    correction = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *correction.items()):
            tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator))
            if "norm" in name or ".ln_" in name:
                tensor.add_(0.8)
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                tensor.mul_(64).round_().div_(64)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
