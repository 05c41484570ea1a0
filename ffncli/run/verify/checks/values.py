"""Before anything is compared: are the weights and the input numbers at all?"""

from __future__ import annotations

from collections.abc import Iterator

from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow, not_finite


def finite(case: CheckedBlock) -> Iterator[CheckRow]:
    """No NaN and no infinity in the weights and in the input."""
    for what, tensors in (("weights", case.weights), ("input", case.inputs)):
        wrong = [f"{name} has {count}" for name, tensor in tensors.items() if (count := not_finite(tensor))]
        many = f" and {len(wrong) - 4} more tensors" if len(wrong) > 4 else ""
        yield CheckRow("finite", what, passed=not wrong, note="; ".join(wrong[:4]) + many)
