"""Second FFNs in a text model's layers, for tokens that are not text: sound, learned queries, images, a page's layout.

No text token goes through them, so they are in no count of the text's FFNs; a config shows how large they are. Facts:
transformers 5.23, the families' `modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, steps
from ffncli.models.files.fields import Fields
from ffncli.models.model import Group, NotCounted

_WHY = "no text token goes through them"


def other_tokens(config: Fields, family: str, groups: Sequence[Group]) -> tuple[NotCounted, ...]:
    """The second FFNs of a model, with the norms that only they use."""
    if family not in FFNS:
        return ()
    whose, parameters = FFNS[family]
    return (NotCounted(f"FFNs of {whose}", _WHY, parameters(config, groups)),)


def _size(spec: FFNSpec) -> int:
    one = cost(steps(spec))
    return one.params + one.norm_params


def _the_same(config: Fields, groups: Sequence[Group]) -> int:
    """As many FFNs as the text has, and as large."""
    return sum(_size(group.spec) * len(group.layers) for group in groups)


def _layout(config: Fields, groups: Sequence[Group]) -> int:
    """The text's FFNs with both widths divided by `channel_shrink_ratio`."""
    by: int = config.integer("channel_shrink_ratio", 4)
    narrow = [(replace(g.spec, d_model=g.spec.d_model // by, d_ff=g.spec.d_ff // by), len(g.layers)) for g in groups]
    return sum(_size(spec) * layers for spec, layers in narrow)


def _image_experts(config: Fields, groups: Sequence[Group]) -> int:
    """As many experts as text tokens choose from, of the second width, with a router of their own."""
    width = (config.integers("moe_intermediate_size") if config.get("moe_intermediate_size", None) else (1536, 512))[-1]
    sparse = [(g.spec, g.spec.moe, len(g.layers)) for g in groups]
    alone = [(replace(moe, shared_experts=0), spec, layers) for spec, moe, layers in sparse if moe]
    return sum(_size(replace(spec, d_ff=width, norm="none", moe=moe)) * layers for moe, spec, layers in alone)


def _images(config: Fields, groups: Sequence[Group]) -> int:
    """One in each layer of images alone, one in each that has both streams."""
    layers: int = config.integer("r_layers") + config.integer("x_layers")
    return _size(groups[0].spec) * layers


def _aligners(config: Fields, groups: Sequence[Group]) -> int:
    """Plain FFNs without biases after a LayerNorm, in every so-manyth layer."""
    depth: int = config.integer("num_hidden_layers")
    every: int = max(depth // config.integer("aligner_num_add_layers", 8), 1)
    d_model = groups[0].spec.d_model
    d_ff: int = config.integer("aligner_ffn_mult", 4) * d_model
    return depth // every * (2 * d_model * d_ff + 2 * d_model)


# Family → whose second FFNs it has, and their parameters.
FFNS: Mapping[str, tuple[str, Callable[[Fields, Sequence[Group]], int]]] = {
    "ernie4_5_vl_moe_text": ("image tokens", _image_experts),
    "evolla": ("its aligners with a protein", _aligners),
    "higgs_audio_v2": ("audio tokens", _the_same),
    "instructblip_qformer": ("its learned queries", _the_same),
    "lilt": ("the page's layout", _layout),
    "lxmert": ("its image stream", _images),
}
