"""Cases of encoders: how each is built tiny, and which parameters are its FFN's."""

from __future__ import annotations

from collections.abc import Mapping

from tests.oracles.architectures import Architecture

_NONE = r"(?!)"  # matches no name
_BERT_FFN = r".*\.layer\.\d+\.(intermediate|output)\.dense\.(weight|bias)"
_BERT = Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.output\.LayerNorm\..*")
_POST_MLP = Architecture(norm=r".*\.layers\.\d+\.post_mlp_layernorm\..*")
_CLIP = Architecture(norm=r".*\.layers\.\d+\.layer_norm2\..*")
_MODERNBERT = Architecture(norm=r".*\.layers\.\d+\.mlp_norm\..*")

CASES: Mapping[str, Architecture] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2",
            "electra", "ernie", "fnet", "layoutlm", "longformer", "mpnet", "mra", "nystromformer", "rembert",
            "roberta", "roc_bert", "roformer", "tapas", "xlm-roberta", "yoso",
        ),
        _BERT,
    ),
    "ibert": Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.output\.LayerNorm\.(weight|bias)"),  # not its scales
    "luke": Architecture(
        ffn=_BERT.ffn, norm=_BERT.norm, values={"entity_vocab_size": 64, "entity_emb_size": 16}
    ),
    "roberta-prelayernorm": Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.intermediate\.LayerNorm\..*"),
    "megatron-bert": Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.ln\..*"),
    **dict.fromkeys(
        ("esm", "xlm-roberta-xl"), Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.LayerNorm\..*")
    ),
    "xmod": Architecture(ffn=_BERT_FFN, norm=_NONE),  # output.LayerNorm also serves the adapters
    "distilbert": Architecture(
        ffn=r".*\.layer\.\d+\.ffn\.lin[12]\..*", norm=r".*\.layer\.\d+\.output_layer_norm\..*"
    ),
    "albert": Architecture(
        ffn=r".*\.albert_layers\.\d+\.(ffn|ffn_output)\..*", norm=r".*\.full_layer_layer_norm\..*",
        values={"num_hidden_groups": 3, "inner_group_num": 2},
    ),
    "mobilebert": Architecture(  # its "norms" are an elementwise scale and shift
        ffn=r".*\.layer\.\d+(\.ffn\.\d+)?\.(intermediate|output)\.dense\..*", norm=_NONE,
        values={"embedding_size": 16, "intra_bottleneck_size": 8, "num_feedforward_networks": 3, "vocab_size": 64},
    ),
    "squeezebert": Architecture(reason="its FFN's two projections are grouped, which Linear cannot say"),
    **dict.fromkeys(("gte", "nomic_bert", "jina_embeddings_v3"), _POST_MLP),
    **dict.fromkeys(("clip_text_model", "tipsv2_text_model"), Architecture(
        ffn=r"encoder\.layers\.\d+\.mlp\..*", norm=r"encoder\.layers\.\d+\.layer_norm2\..*")),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _MODERNBERT),
    "esmc": Architecture(values={"num_key_value_heads": 4}),
    "neomme": Architecture(norm=_NONE, values={"head_dim": 16}),
    "perceiver": Architecture(
        ffn=r".*\.mlp\.dense[12]\..*",
        norm=r".*\.(cross_attention|self_attends\.\d+|decoding_cross_attention)\.layernorm\..*",
        values={
            "d_latents": 16, "d_model": 24, "num_latents": 4, "num_self_attends_per_block": 3, "num_blocks": 2,
            "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "self_attention_widening_factor": 2,
            "cross_attention_widening_factor": 3,
        },
    ),
}  # fmt: skip
