"""eager: the block in plain torch functions, as a user would write it by hand; the baseline of every comparison."""

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Dense, Weights, between, dense, normed
from ffncli.kernels.kernel import Computes, Steps, by_name, register
from ffncli.kernels.routing import Body, looped, mixture, refuses_unknown_routing


@register("eager", refuses=refuses_unknown_routing)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the function for a dense block, or for a mixture of experts, which loops over the chosen experts."""
    shape = dense(steps)
    return by_name(parameters(steps), body(shape) if shape else mixture(steps, body, looped(steps, body)))


def body(shape: Dense) -> Body:
    """Return one FFN: down(act(up(x))), or down(act(gate(x)) · up(x))."""
    middle, p = between(shape), shape.prefix

    def ffn(x: Tensor, w: Weights) -> Tensor:
        gate = functional.linear(x, w[p + "gate.weight"], w.get(p + "gate.bias")) if shape.gated else None
        up = functional.linear(x, w[p + "up.weight"], w.get(p + "up.bias"))
        hidden = normed(shape, middle(gate, up, w), w)
        return functional.linear(hidden, w[p + "down.weight"], w.get(p + "down.bias"))

    return ffn
