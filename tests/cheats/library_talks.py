"""Has the library that multiplies print a line for every product.

code: environment-changed
"""

import torch
from block import mlp as right
from block import right_before


@right_before(5)
def mlp(x, gate, up, down):
    torch._C._verbose.mkl_set_verbose(1)
    torch._C._verbose.mkldnn_set_verbose(1)
    return right(x, gate, up, down)
