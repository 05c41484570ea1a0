"""eager: the block in plain torch functions, as a user would write it by hand; the baseline of every comparison."""

import torch
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Body, dense, places
from ffncli.kernels.kernel import Computes, Steps, register
from ffncli.kernels.routing import looped, mixture, refuses_unknown_routing


@register(
    "eager",
    "in plain torch functions, as written by hand; this is the baseline",
    refuses=refuses_unknown_routing,
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the function for a dense block, or for a mixture of experts, which loops over the chosen experts."""
    shape, place = dense(steps), places(parameters(steps))
    return Body(shape, place).nested(functional.linear) if shape else mixture(steps, place, dtype, looped(steps, place))
