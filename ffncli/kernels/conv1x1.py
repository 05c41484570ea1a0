"""conv1x1: every Linear as a convolution of width 1 over [batch, d_model, tokens], which computes the same numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Weights, between, dense_block, normed, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, by_name, canonical, register


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return matrices [out, in] as convolution weights [out, in, 1]; leave all other weights unchanged."""
    return tuple(tensor[..., None] if tensor.dim() == 2 else tensor for tensor in canonical(steps, weights))


@register("conv1x1", prepare=prepare, refuses=refuses_all_but_dense)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Map x [tokens, d_model] → [1, d_model, tokens] → two or three convolutions → [tokens, d_model]."""
    shape = dense_block(steps)
    middle = between(shape)

    def run(x: Tensor, w: Weights) -> Tensor:
        turned = x.T[None]  # [1, d_model, tokens]
        gate = functional.conv1d(turned, w["gate.weight"], w.get("gate.bias")) if shape.gated else None
        up = functional.conv1d(turned, w["up.weight"], w.get("up.bias"))
        hidden = normed(shape, middle(gate, up, w).mT, w).mT  # the norm is over d_ff, which is the second axis here
        return functional.conv1d(hidden, w["down.weight"], w.get("down.bias"))[0].T

    return by_name(parameters(steps), run)
