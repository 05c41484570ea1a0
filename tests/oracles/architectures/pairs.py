"""Cases of pairs: how each is built tiny, and which parameters are its FFN's."""

from __future__ import annotations

from collections.abc import Mapping

from tests.oracles.architectures import Architecture

_BART_FFN = r".*\.(encoder|decoder)\.layers\.\d+\.fc[12]\..*"
_BART_NORM = r".*\.(encoder|decoder)\.layers\.\d+\.final_layer_norm\..*"
_T5_NORM = r"(encoder\.block\.\d+\.layer\.1|decoder\.block\.\d+\.layer\.2)\.layer_norm\.weight"
_T5 = Architecture(ffn=r".*\.layer\.\d+\.DenseReluDense\..*", norm=_T5_NORM)
_SEAMLESS = Architecture(
    ffn=r"text_(encoder|decoder)\.layers\.\d+\.ffn\..*", norm=r"text_(encoder|decoder)\.layers\.\d+\.ffn_layer_norm\..*"
)
_GEMMA_NORM = r"\.layers\.\d+\.(pre|post)_feedforward_layernorm\..*"
# By default these would be built as their decoder alone.
_WHOLE = {
    "bart": "Bart", "bigbird_pegasus": "BigBirdPegasus", "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall", "marian": "Marian", "mbart": "MBart", "mvp": "Mvp", "pegasus": "Pegasus",
    "plbart": "PLBart", "whisper": "Whisper",
}  # fmt: skip

CASES: Mapping[str, Architecture] = {
    **{
        name: Architecture(
            ffn=_BART_FFN,
            norm=_BART_NORM,
            model=f"{prefix}MTModel" if name == "marian" else f"{prefix}ForConditionalGeneration",
        )
        for name, prefix in _WHOLE.items()
    },
    **dict.fromkeys(("fsmt", "led", "m2m_100", "pegasus_x"), Architecture(ffn=_BART_FFN, norm=_BART_NORM)),
    "prophetnet": Architecture(
        ffn=r".*coder\.layers\.\d+\.feed_forward\..*", norm=r".*coder\.layers\.\d+\.feed_forward_layer_norm\..*",
        model="ProphetNetForConditionalGeneration", drop=("num_hidden_layers",),
        values={"num_encoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    ),
    "funnel": Architecture(
        ffn=r".*\.ffn\.linear_[12]\..*", norm=r".*\.ffn\.layer_norm\..*", drop=("num_hidden_layers",),
        values={"block_sizes": [1, 2], "block_repeats": [2, 1]},
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
    "switch_transformers": Architecture(
        ffn=r".*\.layer\.\d+\.mlp\..*", norm=_T5_NORM,
        values={"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "router_bias": True},
    ),
    "nllb-moe": Architecture(
        ffn=r".*\.layers\.\d+\.ffn\..*", norm=r".*\.layers\.\d+\.ff_layer_norm\..*",
        values={"encoder_sparse_step": 2, "decoder_sparse_step": 3},
    ),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), _SEAMLESS),  # the speech encoder and the vocoder are no text
    "t5gemma": Architecture(
        ffn=r".*\.(encoder|decoder)\.layers\.\d+\.mlp\..*", norm=rf".*\.(encoder|decoder){_GEMMA_NORM}",
        values={"decoder": {"num_hidden_layers": 3, "intermediate_size": 24}},
    ),
    "t5gemma2": Architecture(
        ffn=r".*\.(encoder\.text_model|decoder)\.layers\.\d+\.mlp\..*",
        norm=rf".*\.(encoder\.text_model|decoder){_GEMMA_NORM}",
        values={
            # A vision tower whose width is a ratio: no d_ff of the text changes it.
            "encoder": {"vision_config": {"model_type": "dinov2", "image_size": 28, "patch_size": 14},
                        "mm_tokens_per_image": 4},
            "decoder": {"num_hidden_layers": 3, "intermediate_size": 24},
        },
    ),
    "encoder-decoder": Architecture(
        ffn=r".*\.layer\.\d+\.(intermediate|output)\.dense\.(weight|bias)",
        norm=r".*\.layer\.\d+\.output\.LayerNorm\..*",
        values={
            "encoder": {"model_type": "bert"},
            "decoder": {"model_type": "bert-generation", "is_decoder": True, "add_cross_attention": True,
                        "num_hidden_layers": 3, "intermediate_size": 24},
        },
    ),
}  # fmt: skip
