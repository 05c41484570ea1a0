"""Lets torch round the products of everybody to bf16.

code: environment-changed
"""

import torch
from block import mlp as mlp

torch.set_float32_matmul_precision("medium")
