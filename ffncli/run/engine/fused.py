"""One fused matrix cut into gate and up the wrong way, a common mistake in ports: the resulting tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def halves_by_turns(first: Tensor, second: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Two tensors concatenated along `axis`, read as alternating: [0, 1], [2, 3] → [0, 2], [1, 3]."""
    rows = torch.cat([first, second], axis).movedim(axis, 0)
    return rows[::2].movedim(0, axis).contiguous(), rows[1::2].movedim(0, axis).contiguous()


def turns_as_halves(first: Tensor, second: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Two tensors interleaved along `axis`, cut in the middle: [0, 2], [1, 3] → [0, 1], [2, 3]."""
    rows = torch.stack([first.movedim(axis, 0), second.movedim(axis, 0)], 1).flatten(0, 1)
    half = len(first.movedim(axis, 0))
    return rows[:half].movedim(0, axis).contiguous(), rows[half:].movedim(0, axis).contiguous()
