"""Every activation a second time, from torch and transformers alone: nothing here reads ffncli's table."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2CLS, ACT2FN, XIELUActivation

Oracle = Callable[[Tensor], Tensor]


def softplus(x: Tensor) -> Tensor:
    """functional.softplus without its switch to `x` above 20, which is 2e-9 off there."""
    return torch.logaddexp(x, torch.zeros_like(x))


def module(name: str) -> nn.Module:
    """transformers' own module for `name` in float64; xielu keeps its constants in bfloat16 unless told not to."""
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
    """The learned parameters as torch or transformers start them."""
    found = ORACLES[name]
    return {n: p.item() for n, p in found.named_parameters()} if isinstance(found, nn.Module) else {}


def oracle(name: str, learned: dict[str, float] | None = None) -> Oracle:
    """The function for float64 tensors; `learned` replaces the initial values."""
    if not learned:
        return ORACLES[name]
    changed = module(name)
    for parameter, value in learned.items():
        nn.init.constant_(changed.get_parameter(parameter), value)
    return changed


def autograd_slope(f: Oracle, x: Tensor) -> Tensor:
    """df/dx as torch's autograd has it, kinks included."""
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(x).sum(), x)
    return slope
