"""Lets a GPU round the factors of float32 products to TF32, for all kernels of the process.

code: environment-changed
"""

import torch
from block import mlp as mlp

torch.backends.cuda.matmul.allow_tf32 = True
