"""Cases of decoders: how each is built tiny, and which parameters are its FFN's."""

from __future__ import annotations

from collections.abc import Mapping

from tests.oracles.architectures import Architecture

_NONE = r"(?!)"  # a norm without parameters, or one that the attention reads too
_GPT = Architecture(ffn=r"transformer\.h\.\d+\.mlp\..*", norm=r"transformer\.h\.\d+\.ln_2\..*")
_PARALLEL = Architecture(ffn=r"transformer\.h\.\d+\.mlp\..*", norm=_NONE)
_FAIRSEQ = Architecture(ffn=r".*\.layers\.\d+\.fc[12]\..*", norm=r".*\.layers\.\d+\.final_layer_norm\..*")
_LLAMA_PARALLEL = Architecture(norm=_NONE)
_POST = Architecture(norm=r".*\.layers\.\d+\.post_feedforward_layernorm\.weight")
_BOTH = Architecture(norm=r".*\.layers\.\d+\.(pre|post)_feedforward_layernorm\.weight")
_XLM = Architecture(ffn=r"transformer\.ffns\.\d+\..*", norm=r"transformer\.layer_norm2\.\d+\..*")

CASES: Mapping[str, Architecture] = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "openai-gpt"), _GPT),
    "gpt_neo": Architecture(_GPT.ffn, _GPT.norm, {"attention_types": [[["global", "local"], 2]]}),
    **dict.fromkeys(("codegen", "gptj"), _PARALLEL),
    **dict.fromkeys(("biogpt", "xglm", "opt", "trocr"), _FAIRSEQ),
    "bloom": Architecture(_GPT.ffn, r"transformer\.h\.\d+\.post_attention_layernorm\..*"),
    "falcon": Architecture(_PARALLEL.ffn, _NONE, drop=("head_dim",)),
    "ctrl": Architecture(r"transformer\.h\.\d+\.ffn\..*", r"transformer\.h\.\d+\.layernorm2\..*"),
    "mpt": Architecture(r"transformer\.blocks\.\d+\.ffn\..*", r"transformer\.blocks\.\d+\.norm_2\..*"),
    "phi": _LLAMA_PARALLEL,
    **dict.fromkeys(("cohere", "cohere2"), _LLAMA_PARALLEL),
    "cpmant": Architecture(
        r"cpmant\.encoder\.layers\.\d+\.ffn\.ffn\..*", r"cpmant\.encoder\.layers\.\d+\.ffn\.layernorm_before_ffn\..*"
    ),
    # xielu also stores its two constants, beta and eps.
    "apertus": Architecture(
        r"model\.layers\.\d+\.mlp\.(up_proj\.weight|down_proj\.weight|act_fn\.alpha_[pn])",
        r"model\.layers\.\d+\.feedforward_layernorm\.weight",
    ),
    "bitnet": Architecture(
        r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj\.weight",
        r"model\.layers\.\d+\.(mlp\.ffn_sub_norm|post_attention_layernorm)\.weight",
    ),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _POST),
    "glm4": Architecture(norm=r"model\.layers\.\d+\.(post_attention|post_mlp)_layernorm\.weight"),
    "hyperclovax": Architecture(norm=r"model\.layers\.\d+\.(post_attention_layernorm|post_norm2)\.weight"),
    **dict.fromkeys(("gemma2", "gemma3_text"), _BOTH),
    "vaultgemma": Architecture(norm=r"model\.layers\.\d+\.pre_feedforward_layernorm\.weight"),
    "gemma3n_text": Architecture(
        norm=_BOTH.norm,
        values={"intermediate_size": [40, 40, 48, 48], "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64},
    ),
    "gemma4_text": Architecture(
        norm=_BOTH.norm, values={"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64}
    ),
    # The last two layers reuse the keys and values of earlier ones and are twice as wide.
    "gemma4_unified_text": Architecture(
        norm=_BOTH.norm,
        values={
            "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4_assistant": Architecture(
        reason="transformers 5.23 cannot build it: kv_sharing_modes refuses a model all of whose layers reuse them"
    ),
    # Real ones reuse keys and values in every layer, which transformers 5.23 cannot build; its FFNs do not mind.
    "gemma4_unified_assistant": Architecture(
        r"model\.layers\.\d+\.mlp\..*", _BOTH.norm,
        {"text_config": {
            "model_type": "gemma4_unified_text", "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }},
    ),
    "molmo2_text": Architecture(r"layers\.\d+\.mlp\..*", r"layers\.\d+\.post_attention_layernorm\.weight"),
    "hrm_text": Architecture(r"model\.[LH]_module\.layers\.\d+\.mlp\..*", _NONE),
    "cohere_compass_text": Architecture(
        norm=_NONE, values={"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}}
    ),
    "xlnet": Architecture(
        r"transformer\.layer\.\d+\.ff\.layer_[12]\..*", r"transformer\.layer\.\d+\.ff\.layer_norm\..*",
        drop=("max_position_embeddings",),
    ),
    "reformer": Architecture(
        r"reformer\.encoder\.layers\.\d+\.feed_forward\.(dense|output)\.dense\..*",
        r"reformer\.encoder\.layers\.\d+\.feed_forward\.layer_norm\..*",
        {"is_decoder": True, "axial_pos_embds_dim": [8, 8]},
    ),
    "xlm": _XLM,
    "flaubert": _XLM,
}  # fmt: skip
