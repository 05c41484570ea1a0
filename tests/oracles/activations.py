"""A second implementation of every activation, from torch and transformers: nothing here reads ffncli's table."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2CLS, ACT2FN, XIELUActivation

Oracle = Callable[[Tensor], Tensor]


def softplus(x: Tensor) -> Tensor:
    """Compute softplus without functional.softplus's switch to `x` above 20, which has an error of 2e-9 there."""
    return torch.logaddexp(x, torch.zeros_like(x))


def module(name: str) -> nn.Module:
    """Return transformers' module for `name` in float64; for xielu, with constants in float64, not bfloat16."""
    return XIELUActivation(dtype=torch.float64) if name == "xielu" else ACT2FN[name].double()


ORACLES: dict[str, Oracle] = {
    **{name: module(name) for name in "relu2 prelu quick_gelu gelu_10 laplace xielu".split()},
    **{name: getattr(functional, name) for name in "relu relu6 leaky_relu gelu silu mish hardswish elu selu".split()},
    "identity": nn.Identity(),
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": softplus,
    "sqrtsoftplus": lambda x: softplus(x).sqrt(),  # transformers' class has softplus's switch at 20; see above
}
TRANSFORMERS_NAMES = sorted(ACT2CLS)


def initial(name: str) -> dict[str, float]:
    """Return the initial values of the learned parameters, as torch or transformers set them."""
    found = ORACLES[name]
    return {n: p.item() for n, p in found.named_parameters()} if isinstance(found, nn.Module) else {}


def oracle(name: str, learned: dict[str, float] | None = None) -> Oracle:
    """Return the activation as a function of float64 tensors; `learned` replaces initial values of parameters."""
    if not learned:
        return ORACLES[name]
    changed = module(name)
    for parameter, value in learned.items():
        nn.init.constant_(changed.get_parameter(parameter), value)
    return changed


def autograd_slope(f: Oracle, x: Tensor) -> Tensor:
    """Return df/dx as computed by torch's autograd, also at kinks."""
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(x).sum(), x)
    return slope
