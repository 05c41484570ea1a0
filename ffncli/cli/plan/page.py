"""The page of `ffn plan`: a sentence for each device, a table for each device and format, the assumptions, and checks
against measurements and a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ffncli.block.shard import Ranks
from ffncli.models.model import ranges
from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.text import bytes_text, percent, plural, time_text

if TYPE_CHECKING:
    from ffncli.models.counting.cluster import Assumed, PredictedRow
    from ffncli.models.counting.cluster_plan import ClusterPlan
    from ffncli.models.counting.plan import Collectives, PlanRow
    from ffncli.run.ranks.simulate import CollectiveCheck

LABELS = ("tp", "ep", "tokens")
_COLLECTIVES = ("layers", "split", "tokens each", "all-reduces", "all-to-alls", "simulated")


def parts_of(plan: ClusterPlan) -> list[Part]:
    """Show the sentences first, then tables, refusals and notes."""
    devices = {row.device: [one for one in plan.rows if one.device == row.device] for row in plan.rows}
    lines = [Heading(sentence(plan, rows)) for rows in devices.values()]
    tables = [table for rows in devices.values() for table in _tables(rows)]
    return [*lines, *tables, *map(Line, _refusals(devices)), *(Line(text, quiet=True) for text in _notes(plan))]


def _refusals(devices: Mapping[str, Sequence[PlanRow]]) -> Iterator[str]:
    """List each reason for a refusal once, with the splits that were refused for it. A device for which every split was
    refused is omitted, because its sentence already contains the reason."""
    splits: dict[str, dict[str, None]] = {}
    for rows in devices.values():
        if not all(row.refused for row in rows):
            for row in rows:
                if row.refused:
                    splits.setdefault(row.refused, {})[str(Ranks(row.tp, row.ep))] = None
    return (f"no figures for {', '.join(names)}: {why}" for why, names in splits.items())


def sentence(plan: ClusterPlan, rows: Sequence[PlanRow]) -> str:
    """Describe the cheapest split, as in `fits on 2 × H100 SXM5; memory-bound; 4.2 ms a token`, or what is missing."""
    device = rows[0].device
    best = next((row for row in plan.cheapest if row.device == device), None)
    what = plan.name if plan.whole else f"{plan.name} (FFN weights only)"
    if best is not None:
        layout = f" as {Ranks(best.tp, best.ep)}" if best.devices > 1 else ""
        return f"{what} fits on {best.devices} × {device}{layout} in {best.dtype}; {_speed(best)}"
    known = [row for row in rows if not row.refused]
    if not known:
        return f"{what} has no figures on {device}: {rows[0].refused}"
    one = known[0]
    if one.memory_bytes is None:
        return f"{what} on {one.devices} × {device}: not known whether it fits; {_speed(one)}"
    least = min((row for row in known if not row.fits), key=lambda row: (row.needed_bytes or 0, row.tokens))
    tokens = "" if least.tokens == 1 else f" for {least.tokens:,} tokens"
    room = f"needs {bytes_text(least.needed_bytes or 0)} per device{tokens}, has {bytes_text(one.memory_bytes)}"
    return f"{what} does not fit on {least.devices} × {device} in {least.dtype}: {room}{_would_fit(plan, least)}"


def _would_fit(plan: ClusterPlan, least: PlanRow) -> str:
    """Return the options of the smallest split that fits, as in `; fits on 16 with --tp 16`; "" if none is known."""
    row = next((one for one in plan.would_fit if one.device == least.device), None)
    if row is None:
        return ""
    options = [f"--tp {row.tp}"] + [f"--ep {row.ep}"] * (row.ep > 1)
    options += [f"--dtype {row.dtype}"] * (row.dtype != least.dtype)
    return f"; fits on {row.devices} with {' '.join(options)}"


def _speed(row: PlanRow) -> str:
    time = "a token" if row.tokens == 1 else f"for {row.tokens:,} tokens"
    return f"{row.bound}-bound; {time_text(row.time_s)} {time}"


def _tables(rows: Sequence[PlanRow]) -> Iterator[Table]:
    """Yield one device's tables, one per format."""
    for dtype in dict.fromkeys(row.dtype for row in rows):
        alike = [row for row in rows if row.dtype == dtype and not row.refused]
        if not alike:
            continue
        mixture = alike[0].tokens_per_expert is not None
        columns = [*LABELS, "time", "bound by", "link time", "of ideal", "tokens/s", "needs", "fits"]
        columns += ["per expert", "busiest"] if mixture else []
        first = alike[0]
        rate = "" if first.rate == dtype else f" computed in {first.rate}"
        title = f"{first.device}, {dtype}{rate}: ridge {first.ridge_flops_per_byte:.4g} FLOPs/byte"
        cells = [
            (row.tp, row.ep, row.tokens, *_cells(row),
             *((row.tokens_per_expert, row.busiest_expert_tokens) if mixture else ()))
            for row in alike
        ]  # fmt: skip
        yield Table(tuple(columns), cells, title, labels=3)


def _cells(row: PlanRow) -> tuple[object, ...]:
    return (
        time_text(row.time_s), row.bound, time_text(row.link_s) if row.link_s else None,
        None if row.efficiency is None else percent(row.efficiency, 2), round(row.tokens_per_s or 0),
        bytes_text(row.needed_bytes or 0), row.fits,
    )  # fmt: skip


def _notes(plan: ClusterPlan) -> Iterator[str]:
    for one in plan.assumed:
        yield _assumption(one)
    yield from dict.fromkeys(one.source for one in plan.assumed)
    yield "time: forward pass of all FFNs, with max(compute, memory time) per kernel, plus the collectives"
    if any(row.devices > 1 for row in plan.rows):
        yield "link time: by the fastest of NCCL's protocols, with the latencies of its src/graph/tuning.cc"
        yield "of ideal: speed-up ÷ devices"
    whole = "the whole model's weights (tp also splits the weights outside the FFNs)"
    what = whole if plan.whole else "the FFNs' weights"
    yield f"needs: {what}, and one layer's activations; it excludes the KV cache"
    if any(row.tokens_per_expert is not None for row in plan.rows):
        yield f"busiest: expected tokens of the busiest expert, skew {plan.skew}"


def _assumption(one: Assumed) -> str:
    """Return text such as `H100 SXM5: 0.80 of the peak, 0.90 of the bandwidth, 0.90 of the memory; ...`."""
    text = f"{one.device}: measured rates"
    if one.gemm_efficiency is not None and one.memory_efficiency is not None:
        text = f"{one.device}: {one.gemm_efficiency:.2f} of the peak, {one.memory_efficiency:.2f} of the bandwidth"
    text += f", {one.usable_memory:.2f} of the memory"
    wires = (
        [f"{one.link} ({one.link_gbytes_per_s:g} GB/s) among {one.per_node}"] if one.link and one.per_node > 1 else []
    )
    wires += [f"{one.network} ({one.network_gbytes_per_s:g} GB/s) between nodes"] if one.network else []
    text += f"; {one.link_efficiency:.2f} of {', of '.join(wires)}" if wires else ""
    given = ", ".join(f"--{name.replace('_', '-')}" for name in one.changed)
    return text + (f"; {plural('option', len(one.changed))} {given}" if given else "")


# --- checks of a plan -------------------------------------------------------------------------------------------------


def measured_parts(rows: Sequence[PredictedRow]) -> list[Part]:
    """Show the measurements, their predictions, the errors, and the median absolute error."""
    cells = [
        (row.device, row.block, row.dtype, row.tokens, row.kernel, time_text(row.measured_s),
         time_text(row.predicted_s), None if row.error is None else f"{100 * row.error:+.1f} %")
        for row in rows
    ]  # fmt: skip
    columns = ("device", "block", "dtype", "tokens", "kernel", "measured", "predicted", "error")
    parts: list[Part] = [Table(columns, cells, "measured, and predicted from the other blocks", labels=4)]
    errors = [abs(row.error) for row in rows if row.error is not None]
    if errors:
        parts.append(Line(f"absolute error: median {percent(median(errors), 2)}, worst {percent(max(errors), 2)}"))
    return parts


def collectives_parts(rows: Sequence[CollectiveCheck]) -> list[Part]:
    """Show the counts by formula and, where they differ, the counts of the simulation."""
    cells = [(*_collective_labels(row), *_counts(row.counted), "the same" if row.same else "differs") for row in rows]
    parts: list[Part] = [
        Table(_COLLECTIVES, cells, "collectives of one layer and one rank, counted and simulated", labels=3)
    ]
    parts += [Line(difference_text(row)) for row in rows if not row.same]
    return [*parts, Line("tokens each: tokens per rank, rounded up to divide evenly over the experts", quiet=True)]


def _collective_labels(row: CollectiveCheck) -> tuple[object, ...]:
    return (f"{row.stack} {ranges(row.layers)}", str(Ranks(row.tp, row.ep)), row.entered)


def _counts(one: Collectives) -> tuple[str, ...]:
    """Return cells such as `2, 16.78 MB`: the number of collectives, and the bytes that enter them."""
    pairs = ((one.all_reduces, one.all_reduce_bytes), (one.all_to_alls, one.all_to_all_bytes))
    return tuple(f"{count}, {bytes_text(size)}" if count else "0" for count, size in pairs)


def difference_text(row: CollectiveCheck) -> str:
    """Return a split, and every count in which the formula and the simulation differ."""
    pairs = zip(vars(row.counted).items(), vars(row.simulated).values(), strict=True)
    wrong = [f"{name} {counted:,} and {simulated:,}" for (name, counted), simulated in pairs if counted != simulated]
    return f"{' '.join(map(str, _collective_labels(row)))}: counted and simulated differ: {'; '.join(wrong)}"
