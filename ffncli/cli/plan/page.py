"""The page of `ffn plan`: a sentence for each device, a table for each device and format, the assumptions, and checks
against measurements and a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ffncli.block.shard import Ranks
from ffncli.models.model import ranges
from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.text import bytes_text, percent, plural, rounded, time_text

if TYPE_CHECKING:
    from ffncli.models.counting.cluster import Assumed
    from ffncli.models.counting.cluster_plan import ClusterPlan
    from ffncli.models.counting.plan import Collectives, PlanRow
    from ffncli.models.counting.speeds import PredictedRow
    from ffncli.models.counting.times.published import HeldOutRow
    from ffncli.run.ranks.simulate import CollectiveCheck

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
    """Describe the cheapest split, as in `FFNs: 19.3 ms a token (18.1 to 20.6 ms) on 2 × H100 SXM5, memory-bound; ...`,
    or what is missing."""
    device = rows[0].device
    best = next((row for row in plan.cheapest if row.device == device), None)
    what = plan.name if plan.whole else f"{plan.name} (FFN weights only)"
    if best is not None:
        return f"FFNs: {_speed(best, plan)}; {what} fits"
    known = [row for row in rows if not row.refused]
    if not known:
        return f"FFNs: {what} has no figures on {device}: {rows[0].refused}"
    one = known[0]
    if one.memory_bytes is None:
        return f"FFNs: {_speed(one, plan)}; not known whether {what} fits"
    least = min((row for row in known if not row.fits), key=lambda row: (row.needed_bytes or 0, row.tokens))
    tokens = "" if least.tokens == 1 else f" for {least.tokens:,} tokens"
    room = f"needs {bytes_text(least.needed_bytes or 0)} per device{tokens}, has {bytes_text(one.memory_bytes)}"
    return f"FFNs: {what} does not fit on {least.devices} × {device} in {least.dtype}: {room}{_would_fit(plan, least)}"


def _would_fit(plan: ClusterPlan, least: PlanRow) -> str:
    """Return the options of the smallest split that fits, as in `; fits on 16 with --tp 16`; "" if none is known."""
    row = next((one for one in plan.would_fit if one.device == least.device), None)
    if row is None:
        return ""
    options = [f"--tp {row.tp}"] + [f"--ep {row.ep}"] * (row.ep > 1)
    options += [f"--dtype {row.dtype}"] * (row.dtype != least.dtype)
    return f"; fits on {row.devices} with {' '.join(options)}"


def _speed(row: PlanRow, plan: ClusterPlan) -> str:
    """Return the time, where it is taken, and what bounds it, for which numbers of tokens."""
    time = "a token" if row.tokens == 1 else f"for {row.tokens:,} tokens"
    layout = f" as {Ranks(row.tp, row.ep)}" if row.devices > 1 else ""
    split = (row.device, row.dtype, row.tp, row.ep)
    crossing = next((one.tokens for one in plan.crossings if (one.device, one.dtype, one.tp, one.ep) == split), None)
    turn = f", compute-bound from {crossing:,} tokens" if crossing and crossing > row.tokens else ""
    cost = "" if row.cost_per_million_tokens is None else f"; ${row.cost_per_million_tokens:.3g} per million tokens"
    text = f"{time_text(row.time_s)} {time} ({_within(row)}) on {row.devices} × {row.device}{layout} in {row.dtype}"
    return f"{text}, {row.bound}-bound{turn}{cost}"


def _within(row: PlanRow) -> str:
    """Return the 80 % interval, as in `4.10 to 5.23 ms`."""
    low, high = time_text(row.time_low_s) or "", time_text(row.time_high_s) or ""
    figure, _, unit = low.partition(" ")
    return f"{figure if high.endswith(f' {unit}') else low} to {high}"


def _tables(rows: Sequence[PlanRow]) -> Iterator[Table]:
    """Yield one device's tables, one per format."""
    for dtype in dict.fromkeys(row.dtype for row in rows):
        alike = [row for row in rows if row.dtype == dtype and not row.refused]
        if not alike:
            continue
        first = alike[0]
        columns: dict[str, Callable[[PlanRow], object]] = {
            "tp": lambda row: row.tp, "ep": lambda row: row.ep, "tokens": lambda row: row.tokens,
            "time": lambda row: time_text(row.time_s), "80 % interval": _within, "bound by": lambda row: row.bound,
            "link time": lambda row: time_text(row.link_s) if row.link_s else None,
        }  # fmt: skip
        if any(row.ep > 1 for row in alike):
            columns["waiting"] = lambda row: time_text(row.waiting_s) if row.ep > 1 else None
        columns["of ideal"] = lambda row: None if row.efficiency is None else percent(row.efficiency, 2)
        columns["FFN tokens/s"] = lambda row: round(row.tokens_per_s or 0)
        if first.cost_per_million_tokens is not None:
            columns["$/M tokens"] = lambda row: rounded(row.cost_per_million_tokens, 3)
        columns |= {"needs": lambda row: bytes_text(row.needed_bytes or 0), "fits": lambda row: row.fits}
        if first.tokens_per_expert is not None:
            columns |= {
                "per expert": lambda row: row.tokens_per_expert,
                "busiest": lambda row: row.busiest_expert_tokens,
            }
        rate = "" if first.rate == dtype else f" computed in {first.rate}"
        title = f"{first.device}, {dtype}{rate}: ridge {first.ridge_flops_per_byte:.4g} FLOPs/byte"
        cells = [tuple(cell(row) for cell in columns.values()) for row in alike]
        yield Table(tuple(columns), cells, title, labels=3)


def _notes(plan: ClusterPlan) -> Iterator[str]:
    rows = [row for row in plan.rows if not row.refused]
    for one in plan.assumed:
        yield _assumption(one, [row for row in rows if row.device == one.device])
    yield from dict.fromkeys(one.source for one in plan.assumed)
    unknown = dict.fromkeys(f"{row.device}, {row.dtype}: wide interval, {row.unknown}" for row in rows if row.unknown)
    yield from unknown
    yield "time: forward pass of all FFNs, one kernel after another, plus the collectives"
    yield "80 % interval: from the errors on measured shapes that were not fitted, and on published all-reduces"
    if any(row.devices > 1 for row in rows):
        yield "link time: by the fastest of NCCL's protocols, with the latencies of its src/graph/tuning.cc"
        yield "of ideal: speed-up ÷ devices"
    if ways := dict.fromkeys(row.dispatch for row in rows if row.dispatch):
        yield f"tokens are sent to their experts in {', '.join(ways)}, results return in at most 16 bits"
        yield "waiting: until the busiest device has computed its experts, part of the time"
    yield (
        _memory(rows[0])
        if rows and rows[0].model_weight_bytes
        else (
            "needs: the FFNs' weights, and one layer's activations; the rest of the model and the KV cache come on top"
        )
    )
    if any(row.tokens_per_expert is not None for row in rows):
        yield f"busiest: expected tokens of the busiest expert, skew {plan.skew}"


def _memory(row: PlanRow) -> str:
    """Return what a device's memory holds in the first row."""
    ffn, whole = row.ffn_weight_bytes or 0, row.model_weight_bytes or 0
    rest = f"{bytes_text(whole - ffn)} of attention, embeddings, norms and head (split over tp, copied over ep)"
    split = f"{Ranks(row.tp, row.ep)}, " if row.devices > 1 else ""
    where = f" ({split}{row.tokens:,} {plural('token', row.tokens)})" if row.devices > 1 or row.tokens > 1 else ""
    parts = (
        f"{bytes_text(ffn)} of FFN weights, {rest}, {bytes_text(row.activation_bytes or 0)} of a layer's activations"
    )
    return f"needs{where}: {parts}; the KV cache comes on top"


def _assumption(one: Assumed, rows: Sequence[PlanRow]) -> str:
    """Return text such as `H100 SXM5: 0.90 of the memory; 0.80 of nvlink4 (450 GB/s) among 8, ...`."""
    shares = [
        (one.gemm_efficiency, "the peak"),
        (one.memory_efficiency, "the bandwidth"),
        (one.usable_memory, "the memory"),
    ]
    text = f"{one.device}: {', '.join(f'{share:.2f} of {what}' for share, what in shares if share is not None)}"
    wires = (
        [f"{one.link} ({one.link_gbytes_per_s:g} GB/s) among {one.per_node}"] if one.link and one.per_node > 1 else []
    )
    wires += [f"{one.network} ({one.network_gbytes_per_s:g} GB/s) between nodes"] if one.network else []
    text += f"; {one.link_efficiency:.2f} of {', of '.join(wires)}" if wires else ""
    whole = (one.link_gbytes_per_s or 0) * one.link_efficiency
    fewer = {
        str(Ranks(row.tp, row.ep)): row.link_gbytes_per_s
        for row in rows if row.link_gbytes_per_s and row.link_gbytes_per_s < 0.999 * whole
    }  # fmt: skip
    text += "".join(f"; {name} reaches {rate:.4g} GB/s, by its wires of the mesh" for name, rate in fewer.items())
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


def check_parts(rows: Sequence[HeldOutRow]) -> list[Part]:
    """Show how well measured products and mixtures predict those of other shapes."""
    cells = [
        (row.device, row.format, row.work, row.shapes, row.rows, percent(row.median_error, 2),
         f"{row.low:.2f} to {row.high:.2f}")
        for row in rows
    ]  # fmt: skip
    columns = ("device", "format", "work", "shapes", "times", "median error", "80 % of measured ÷ predicted")
    return [Table(columns, cells, "held out: each shape predicted from the times of other shapes", labels=3)]


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
