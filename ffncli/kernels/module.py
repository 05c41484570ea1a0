"""module: the block as an nn.Module of nn.Linear layers, as people often write it in a notebook.

`run/verify/module.py` contains another such module on purpose: it is the independent implementation that `ffn verify`
compares the steps with.
"""

import torch
from torch import Tensor, nn

from ffncli.block.steps import Axis, parameters
from ffncli.kernels.dense import Body, Weights, body_of, places, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, register


class FeedForward(nn.Module):
    """Two nn.Linear layers, or three with a gate, and a function between them.

    The weights must be set before the first call.
    """

    def __init__(self, body: Body, axes: dict[str, tuple[Axis, ...]]) -> None:
        super().__init__()

        def linear(name: str) -> nn.Linear:
            out, into = axes[f"{name}.weight"]
            return nn.Linear(into.size, out.size, f"{name}.bias" in axes, device="meta")

        self.gate, self.up, self.down = linear("gate") if body.shape.gated else None, linear("up"), linear("down")
        self.act, self.lift, self.norm = body.act, body.lift, body.norm
        self.weights: Weights = ()  # for the activation and the norm

    def forward(self, x: Tensor) -> Tensor:
        """Map x [tokens, d_model] → [tokens, d_model]."""
        p = self.weights
        hidden = self.act(self.up(x), p) if self.gate is None else self.act(self.gate(x), p) * self.lift(self.up(x))
        out: Tensor = self.down(self.norm(hidden, p))
        return out


@register(
    "module",
    "as an nn.Module of nn.Linear layers",
    refuses=refuses_all_but_dense,
    keeps="params",
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Call the module on x. Its parameters are looked up as in any module, and replaced if `params` change."""
    axes = parameters(steps)
    module, place = FeedForward(body_of(steps), axes).eval(), places(axes)
    linears = [(name, part._parameters) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    homes = [(home, key, place(f"{name}.{key}")) for name, home in linears for key in home]
    last: list[Params] = [()]

    def run(x: Tensor, params: Params) -> Tensor:
        # Written directly to the dicts in which torch looks them up: assigning attributes, or
        # torch.func.functional_call, would add about 20 µs to each call, which a module in a notebook does not take.
        # Gradients flow to the tensors themselves.
        if params is not last[0]:
            p = vars(module)["weights"] = (*params, None)
            for home, key, at in homes:
                home[key] = p[at]
            last[0] = params
        out: Tensor = module(x)
        return out

    return run
