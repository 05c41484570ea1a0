"""Which block ran, as a page describes it: names, sizes, where its weights come from, in which mode."""

from __future__ import annotations

from dataclasses import dataclass

from ffncli.block.steps import Dropout, Linear, walk
from ffncli.models.model import Resolved
from ffncli.run.engine.prepare import Prepared


@dataclass(frozen=True)
class BlockSummary:
    """The key `block` of docs/json.md. Of a final layer alone `d_ff`, `activation` and `gated` are None."""

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


def block_summary(model: Resolved, ready: Prepared, device: str) -> BlockSummary:
    """The summary of a layer that is ready to run on a device."""
    spec = ready.layer.spec
    alone = ready.steps[0].output == "logits"  # a final layer without any block
    return BlockSummary(
        name=model.name if model.bare else f"{model.name}, {ready.layer.stack} layer {ready.layer.index}",
        source=model.source,
        layer=None if model.bare else ready.layer.index,
        stack=None if model.bare else ready.layer.stack,
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
        evidence=tuple(model.evidence),
    )


def _mask(ready: Prepared) -> str | None:
    """Where the masks of active dropouts come from; None where none is active."""
    dropouts = [s.output for _, s in walk(ready.steps) if isinstance(s.op, Dropout)] if ready.mode.train else []
    if not dropouts:
        return None
    if all(name in ready.mode.masks for name in dropouts):
        return "the notebook's"
    return f"drawn, seed {0 if ready.mode.generator is None else ready.mode.generator.initial_seed()}"
