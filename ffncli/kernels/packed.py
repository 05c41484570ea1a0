"""packed: gate and up are one matrix, so that x is read once and one larger product replaces two products."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Weights, between, dense, dense_block, normed, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, by_name, register


def refuses(steps: Steps) -> str | None:
    """Return why packed cannot compute a block: a plain block has no gate to pack."""
    shape = dense(steps)
    return refuses_all_but_dense(steps) or (None if shape and shape.gated else "a plain block has no gate to pack")


def _names(steps: Steps) -> tuple[list[str], list[str]]:
    """Return two lists of names: the packed parameters (weight, and bias if there is one), and the other parameters in
    step order."""
    every = list(parameters(steps))
    return (
        [name.removeprefix("gate.") for name in every if name.startswith("gate.")],
        [name for name in every if not name.startswith(("gate.", "up."))],
    )


def names(steps: Steps) -> list[str]:
    """Return the names of the tensors that `prepare` returns; `weight` and `bias` are the packed tensors."""
    together, rest = _names(steps)
    return [*together, *rest]


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Stack gate above up, [2 · d_ff, d_model], and their biases; then everything else unchanged, in step order."""
    packed, rest = _names(steps)
    together = [torch.cat([weights[f"gate.{name}"], weights[f"up.{name}"]]) for name in packed]
    return (*together, *(weights[name] for name in rest))


@register("packed", prepare=prepare, refuses=refuses)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute one product, its two halves, the gate, and down."""
    return computing(steps, functional.linear)


def computing(steps: Steps, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Computes:
    """Return the packed block with products computed by `linear(x, weight, bias)`."""
    shape = dense_block(steps)
    middle = between(shape)

    def run(x: Tensor, w: Weights) -> Tensor:
        gate, up = linear(x, w["weight"], w.get("bias")).chunk(2, -1)
        return linear(normed(shape, middle(gate, up, w), w), w["down.weight"], w.get("down.bias"))

    return by_name(names(steps), run)
