"""What lies outside the FFNs of two checkpoints: one line for each kind of tensor, by headers and by samples."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import sqrt

from ffncli.errors import FFNError
from ffncli.models.files.dequantize import stored
from ffncli.models.files.rows import OpenFiles
from ffncli.run.checkpoints.results import OutsideGroup
from ffncli.run.checkpoints.sides import SideFile
from ffncli.show.text import plural

_KINDS = (
    ("embeddings", r"embed|wte|wpe|tok_emb|token_embd|position_embd|shared\.weight"),
    ("head", r"lm_head|^output\.weight|score|classifier|predictions|pooler"),
    ("norms", r"norm|ln_|layer_norm|\.ln"),
    ("attention", r"att|[qkvo]_proj|c_attn|query|key|value|mixer|mamba|conv"),
)  # fmt: skip
_SHARE = 0.02  # of the bytes of the FFNs that samples outside them may read


def outside(
    base: SideFile, new: SideFile, used: tuple[Iterable[str], Iterable[str]], ffn_bytes: int
) -> list[OutsideGroup]:
    """Compare what is outside the FFNs, whose tensors are `used` on both sides, group by group. The first rows of
    tensors with equal names and shapes are read, in all up to a small share of `ffn_bytes`."""
    sides = [_others(side, names) for side, names in zip((base, new), used, strict=True)]
    out = []
    shared = [name for name in sides[0] if name in sides[1]]
    budget = _SHARE * ffn_bytes / max(1, 2 * len(shared))
    for group in dict.fromkeys((*sides[0].values(), *sides[1].values())):
        names = [[name for name, kind in side.items() if kind == group] for side in sides]
        both = [name for name in names[0] if name in sides[1]]
        shapes = {name: [side.checkpoint.info(name).shape for side in (base, new)] for name in both}
        unlike = [name for name in both if shapes[name][0] != shapes[name][1]]
        changed, seen, sampled, sums = 0, 0, 0, [0.0, 0.0]
        for name in (name for name in both if name not in unlike):
            if counts := _sampled(base, new, name, budget):
                changed, seen, sampled = changed + counts[0], seen + counts[1], sampled + 1
                sums = [sums[0] + counts[2], sums[1] + counts[3]]
        share, relative = (changed / seen, sqrt(sums[0] / (sums[1] or 1.0))) if seen else (None, None)
        texts = [f"{name} {_shape(shapes[name][0])} became {_shape(shapes[name][1])}" for name in unlike[:2]]
        texts = [f"resized: {'; '.join(texts)}"] if texts else []
        if share is not None:
            text = f"{100 * share:.3g} % of the sampled values differ, relative change {relative:.2g}"
            texts.append(text if share else "samples are equal")
        if not both:
            texts.append("names differ, so values are not compared")
        elif lone := len(names[0]) + len(names[1]) - 2 * len(both):
            texts.append(f"{lone} {plural('tensor', lone)} on one side alone")
        out.append(OutsideGroup(group, len(names[0]), len(names[1]), sampled, share, relative, ", ".join(texts)))
    if new.adapter is not None:
        rest = len(new.adapter.modules) - len({id(change) for change in new.adapted.values()} & _of(new, used[1]))
        if rest > 0:
            where = "attention or others"
            out.append(
                OutsideGroup("adapter", 0, rest, 0, None, None, f"the adapter also changes {rest} matrices of {where}")
            )
    return out


def _of(side: SideFile, used: Iterable[str]) -> set[int]:
    return {id(side.adapted[name]) for name in used if name in side.adapted}


def _others(side: SideFile, used: Iterable[str]) -> dict[str, str]:
    """Return the tensors outside the FFNs, with their kinds; pieces of packed matrices are left out."""
    stems = {name.removesuffix(".weight") for name in used}
    out = {}
    for name in side.checkpoint.sorted_names:
        stem, _, leaf = name.rpartition(".")
        mine = {name, stem, re.sub(r"_(?:blocks|scales)$", "", name)} & stems
        if not mine and leaf in ("weight", "bias"):
            kind = next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "others")
            out[name] = kind
    return out


def _sampled(base: SideFile, new: SideFile, name: str, budget: float) -> tuple[int, int, float, float] | None:
    """Return (unequal values, values, squared norm of the change, that of BASE) of a tensor's first rows; None if it
    cannot be read within the budget."""
    parts = []
    try:
        with OpenFiles() as files:
            for side in (base, new):
                tensor = stored(side.checkpoint, name, side.resolved.quantization)
                rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
                size = side.checkpoint.info(name).bytes / max(1, rows)
                count = min(rows, int(budget / size) if size else 0)
                if not count:
                    return None
                parts.append(tensor.decode(files, 0, count).float().clone())
    except FFNError:
        return None
    count = min(len(part) for part in parts)
    a, b = (part[:count].double() for part in parts)
    return int((a != b).sum()), a.numel(), float((a - b).square().sum()), float(a.square().sum())


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
