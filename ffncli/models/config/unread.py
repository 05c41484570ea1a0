"""Detect config fields that may affect the FFN's size or arithmetic, but that no row has read.

Configs grow: if a new release adds `routed_expert_hidden_size` to a known model_type, a count that ignores it is wrong
by a factor of two. So each config field whose name suggests a size or arithmetic (`_CONCERNS`) must meet one of these
conditions: the family's row has read it; it is known to concern something else (`_ELSEWHERE`, `HARMLESS`, each with a
reason); it is known to matter, but not for the block (`NOTED`); or it is off (null, 0, empty, and false for most
flags). Any other field is unknown: in the text model's config, it raises an error that names it; elsewhere in the
config, it causes a note.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ffncli.errors import FFNError, clean, shown
from ffncli.models.config.attention import MEMORIES
from ffncli.models.files.strict_json import Fields

_MOST_NAMED = 3  # maximum number of fields in one message

_CONCERNS = re.compile(
    r"expert|moe|latent|hidden_(size|dim|act)|intermediate|n_?gram|limit|clamp|clip|soft_?cap|mlp|ffn|ffw|feed_?forward"
    r"|rout(e|ing)|shared|top_?k|d_ff|dff|dim_ff|inner|glu|swish|act(ivation)?(_|$)|gat(e|ing)|dense|sparse|altup"
    r"|^(num_hidden_layers|n_layers?|num_layers|num_blocks|d_model|n_embd|n_embed|dim|embed_dim)$"
    r"|laurel|scor(e|ing)|renorm|scaling_factor|capacity|multiplier|expan|mlp_ratio|per_layer|hash|residual_(scale|mult)",
    re.IGNORECASE,
)

# Maps names that concern something other than the FFN, in every family, to what they concern.
_ELSEWHERE: Mapping[str, str] = {
    r".*loss(_.*)?|(.*_)?aux(_.*)?": "a loss in training",
    r".*(jitter|drop(out)?|layerdrop|noise|regulari[sz]ation|balanc(e|ing))(_.*)?": "training alone",
    r".*bias_update_(rate|speed|factor)|.*z_loss.*": "training alone",
    r".*(grouped_gemm|dispatcher|permute_fusion|megablocks|implementation|_impl|kernel|backend|recompute)(_.*)?": "how"
    " it is computed",
    r"(attention|attn|key|query|value|qkv?|kv|index|kda|linear|position|rope|rotary|sliding|cross)_.*": "attention",
    r".*_(attention|attn|attention_heads|rotary|key_value_heads|kv_heads)(_.*)?": "attention",
    r"use_(attention|qk)_.*|head_.*|num_hash(es)?|use_fast_hash|hash_code_len|clamp_len": "attention",
    r".*sliding_window.*|.*kv_shared.*|blocksparse_.*": "attention",
    r"(mamba|ssm|conv|lin|rg_?lru|lru|time_step|dt|state)_.*|expand|hidden_mamba_act": "a state-space layer",
    r"(embedding|embed|vocab|logits?|lm_head|summary|classifier|pooler|projection|final|sparse_pred)_.*|pooler_act"
    r"|(?!.*rout).*_logit_soft_?cap.*": "embeddings, the head, the pooler",
    r"ngram_size|heads_per_ngram|make_ngram_.*|split_ngram_parts|.*hash_byte_group_(size|nb_.*)": "attention.py",
    r"expert_capacity_.*|.*capacity_(token_fraction|factor)|.*token_dropping": "the maximum number of tokens"
    " per expert, see NOTED",
    r"(hidden_)?act(ivation)?(_fn|_function)?": "if the code uses another activation, the evidence names it",
    r".*no_repeat_ngram_size|top_k|output_router_logits|output_hidden_states": "generation and outputs",
    r"(speech|vision|audio|image|video|mm|t2u|vocoder|acoustic|projector)_.*|encoder_hidden_size": "another tower",
    r"mtp_.*|.*nextn.*": "layers that predict more than one token",
    r"initializer_.*|rescale_.*|mup_.*init.*|.*_init(_.*)?|.*_parallel(_.*)?|ep_size|pretraining_.*": "training alone",
}
_ANYWHERE = re.compile("|".join(f"(?:{name})" for name in _ELSEWHERE))

# Maps each family to its fields (patterns), and a field to why it does not affect what ffn counts or computes.
HARMLESS: Mapping[str, Mapping[str, str]] = {
    "bert": {"xpath_unit_hidden_size": "embeddings of a page element's path"},
    "blt_patcher": {"hidden_size_global": "each part has its own widths"},
    "canine": {"num_hash_(buckets|functions)": "hashed embeddings of characters"},
    "csm": {r"depth_decoder_config\.backbone_hidden_size": "the input width of its projection"},
    "csm_depth_decoder_model": {"backbone_hidden_size": "the input width of its projection"},
    "decision_transformer": {"act_dim": "the actions that it embeds"},
    "gradium_phonon_tts": {"latent_.*": "the head that generates sound"},
    "pocket_tts": {"latent_.*": "the head that generates sound"},
    "qwen3_omni_moe_talker_text": dict.fromkeys(
        ("decoder_sparse_step", "mlp_only_layers", "intermediate_size"), "every layer has experts"
    ),
    "speecht5": {"(num_)?feat_extract_.*": "the convolutions before its speech encoder"},
    "blt": {
        r".*_config\.hidden_size_global": "each part has its own widths",
        r"patcher_config\..*": "read only if patch_in_forward is true",
    },
    "bailing_hybrid": {"kda_safe_gate": "a gate of its attention"},
    "cohere2_moe": {"norm_topk_prob": "a softmax over the chosen experts is already normalised"},
    "dbrx": {r"ffn_config\.hidden_size": "same as d_model"},
    "doge": {"num_experts(_per_tok)?|norm_topk_prob": "read only if is_moe is true, which its adjust refuses"},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"),
        dict.fromkeys(("n_group", "topk_group"), "read only if topk_method chooses among groups"),
    ),
    "ernie4_5_moe": {
        "moe_capacity": "a limit for training; no token is dropped at inference", "moe_gate": "its one kind of router",
        "moe_use_aux_free": "the correction, which every model of this family has",
    },
    "ernie4_5_vl_moe_text": {"moe_norm_min": "the minimum, 1e-12, of the sum that scores are divided by"},
    "evolla": {"resampler_.*": "the resampler that condenses the protein"},
    "gemma3n_text": {r"(altup|laurel)_.*": "its residual streams, which the block does not touch"},
    "gemma4_text": {"num_experts|top_k_experts|moe_intermediate_size": "read only if enable_moe_block is true"},
    "hrm_text": {"num_hidden_layers": "how often both stacks run; num_layers_per_stack counts the stored layers"},
    "gpt_oss": {"experts_per_token": "same as num_experts_per_tok; its checkpoints have both"},
    "hy_v3": {"enable_moe_fp32_combine": "the number format in which experts are summed"},
    "inkling_text": {"rms_norm_eps_moe_gate": "no code reads it"},
    "inkling2_text": {
        "rel_l2_clip_threshold": "a limit in its attention", "hidden_act": "it always runs the soft-capped unit",
    },
    "laguna": {"gating": "a gate of its attention"},
    "lxmert": {r"num_hidden_layers(\..*)?": "same as l_layers, x_layers and r_layers"},
    "minimax_m3_vl_text": {"n_shared_experts": "shared_intermediate_size is the width of all shared experts together"},
    "minimax": dict.fromkeys(("mlp_alpha_factor", "mlp_beta_factor"), "the residual connection around the block"),
    "hunyuan_v1_moe": {
        "moe_intermediate_size": "its experts are intermediate_size wide in any case", "dense_list": "its classifier",
    },
    "lfm2": {"block_.*": "read only if block_auto_adjust_ff_dim is true"},
    "minicpm3": {
        "n_routed_experts|n_shared_experts|num_experts_per_tok|moe_(intermediate_size|layer_freq)|n_group|topk_(group|method)"
        "|norm_topk_prob|first_k_dense_replace|routed_scaling_factor": "its code has no experts",
    },
    "minicpm": {"sparse_config": "its attention"},
    "mobilebert": {"hidden_size": "the width between its blocks if use_bottleneck is true"},
    "muse_glimmer_text": {"output_multiplier": "the logits of its head"},
    "muse_spark_text": {"residual_gate_temperature": "the residual connection around the block"},
    "nemotron_h": {
        "n_shared_experts": "moe_shared_expert_intermediate_size is the width of all shared experts together",
        "moe_shared_expert_overlap": "when they run",
    },
    "perceiver": {"num_latents": "the number of vectors with which it attends"},
    "prophetnet": {"ngram": "the number of tokens that it predicts"},
    "phi3small": {"mup_.*": "its embeddings, attention and head"},
    "plamo": {"n_shared_head": "its attention"},
    "qwen3_5_text": {"output_gate_type": "a gate of its attention"},
    "grok-1": {"output_multiplier_scale": "the logits of its head", "embedding_multiplier_scale": "its embeddings"},
    "starcoder2": {"mlp_type": "its one kind of MLP"},
    "xlstm": {"gate_soft_cap": "a gate of its cells"},
}  # fmt: skip
# Maps each field to its effect outside the blocks.
NOTED: Mapping[str, str] = {"expert_capacity": "experts drop tokens beyond this capacity, which is not modelled"}
_ARITHMETIC = re.compile(
    r"limit|clamp|clip|soft_?cap|scor(e|ing)_|renorm|norm_topk|scaling_factor|multiplier|residual_(scale|mult)|latent|_norm$"
)
# Maps spellings that rows share to the families whose code reads them. Other families' code ignores the spelling and
# uses its default.
_LAYERS: Mapping[str, str] = {
    "n_layer": "codegen codeshell ctrl jais btlm telechat telechat2 decision_transformer gpt2 gpt_bigcode "
    "imagegpt openai-gpt phi-msft mixformer-sequential xlnet RefinedWeb RefinedWebModel bloom",
    "n_layers": "dbrx hf_olmo llada distilbert flaubert mpt xlm",
    "num_layers": "chatglm exaone gpt_neo longcat_flash pix2struct_text_model pop2piano switch_transformers t5 xglm",
}
_EXPERTS: Mapping[str, str] = {
    "num_experts": "afmoe bailing_hybrid beam cohere2_moe deepseek_ocr2_text deepseek_v2 deepseek_v32 ernie4_5_moe "
    "exaone_moe flex_olmo flint glm_moe_dsa gpt_oss hunyuan_v1_moe hy_v3 jamba kimi_linear kolibri1 laguna lfm2_moe "
    "mellum minimax minimax_m2 minimax_m3_vl_text mistral_large4_text mixtral nllb-moe olmoe "
    "qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text switch_transformers "
    "unlimited_ocr_text",
    "n_routed_experts": "axk1 deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32 dots1 dots3_note_text "
    "glm4_moe glm4_moe_lite glm5_next_text glm_moe_dsa hy_v4 mimo_v2_flash mistral4 mistral_large4_text nemotron_h "
    "solar_open unlimited_ocr_text",
    "num_local_experts": "axk1 bailing_hybrid deepseek_v3 deepseek_v32 dots1 dots3_note_text flex_olmo glm4_moe "
    "glm4_moe_lite glm5_next_text glm_moe_dsa gpt_oss granitemoe granitemoehybrid granitemoeshared granitemoe_swa "
    "hunyuan_v1_moe hy_v3 hy_v4 jamba kimi_linear kolibri1 llama4_text mellum mimo_v2_flash minimax minimax_m2 "
    "minimax_m3_vl_text mistral4 mistral_large4_text mixtral nemotron_h olmoe qwen3_moe qwen3_vl_moe_text solar_open",
    "moe_num_experts": "aria_text ernie4_5_moe",
}
# Flags for which false does not mean that something is absent, but selects different arithmetic.
_FALSE_MATTERS = re.compile(
    r"norm_topk_prob|moe_renormalize|route_norm|norm_expert_weight|use_(moe_router|routing)_bias|use_grouped_topk"
    r"|use_moe|need_fp32_gate"
)
# Steps between layers with experts: 1 says that every layer has them, as the row says of its family.
_EVERY = re.compile(r"(moe|expert)_(layer_)?(freq(uency)?|interval|step|every)")
# Unknown fields that change what a block computes, but not how many parameters it has.
_COUNTED = re.compile(
    r"limit|clamp|clip|soft_?cap|scor(e|ing)_|renorm|norm_topk|scaling_factor|multiplier|residual_(scale|mult)|temperature"
)
_BY_LAYER = "per_layer_config"  # an object with fields for each layer


class UnknownField(FFNError):
    """The error for config fields that the family's row does not know; `fields` describes them."""

    def __init__(self, where: str, family: str, fields: str) -> None:
        super().__init__(
            f"{where}: {fields}: unknown for model_type {family}, but it may change the FFN",
            "give the model's tensors (a directory or .safetensors file), which are counted without it",
        )
        self.fields = fields


def unread(config: Fields, family: str = "") -> dict[str, Any]:
    """Return the fields (with values) that are on, were not read, are not known to be harmless, and have names that
    suggest a size or arithmetic.

    Call it after all other fields have been read. It also searches nested objects from which at least one field was
    read.
    """
    harmless = re.compile("|".join(HARMLESS.get(family, ["(?!)"])))
    fields = ((path.removeprefix(config.prefix), value) for path, value in _fields(config))
    return {
        name: value
        for name, value in fields
        if (_is_on(value) or (value is False and _FALSE_MATTERS.fullmatch(name.rpartition(".")[2])))
        and not (value == 1 and _EVERY.fullmatch(name.rpartition(".")[2]))
        and not (harmless.fullmatch(name) or any(map(_ANYWHERE.fullmatch, name.split("."))))
    }


def require_read(config: Fields, family: str) -> tuple[str, ...]:
    """Return notes on fields of a text model that matter, but not for its blocks. Unknown fields that change no number
    of parameters become a reason not to run it.

    Raises UnknownField for other fields that the family's row does not know.
    """
    left = {name: value for name, value in unread(config, family).items() if name not in MEMORIES}
    kind = clean(str(config.values.get("model_type", family)))
    counted = {
        n: v for n, v in left.items() if n not in NOTED and _COUNTED.search(n) and isinstance(v, float | int | str)
    }
    for name, value in counted.items():
        config.not_run[f"{in_words({name: value})}: unknown for model_type {kind}"] = None
        del left[name]
    if fields := in_words({name: value for name, value in left.items() if name not in NOTED}):
        raise UnknownField(config.where, kind, fields)
    return (*_respelled(config, family), *(f"{in_words({name: value})}: {NOTED[name]}" for name, value in left.items()))


def _respelled(config: Fields, family: str) -> Iterator[str]:
    """Yield notes on layer and expert counts that were read under a name that the family's code does not read."""
    kind = config.values.get("model_type")
    for table, usual in ((_LAYERS, ["num_hidden_layers"]), (_EXPERTS, [])):
        known = [name for name, families in table.items() if {family, kind} & {*families.split()}] or usual
        read = {name: config.values.get(name) for name in table if config.prefix + name in config.looked_up}
        given = {name: value for name, value in read.items() if value is not None}
        if known and given and all(config.values.get(name) is None for name in (*usual, *known)):
            yield f"{in_words(given)}: {family}'s code ignores this and uses the default for {' or '.join(known)}"


def outside_note(whole: Fields, text: Fields) -> str:
    """Return a note on fields outside a multimodal config's text model with values that it lacks; may be empty."""
    left = {name: value for name, value in unread(whole).items() if text.values.get(name) != value}
    known = (*NOTED, *MEMORIES)
    left = {name: value for name, value in left.items() if name not in known and not isinstance(value, Mapping)}
    return f"outside the text model, so not read: {in_words(left)}" if left else ""


def unread_arithmetic(config: Fields) -> str:
    """Describe the arithmetic fields of an unknown model_type, as its tensors do not show the arithmetic."""
    return in_words({name: value for name, value in unread(config).items() if _ARITHMETIC.search(name)})


def in_words(left: Mapping[str, Any]) -> str:
    """Return fields as text: `routed_expert_hidden_size = 3584, moe_latent_size = 64 and 2 more`; empty if none."""
    named = ", ".join(f"{clean(name)} = {shown(value)}" for name, value in list(left.items())[:_MOST_NAMED])
    more = len(left) - _MOST_NAMED
    return named + (f" and {more} more" if more > 0 else "")


def _fields(config: Fields, values: Mapping[str, Any] | None = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for every field that was not read and whose name is in `_CONCERNS`."""
    prefix = prefix or config.prefix
    for name, value in (config.values if values is None else values).items():
        path = f"{prefix}{name}"
        # [-2:][0] is the enclosing object's name, as prefixes end with a dot; at the top level it is empty
        read_from = any(other.startswith(f"{path}.") for other in config.looked_up)
        if isinstance(value, Mapping) and (read_from or _BY_LAYER in (name, prefix.split(".")[-2:][0])):
            yield from _fields(config, value, f"{path}.")
        elif path not in config.looked_up and _CONCERNS.search(name):
            yield path, value


def _is_on(value: object) -> bool:
    """Return whether a value means that something is present: not null, false, 0 or empty."""
    return not (value is None or value is False or value == 0 or (isinstance(value, str | list | dict) and not value))
