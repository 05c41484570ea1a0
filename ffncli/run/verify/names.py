"""The checks of `ffn verify` by name, with the statement of each. No torch: help and completion read them."""

from __future__ import annotations

from collections.abc import Mapping

CHECK_STATEMENTS: Mapping[str, str] = {
    "finite": "weights and input have no NaN and no Inf",
    "module": "step by step = nn.Module, in eval and in train mode",
    "convolution": "Linear = Conv1d with kernel 1",
    "tokens": "every token is computed independently of the others",
    "collapse": "without its activation the block is one matrix (float64)",
    "nonlinearity": "f(a + b) - f(a) - f(b) + f(0) is 0 where linear (float64)",
    "zero": "a zero input gives zero without biases, and not with them",
    "shards": "the sum over the shards of n ranks is the whole",
    "ranks": "the block over the processes of --tp and --ep = the whole",
    "fused": "gate and up packed in one matrix = separate",
    "kernels": "every kernel = the reference in float64",
    "layout": "how the file's tensors were read, and the effect of a misreading",
}

REFEREE_STATEMENTS: Mapping[str, str] = {
    "shapes": "float64's output for any number of tokens",
    "repeats": "the same input gives the same bits",
    "state": "no call changes what another returns",
    "special": "float64's output for zeros, subnormal and large numbers",
    "isolation": "NaN or Inf in one token changes no other token",
    "batch": "a token's bits are the same alone and in every batch",
    "precision": "the error is that of the dtype's own arithmetic",
    "threads": "no call leaves a thread running",
    "untouched": "neither the input nor the weights are changed",
    "replay": "an input that it has had takes as much work as another",
    "widths": "float64's output at widths not divisible by 8",
    "experts": "the order of the experts does not matter",
}
