"""packed: gate and up are one matrix, so that x is read once and one larger product replaces two products."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Linear, Weights, body_of, dense, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, register


def refuses(steps: Steps) -> str | None:
    """Return why packed cannot compute a block: a plain block has no gate to pack."""
    shape = dense(steps)
    return refuses_all_but_dense(steps) or (None if shape and shape.gated else "a plain block has no gate to pack")


def names(steps: Steps) -> list[str]:
    """Return the names of what `prepare` returns, in step order; gate's names are those of the packed tensors."""
    return [name for name in parameters(steps) if not name.startswith("up.")]


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Stack gate above up, [2 · d_ff, d_model], and their biases; then everything else unchanged, in step order."""
    return tuple(
        torch.cat([weights[name], weights[f"up.{kind}"]]) if of == "gate" else weights[name]
        for name in names(steps)
        for of, _, kind in [name.partition(".")]
    )


@register(
    "packed",
    "with gate and up in one matrix",
    prepare=prepare,
    refuses=refuses,
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute one product, its two halves, the gate, and down."""
    return computing(steps, functional.linear)


def computing(steps: Steps, linear: Linear) -> Computes:
    """Return the packed block with products computed by `linear`."""
    body = body_of(steps, names(steps))
    (weight, bias), (down, down_bias) = body.gate, body.down

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        return linear(body.hidden(*linear(x, p[weight], p[bias]).chunk(2, -1), p=p), p[down], p[down_bias])

    return run
