"""Mixtures whose experts are computed together: gate and up of all experts in one tensor, down of all in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Experts, Step, parameters
from ffncli.kernels.between import Weights, between
from ffncli.kernels.eager import body
from ffncli.kernels.kernel import Computes, Params, Steps
from ffncli.kernels.routing import Summed, mixture, refuses_unknown_routing, routed_experts

Product = Callable[[Tensor, Tensor], Tensor]  # (rows [n, in], matrices of all experts [experts, out, in]) → [n, out]
Made = Callable[[Tensor, Tensor, Weights, Product], Tensor]
_MULTIPLE = 8  # of widths: torch's grouped products need strides of 16 bytes, forward and backward, in every dtype
_PARTS = tuple(f"{name}.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias"))
_STACKED = ("inward.weight", "inward.bias", "down.weight", "down.bias")


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block: it needs a mixture whose experts differ in matrices and biases alone."""
    ops = [step.op for step in steps if isinstance(step.op, Experts)]
    if not ops:
        return "a dense block has no experts"
    others = (name for op in ops for name in op.parameters() if name not in _PARTS and not op.is_common(name))
    name = next(others, None)
    return refuses_unknown_routing(steps) or (name and f"cannot compute experts with a {name} of each")


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """gate above up and down, [experts, out, in], with zeros up to the next multiple, and their biases [experts, out];
    then everything else unchanged, in step order."""
    stacked = _stacked(steps, weights)
    return (*stacked.values(), *(weights[name] for name in _others(steps)))


def _stacked(steps: Steps, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `_STACKED` that the experts have; a mixture whose shared experts are routed has them last."""
    parts = {}
    for name in _PARTS:
        of_steps = [weights[step.prefix + name] for step in _sources(steps) if name in step.op.parameters()]
        if of_steps:
            parts[name] = padded(of_steps[0] if len(of_steps) == 1 else torch.cat(of_steps), 1)
    for kind in ("weight", "bias"):
        inward = [parts.pop(f"{name}.{kind}") for name in ("gate", "up") if f"{name}.{kind}" in parts]
        if inward:
            parts[f"inward.{kind}"] = inward[0] if len(inward) == 1 else torch.cat(inward, 1)
    return {name: padded(parts[name], -1) for name in _STACKED if name in parts}


def _sources(steps: Steps) -> tuple[Step, ...]:
    return routed_experts(steps).sources


def _others(steps: Steps) -> list[str]:
    """The parameters that are not stacked, in step order."""
    stacked = {step.prefix + name for step in _sources(steps) for name in _PARTS}
    return [name for name in parameters(steps) if name not in stacked]


def padded(x: Tensor, axis: int) -> Tensor:
    """x with zeros at the end of an axis, up to the next multiple; x itself if that is its size."""
    missing = -x.shape[axis] % _MULTIPLE
    after = x.dim() - 1 - axis % x.dim()  # functional.pad counts from the last axis
    return functional.pad(x, (0, 0) * after + (0, missing)) if missing else x


def stacked_mixture(steps: Steps, summed: Callable[[Made, bool], Summed]) -> Computes:
    """The function of a kernel that computes all experts together.

    `summed` makes the sum over the chosen experts from (what makes rows of tokens the outputs of their experts; whether
    the route's weight multiplies these, or else the rows).
    """
    names = [name for name in _STACKED if name in _names_of(steps)] + _others(steps)
    compute = mixture(steps, body, summed(experts_together(steps), routed_experts(steps).weigh == "output"))

    def run(x: Tensor, params: Params) -> Tensor:
        return compute(x, dict(zip(names, params, strict=True)))

    return run


def _names_of(steps: Steps) -> set[str]:
    parts = {name for step in _sources(steps) for name in step.op.parameters()}
    return parts | {f"inward.{kind}" for kind in ("weight", "bias") if f"up.{kind}" in parts}


def experts_together(steps: Steps) -> Made:
    """made(rows [n, width], expert of each row [n], weights, product) → the outputs of the experts [n, width]."""
    experts = routed_experts(steps)
    middle, gated = between(experts.shape), experts.shape.gated
    d_ff = next(axes[-1].size for name, axes in experts.sources[0].op.parameters().items() if name == "down.weight")

    def made(rows: Tensor, expert: Tensor, w: Weights, product: Product) -> Tensor:
        inward = _with_bias(product(padded(rows, -1), w["inward.weight"]), expert, w.get("inward.bias"))
        gate, up = inward.chunk(2, -1) if gated else (None, inward)
        hidden = middle(None if gate is None else gate[:, :d_ff], up[:, :d_ff], w)
        out = _with_bias(product(padded(hidden, -1), w["down.weight"]), expert, w.get("down.bias"))
        return experts.normed(out[:, : rows.shape[1]], w)

    return made


def _with_bias(x: Tensor, expert: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.index_select(0, expert)
