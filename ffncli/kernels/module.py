"""module: the block as an nn.Module of nn.Linear layers, as people often write it in a notebook.

`run/verify/module.py` contains another such module on purpose: it is the independent implementation that `ffn verify`
compares the steps with.
"""

import torch
from torch import Tensor, nn

from ffncli.block.steps import Axis, parameters
from ffncli.kernels.dense import Dense, between, dense_block, normed, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, register


class _EmptyLinear(nn.Linear):
    """nn.Linear that does not initialise its weights, because they would be replaced before the first call."""

    def __init__(self, into: int, out: int, bias: bool) -> None:
        super().__init__(into, out, bias, device="meta")

    def reset_parameters(self) -> None:
        """Do nothing."""


class FeedForward(nn.Module):
    """Two nn.Linear layers, or three with a gate, and a function between them.

    The weights must be set before the first call.
    """

    def __init__(self, shape: Dense, axes: dict[str, tuple[Axis, ...]]) -> None:
        super().__init__()
        layers = {
            name: _EmptyLinear(axes[f"{name}.weight"][1].size, axes[f"{name}.weight"][0].size, f"{name}.bias" in axes)
            for name in ("gate", "up", "down")
            if f"{name}.weight" in axes
        }
        self.gate, self.up, self.down = layers.get("gate"), layers["up"], layers["down"]
        self.shape, self.between = shape, between(shape)
        self.others: dict[str, Tensor] = {}  # parameters of the activation and of the norm

    def forward(self, x: Tensor) -> Tensor:
        """Map x [tokens, d_model] → [tokens, d_model]."""
        gate = None if self.gate is None else self.gate(x)
        hidden = normed(self.shape, self.between(gate, self.up(x), self.others), self.others)
        out: Tensor = self.down(hidden)
        return out


@register("module", refuses=refuses_all_but_dense)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Call the module on x. Its parameters are looked up as in any module, and replaced if `params` change."""
    shape, axes = dense_block(steps), parameters(steps)
    module = FeedForward(shape, axes).eval()
    places = [_place(module, name) for name in axes]
    last: list[Params] = [()]

    def run(x: Tensor, params: Params) -> Tensor:
        # Written directly to the dicts in which torch looks them up: assigning attributes, or
        # torch.func.functional_call, would add about 20 µs to each call, which a module in a notebook does not take.
        # Gradients flow to the tensors themselves.
        if params is not last[0]:
            for (home, name), tensor in zip(places, params, strict=True):
                home[name] = tensor
            last[0] = params
        out: Tensor = module(x)
        return out

    return run


def _place(module: FeedForward, name: str) -> tuple[dict[str, Tensor], str]:
    """Return (the dict in which the module stores that parameter, its key there)."""
    layer, _, key = name.rpartition(".")
    linear = getattr(module, layer, None)
    if isinstance(linear, nn.Linear):
        return linear._parameters, key  # type: ignore[return-value]  # it accepts any tensor
    return module.others, name
