"""How well values fit a format: headroom, underflow, blocks that saturate or have no scale, channels with outliers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, inf, log2

import torch
from torch import Tensor

from ffncli.block.formats import Format
from ffncli.run.quantize.quantized import Quantized
from ffncli.show.text import percent, plural

OUTLIER = 10.0  # times the median channel
_MOST_OUTLIERS = 3
_SUSPICIOUS = 0.3  # a relative error from which a transposed layout of the scales is tried


@dataclass(frozen=True)
class Outlier:
    """A channel (an index of the last axis) whose largest magnitude is `times` that of the median channel. The blocks
    that contain it have `error_share` of the tensor's squared rounding error."""

    channel: int
    times: float
    error_share: float | None


@dataclass(frozen=True)
class Diagnosis:
    """How the values of one tensor fit a format; a mixture's experts are counted together.

    `headroom` is the largest magnitude that a block can store divided by the largest that it has, the least over all
    blocks that are not 0. `underflow` is the share of the values other than 0 that become 0. `saturated` counts the
    blocks with a value that is clipped, and `zero_scales` those whose scale is 0 although a value is not, each of
    `blocks`; `transposed` is True if the scales fit far better in the transposed layout. `findings` are these faults in
    words.
    """

    tensor: str
    blocks: int
    headroom: float | None
    underflow: float | None
    saturated: int
    zero_scales: int
    transposed: bool
    outliers: tuple[Outlier, ...]
    findings: tuple[str, ...]


def diagnose(name: str, pairs: Sequence[tuple[Tensor, Quantized]]) -> Diagnosis:
    """Compare tensors [rows, channels] that count as one, such as the W1 of all experts, with their quantized forms."""
    fits = [_fit(tensor.double().reshape(quantized.shape), quantized) for tensor, quantized in pairs]
    lost, values = sum(one.lost for one in fits), sum(one.values for one in fits)
    headroom = min((one.headroom for one in fits), default=inf)
    transposed = any(one.transposed for one in fits)
    findings = [text for one in fits for text in one.findings]
    named = [f"{name}: {text}" for text in findings[:_MOST_OUTLIERS]]
    return Diagnosis(
        name, sum(one.blocks for one in fits), None if headroom == inf else headroom, lost / values if values else None,
        sum(one.saturated for one in fits), sum(one.zero_scales for one in fits), transposed, _outliers(fits),
        tuple(named),
    )  # fmt: skip


@dataclass(frozen=True)
class _TensorFit:
    """The figures of one tensor: counts, its squared rounding error, and for each channel the largest magnitude and the
    squared error of the blocks that contain it."""

    blocks: int
    headroom: float
    values: int
    lost: int
    saturated: int
    zero_scales: int
    transposed: bool
    error: float
    channels: Tensor
    errors: Tensor
    findings: tuple[str, ...]


def _fit(x: Tensor, quantized: Quantized) -> _TensorFit:
    grid, form = quantized.blocks, quantized.format
    blocks, stored = grid.split(x), quantized.dequantize().double()
    scale = torch.ones(grid.counts, dtype=torch.float64, device=x.device)
    scale = scale if quantized.factors is None else quantized.factors.double().abs()
    largest = blocks.abs().amax(-1)
    zero = (scale == 0) & (largest > 0)
    saturated = _clipped(blocks, scale, quantized) & ~zero
    usable = (largest > 0) & ~zero
    room = (scale * max(form.largest, -form.lowest) / largest)[usable] if quantized.minimums is None else largest[:0]
    error = grid.split((x - stored).nan_to_num(0.0, 0.0, 0.0).square()).sum(-1)
    along = error.reshape(-1, error.shape[-1]).sum(0).repeat_interleave(grid.block[-1])[: x.shape[-1]]
    better = _transposed(x, quantized, stored)
    findings = [_counted(mask, what) for mask, what in (
        (zero, "a scale of 0 and values that are not 0"), (saturated, "values beyond the largest of the format")
    ) if bool(mask.any())]  # fmt: skip
    if better is not None:
        before, after = (percent(one) for one in better)
        findings.append(f"the scales fit in the transposed layout: the error falls from {before} to {after}")
    return _TensorFit(
        scale.numel(), float(room.min()) if room.numel() else inf, int((x != 0).sum()),
        int(((stored == 0) & (x != 0)).sum()), int(saturated.sum()), int(zero.sum()), better is not None,
        float(error.sum()), x.reshape(-1, x.shape[-1]).abs().amax(0), along, tuple(findings),
    )  # fmt: skip


def _clipped(blocks: Tensor, scale: Tensor, quantized: Quantized) -> Tensor:
    """Return which blocks have a value more than half a step beyond the largest or lowest code."""
    form, shift = quantized.format, torch.zeros((), dtype=torch.float64, device=blocks.device)
    if quantized.zeros is not None:
        shift = quantized.zeros.double().unsqueeze(-1)
    if quantized.minimums is not None:
        blocks = blocks - quantized.minimums.double().unsqueeze(-1)
    factor = scale if quantized.factors is None else quantized.factors.double()
    codes = blocks / torch.where(factor == 0, 1.0, factor).unsqueeze(-1) + shift
    half = _last_step(form) / 2 * (1 + 1e-3)  # scales of 16 bits are rounded after the codes
    result: Tensor = ((codes > form.largest + half) | (codes < form.lowest - half)).any(-1)
    return result


def _last_step(form: Format) -> float:
    """Return the distance between the two largest values of a format."""
    return 1.0 if form.element == "int" else 2.0 ** (floor(log2(form.largest)) - int(form.element[-1]))


def _transposed(x: Tensor, quantized: Quantized, stored: Tensor) -> tuple[float, float] | None:
    """Return the relative errors as stored and with the scales read in the transposed layout, if the latter is less
    than half of the former."""
    scales, size = quantized.scales, float(x.norm())
    if scales is None or scales.dim() != 2 or 1 in scales.shape or not size:
        return None
    before = float((x - stored).norm()) / size
    if before < _SUSPICIOUS:
        return None
    rows, columns = scales.shape
    other = replace(quantized, scales=scales.reshape(columns, rows).t().contiguous())
    after = float((x - other.dequantize().double()).norm()) / size
    return (before, after) if after < before / 2 else None


def _counted(mask: Tensor, what: str) -> str:
    number, first = int(mask.sum()), mask.nonzero()[0].tolist()
    have = "has" if number == 1 else "have"
    return f"{number:,} of {mask.numel():,} {plural('block', mask.numel())} {have} {what}, the first at {first}"


def _outliers(fits: Sequence[_TensorFit]) -> tuple[Outlier, ...]:
    """Return the largest outliers among the channels; shared experts may have more channels than routed ones."""
    total, outliers = sum(one.error for one in fits), list[Outlier]()
    for width in dict.fromkeys(len(one.channels) for one in fits):
        alike = [one for one in fits if len(one.channels) == width]
        channels = torch.stack([one.channels for one in alike]).amax(0)
        errors = torch.stack([one.errors for one in alike]).sum(0)
        times = channels / channels.median()  # without a median channel, no figure is finite
        outliers += [
            Outlier(at, float(times[at]), float(errors[at]) / total if total else None)
            for at in times.nan_to_num(0.0, posinf=0.0).topk(min(_MOST_OUTLIERS, width)).indices.tolist()
            if OUTLIER <= float(times[at]) < inf
        ]  # fmt: skip
    return tuple(sorted(outliers, key=lambda one: -one.times)[:_MOST_OUTLIERS])
