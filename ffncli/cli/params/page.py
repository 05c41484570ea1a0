"""How `ffn params` reads to a person: one source in full, several side by side, sweeps, costs, splits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from ffncli.show.parts import Heading, Line, Part
from ffncli.show.tables import Short, Table
from ffncli.show.text import plural

if TYPE_CHECKING:
    from ffncli.models.counting.count import GroupCount, ModelCount, TensorCount
    from ffncli.models.counting.figures import CostReport, Ridge
    from ffncli.models.counting.sweep import Point
    from ffncli.models.counting.tensor_parallel import Split
    from ffncli.models.counting.traffic import TokenCost

Row = tuple[object, ...]
_MOST_BESIDE = 12  # more sources than this read better below one another


def parts_of(found: list[CostReport], costs: bool = False) -> list[Part]:
    """Everything that was asked for, counts first; `costs` says whether memory traffic was."""
    counts, several = [one.count for one in found], len(found) > 1
    parts: list[Part]
    if not several:
        parts = _one(counts[0])
    else:
        parts = [_side_by_side(counts) if len(counts) <= _MOST_BESIDE else _below(counts)]
    parts += [_costs(one.costs, several) for one in found if costs and one.costs]
    splits = [one.split for one in found if one.split]
    parts += [_splits(splits)] if len(splits) > _MOST_BESIDE else [p for s in splits for p in _split(s, several)]
    return parts + [_ridge(one.count.name, one.ridge) for one in found if one.ridge]


# --- one source -------------------------------------------------------------------------------------------------------


def _one(c: ModelCount) -> list[Part]:
    """What it is, each group's matrices on their own lines, totals, evidence."""
    parts: list[Part] = [Heading(c.name, c.source if c.source != c.name else "")]
    kind = "gated" if c.gated else "plain"
    several = [str(d_ff) for d_ff in dict.fromkeys(group.d_ff for group in c.groups)]
    widths = " and ".join(several) if len(several) < 4 else f"{min(several, key=int)} to {max(several, key=int)}"
    where = "" if c.layers is None else f", {c.layers} layers"
    act = c.activation or "activation not known"
    parts.append(Line(f"d_model {c.d_model}, d_ff {widths}, {act}, {kind}, {'bias' if c.bias else 'no bias'}{where}"))
    for group in c.groups:
        title = _kind(group) + ("" if c.layers is None else f", {group.stack} {_ranges(group.layers)}")
        rows: list[Row] = [(t.name, " × ".join(map(str, t.shape)), t.params, _remark(t)) for t in group.tensors]
        rows.append(("one layer" if c.layers else "total", "", group.ffn_params_per_layer, ""))
        parts.append(Table(("tensor", "shape", "parameters", " "), rows, title, frozenset({len(rows) - 1})))
    if any(group.attention_params_per_layer is not None for group in c.groups):
        parts.append(_layers(c))
    parts.append(
        Table(("quantity", "value"), _totals(c), "per layer and in total" if c.layers else "per token and in total")
    )
    if c.evidence:
        parts += [Heading("evidence"), *(Line(text, quiet=True) for text in c.evidence)]
    if c.differences:
        parts += [Heading("what disagrees"), *map(Line, c.differences)]
    if c.citation:
        parts.append(Line(f"source: {c.citation}", quiet=True))
    return parts


def _layers(c: ModelCount) -> Table:
    """The FFN beside the attention, for each kind of layer."""
    rows: list[Row] = []
    for group in c.groups:
        what = f"{group.stack} {_ranges(group.layers)}" if len(c.groups) > 1 else "one layer"
        rows.append((what, group.attention_params_per_layer, group.ffn_params_per_layer,
                     group.layer_norm_params_per_layer, _percent(group.ffn_share_of_layer)))  # fmt: skip
    return Table(("layer", "attention", "FFN", "norms", "FFN share"), rows, "the whole layer")


def _remark(tensor: TensorCount) -> str:
    """Why a tensor is not part of the FFN's own sum."""
    return "shared with attention" if tensor.shared else "norm, apart" if tensor.norm else ""


def _totals(c: ModelCount) -> list[Row]:
    moe = c.has_experts
    rows: list[Row] = [("parameters per layer", c.ffn_params_per_layer)]
    rows += [("active per layer", c.ffn_params_active_per_layer)] if moe else []
    rows += [
        ("norm parameters per layer", c.norm_params_per_layer),
        ("matmul FLOPs per token and layer", c.matmul_flops_per_token),
        ("elementwise FLOPs per token and layer", c.elementwise_flops_per_token),
    ]
    rows += [("parameters, all layers", c.ffn_params_total)] if c.layers else []
    rows += [("active, all layers", c.ffn_params_active)] if moe and c.layers else []
    if c.layers or c.tokens > 1:
        over = ", ".join([*(["all layers"] if c.layers else []), f"{c.tokens:,} {plural('token', c.tokens)}"])
        rows += [
            (f"matmul FLOPs, {over}", c.matmul_flops_total),
            (f"elementwise FLOPs, {over}", c.elementwise_flops_total),
        ]
    rows.append((f"weight bytes ({c.dtype})", c.weight_bytes))
    return rows + _model_rows(c) + _stored_rows(c)


def _model_rows(c: ModelCount) -> list[Row]:
    if c.model_params_total is None:
        return []
    rows: list[Row] = [("whole model, parameters", c.model_params_total)]
    if c.has_experts:
        rows += [
            ("whole model, active", c.model_params_active),
            ("whole model, active without the input embedding", c.model_params_active_no_embedding),
        ]
    return [*rows, ("FFN's share of the model", _percent(c.ffn_share_of_model))]


def _stored_rows(c: ModelCount) -> list[Row]:
    if c.ffn_params_stored is None:
        return []
    rows: list[Row] = [
        ("FFN parameters by the tensors", c.ffn_params_stored),
        ("FFN bytes as stored", c.ffn_stored_bytes),
        ("FFN bits per weight", c.ffn_bits_per_weight),
    ]
    if c.stored_params is not None:
        rows += [("parameters in the files", c.stored_params), ("bytes of all tensors", c.stored_bytes)]
        rows += [("bits per weight, all tensors", c.bits_per_weight)]
    return rows


# --- several ----------------------------------------------------------------------------------------------------------

_FIELDS = (
    ("d_model", "d_model"), ("d_ff", "d_ff"), ("activation", "activation"), ("gated", "gated"), ("bias", "bias"),
    ("layers", "layers"), ("experts", "experts"), ("top_k", "top_k"), ("shared experts", "shared_experts"),
    ("parameters/layer", "ffn_params_per_layer"), ("active/layer", "ffn_params_active_per_layer"),
    ("norm/layer", "norm_params_per_layer"), ("attention/layer", "attention_params_per_layer"),
    ("FFN share of layer", "ffn_share_of_layer"), ("matmul FLOPs/token", "matmul_flops_per_token"),
    ("elementwise FLOPs/token", "elementwise_flops_per_token"), ("parameters", "ffn_params_total"),
    ("active", "ffn_params_active"), ("tokens", "tokens"), ("matmul FLOPs", "matmul_flops_total"),
    ("elementwise FLOPs", "elementwise_flops_total"), ("dtype", "dtype"), ("weight bytes", "weight_bytes"),
    ("whole model", "model_params_total"), ("whole model active", "model_params_active"),
    ("... no embedding", "model_params_active_no_embedding"), ("FFN share of model", "ffn_share_of_model"),
    ("bits per weight", "bits_per_weight"),
)  # fmt: skip
_OF_MOE = {
    "experts", "top_k", "shared_experts", "ffn_params_active_per_layer", "ffn_params_active", "model_params_active",
    "model_params_active_no_embedding",
}  # fmt: skip


def _side_by_side(counts: list[ModelCount]) -> Table:
    """One column per source, one row per quantity; rows in which sources differ are marked."""
    hidden = set() if any(c.has_experts for c in counts) else set(_OF_MOE)
    rows: list[Row] = []
    for label, name in _FIELDS:
        values = [getattr(c, name) for c in counts]
        if name in hidden or all(value is None for value in values):
            continue
        cells = [_percent(v) if "share_of" in name else v for v in values]
        rows.append((("≠ " if len(set(cells)) > 1 else "  ") + label, *cells))
    names = [c.name if sum(o.name == c.name for o in counts) == 1 else _apart(c, counts) for c in counts]
    return Table(("  quantity", *names), rows, side_by_side=True)


def _apart(c: ModelCount, counts: list[ModelCount]) -> str:
    """What tells a source from another of the same name: its format, else what was typed."""
    formats = {o.dtype for o in counts if o.name == c.name}
    return f"{c.name} {c.dtype}" if len(formats) > 1 else c.source


def _below(counts: list[ModelCount]) -> Table:
    """One row per source, short enough for any terminal; `ffn models` has the widths."""
    rows: list[Row] = [
        (c.name, Short(c.ffn_params_per_layer), _percent(c.ffn_share_of_layer), Short(c.ffn_params_total),
         _short(c.ffn_params_active), _short(c.model_params_total), _percent(c.ffn_share_of_model))
        for c in counts
    ]  # fmt: skip
    return Table(("model", "FFN/layer", "of layer", "FFN", "active", "whole model", "FFN share"), rows)


def _short(number: int | None) -> Short | None:
    return None if number is None else Short(number)


def sweep_table(found: Sequence[tuple[Point, CostReport]], tokens: bool) -> Table:
    """One row per combination: what was swept, then what it comes to; `tokens` says whether a number was given."""
    names = [name for name, _ in found[0][0].values]
    moe = any(one.count.experts for _, one in found)
    columns = {
        "d_model": "d_model", "d_ff": "d_ff", "activation": "activation",
        **({"experts": "experts", "top_k": "top_k"} if moe else {}), "parameters/layer": "ffn_params_per_layer",
        **({"active/layer": "ffn_params_active_per_layer"} if moe else {}),
        "matmul FLOPs/token": "matmul_flops_per_token",
    }  # fmt: skip
    columns |= (
        {"matmul FLOPs": "matmul_flops_total", "FLOPs/byte": "flops_per_byte"} if tokens or "tokens" in names else {}
    )
    columns |= {"parameters": "ffn_params_total", "weight bytes": "weight_bytes"}
    kept = {label: key for label, key in columns.items() if label not in names}
    rows = [(*(text for _, text in point.values), *map(one.lines()[0].get, kept.values())) for point, one in found]
    return Table((*names, *kept), rows)


# --- costs and splits -------------------------------------------------------------------------------------------------


def _costs(rows: Sequence[TokenCost], several: bool) -> Table:
    """Bytes moved and intensity, one row for each number of tokens."""
    first = rows[0]
    title = f"{first.name}: " if several else ""
    title += f"memory traffic, weights {first.dtype}, activations {first.activation_dtype}, all layers"
    title += f", one of {first.ranks} ranks" if first.ranks > 1 else ""
    moe = first.experts_touched is not None
    columns = ["tokens", *(["experts read"] if moe else []), "weight bytes", "activation bytes", "fused",
               "matmul FLOPs", "FLOPs/byte", "fused at most"]  # fmt: skip
    table = [
        (c.tokens, *([c.experts_touched] if moe else []), c.weight_bytes_read, c.activation_bytes,
         c.activation_bytes_fused, c.matmul_flops, c.flops_per_byte, c.flops_per_byte_fused)
        for c in rows
    ]  # fmt: skip
    return Table(tuple(columns), table, title)


def _split(found: Split, several: bool) -> list[Part]:
    """Every tensor's slice, then what a rank holds and sends."""
    parts: list[Part] = []
    name = f"{found.name}: " if several else ""
    for group in found.groups:
        rows: list[Row] = [
            (t.name, " × ".join(map(str, t.shape)), " × ".join(map(str, t.rank_shape)), t.place) for t in group.slices
        ]
        title = f"{name}over {found.ranks} ranks, {group.stack} {_ranges(group.layers)}"
        parts.append(Table(("tensor", "whole", "one rank", "how"), rows, title))
    totals: list[Row] = [
        ("parameters, all layers", found.rank_0_params_total, found.other_rank_params_total),
        (f"weight bytes ({found.dtype})", found.rank_0_weight_bytes_total, found.other_rank_weight_bytes_total),
        ("ring all-reduce, bytes/token/layer", *[_sent(found)[0]] * 2),
        ("all-gather of sums, bytes/token/layer", *[_sent(found)[1]] * 2),
    ]
    parts.append(Table(("holds and sends", "rank 0", "any other"), totals, name.removesuffix(": ")))
    return parts


def _splits(found: Sequence[Split]) -> Table:
    """One row for each of many models."""
    rows: list[Row] = [
        (s.name, s.d_ff, Short(s.rank_0_params_total), Short(s.rank_0_weight_bytes_total), _sent(s)[0]) for s in found
    ]
    return Table(("model", "d_ff", "parameters", "weight bytes", "bytes sent"), rows, f"one of {found[0].ranks} ranks")


def _sent(split: Split) -> tuple[int, int]:
    """Bytes that a rank sends per token and layer: ring all-reduce (rounded up), all-gather."""
    return ceil(split.ring_all_reduce_bytes_per_token), split.all_gather_bytes_per_token


def _ridge(name: str, ridge: Ridge) -> Line:
    def reached(tokens: int | None) -> str:
        return f"from {tokens:,} tokens on" if tokens is not None else "at no number of tokens"

    fused = f"{reached(ridge.ridge_tokens_fused)} fused"
    return Line(f"{name}: {ridge.flops_per_byte:g} FLOPs per byte {reached(ridge.ridge_tokens)}, {fused}")


def _kind(group: GroupCount) -> str:
    top = "top_k not known" if group.top_k is None else f"top {group.top_k}"
    return f"MoE, {group.experts} experts, {top}" if group.kind == "moe" else "dense"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def _ranges(layers: tuple[int, ...]) -> str:
    """`layers 0-2, 5`, `layers 0-46 by 2`."""
    step = layers[1] - layers[0] if len(layers) > 3 else 1
    if step > 1 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        return f"layers {layers[0]}-{layers[-1]} by {step}"
    out: list[list[int]] = []
    for layer in layers:
        if out and layer == out[-1][1] + 1:
            out[-1][1] = layer
        else:
            out.append([layer, layer])
    return "layers " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in out)
