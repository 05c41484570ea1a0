"""Which block ran, as a page describes it: names, sizes, where its weights come from, in which mode."""

from __future__ import annotations

import re

from ffncli.block.steps import Dropout, Linear, walk
from ffncli.dataclass import dataclass
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.weights import RANDOM


@dataclass(frozen=True)
class BlockSummary:
    """The key `block` of docs/json.md. For a final layer alone `d_ff`, `activation`, `gated` and `norm` are None."""

    name: str
    source: str
    layer: int | None
    stack: str | None
    d_model: int
    d_ff: int | None
    activation: str | None
    gated: bool | None
    bias: bool
    vocab: int | None
    weights: str
    mode: str
    mask: str | None
    device: str
    evidence: tuple[str, ...]
    random_weights: bool
    norm: str | None
    experts: int
    top_k: int
    shared_experts: int


def block_summary(resolved: Resolved, ready: Prepared, device: str) -> BlockSummary:
    """The summary of a layer that is ready to run on a device."""
    spec = ready.layer.spec
    alone, moe = ready.steps[0].output == "logits", spec.moe  # alone: a final layer without any block
    return BlockSummary(
        name=resolved.model.name
        if resolved.model.bare
        else f"{resolved.model.name}, {ready.layer.stack} layer {ready.layer.index}",
        source=resolved.source,
        layer=None if resolved.model.bare else ready.layer.index,
        stack=None if resolved.model.bare else ready.layer.stack,
        d_model=spec.d_model,
        d_ff=None if alone else spec.d_ff,
        activation=None if alone else spec.activation,
        gated=None if alone else spec.gated,
        bias=bool(spec.bias),
        vocab=next((s.op.out.size for s in ready.steps if s.output == "logits" and isinstance(s.op, Linear)), None),
        weights=ready.origin,
        mode="train" if ready.mode.train else "eval",
        mask=_mask(ready),
        device=device,
        evidence=_evidence(resolved, ready.layer),
        random_weights=ready.origin.startswith(RANDOM),
        norm=None if alone or spec.norm == "none" else spec.norm,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        shared_experts=moe.shared_experts if moe else 0,
    )


def _evidence(model: Resolved, layer: Layer) -> tuple[str, ...]:
    """The evidence, which cites a tensor of the first layer of its kind, with this layer's tensors substituted."""
    spot = model.spots.get((layer.stack, layer.index))
    if spot is None or model.checkpoint is None:
        return tuple(model.evidence)
    files = model.checkpoint.files
    cited = re.compile(rf"'({re.escape(spot.prefix)}\.)\d+(\.[^']+)'")

    def of_this_layer(match: re.Match[str]) -> str:
        name = f"{match[1]}{spot.layer}{match[2]}"
        return f"'{name}'" if name in files else match[0]

    return tuple(cited.sub(of_this_layer, text) for text in model.evidence)


def _mask(ready: Prepared) -> str | None:
    """The origin of the masks of active dropouts; None if none is active."""
    dropouts = [s.output for _, s in walk(ready.steps) if isinstance(s.op, Dropout)] if ready.mode.train else []
    if not dropouts:
        return None
    if all(name in ready.mode.masks for name in dropouts):
        return "the notebook's"
    return f"drawn, seed {0 if ready.mode.generator is None else ready.mode.generator.initial_seed()}"
