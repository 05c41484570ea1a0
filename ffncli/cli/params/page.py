"""The pages of `ffn params`: one source in full, several side by side, sweeps, costs, time floors, splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from ffncli.block.dtypes import find_storage
from ffncli.models.counting.assertions import LABELS, label
from ffncli.models.model import ranges
from ffncli.show.parts import Heading, Line, Part, Short, Table, apart
from ffncli.show.text import bytes_text, plural, time_text

if TYPE_CHECKING:
    from ffncli.models.counting.count import GroupCount, ModelCount, TensorCount
    from ffncli.models.counting.figures import CostReport, Ridge
    from ffncli.models.counting.parallel import ExpertExchange, Split
    from ffncli.models.counting.sweep import Point
    from ffncli.models.counting.traffic import DeviceFloor, TokenCost
    from ffncli.models.counting.training import TrainingMemory

Row = tuple[object, ...]
_MOST_COLUMNS = 12  # with more sources than this, a row per source is easier to read than a column


def parts_of(reports: list[CostReport], costs: bool = False) -> list[Part]:
    """Show everything that was requested, counts first; `costs` is True if memory traffic was requested."""
    counts, several = [one.count for one in reports], len(reports) > 1
    parts: list[Part]
    if not several:
        parts = _one(counts[0])
    else:
        parts = [_side_by_side(counts) if len(counts) <= _MOST_COLUMNS else _below(counts)]
    parts += [_costs(one.costs, several) for one in reports if costs and one.costs]
    splits = [one.split for one in reports if one.split]
    parts += [_splits(splits)] if len(splits) > _MOST_COLUMNS else [p for s in splits for p in _split(s, several)]
    parts += [_exchange(one.exchange, several) for one in reports if one.exchange]
    parts += [part for one in reports if one.training for part in _training(one.count.name, one.training, several)]
    parts += [part for one in reports for part in _floors(one, several)]
    return parts + [_ridge(one.count.name, ridge) for one in reports for ridge in one.ridges if not ridge.device]


def _training(name: str, one: TrainingMemory, several: bool) -> list[Part]:
    """Show the bytes of rank 0 and the FLOPs, what each kind of layer keeps, and what others count differently."""
    split = ", ".join(f"{key} {n}" for key, n in (("tp", one.tp), ("ep", one.ep), ("dp", one.dp)) if n > 1)
    about = [f"{one.tokens:,} {plural('token', one.tokens)}", one.dtype, *([f"rank 0 of {split}"] if split else [])]
    about += [f"ZeRO {one.zero}"] if one.zero else []
    about += [f"recompute {one.recompute}"] if one.recompute != "none" else []
    flops = {
        "matmuls forward": one.forward_matmul_flops, "matmuls backward": one.backward_matmul_flops,
        "computed again": one.recomputed_flops,
    }  # fmt: skip
    sizes = (
        ("weights", one.weight_bytes), ("gradients", one.gradient_bytes), ("optimizer state", one.optimizer_bytes),
        ("kept for backward", one.kept_bytes), ("in all", one.total_bytes),
    )  # fmt: skip
    rows: list[Row] = [(what, size, bytes_text(size)) for what, size in sizes]
    rows += [(f"{what}, FLOPs", count, "") for what, count in flops.items() if count]
    title = f"training {name if several else ''} with {one.optimizer}".replace("  ", " ")
    parts: list[Part] = [Table(("quantity", "value", " "), rows, f"{title}: {', '.join(about)}", frozenset({4}))]
    for layer in one.layers:
        where = f", {layer.stack} {ranges(layer.layers)}" if layer.stack != "block" else ""
        kept: list[Row] = [(row.step, row.tensor, row.bytes) for row in layer.kept]
        kept.append(("one layer" if where else "total", "", layer.kept_bytes))
        title = f"kept for backward{where}"
        parts.append(Table(("step", "keeps", "bytes"), kept, title, frozenset({len(kept) - 1})))
    if one.simplifications:
        parts.append(Heading("what others count"))
        parts += [
            Line(f"{other.name}: {bytes_text(other.bytes)}; here {bytes_text(other.exact_bytes)}", quiet=True)
            for other in one.simplifications
        ]
    return parts


# --- one source -------------------------------------------------------------------------------------------------------


def _one(c: ModelCount) -> list[Part]:
    """Show one source: its shape, a table of matrices for each group, totals, evidence."""
    parts: list[Part] = [Heading(c.name, c.source if c.source != c.name else "")]
    kind = "gated" if c.gated else "plain"
    several = [str(d_ff) for d_ff in dict.fromkeys(group.d_ff for group in c.groups)]
    widths = " and ".join(several) if len(several) < 4 else f"{min(several, key=int)} to {max(several, key=int)}"
    where = "" if c.layers is None else f", {c.layers} layers"
    act = c.activation or "activation not known"
    parts.append(Line(f"d_model {c.d_model}, d_ff {widths}, {act}, {kind}, {'bias' if c.bias else 'no bias'}{where}"))
    for group in c.groups:
        title = _kind(group) + ("" if c.layers is None else f", {group.stack} {ranges(group.layers)}")
        rows: list[Row] = [(t.name, " × ".join(map(str, t.shape)), t.params, _remark(t)) for t in group.tensors]
        rows.append(("one layer" if c.layers else "total", "", group.ffn_params_per_layer, ""))
        parts.append(Table(("tensor", "shape", "parameters", " "), rows, title, frozenset({len(rows) - 1})))
    if any(group.attention_params_per_layer is not None for group in c.groups):
        parts.append(_layers(c))
    title = "per layer and in total" if c.layers else "per token and in total"
    parts.append(Table(("quantity", "value", " "), _totals(c), title))
    if c.evidence:
        parts += [Heading("evidence"), *(Line(text, quiet=True) for text in c.evidence)]
    if c.published_as:
        parts.append(Line(f"published as: {c.published_as}", quiet=True))
    if c.citation:
        parts.append(Line(f"source: {c.citation}", quiet=True))
    if c.differences:
        parts += [Heading("what disagrees"), *map(Line, c.differences)]
    if c.not_counted:
        parts += [Heading("not counted"), *(Line(str(part), quiet=True) for part in c.not_counted)]
    return parts


def _layers(c: ModelCount) -> Table:
    """Show the sizes of attention, FFN and norms, for each kind of layer."""
    rows: list[Row] = []
    for group in c.groups:
        what = f"{group.stack} {ranges(group.layers)}" if len(c.groups) > 1 else "one layer"
        rows.append((what, group.attention_params_per_layer, group.ffn_params_per_layer,
                     group.layer_norm_params_per_layer, _percent(group.ffn_share_of_layer)))  # fmt: skip
    return Table(("layer", "attention", "FFN", "norms", "FFN share"), rows, "the whole layer")


def _remark(tensor: TensorCount) -> str:
    """Return why a tensor is not included in the FFN's sum."""
    return "shared with attention" if tensor.shared else "norm, separate" if tensor.norm else ""


def _totals(c: ModelCount) -> list[Row]:
    moe, per_layer = c.has_experts, _of_kind(c)
    keys = ["ffn_params_per_layer", *(["ffn_params_active_per_layer"] if moe else []), "norm_params_per_layer",
            "matmul_flops_per_token", "elementwise_flops_per_token"]  # fmt: skip
    rows: list[Row] = [_row(c, "latent")] if c.latent else []
    rows += [(per_layer(label(key)), getattr(c, key), "") for key in keys]
    rows += [_row(c, "ffn_params_total")] if c.layers else []
    rows += [_row(c, "ffn_params_active")] if moe and c.layers else []
    if c.layers or c.tokens > 1:
        over = ", ".join([*(["all layers"] if c.layers else []), f"{c.tokens:,} {plural('token', c.tokens)}"])
        rows += [_row(c, key, f", {over}") for key in ("matmul_flops_total", "elementwise_flops_total")]
    rows.append(_row(c, "weight_bytes", f" ({_format(c)})"))
    return rows + _model_rows(c) + _stored_rows(c)


def _row(c: ModelCount, key: str, more: str = "") -> Row:
    """Return the row of one key: its label, its value and, if it counts bytes, a readable size."""
    value = getattr(c, key)
    return (label(key) + more, value, bytes_text(value) if key.endswith("_bytes") and value is not None else "")


def _format(c: ModelCount) -> str:
    """Return text such as `bf16`, or `q8_0, 8.5 bits per weight` for a packed format; its scales are included."""
    packed = find_storage(c.dtype)
    if packed is None or packed.computable or c.weight_bytes == c.ffn_stored_bytes:
        return c.dtype
    return f"{c.dtype}, {packed.bits_per_weight:g} bits per weight"


def _of_kind(c: ModelCount) -> Callable[[str], str]:
    """Return a function that adds the kind of layer to a label, if there are several kinds."""
    if len({group.kind for group in c.groups}) == 1:
        return lambda text: text if c.uniform else text.replace("layer", "most common layer")
    kind = "MoE" if c.experts else "dense"
    return lambda text: text.replace("layer", f"{kind} layer")


def _model_rows(c: ModelCount) -> list[Row]:
    if c.model_params_total is None:
        return []
    rows = [_row(c, "model_params_total")]
    if c.has_experts:
        rows += [_row(c, key) for key in ("model_params_active", "model_params_active_no_embedding")]
    if c.model_weight_bytes is not None and c.model_weight_bytes != c.stored_bytes:
        rows.append(_row(c, "model_weight_bytes", f" ({c.dtype})"))
    return [*rows, (label("ffn_share_of_model"), _percent(c.ffn_share_of_model), "")]


def _stored_rows(c: ModelCount) -> list[Row]:
    if c.ffn_params_stored is None:
        return []
    rows = [_row(c, key) for key in ("ffn_params_stored", "ffn_stored_bytes", "ffn_bits_per_weight")]
    if c.stored_params is not None:
        rows += [_row(c, key) for key in ("stored_params", "stored_bytes", "bits_per_weight")]
    return rows


# --- several ----------------------------------------------------------------------------------------------------------

_FIELDS = (
    "d_model", "d_ff", "activation", "gated", "bias", "layers", "experts", "top_k", "shared_experts", "latent",
    "ffn_params_per_layer", "ffn_params_active_per_layer", "norm_params_per_layer", "attention_params_per_layer",
    "ffn_share_of_layer", "matmul_flops_per_token", "elementwise_flops_per_token", "ffn_params_total",
    "ffn_params_active", "tokens", "matmul_flops_total", "elementwise_flops_total", "dtype", "weight_bytes",
    "model_params_total", "model_params_active", "model_params_active_no_embedding", "model_weight_bytes",
    "ffn_share_of_model", "bits_per_weight",
)  # fmt: skip
_OF_MOE = {
    "experts", "top_k", "shared_experts", "ffn_params_active_per_layer", "ffn_params_active", "model_params_active",
    "model_params_active_no_embedding",
}  # fmt: skip


def _side_by_side(counts: list[ModelCount]) -> Table:
    """Show one column per source and one row per quantity; rows in which the sources differ are marked."""
    hidden = set() if any(c.has_experts for c in counts) else set(_OF_MOE)
    hidden |= set() if any(c.latent for c in counts) else {"latent"}
    rows: list[Row] = []
    for name in _FIELDS:
        values = [getattr(c, name) for c in counts]
        if name in hidden or all(value is None for value in values):
            continue
        mark = "≠ " if len(set(values)) > 1 else "  "
        rows.append((mark + LABELS[name][1], *(apart(values, _percent) if "share_of" in name else apart(values))))
        if name.endswith("_bytes"):
            rows.append((mark + "  rounded", *(None if v is None else bytes_text(v) for v in values)))
        if name == "layers" and any(len({group.kind for group in c.groups}) > 1 for c in counts):
            kinds = [_main_kind(c) for c in counts]
            rows.append((("≠ " if len(set(kinds)) > 1 else "  ") + "kind of layer", *kinds))
    names = [c.name if sum(o.name == c.name for o in counts) == 1 else _apart(c, counts) for c in counts]
    return Table(("  quantity", *names), rows, side_by_side=True)


def _main_kind(c: ModelCount) -> str:
    """Return the kind of layer that all "per layer" rows refer to: `dense`, or `MoE, 58 of 61`."""
    kind = "MoE" if c.experts else "dense"
    alike = sum(len(group.layers) for group in c.groups if bool(group.experts) == bool(c.experts))
    return kind if alike == c.layers else f"{kind}, {alike} of {c.layers}"


def _apart(c: ModelCount, counts: list[ModelCount]) -> str:
    """Return a heading that distinguishes sources of the same name: name and format if the formats differ, otherwise
    the source as typed."""
    formats = {o.dtype for o in counts if o.name == c.name}
    return f"{c.name} {c.dtype}" if len(formats) > 1 else c.source


def _below(counts: list[ModelCount]) -> Table:
    """Show one row per source, narrow enough for any terminal; `ffn models` shows the widths."""
    rows: list[Row] = [
        (c.name, Short(c.ffn_params_per_layer), _percent(c.ffn_share_of_layer), Short(c.ffn_params_total),
         _short(c.ffn_params_active), _short(c.model_params_total), _percent(c.ffn_share_of_model))
        for c in counts
    ]  # fmt: skip
    return Table(("model", "FFN/layer", "of layer", "FFN", "active", "whole model", "FFN share"), rows)


def _short(number: int | None) -> Short | None:
    return None if number is None else Short(number)


def sweep_table(reports: Sequence[tuple[Point, CostReport]], tokens: bool) -> Table:
    """Show one row per combination: the swept values, then the results; `tokens` is True if token counts were given."""
    names = [name for name, _ in reports[0][0].values]
    moe = any(one.count.experts for _, one in reports)
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
    rows = [(*(text for _, text in point.values), *map(one.lines()[0].get, kept.values())) for point, one in reports]
    return Table((*names, *kept), rows, labels=len(names))


# --- costs and splits -------------------------------------------------------------------------------------------------


def _costs(rows: Sequence[TokenCost], several: bool) -> Table:
    """Show bytes moved and arithmetic intensity, one row per number of tokens."""
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
    return Table(tuple(columns), table, title, labels=1)


# --- time floors ------------------------------------------------------------------------------------------------------


def _floors(report: CostReport, several: bool) -> list[Part]:
    """Show one source: a row per device and number of tokens, then a line per device."""
    if not report.devices:
        return []
    count = report.count
    who = f"{count.name}: " if several else ""
    if not report.floors:
        return [Line(f"{who}no time floor: the number of experts per token is not known")]
    ranks = report.floors[0].ranks
    split = f", one of {ranks} ranks" if ranks > 1 else ""
    title = f"{who}time floor of the forward pass of all FFNs, weights {count.dtype}{split}"
    memory = (
        [] if ranks > 1 else ["FFN weights" if count.model_weight_bytes is None else "whole model", "memory", "fits"]
    )
    columns = ("device", "tokens", "bound by", "time floor", "FLOPs/byte", "ridge", *memory)
    rows = [(*_floor_row(one), *(_memory(one) if memory else ())) for one in report.floors]
    return [Table(columns, rows, title, labels=2), *_sources(report)]


def _floor_row(one: DeviceFloor) -> tuple[object, ...]:
    ridge = None if one.ridge_flops_per_byte is None else f"{one.ridge_flops_per_byte:.4g}"
    return (one.device, one.tokens, one.bound, time_text(one.floor_s), f"{one.flops_per_byte:.4g}", ridge)


def _memory(one: DeviceFloor) -> tuple[object, ...]:
    """Return the memory that the weights need, the memory that the device has, and whether they fit."""
    memory = None if one.memory_bytes is None else bytes_text(one.memory_bytes)
    return (None if one.needed_bytes is None else bytes_text(one.needed_bytes), memory, one.fits)


def _sources(report: CostReport) -> Iterator[Line]:
    """Yield a line per device: its rates, their source, and the number of tokens at which the FFNs become compute bound
    on it."""
    ridges = {ridge.device: ridge for ridge in report.ridges}
    for one in {floor.device: floor for floor in report.floors}.values():
        rates = f"{one.bytes_per_s / 1e9:,.0f} GB/s"
        if one.peak_flops_per_s is None:
            rates += ", no rate published for these weights"
        else:
            rates = f"{one.peak_flops_per_s / 1e12:,.4g} TFLOP/s in {one.rate}, {rates}"
        accuracy = ", accurate to 10 %" if one.approximate else ""
        yield Line(f"{one.device}: {rates} ({one.source}{accuracy}){_reached(ridges.get(one.device))}", quiet=True)
    yield Line("floor: least traffic at full rates; excludes attention and communication", quiet=True)
    if any(one.fits is not None for one in report.floors):
        yield Line("fits: counts only weights, not the KV cache and activations", quiet=True)


def _reached(ridge: Ridge | None) -> str:
    if ridge is None:
        return ""
    if ridge.ridge_tokens_fused is None:
        return "; never compute bound"
    return f"; compute bound from {ridge.ridge_tokens_fused:,} tokens on"


# --- splits over ranks ------------------------------------------------------------------------------------------------


def _split(split: Split, several: bool) -> list[Part]:
    """Show every tensor's slice, then the totals that each rank stores and sends."""
    parts: list[Part] = []
    name = f"{split.name}: " if several else ""
    for group in split.groups:
        rows: list[Row] = [
            (t.name, " × ".join(map(str, t.shape)), " × ".join(map(str, t.rank_shape)), t.place) for t in group.slices
        ]
        title = f"{name}{_over(split)}, {group.stack} {ranges(group.layers)}"
        parts.append(Table(("tensor", "whole", "one rank", "how"), rows, title))
    if split.ranks == 1:
        alike: list[Row] = [
            ("parameters, all layers", split.rank_0_params_total),
            (f"weight bytes ({split.dtype})", split.rank_0_weight_bytes_total),
        ]
        return [*parts, Table(("stores", "each rank"), alike, name.removesuffix(": "))]
    totals: list[Row] = [
        ("parameters, all layers", split.rank_0_params_total, split.other_rank_params_total),
        (f"weight bytes ({split.dtype})", split.rank_0_weight_bytes_total, split.other_rank_weight_bytes_total),
        ("ring all-reduce, bytes/token/layer", *[_sent(split)[0]] * 2),
        ("all-gather of sums, bytes/token/layer", *[_sent(split)[1]] * 2),
    ]
    parts.append(Table(("stores and sends", "rank 0", "any other"), totals, name.removesuffix(": ")))
    return parts


def _splits(splits: Sequence[Split]) -> Table:
    """Show one row per model, for many models."""
    rows: list[Row] = [
        (s.name, s.d_ff, Short(s.rank_0_params_total), Short(s.rank_0_weight_bytes_total), _sent(s)[0]) for s in splits
    ]
    return Table(
        ("model", "d_ff", "parameters", "weight bytes", "bytes sent"), rows, _over(splits[0]).replace("over", "one of")
    )


def _over(split: Split) -> str:
    """Return text such as `over 4 ranks` or `over 8 ranks (tp 2, ep 4)`."""
    grid = f" (tp {split.ranks}, ep {split.expert_ranks})" if split.ranks > 1 and split.expert_ranks > 1 else ""
    return f"over {split.ranks * split.expert_ranks} ranks{grid}"


def _exchange(exchange: ExpertExchange, several: bool) -> Table:
    """Show the bytes that a rank sends in its two all-to-alls, and how many experts the ranks have."""
    name = f"{exchange.name}: " if several else ""
    rows: list[Row] = [
        ("dispatch, bytes/token/layer", ceil(exchange.dispatch_bytes_per_token)),
        ("combine, bytes/token/layer", ceil(exchange.combine_bytes_per_token)),
        (f"both, {exchange.layers} layers, {exchange.tokens:,} {plural('token', exchange.tokens)} per rank",
         ceil(exchange.dispatch_bytes_total + exchange.combine_bytes_total)),
    ]  # fmt: skip
    count = f"{exchange.experts} {plural('expert', exchange.experts)}"
    title = f"{name}two all-to-alls between {exchange.ranks} ranks of {count}, with even routing"
    return Table((f"sends ({exchange.activation_dtype})", "each rank"), rows, title)


def _sent(split: Split) -> tuple[int, int]:
    """Return the bytes that a rank sends per token and layer in a ring all-reduce (rounded up) and in an all-gather."""
    return ceil(split.ring_all_reduce_bytes_per_token), split.all_gather_bytes_per_token


def _ridge(name: str, ridge: Ridge) -> Line:
    def reached(tokens: int | None) -> str:
        return f"from {tokens:,} tokens on" if tokens is not None else "never reached"

    fused = f"{reached(ridge.ridge_tokens_fused)} fused"
    return Line(f"{name}: {ridge.flops_per_byte:g} FLOPs per byte {reached(ridge.ridge_tokens)}, {fused}")


def _kind(group: GroupCount) -> str:
    top = "top_k not known" if group.top_k is None else f"top {group.top_k}"
    return f"MoE, {group.experts} experts, {top}" if group.kind == "moe" else "dense"


def _percent(share: float | None, digits: int = 1) -> str | None:
    return None if share is None else f"{100 * share:.{digits}f} %"
