"""Every activation in mpmath, from its definition in the literature: exact to the requested digits.

Constants are the doubles nearest to the decimals in the definition, as in any implementation.
"""

from collections.abc import Callable

from mpmath import erf, exp, expm1, log1p, mpf, ncdf, pi, sqrt, tanh

Function = Callable[[mpf], mpf]


def sigmoid(x: mpf) -> mpf:
    return 1 / (1 + exp(-x))


def softplus(x: mpf) -> mpf:
    return log1p(exp(x))


def gelu_tanh(x: mpf) -> mpf:
    return x / 2 * (1 + tanh(sqrt(2 / pi) * (x + mpf(0.044715) * x**3)))


def gelu(x: mpf) -> mpf:
    return x * ncdf(x)


def elu(x: mpf) -> mpf:
    return x if x > 0 else expm1(x)


def laplace(x: mpf) -> mpf:
    return (1 + erf((x - mpf(0.707107)) / (mpf(0.282095) * sqrt(mpf(2))))) / 2


def xielu(x: mpf) -> mpf:
    """Compute xIELU with the initial α₊ = 0.8 and α₋ = 0.3 + 0.5 (transformers' XIELUActivation); its eps is -1e-6."""
    if x > 0:
        return mpf("0.8") * x * x + x / 2
    return (expm1(min(x, mpf(-1e-6))) - x) * mpf("0.8") + x / 2


EXACT: dict[str, Function] = {
    "identity": lambda x: x,
    "relu": lambda x: max(x, mpf(0)),
    "relu2": lambda x: max(x, mpf(0)) ** 2,
    "relu6": lambda x: min(max(x, mpf(0)), mpf(6)),
    "leaky_relu": lambda x: x if x > 0 else mpf(0.01) * x,
    "prelu": lambda x: x if x > 0 else x / 4,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * sigmoid(mpf(1.702) * x),
    "gelu_10": lambda x: min(gelu(x), mpf(10)),
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "tanh": tanh,
    "mish": lambda x: x * tanh(softplus(x)),
    "hardswish": lambda x: x * min(max(x + 3, mpf(0)), mpf(6)) / 6,
    "softplus": softplus,
    "sqrtsoftplus": lambda x: sqrt(softplus(x)),
    "elu": elu,
    "selu": lambda x: mpf(1.0507009873554805) * (x if x > 0 else mpf(1.6732632423543772) * expm1(x)),
    "laplace": laplace,
    "xielu": xielu,
}

# Gated units with limits, as functions (gate, up) -> y.
UNITS: dict[str, Callable[[mpf, mpf], mpf]] = {
    "swiglu_oai": lambda g, u: min(g, 7) * sigmoid(mpf(1.702) * min(g, 7)) * (max(-7, min(u, 7)) + 1),
    "deepseek_v4": lambda g, u: min(g, 10) * sigmoid(min(g, 10)) * max(-10, min(u, 10)),
    "swiglustep": lambda g, u: min(g * sigmoid(g), 7) * max(-7, min(u, 7)),
    "situ": lambda g, u: 4 * tanh(g / 4) * sigmoid(g) * 25 * tanh(u / 25),
}
