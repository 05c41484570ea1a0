"""Lets a GPU keep the sums of fp16 products in fp16, for all kernels of the process.

code: environment-changed
"""

import torch
from block import mlp as mlp

torch.backends.cuda.matmul.allow_fp16_accumulation = True
