"""The facts that `ffn activations` reports on one function, as a record. Also checks claimed values of a function."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from ffncli.block.activations import resolve
from ffncli.block.analysis.curve import Shape, curve, exact_zero_share, expectation, near_zero_share, shape
from ffncli.block.value import NEAR_ZERO
from ffncli.errors import FFNError, option, shown
from ffncli.options.accept import ABOVE_ZERO, TEXT, real, several
from ffncli.options.arguments import checked
from ffncli.system.notebook import Shown

FARTHEST = 1e9  # maximum |x|
NARROWEST, WIDEST = 1e-6, 1e6  # bounds on the input's std: outside, every activation is just its asymptotes
CONVENTIONS = {
    "slope": "df/dx; at a kink, torch's value",
    "minimum": "the greatest lower bound, null if there is none; minimum_at is null if it is only approached, and the "
    "point nearest to 0 if there are several; maximum likewise",
    "lipschitz": "the least L with |f(a) - f(b)| <= L |a - b|, null if there is none",
    "smoothness_at_0": "how many derivatives are continuous at 0: null for all, -1 if f itself jumps",
    "zero_share": f"share of a normal input (mean 0, this std) with |f(x)| <= {NEAR_ZERO:g}; exact_zero_share: "
    "share with f(x) = 0, in exact arithmetic",
    "mean, variance": "mean and variance of f(x) for this input, by quadrature",
    "gain": "std / sqrt(E[f(x)^2]): weights of standard deviation gain / sqrt(fan_in) keep the second moment",
    "gradient_gain": "1 / sqrt(E[f'(x)^2]): in place of gain, it keeps the gradient's second moment",
    "learned": "learned parameters have their initial values",
}


@dataclass(frozen=True)
class Value:
    """f and its slope at x; `ratio` is f(x) / x, or None at x = 0."""

    x: float
    value: float
    slope: float
    ratio: float | None


@dataclass(frozen=True)
class Facts(Shown):
    """One activation: its definition, its shape, its values, and its effect on x ~ N(0, std²).

    `kinks` are the points where a derivative jumps; `smoothness_at_0` is the number of derivatives that are continuous
    at 0 (None: all, -1: not even f). `zero_share` is the probability of |f(x)| ≤ NEAR_ZERO, `exact_zero_share` the
    probability of f(x) = 0. `gain` is std / √E[f²] and `gradient_gain` 1 / √E[f′²] (He et al. 2015, arXiv:1502.01852;
    √2 for relu).
    """

    name: str
    formula: str
    values: tuple[Value, ...]
    shape: Shape
    kinks: tuple[float, ...]
    smoothness_at_0: int | None
    std: float
    zero_share: float
    exact_zero_share: float
    mean: float
    variance: float
    gain: float
    gradient_gain: float
    used_by: str
    source: str


def facts(name: str, at: Sequence[float] = (), std: float = 1.0) -> Facts:
    """Return the facts of an activation by its canonical name, with its values at the points `at`.

    Raises FFNError if std is not between NARROWEST and WIDEST.
    """
    check_width(std)
    c = curve(name)
    mean = expectation(c.f, std, c.kinks)
    variance = expectation(lambda x: (c.f(x) - mean) ** 2, std, c.kinks)
    slope_square = expectation(lambda x: c.slope(x) ** 2, std, c.kinks)
    return Facts(
        name, c.row.formula, tuple(_value(c.f(x), c.slope(x), x) for x in at), shape(c), c.kinks,
        next((order - 1 for x, order in c.row.kinks if x == 0), None),
        std, near_zero_share(c, std), exact_zero_share(c, std), mean, variance,
        std / math.sqrt(variance + mean * mean), 1.0 / math.sqrt(slope_square), c.row.used_by, c.row.source,
    )  # fmt: skip


@checked(
    name=TEXT,
    at=several(real("a number", lambda x: abs(x) <= FARTHEST), f"numbers from -{FARTHEST:g} to {FARTHEST:g}", least=0),
    std=ABOVE_ZERO,
)
def activation(name: str, at: Sequence[float] = (), std: float = 1.0) -> Facts:
    """Return the facts of an activation by any of its names, such as `gelu_new`.

    Raises FFNError like `facts`, and for an unknown name or the name of a gated unit.
    """
    canonical, gated = resolve(name, "name")
    if gated:
        raise FFNError(f"{name} is a gated unit, a function of two inputs", f"its gate's function is {canonical}")
    return facts(canonical, at, std)


def check_width(std: float) -> None:
    """Raise FFNError if std is not between NARROWEST and WIDEST."""
    if not NARROWEST <= std <= WIDEST:
        raise FFNError(f"{option('std')} must be from {NARROWEST:g} to {WIDEST:g}, got {std:g}")


def _value(value: float, slope: float, x: float) -> Value:
    return Value(x, value, slope, value / x if x else None)


@dataclass(frozen=True)
class Claim:
    """The claim that f(x) is `stated`, accurate to `half_unit`, which is half a unit of its last decimal.

    `text` is Y as it was written: 0.150 is more precise than 0.15.
    """

    x: float
    stated: float
    half_unit: float
    text: str


@dataclass(frozen=True)
class Checked:
    """A claim, and the actual f(x); `ratio` is f(x) / x, or None at x = 0. The claim is right if f(x) rounds to it."""

    name: str
    x: float
    stated: float
    value: float
    ratio: float | None
    right: bool
    text: str


def claim(text: str) -> Claim:
    """Parse the claim `X=Y`. Raises FFNError if it is not a pair of finite numbers."""
    x, equals, y = text.partition("=")
    try:
        at, stated = Decimal(x.strip()), Decimal(y.strip())
        exponent = stated.as_tuple().exponent
        if not (equals and at.is_finite() and isinstance(exponent, int) and abs(exponent) < 300 and len(text) < 400):
            raise InvalidOperation
        if max(abs(at), abs(stated)) > FARTHEST:
            raise InvalidOperation
    except InvalidOperation:
        raise FFNError(f"{shown(text)} is not of the form X=Y, with two numbers", "for example 0.12=0.066") from None
    return Claim(float(at), float(stated), 0.5 * 10.0**exponent, y.strip())


def check(name: str, claims: Sequence[Claim]) -> tuple[Checked, ...]:
    """Check the claims against the activation of that canonical name."""
    c, out = curve(name), []
    for one in claims:
        value = c.f(one.x)
        right = abs(value - one.stated) <= one.half_unit * (1 + 1e-9)  # for the claim's binary rounding
        out.append(Checked(name, one.x, one.stated, value, value / one.x if one.x else None, right, one.text))
    return tuple(out)
