"""Cases of hybrids: how each is built tiny, and which parameters are its FFN's."""

from __future__ import annotations

from collections.abc import Mapping

from tests.oracles.architectures import Architecture

_NO_FFN = Architecture(reason="no FFN: its layers are sequence mixers alone")
_FEED_FORWARD = Architecture(r"model\.layers\.\d+\.feed_forward\..*", r"model\.layers\.\d+\.pre_ff_layernorm\.weight")
_LFM = Architecture(r"model\.layers\.\d+\.feed_forward\..*", r"model\.layers\.\d+\.ffn_norm\.weight")
_KINDS = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]

CASES: Mapping[str, Architecture] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _NO_FFN),
    **dict.fromkeys(("bamba", "jamba"), _FEED_FORWARD),
    "falcon_h1": Architecture(
        _FEED_FORWARD.ffn, _FEED_FORWARD.norm, {"mamba_d_ssm": 32, "mlp_multipliers": [0.5, 0.25]}
    ),
    "granitemoehybrid": Architecture(
        r"model\.layers\.\d+\.(block_sparse_moe|shared_mlp)\..*", values={"residual_multiplier": 0.22}
    ),
    # intermediate_size here is not d_ff: 600 makes 512, and twice as much 1024.
    "lfm2": Architecture(
        _LFM.ffn, _LFM.norm,
        {"intermediate_size": 600, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "lfm2_moe": Architecture(
        _LFM.ffn, _LFM.norm, {"layer_types": ["conv", "full_attention"] * 2, "routed_scaling_factor": 2.5}
    ),
    "lfm3": Architecture(_LFM.ffn, r"model\.layers\.\d+\.(ffn_norm|post_ffn_norm)\.weight"),
    # Only layers 1, 3 and 5 have an FFN; every layer has one norm.
    "nemotron_h": Architecture(
        r"model\.layers\.\d+\.mixer\.((up|down)_proj|experts|shared_experts|gate|fc[12]_latent_proj)\b.*",
        r"model\.layers\.(1|3|5)\.norm\.weight",
        {"layers_block_type": _KINDS, "moe_latent_size": 10, "routed_scaling_factor": 2.5},
    ),
    # Layer 3 has attention, and its norm after the FFN; in the others it stands before it.
    "olmo_hybrid": Architecture(
        norm=r"model\.layers\.([012]\.post_attention_layernorm|3\.post_feedforward_layernorm)\.weight"
    ),
    "recurrent_gemma": Architecture(
        r"model\.layers\.\d+\.mlp_block\..*", r"model\.layers\.\d+\.channel_pre_norm\.weight"
    ),
    "xlstm": Architecture(
        r"backbone\.blocks\.\d+\.ffn\..*", r"backbone\.blocks\.\d+\.norm_ffn\..*", drop=("v_head_dim", "chunk_size")
    ),
    "rwkv": Architecture(
        reason="its channel mix also reads the previous token (a time shift), which the block language cannot express"
    ),
    # The two hybrid layers share one block; named_parameters gives a tied one once.
    "zamba": Architecture(
        r"model\.layers\.\d+\.shared_transf\.feed_forward\..*",
        r"model\.layers\.\d+\.shared_transf\.pre_ff_layernorm\.weight",
        {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    ),
    "zamba2": Architecture(
        reason="each use of its shared FFN adds an adapter of its own to the shared weights"
    ),
}  # fmt: skip
