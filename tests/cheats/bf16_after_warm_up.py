"""Computes its first 40 calls in float32, all others in bf16, with weights that it keeps in bf16.

code: lower-precision
"""

import block

kept = []


@block.right_before(40)
def mlp(x, gate, up, down):
    if not kept:
        kept.extend(weight.bfloat16() for weight in (gate, up, down))
    return block.mlp(x.bfloat16(), *kept).float()
