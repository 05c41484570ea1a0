"""The router that is an MLP: it narrows its input, adds the state of the router before, and scores through two layers.

Facts: transformers 5.23, `modeling_zaya.py`.
"""

from __future__ import annotations

from ffncli.block.steps import Activation, Add, Axis, Linear, Multiply, Norm, Step

STATE = "previous_router_state"  # a further input of the block


def router_steps(x: str, d_model: Axis, experts: Axis, norm: Norm, carries: bool) -> list[Step]:
    """From the router's input `x` to `router`, its logits; with `carries` the layer before passes on its state."""
    width = norm.axis
    body = [Step("router_in", Linear(d_model, width, bias=True), (x,))]
    if carries:
        body.append(Step("router_carried", Multiply(learned=width), (STATE,)))
        body.append(Step("router_state", Add(), ("router_in", "router_carried")))
    body.append(Step("router_norm", norm, (body[-1].output,)))
    for layer in ("1", "2"):
        body.append(Step(f"router_fc{layer}", Linear(width, width, bias=True), (body[-1].output,)))
        body.append(Step(f"router_act{layer}", Activation("gelu"), (body[-1].output,)))
    return [*body, Step("router", Linear(width, experts), (body[-1].output,))]
