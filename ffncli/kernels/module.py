"""module: the block as an nn.Module of nn.Linear layers, as one writes it in a notebook."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ffncli.block.steps import Axis, parameters
from ffncli.kernels.between import between, normed
from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.pattern import Dense, dense, refuses_all_but_dense


class FeedForward(nn.Module):
    """Two nn.Linear, or three where there is a gate; what lies between them is a function.

    It is made without weights: `fill` puts tensors in their place, before it is called.
    """

    def __init__(self, shape: Dense, axes: dict[str, tuple[Axis, ...]]) -> None:
        super().__init__()
        for name in ("gate", "up", "down") if shape.gated else ("up", "down"):
            out, into = axes[f"{name}.weight"]
            self.add_module(name, nn.Linear(into.size, out.size, f"{name}.bias" in axes, device="meta"))
        self.shape, self.between = shape, between(shape)
        self.others: dict[str, Tensor] = {}  # what an activation learns, a norm's parameters

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, d_model] → [tokens, d_model]."""
        gate = self.gate(x) if self.shape.gated else None
        hidden = normed(self.shape, self.between(gate, self.up(x), self.others), self.others)
        out: Tensor = self.down(hidden)
        return out


@register("module", refuses=refuses_all_but_dense)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """The module called on x. Its parameters are looked up as a module's are, and replaced where others are given."""
    shape, axes = dense(steps), parameters(steps)
    assert shape is not None
    module = FeedForward(shape, axes).eval()
    places = [_place(module, name) for name in axes]
    last: list[Params] = [()]

    def run(x: Tensor, params: Params) -> Tensor:
        # Written where torch looks them up: assigning attributes, or torch.func.functional_call, takes some 20 µs at
        # each call, which no module in a notebook spends. Gradients flow to the tensors themselves.
        if params is not last[0]:
            for (home, name), tensor in zip(places, params, strict=True):
                home[name] = tensor
            last[0] = params
        out: Tensor = module(x)
        return out

    return run


def _place(module: FeedForward, name: str) -> tuple[dict[str, Tensor], str]:
    """The dict, and the key in it, where the module has that parameter."""
    layer, _, own = name.rpartition(".")
    found = getattr(module, layer, None)
    return (found._parameters, own) if isinstance(found, nn.Linear) else (module.others, name)  # type: ignore[return-value]
