"""Write integers of 8 and 4 bits with scales, as compressed-tensors does: symmetric, or with zero points."""

import torch
from torch import Tensor

from ffncli.block.formats import Format
from ffncli.run.quantize.parts import Parts, without_nan


def integers(x: Tensor, form: Format) -> Parts:
    """Write signed integers: value ≈ (integer - zero) × scale, computed in the dtype of x.

    Half of the codes are for each sign, so that a symmetric int8 scale is the largest magnitude / 127.5.
    """
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)  # 0 is always a code
    steps = form.largest - form.lowest
    if form.asymmetric:
        scales = (high - low) / steps
        zeros = without_nan(form.lowest - low / scales).clamp(form.lowest, form.largest).round()
    else:
        scales, zeros = torch.maximum(-low, high) / (steps / 2), None
    scales = torch.where(scales == 0, torch.finfo(x.dtype).eps, scales)
    scaled = x / scales.unsqueeze(-1)
    scaled = scaled if zeros is None else scaled + zeros.unsqueeze(-1)
    codes = scaled.clamp(form.lowest, form.largest).round().to(torch.int8)
    return Parts(codes, scales, None if zeros is None else zeros.to(torch.int8))
