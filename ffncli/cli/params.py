"""`ffn params`."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Annotated

import typer

from ffncli.block import dtypes
from ffncli.block.cost import CONVENTIONS
from ffncli.cli.options import DimensionOptions, OutputOptions, TokenOptions, spread
from ffncli.models.count import ModelCount, TensorCount, count
from ffncli.run.sources import load
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table


@spread
def command(
    *,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Model names, directories, 512x2048:gelu, my.py:Class (runs that file)."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAME", help="For weight_bytes: fp32, bf16, ...; default the stored one."),
    ] = None,
    tokens: TokenOptions,
    dimensions: DimensionOptions,
    show: OutputOptions,
) -> None:
    """Count parameters, FLOPs and bytes, per layer and in total; several sources side by side.

    Try: ffn params llama-2-7b mixtral-8x7b, ffn params ./my-model
    """
    output = show.output()
    said = dimensions.dimensions()
    if dtype is not None:
        dtypes.dtype(dtype)  # a wrong one is said before anything is read
    number = prod(tokens.leading() or (1,))
    models = [load(source, said) for source in sources] if sources else [load(None, said)]
    for model in models:
        for note in model.notes:
            output.note(f"{model.name}: {note}" if len(models) > 1 else note)
    output.show(answer([count(model, dtype, number) for model in models]))


def answer(counts: list[ModelCount]) -> Answer:
    """The records as JSON rows, CSV rows and tables."""
    parts = _one(counts[0]) if len(counts) == 1 else [_side_by_side(counts)]
    return Answer("params", {"rows": [asdict(c) for c in counts]}, _flat(counts), parts, CONVENTIONS)


def _flat(counts: list[ModelCount]) -> Table:
    names = [name for name in asdict(counts[0]) if name != "groups"]
    return Table(tuple(names), [tuple(getattr(c, name) for name in names) for c in counts])


def _one(c: ModelCount) -> list[Part]:
    """One source in full: what it is, each group's matrices on their own lines, totals, evidence."""
    parts: list[Part] = [Heading(c.name, c.source if c.source != c.name else "")]
    kind = "gated" if c.gated else "plain"
    widths = " and ".join(str(d_ff) for d_ff in dict.fromkeys(group.d_ff for group in c.groups))
    where = "" if c.layers is None else f", {c.layers} layers"
    parts.append(
        Line(f"d_model {c.d_model}, d_ff {widths}, {c.activation}, {kind}, {'bias' if c.bias else 'no bias'}{where}")
    )
    for group in c.groups:
        title = f"{_kind(group.kind, group.experts, group.top_k)}" + (
            "" if c.layers is None else f", {group.stack} {_ranges(group.layers)}"
        )
        rows = [(t.name, " × ".join(map(str, t.shape)), t.params, _remark(t)) for t in group.tensors]
        total = ("one layer" if c.layers else "total", "", group.ffn_params_per_layer, "")
        rows = [*rows, total]
        parts.append(Table(("tensor", "shape", "parameters", " "), rows, title, frozenset({len(rows) - 1})))
    parts.append(
        Table(("quantity", "value"), _totals(c), "per layer and in total" if c.layers else "per token and in total")
    )
    if c.evidence:
        parts += [Heading("evidence"), *(Line(text, quiet=True) for text in c.evidence)]
    if c.citation:
        parts.append(Line(f"source: {c.citation}", quiet=True))
    return parts


def _remark(tensor: TensorCount) -> str:
    """Why a tensor is not part of the FFN's own sum."""
    return "shared with attention" if tensor.shared else "norm, apart" if tensor.norm else ""


def _totals(c: ModelCount) -> list[tuple[object, ...]]:
    moe = c.experts > 0
    rows: list[tuple[object, ...]] = [("parameters per layer", c.ffn_params_per_layer)]
    rows += [("active per layer", c.ffn_params_active_per_layer)] if moe else []
    rows += [
        ("norm parameters per layer", c.norm_params_per_layer),
        ("matmul FLOPs per token and layer", c.matmul_flops_per_token),
        ("elementwise FLOPs per token and layer", c.elementwise_flops_per_token),
    ]
    rows += [("parameters, all layers", c.ffn_params_total)] if c.layers else []
    rows += [("active, all layers", c.ffn_params_active)] if moe and c.layers else []
    if c.layers or c.tokens > 1:
        over = ", ".join([*(["all layers"] if c.layers else []), f"{c.tokens:,} token{'s' if c.tokens > 1 else ''}"])
        rows += [
            (f"matmul FLOPs, {over}", c.matmul_flops_total),
            (f"elementwise FLOPs, {over}", c.elementwise_flops_total),
        ]
    return [*rows, (f"weight bytes ({c.dtype})", c.weight_bytes)]


def _side_by_side(counts: list[ModelCount]) -> Table:
    """One column per source, one row per quantity."""
    fields: list[tuple[str, str]] = [
        ("d_model", "d_model"), ("d_ff", "d_ff"), ("activation", "activation"), ("gated", "gated"), ("bias", "bias"),
        ("layers", "layers"), ("experts", "experts"), ("top_k", "top_k"), ("shared experts", "shared_experts"),
        ("parameters/layer", "ffn_params_per_layer"), ("active/layer", "ffn_params_active_per_layer"),
        ("norm/layer", "norm_params_per_layer"), ("matmul FLOPs/token", "matmul_flops_per_token"),
        ("elementwise FLOPs/token", "elementwise_flops_per_token"), ("parameters", "ffn_params_total"),
        ("active", "ffn_params_active"), ("tokens", "tokens"), ("matmul FLOPs", "matmul_flops_total"),
        ("elementwise FLOPs", "elementwise_flops_total"), ("dtype", "dtype"), ("weight bytes", "weight_bytes"),
    ]  # fmt: skip
    moe = any(c.experts for c in counts)
    hidden = (
        set() if moe else {"experts", "top_k", "shared_experts", "ffn_params_active_per_layer", "ffn_params_active"}
    )
    rows = [(label, *(getattr(c, name) for c in counts)) for label, name in fields if name not in hidden]
    names = [c.name if sum(o.name == c.name for o in counts) == 1 else c.source for c in counts]
    return Table(("quantity", *names), rows, side_by_side=True)


def _kind(kind: str, experts: int, top_k: int) -> str:
    return f"MoE, {experts} experts, top {top_k}" if kind == "moe" else "dense"


def _ranges(layers: tuple[int, ...]) -> str:
    """`0-2, 5`."""
    out: list[list[int]] = []
    for layer in layers:
        if out and layer == out[-1][1] + 1:
            out[-1][1] = layer
        else:
            out.append([layer, layer])
    return "layers " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in out)
