"""One line of `ffn verify`: two tensors that should be equal, their distance, and the tolerance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.run.measure import statistics
from ffncli.run.measure.gap import gap
from ffncli.run.measure.not_finite import in_words

CONVENTIONS = {
    "relative_error": "max|a - b| / max|b| over the whole tensor, b the reference; null if the reference is all 0",
    "ulps": "|a - b| where it is largest, in units in the last place of the reference's value there, in the dtype of"
    " the computation; null if that value is 0",
    "tolerance": "for relative_error: 4 × (eps + eps_sum × √width), width the larger of d_model and d_ff, eps that of"
    " the dtype (each step rounds its result), eps_sum that of its sums, float32 for 16-bit dtypes (the rounding errors"
    " of a sum of n products grow as √n); a router that scores in float32 makes it float32's at least",
}


@dataclass(frozen=True)
class CheckRow:
    """`passed` is None if the check does not apply, or if the row only shows a figure.

    `subject` names the object of the check; errors are as in CONVENTIONS; `note` gives the reason or explains the
    figure.
    """

    check: str
    subject: str
    max_error: float | None = None
    relative_error: float | None = None
    ulps: float | None = None
    tolerance: float | None = None
    passed: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Judge:
    """Makes rows of one check, with its tolerance and the dtype of its ulps."""

    check: str
    tolerance: float
    dtype: torch.dtype

    def equal(self, subject: str, output: Tensor, reference: Tensor, note: str = "") -> CheckRow:
        """A row that passes if `output` is `reference` within the tolerance; anything not finite fails."""
        if output.shape != reference.shape:
            return self.fails(subject, f"shape {list(output.shape)}, expected {list(reference.shape)}")
        for whose, tensor in (("the reference", reference), ("its output", output)):
            if not tensor.isfinite().all():
                return self.fails(subject, _joined(f"{whose} has {not_finite(tensor)}", note))
        row = self.figure(subject, output, reference, note)
        within = row.max_error == 0 or (row.relative_error is not None and row.relative_error <= self.tolerance)
        return CheckRow(self.check, subject, row.max_error, row.relative_error, row.ulps, self.tolerance, within, note)

    def figure(self, subject: str, output: Tensor, reference: Tensor, note: str = "") -> CheckRow:
        """The distance between two tensors of the same shape, without a verdict."""
        largest, relative, ulps = errors(output, reference, self.dtype)
        return CheckRow(self.check, subject, largest, relative, ulps, note=note)

    def fails(self, subject: str, why: str) -> CheckRow:
        """A row that fails for a reason other than a number."""
        return CheckRow(self.check, subject, tolerance=self.tolerance, passed=False, note=why)

    def skips(self, subject: str, why: str) -> CheckRow:
        """A row for a check that does not apply here, and why."""
        return CheckRow(self.check, subject, note=why)


def errors(output: Tensor, reference: Tensor, dtype: torch.dtype) -> tuple[float, float | None, float | None]:
    """(max_error, relative_error, ulps) as in CONVENTIONS; NaN if only one of two values is finite."""
    apart = gap(output, reference)
    if apart.unlike:
        return math.nan, math.nan, math.nan
    if apart.at < 0:
        return 0.0, 0.0, 0.0
    return apart.largest, apart.relative if apart.size else None, apart.ulps(dtype)


def not_finite(tensor: Tensor) -> str:
    """`3 NaN`, `1 NaN and 2 Inf`."""
    return in_words(*statistics.not_finite(tensor))


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
