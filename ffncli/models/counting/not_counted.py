"""What of a model is in none of its numbers: parts that its source left out, and parts of which nothing is known."""

from __future__ import annotations

from ffncli.models.config.non_ffn_rows import RESTS
from ffncli.models.model import NotCounted, Resolved
from ffncli.models.non_ffn import MORE_TOKENS
from ffncli.show.text import plural


def not_counted(resolved: Resolved) -> tuple[NotCounted, ...]:
    """The parts of a model that no number of its count holds; none for a bare block."""
    model, out = resolved.model, [*resolved.not_counted]
    if resolved.model.bare:
        return tuple(out)
    if model.extra_layers and all(part.why != MORE_TOKENS for part in out):
        layers = plural("layer", model.extra_layers)
        out.append(NotCounted(f"{model.extra_layers} {layers} after the model's last", MORE_TOKENS))
    if model.non_ffn is None or model.non_ffn.parts is None:
        out.append(NotCounted("everything outside the FFN: attention, norms, embeddings, head", _why(resolved)))
    elif "norm" in model.unknown:
        out.append(NotCounted("which norms are the FFN's", "tensor names alone do not say it"))
    return tuple(out)


def _why(resolved: Resolved) -> str:
    """Why the whole model is not known."""
    if resolved.from_tensors or resolved.checkpoint:
        return "the tensors leave open which of them are the text model's, or which are stored twice"
    if resolved.model.non_ffn or resolved.model.model_type in RESTS:
        return "its source lacks a number that it takes"
    return f"there is no row of the whole model for model_type {resolved.model.model_type}"
