"""The formulas of the table in `activations.py`: functions and slopes over a namespace `m` with torch's names.

SCALAR provides the same names for Python floats, so that one formula serves both: `f(x, SCALAR)` and `f(x, torch)`.
Under SCALAR, large arguments saturate as in torch instead of raising OverflowError.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

Function = Callable[[Any, Any], Any]
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def zero(x: Any, m: Any) -> Any:
    """Return 0, or NaN if x is NaN, in x's dtype; infinities give 0."""
    return m.where(x == x, 0.0, x)


def _cdf(x: Any, m: Any) -> Any:
    return 0.5 * (1.0 + m.erf(x * _SQRT_HALF))


def softplus(x: Any, m: Any) -> Any:
    """log(1 + eˣ), without overflow."""
    return m.where(x > 0, x, zero(x, m)) + m.log1p(m.exp(-m.abs(x)))


def gelu(x: Any, m: Any) -> Any:
    """x Φ(x), with Φ computed by erf."""
    return x * _cdf(x, m)


def gelu_slope(x: Any, m: Any) -> Any:
    """Φ(x) + x φ(x)."""
    return _cdf(x, m) + x * _INV_SQRT_2PI * m.exp(-0.5 * x * x)


def gelu_slope_stable(x: Any, m: Any) -> Any:
    """Φ(x) + x φ(x), with Φ computed by erfc."""
    return 0.5 * m.erfc(-x * _SQRT_HALF) + x * _INV_SQRT_2PI * m.exp(-0.5 * x * x)


def gelu_stable(x: Any, m: Any) -> Any:
    """x Φ(x), with Φ computed by erfc."""
    return 0.5 * x * m.erfc(-x * _SQRT_HALF)  # 1 + erf(z) would round to 0 below z = -6


def tanh_argument(x: Any) -> Any:
    """Return the argument of tanh in GELU's tanh approximation."""
    return _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)


def gelu_tanh_slope(x: Any, m: Any) -> Any:
    """The slope of the tanh approximation of GELU."""
    t = m.tanh(tanh_argument(x))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _SQRT_2_OVER_PI * (1.0 + 0.134145 * x * x)


def gelu_tanh_slope_stable(x: Any, m: Any) -> Any:
    """The slope of GELU's tanh approximation, with (1 + tanh u) / 2 written as σ(2u)."""
    u = 2.0 * tanh_argument(x)
    s = m.sigmoid(u)
    return s + 2.0 * x * s * m.sigmoid(-u) * _SQRT_2_OVER_PI * (1.0 + 0.134145 * x * x)


def swish(k: float) -> Function:
    """x σ(kx)."""
    return lambda x, m: x * m.sigmoid(k * x)


def swish_slope(k: float) -> Function:
    """The slope of x σ(kx)."""

    def slope(x: Any, m: Any) -> Any:
        s = m.sigmoid(k * x)
        return s + k * x * s * (1.0 - s)

    return slope


def elu(alpha: float, scale: float) -> tuple[Function, Function]:
    """Return ELU's function and slope, both multiplied by `scale`."""
    return (
        lambda x, m: scale * m.where(x > 0, x, alpha * m.expm1(m.where(x > 0, zero(x, m), x))),
        lambda x, m: scale * m.where(x > 0, zero(x, m) + 1.0, alpha * m.exp(m.where(x > 0, zero(x, m), x))),
    )


def mish_slope(x: Any, m: Any) -> Any:
    """The slope of x tanh(softplus(x))."""
    t = m.tanh(softplus(x, m))
    return t + x * (1.0 - t * t) * m.sigmoid(x)


def sqrtsoftplus_slope(x: Any, m: Any) -> Any:
    """The slope of √softplus(x)."""
    y = m.sqrt(softplus(x, m))  # 0 below -745, where the sigmoid is 0 too
    return 0.5 * m.sigmoid(x) / m.where(y == 0, 1.0, y)


def hardswish(x: Any, m: Any) -> Any:
    """x min(max(x + 3, 0), 6) / 6."""
    return m.where(x <= -3, zero(x, m), m.where(x >= 3, x, x * (x + 3.0) / 6.0))


def hardswish_slope(x: Any, m: Any) -> Any:
    """The slope of x min(max(x + 3, 0), 6) / 6."""
    # The slope at the kinks, as in torch: 0 at -3, 1 at 3.
    return m.where(x <= -3, zero(x, m), m.where(x >= 3, zero(x, m) + 1.0, (2.0 * x + 3.0) / 6.0))


def laplace_argument(x: Any) -> Any:
    """Return the argument of erf in MEGA's Laplace function."""
    return (x - 0.707107) / (0.282095 * math.sqrt(2.0))


def laplace_slope(x: Any, m: Any) -> Any:
    """The slope of the Laplace function."""
    z = laplace_argument(x)
    return m.exp(-z * z) / (0.282095 * math.sqrt(2.0 * math.pi))


def clip10(gelu: Function) -> Function:
    """Return a GELU whose output is at most 10."""

    def clipped(x: Any, m: Any) -> Any:
        y = gelu(x, m)
        return m.where(y > 10.0, zero(x, m) + 10.0, y)

    return clipped


_XIELU_BETA, XIELU_EPS = 0.5, -1e-6


def xielu(x: Any, m: Any) -> Any:
    """xIELU, with its learned parameters m.alpha_p and m.alpha_n."""
    ap = softplus(m.alpha_p, m)
    an = _XIELU_BETA + softplus(m.alpha_n, m)
    low = m.where(x < XIELU_EPS, x, zero(x, m) + XIELU_EPS)
    return m.where(x > 0, ap * x * x, (m.expm1(low) - x) * an) + _XIELU_BETA * x


def xielu_slope(x: Any, m: Any) -> Any:
    """The slope of xIELU."""
    ap = softplus(m.alpha_p, m)
    an = _XIELU_BETA + softplus(m.alpha_n, m)
    low = m.where(x < XIELU_EPS, x, zero(x, m) + XIELU_EPS)
    share = m.where(x < XIELU_EPS, zero(x, m) + 1.0, m.where(x > XIELU_EPS, zero(x, m), zero(x, m) + 0.5))
    curve = share * m.exp(low)  # at a tie, torch.min gives each half of the gradient
    return m.where(x > 0, 2.0 * ap * x, (curve - 1.0) * an) + _XIELU_BETA


def xielu_by_alpha_p(x: Any, m: Any) -> Any:
    """The derivative of xIELU by alpha_p."""
    return m.where(x > 0, m.sigmoid(m.alpha_p) * x * x, zero(x, m))


def xielu_by_alpha_n(x: Any, m: Any) -> Any:
    """The derivative of xIELU by alpha_n."""
    low = m.where(x < XIELU_EPS, x, zero(x, m) + XIELU_EPS)
    return m.where(x > 0, zero(x, m), m.sigmoid(m.alpha_n) * (m.expm1(low) - x))


def inverse_softplus(y: float) -> float:
    """Return the x with softplus(x) = y."""
    return math.log(math.expm1(y))


def sigma(x: Any, m: Any) -> Any:
    """1 / (1 + e⁻ˣ)."""
    return m.sigmoid(x)


def sigmoid_slope(x: Any, m: Any) -> Any:
    """σ(x) (1 − σ(x))."""
    return m.sigmoid(x) * (1.0 - m.sigmoid(x))


def _exp(x: float) -> float:
    return math.inf if x >= 709.0 else math.exp(x)


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = _exp(x)
    return e / (1.0 + e)


SCALAR = SimpleNamespace(
    exp=_exp,
    expm1=lambda x: math.inf if x >= 709.0 else math.expm1(x),
    log1p=math.log1p,
    erf=math.erf,
    erfc=math.erfc,
    tanh=math.tanh,
    sqrt=math.sqrt,
    sigmoid=_sigmoid,
    abs=abs,
    where=lambda condition, a, b: a if condition else b,
)


def with_learned(m: Any, values: Mapping[str, Any]) -> Any:
    """Return the namespace `m` extended by learned parameters (`m.alpha_p`), floats or one-element tensors."""
    return SimpleNamespace(**{n: getattr(m, n) for n in vars(SCALAR)}, **values)
