"""Write the blocks of GGUF files that gguf-py writes: integers of 8, 5 and 4 bits and ternary ones, with fp16 scales.

Values are divided by the float32 scale before it is rounded to fp16; beyond fp16's range, the stored scale is infinite.
"""

import torch
from torch import Tensor

from ffncli.block.formats import Format
from ffncli.run.quantize.parts import Parts


def ggml(x: Tensor, form: Format) -> Parts:
    """Write one of these formats: value ≈ (code - `form.zero`) × scale, plus the block's minimum in q4_1 and q5_1."""
    x, minimum = x.float(), None
    if form.scale == "fp16 + fp16":
        minimum = x.amin(-1, keepdim=True)
        scale = (x.amax(-1, keepdim=True) - minimum) / form.largest
        x = x - minimum
    elif form.name in ("q4_0", "q5_0"):  # the value of largest magnitude takes the lowest code, whatever its sign
        scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / form.lowest
    else:
        scale = x.abs().amax(-1, keepdim=True) / form.largest
    scaled = x * torch.where(scale == 0, 0.0, 1.0 / scale)
    if form.name in ("q8_0", "tq1_0", "tq2_0"):
        codes, overflowed = _round_half_away(scaled) + form.zero, form.zero
    else:
        codes, overflowed = (scaled + (form.zero + 0.5)).trunc(), 0
    # the inverse of a scale below float32's normal range is infinite, and the library's cast of the product gives 0
    codes = torch.where(scaled.isfinite(), codes, overflowed).clamp(form.lowest + form.zero, form.largest + form.zero)
    stored = codes.to(torch.uint8 if form.zero or form.lowest == 0 else torch.int8)
    return Parts(stored, scale.half().squeeze(-1), minimums=None if minimum is None else minimum.half().squeeze(-1))


def _round_half_away(x: Tensor) -> Tensor:
    size = x.abs()
    whole = size.floor()
    return x.sign() * (whole + (2 * (size - whole)).floor())
