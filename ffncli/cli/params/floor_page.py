"""The time floors of `ffn params --ridge DEVICE` as a table, with the data sheets that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ffncli.show.parts import Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import bytes_text, time_text

if TYPE_CHECKING:
    from ffncli.models.counting.device_floor import DeviceFloor
    from ffncli.models.counting.figures import CostReport, Ridge


def floor_parts(report: CostReport, several: bool) -> list[Part]:
    """One source: a row for each device and number of tokens, then a line for each device."""
    if not report.devices:
        return []
    count = report.count
    who = f"{count.name}: " if several else ""
    if not report.floors:
        return [Line(f"{who}no time floor: nothing says how many experts work on a token")]
    ranks = report.floors[0].ranks
    split = f", one of {ranks} ranks" if ranks > 1 else ""
    title = f"{who}time floor, weights {count.dtype}, all layers' FFNs forward{split}"
    memory = (
        [] if ranks > 1 else ["FFN weights" if count.model_weight_bytes is None else "whole model", "memory", "fits"]
    )
    columns = ("device", "tokens", "bound by", "time floor", "FLOPs/byte", "ridge", *memory)
    rows = [(*_row(one), *(_memory(one) if memory else ())) for one in report.floors]
    return [Table(columns, rows, title, labels=2), *_lines(report)]


def _row(one: DeviceFloor) -> tuple[object, ...]:
    ridge = None if one.ridge_flops_per_byte is None else f"{one.ridge_flops_per_byte:.4g}"
    return (one.device, one.tokens, one.bound, time_text(one.floor_s), f"{one.flops_per_byte:.4g}", ridge)


def _memory(one: DeviceFloor) -> tuple[object, ...]:
    """What the device has to hold, what it can, and whether that is enough."""
    memory = None if one.memory_bytes is None else bytes_text(one.memory_bytes)
    return (None if one.needed_bytes is None else bytes_text(one.needed_bytes), memory, one.fits)


def _lines(report: CostReport) -> Iterator[Line]:
    """Each device's rates and their source, and from how many tokens on it is compute bound."""
    ridges = {ridge.device: ridge for ridge in report.ridges}
    for one in {floor.device: floor for floor in report.floors}.values():
        rates = f"{one.bytes_per_s / 1e9:,.0f} GB/s"
        if one.peak_flops_per_s is None:
            rates += ", no rate published for these weights"
        else:
            rates = f"{one.peak_flops_per_s / 1e12:,.4g} TFLOP/s in {one.rate}, {rates}"
        accuracy = ", good to 10 %" if one.approximate else ""
        yield Line(f"{one.device}: {rates} ({one.source}{accuracy}){_reached(ridges.get(one.device))}", quiet=True)
    yield Line("floor: the least traffic at full rates, without attention and without time between devices", quiet=True)
    if any(one.fits is not None for one in report.floors):
        yield Line("fits: the weights alone; caches and activations need room too", quiet=True)


def _reached(ridge: Ridge | None) -> str:
    if ridge is None:
        return ""
    if ridge.ridge_tokens_fused is None:
        return "; never compute bound"
    return f"; compute bound from {ridge.ridge_tokens_fused:,} tokens on"
