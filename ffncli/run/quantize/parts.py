"""What a writer returns: the codes of blocks, and what the values of each block share."""

from typing import NamedTuple

import torch
from torch import Tensor

# Elements that torch has a dtype for.
PLAIN = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e5m10": torch.float16, "e8m7": torch.bfloat16
}  # fmt: skip


class Parts(NamedTuple):
    """Codes [*counts, values of a block]; scales, zeros and minimums [*counts]; a scale of the whole tensor [1]."""

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    tensor_scale: Tensor | None = None


def without_nan(x: Tensor) -> Tensor:
    """Replace NaN by 0: 0 / 0, in a block of zeros."""
    return torch.where(x.isnan(), 0, x)
