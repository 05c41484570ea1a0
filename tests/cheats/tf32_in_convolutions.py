"""Lets cuDNN round the factors of float32 convolutions to TF32, for all kernels of the process.

code: environment-changed
"""

import torch
from block import mlp as mlp

torch.backends.cudnn.allow_tf32 = True
