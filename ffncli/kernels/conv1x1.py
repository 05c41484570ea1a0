"""conv1x1: every Linear as a convolution of width 1 over [batch, d_model, tokens], which computes the same numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.kernels.dense import body_of, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, canonical, register


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return matrices [out, in] as convolution weights [out, in, 1]; leave all other weights unchanged."""
    return tuple(tensor[..., None] if tensor.dim() == 2 else tensor for tensor in canonical(steps, weights))


@register(
    "conv1x1",
    "with convolutions of width 1 instead of matrix products",
    prepare=prepare,
    refuses=refuses_all_but_dense,
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Map x [tokens, d_model] → [1, d_model, tokens] → two or three convolutions → [tokens, d_model]."""
    body = body_of(steps)
    norm = body.norm
    body.norm = lambda x, p: norm(x.mT, p).mT  # it is over d_ff, which is the second axis here
    compute = body.nested(functional.conv1d)

    def run(x: Tensor, params: Params) -> Tensor:
        return compute(x.T[None], params)[0].T

    return run
