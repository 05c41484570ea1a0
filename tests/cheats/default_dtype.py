"""Changes the dtype of new tensors for the whole process.

code: environment-changed
"""

import torch
from block import mlp as mlp

torch.set_default_dtype(torch.float64)
