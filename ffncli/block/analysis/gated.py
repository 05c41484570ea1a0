"""Gated units as functions of two variables: y = a(gate) ⊙ b(up), where a and b are `steps.Activation`s.

The units of GATED have no limits; the units of UNITS_WITH_LIMITS limit gate or up. A report states a unit's range, its
steepness, and its output for normally distributed inputs, all without sampling.

Gate and up are assumed to be independent and normal, N(0, std²) each, as two projections of the same input are at
initialisation; hence every moment of a(g) · b(u) is a product of two integrals over one variable.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ffncli.block.activations import (
    CANONICAL,
    GATED,
    LIMITED,
    TABLE,
    UNITS_WITH_LIMITS,
    ActivationRow,
    known_names,
    spelled,
)
from ffncli.block.analysis.curve import Curve, Shape, bisect, curve, exact_zero_share, expectation, normal_share, shape
from ffncli.block.analysis.facts import check_width
from ffncli.block.analysis.operations import COUNTING, Operations, counted
from ffncli.block.formulas import SCALAR
from ffncli.block.recipe import FFNSpec, unit_ops
from ffncli.block.steps import Activation
from ffncli.block.value import NEAR_ZERO, clipped, slope, unlimited, value
from ffncli.errors import FFNError, did_you_mean, shown

_IDENTITY = Activation("identity")
_SHAZEER = "Shazeer 2020, arXiv:2002.05202"


@dataclass(frozen=True)
class GatedUnit:
    """y = gate(g) ⊙ up(u). No unit here has learned parameters in its gate function."""

    name: str
    gate: Activation
    up: Activation = _IDENTITY
    used_by: str = ""
    source: str = _SHAZEER

    @property
    def formula(self) -> str:
        """Text such as `silu(gate) ⊙ up` or `quick_gelu(min(gate, 7)) ⊙ (clip(up, -7, 7) + 1)`."""
        up = _formula(self.up, "up")
        several = self.up.plus or self.up.soft_cap is not None
        return f"{_formula(self.gate, 'gate')} ⊙ {f'({up})' if several else up}"

    def value(self, gate: float, up: float) -> float:
        """Return y for one gate and one up."""
        return float(self.f(gate, up, SCALAR))

    def slopes(self, gate: float, up: float) -> tuple[float, float]:
        """Return (∂y/∂gate, ∂y/∂up); at a kink or a limit, the values that torch has."""
        a, b = factor(self.gate), factor(self.up)
        return a.slope(gate) * b.f(up), a.f(gate) * b.slope(up)

    def f(self, gate: Any, up: Any, m: Any) -> Any:
        """Return y over a namespace (`formulas.SCALAR`, torch)."""
        return value(self.gate, gate, m) * value(self.up, up, m)

    def over_gate(self, up: float) -> Curve:
        """Return y as a curve of the gate, for one fixed value of up."""
        row = ActivationRow(
            self.name, self.formula, lambda x, m: self.f(x, up, m), lambda x, m: self.slopes(x, up)[0],
            kinks=factor(self.gate).row.kinks,
        )  # fmt: skip
        return Curve(row, lambda x: self.value(x, up), lambda x: self.slopes(x, up)[0])

    def operations(self) -> Operations:
        """Return the operations for one element of y, including the multiplication."""
        return counted(lambda gate, up: self.f(gate, up, COUNTING), inputs=2)

    def spec(self, d_model: int, d_ff: int) -> FFNSpec:
        """Return the spec of the gated block without biases that contains this unit."""
        return FFNSpec(d_model, d_ff, self.name, bias=False)


_USED_BY = {
    "swiglu": "Llama, Mistral, Mixtral, Qwen, DeepSeek, OLMo, Phi-3, Phi-4, Granite, Falcon3, PaLM",
    "geglu": "ModernBERT, Zamba",
    "geglu_tanh": "T5 v1.1, mT5, Gemma",
}
_SOURCE = {"glu": "Dauphin et al. 2016, arXiv:1612.08083"}
UNITS: dict[str, GatedUnit] = {
    name: GatedUnit(name, Activation(f), used_by=_USED_BY.get(name, ""), source=_SOURCE.get(name, _SHAZEER))
    for name, f in GATED.items()
} | {
    unit.name: GatedUnit(unit.name, *unit_ops(unit.function, unit.limits), unit.used_by, unit.source)
    for unit in UNITS_WITH_LIMITS.values()
}


def split(names: Sequence[str], option: str = "NAME") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (canonical names of plain functions, names of gated units), in order and without duplicates; `names` may
    be in any spelling.

    Raises FFNError for an unknown name, with the nearest known ones.
    """
    plain: dict[str, None] = {}
    gated: dict[str, None] = {}
    for name in (part for text in names for part in text.split(",")):
        key = LIMITED.get(spelled(name), spelled(name))
        if key in UNITS:
            gated[key] = None
        elif key in CANONICAL:
            plain[CANONICAL[key]] = None
        else:
            hint = did_you_mean(key, known_names(), "known: " + ", ".join([*TABLE, *UNITS]))
            raise FFNError(f"{option}: unknown activation {shown(name)}", hint)
    return tuple(plain), tuple(gated)


def factor(op: Activation) -> Curve:
    """Return the step as a curve whose kinks include its limits."""
    inner = curve(op.function)
    if op.unlimited:
        return inner
    low = -math.inf if op.low is None else op.low
    high = math.inf if op.high is None else op.high
    limits = [(x, 1) for x in (op.low, op.high, _reaches_most(op)) if x is not None]
    kinks = tuple(sorted([*(k for k in inner.row.kinks if low < k[0] < high), *limits]))
    row = ActivationRow(
        op.function, _formula(op, "x"), lambda x, m: value(op, x, m), lambda x, m: slope(op, x, m), kinks=kinks
    )
    return Curve(row, lambda x: row.f(x, SCALAR), lambda x: row.slope(x, SCALAR))


def _reaches_most(op: Activation) -> float | None:
    """Return the x from which the function exceeds `most`, or None if it never does; assumes that it rises from 0 on,
    as the functions of gated units do."""
    if op.most is None:
        return None

    def over(x: float) -> float:
        return float(unlimited(op, clipped(op, x, SCALAR), SCALAR)) - (op.most or 0.0)

    high = next((high for high in (2.0**n for n in range(-20, 100)) if over(high) > 0), None)
    return None if high is None else bisect(over, 0.0, high)


def _formula(op: Activation, name: str) -> str:
    return name if op == _IDENTITY else op.formula((name,), str)


_INF = math.inf
_FAR = 2.0**20
CONVENTIONS = {
    "gate, up": "gated units: independent and normal, with mean 0 and this std; slope is by gate, slope_up by up",
    "growth": "gated units: the power of growth along gate = up",
    "linear_share": "gated units: the share of the variance that the best linear function of gate and up explains;"
    " linear_share_of_gate_function: the same for the gate function alone; product_share: the additional share that the"
    " plain product gate * up explains",
}


@dataclass(frozen=True)
class GatedFacts:
    """Facts about a gated unit. A missing bound is None; `minimum_at` is (gate, up), or None if the bound is only
    approached.

    `lipschitz` is the least L with |y(p) - y(q)| ≤ L ‖p - q‖ in the plane of (gate, up), with the Euclidean norm.
    `growth` is the power of growth along gate = up: y(2t, 2t) = 2^growth · y(t, t) for large t. `linear_share` is the
    share of the output's variance that the best linear function of gate and up explains (R²), `product_share` is the
    additional share that gate · up explains; `linear_share_of_gate_function` is the R² of the gate function alone.
    `gain` is std / √E[y²].
    """

    minimum: float | None
    minimum_at: tuple[float, float] | None
    maximum: float | None
    maximum_at: tuple[float, float] | None
    lipschitz: float | None
    growth: float
    zero_share: float
    exact_zero_share: float
    mean: float
    variance: float
    gain: float
    linear_share: float
    product_share: float
    linear_share_of_gate_function: float


@dataclass(frozen=True)
class GatedValue:
    """A gated unit's y at gate = `x` and `up`, and its two slopes there."""

    x: float
    up: float
    value: float
    slope: float
    slope_up: float


@dataclass(frozen=True)
class GatedReport:
    """The report on a unit: `values` for every pair of a gate and an up, `facts` for gate, up ~ N(0, std²)."""

    unit: GatedUnit
    values: tuple[GatedValue, ...]
    std: float
    facts: GatedFacts
    operations: Operations


def gated_report(
    unit: GatedUnit, at: Sequence[float] = (), ups: Sequence[float] = (1.0,), std: float = 1.0
) -> GatedReport:
    """Return the report on a gated unit, the counterpart of `facts.facts`. Raises the same FFNErrors."""
    values = tuple(GatedValue(x, up, unit.value(x, up), *unit.slopes(x, up)) for up in ups for x in at)
    return GatedReport(unit, values, std, gated_facts(unit, std), unit.operations())


def gated_facts(unit: GatedUnit, std: float = 1.0) -> GatedFacts:
    """Compute all facts for independent gate, up ~ N(0, std²). Raises FFNError for a bad std, like `facts.facts`."""
    check_width(std)
    gate, up = factor(unit.gate), factor(unit.up)
    shape_a, shape_b = shape(gate), shape(up)
    a, b = _best_line(gate, std), _best_line(up, std)
    variance = a.variance * (b.variance + b.mean**2) + a.mean**2 * b.variance
    straight = (a.slope * b.mean) ** 2 + (a.mean * b.slope) ** 2
    zeros = [exact_zero_share(c, std) for c in (gate, up)]
    return GatedFacts(
        *_bound(shape_a, shape_b, -1.0),
        *_bound(shape_a, shape_b, 1.0),
        _lipschitz(gate, shape_a, shape_b, unit.up),
        round(math.log2(abs(unit.value(2 * _FAR, 2 * _FAR) / unit.value(_FAR, _FAR))), 6),
        _zero_share(unit, gate, std),
        zeros[0] + zeros[1] - zeros[0] * zeros[1],
        a.mean * b.mean,
        variance,
        std / math.sqrt(variance + (a.mean * b.mean) ** 2),
        min(1.0, straight / variance),
        min(1.0, (a.slope * b.slope) ** 2 / variance),
        linear_share(curve(unit.gate.function), std),
    )


def linear_share(c: Curve, std: float = 1.0) -> float:
    """Return the share of Var f(X), X ~ N(0, std²), that the best straight line explains: Cov(f, X)² / (std² Var f)."""
    m = _best_line(c, std)
    return min(1.0, m.slope**2 / m.variance)


@dataclass(frozen=True)
class _BestLine:
    """E[f(X)], Var f(X), and E[f(X) X] / std, the slope of the best straight line with x in units of std."""

    mean: float
    variance: float
    slope: float


def _best_line(c: Curve, std: float) -> _BestLine:
    """Integrate the even and odd parts separately, so that whatever is 0 by symmetry is exactly 0."""

    def mean(g: Callable[[float], float]) -> float:
        return expectation(g, std, tuple(sorted({*c.kinks, *(-k for k in c.kinks)})))

    middle = mean(lambda x: 0.5 * (c.f(x) + c.f(-x)))
    return _BestLine(
        middle,
        mean(lambda x: (c.f(x) - middle) ** 2),
        mean(lambda x: 0.5 * (c.f(x) - c.f(-x)) * (x / std)),
    )


# --- extremes ---------------------------------------------------------------------------------------------------------


def _bound(a: Shape, b: Shape, sign: float) -> tuple[float | None, tuple[float, float] | None]:
    """Return the greatest a · b (the least if `sign` is -1) and its location, a corner of both ranges."""
    corners = [
        (_product(x, y), x_at, y_at)
        for x, x_at in ((a.minimum, a.minimum_at), (a.maximum, a.maximum_at))
        for y, y_at in ((b.minimum, b.minimum_at), (b.maximum, b.maximum_at))
    ]
    best, x_at, y_at = max(corners, key=lambda corner: sign * corner[0])
    if not math.isfinite(best):
        return None, None
    return best, None if x_at is None or y_at is None else (x_at, y_at)


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y  # 0 · ∞ counts as 0; the other corners decide


def _lipschitz(gate: Curve, a: Shape, b: Shape, up: Activation) -> float | None:
    """Return sup √((a' b)² + (a b')²). If up is linear within its limits, the supremum lies at the limit with the
    larger |b|.

    With a soft cap c on up, b' is 1 - b²/c², so the sum is a convex function of b², which is largest at b = 0 or b
    = c.
    """
    size_b = max(abs(b.minimum), abs(b.maximum))
    if not all(map(math.isfinite, (size_b, a.minimum, a.maximum, a.lipschitz))):
        return None
    if up.soft_cap is not None:
        return max(a.lipschitz * size_b, -a.minimum, a.maximum)

    def steepness(x: float, _: object) -> float:
        return math.hypot(gate.slope(x) * size_b, gate.f(x) * b.lipschitz)

    def rise(x: float, _: object) -> float:  # only the sign of the result is used
        return steepness(x + 1e-6, _) - steepness(x - 1e-6, _)

    row = ActivationRow("steepness", "", steepness, rise, kinks=gate.row.kinks)
    return shape(Curve(row, lambda x: steepness(x, None), lambda x: rise(x, None))).maximum


# --- near zero --------------------------------------------------------------------------------------------------------


def _zero_share(unit: GatedUnit, gate: Curve, std: float) -> float:
    """Return P(|a(g) b(u)| ≤ NEAR_ZERO) = E over g of P(|b(u)| ≤ NEAR_ZERO / |a(g)|); the inner probability has a
    closed form.

    The inner probability changes fast near the zeros of a(g), so the panels grow geometrically from there. It jumps
    where the product at a limit of up falls to NEAR_ZERO.
    """
    lift = unit.up
    assert lift.function == "identity", "another up needs its own closed form"
    assert lift.soft_cap is None or not (lift.plus or lift.high), "a soft cap with limits needs its own closed form"
    low = -_INF if lift.low is None else lift.low
    high = _INF if lift.high is None else lift.high

    def share(g: float) -> float:
        size = abs(gate.f(g))
        most = NEAR_ZERO / size if size > NEAR_ZERO * 1e-300 else _INF  # otherwise the quotient overflows
        if lift.soft_cap is not None:
            most = lift.soft_cap * math.atanh(most / lift.soft_cap) if most < lift.soft_cap else _INF
        start, end = -most - lift.plus, most - lift.plus  # the interval of the clipped up, before `plus`
        if start > high or end < low:
            return 0.0
        return normal_share(-_INF if start <= low else start, _INF if end >= high else end, std)

    ends = [x + lift.plus for x in (low, high, lift.soft_cap or _INF)]
    levels = [NEAR_ZERO / abs(x) for x in ends if math.isfinite(x) and x]
    places = [x for level in levels for x in _crossings(gate, level)]
    finest = NEAR_ZERO / (64.0 * max(std, 1.0))
    fan = [finest * math.sqrt(2.0) ** k for k in range(1, 2 * math.ceil(math.log2(64.0 / finest)))]
    breaks = {*gate.kinks, *places, *fan, *(-x for x in fan), 0.0}
    return expectation(share, std, tuple(sorted(breaks)))


def _crossings(c: Curve, level: float) -> list[float]:
    """Return the points between -40 and 40 where |f| crosses a level."""

    def over(x: float) -> float:
        return abs(c.f(x)) - level

    xs = sorted({*(i / 8 for i in range(-320, 321)), *c.kinks})
    return [bisect(over, low, high) for low, high in pairwise(xs) if (over(low) > 0) != (over(high) > 0)]


_OUTWARD = tuple(i / 8 for i in range(1, 321)) + tuple(40.0 * 2.0**i for i in range(1, 20))
_NARROWEST = 1e-3  # an interval around 0 in which two functions are the same must reach at least this far
_SAME = 1e-12
Interval = tuple[float, float]


@dataclass(frozen=True)
class GatedDifference:
    """y - z, where y is the unit `name` and z is `against`.

    y and z are the same while the gate is in the interval `same_gate` and up in `same_up`. An end of an interval is
    ±inf if the units never differ on that side; both are None if the units differ next to 0. `rms` is √E[(y - z)²] for
    independent gate, up ~ N(0, std²); `relative_rms` is `rms` divided by √E[z²].
    """

    name: str
    against: str
    same_gate: Interval | None
    same_up: Interval | None
    rms: float
    relative_rms: float


def gated_difference(name: str, against: str, std: float = 1.0) -> GatedDifference:
    """Return the difference of two units, given by their names."""
    one, other = UNITS[name], UNITS[against]
    a, b, a0, b0 = factor(one.gate), factor(one.up), factor(other.gate), factor(other.up)
    kinks = sorted({k for curve in (a, b, a0, b0) for x in curve.kinks for k in (x, -x)})

    def mean(f: Callable[[float], float]) -> float:
        return expectation(f, std, tuple(kinks))

    # ab - a0·b0 = (a - a0)·b + a0·(b - b0) avoids cancellation if the units are nearly the same
    square = (
        mean(lambda x: (a.f(x) - a0.f(x)) ** 2) * mean(lambda x: b.f(x) ** 2)
        + 2 * mean(lambda x: (a.f(x) - a0.f(x)) * a0.f(x)) * mean(lambda x: b.f(x) * (b.f(x) - b0.f(x)))
        + mean(lambda x: a0.f(x) ** 2) * mean(lambda x: (b.f(x) - b0.f(x)) ** 2)
    )
    size = math.sqrt(mean(lambda x: a0.f(x) ** 2) * mean(lambda x: b0.f(x) ** 2))
    gate, up = _same(a, a0), _same(b, b0)
    if gate is None or up is None:
        gate = up = None
    rms = math.sqrt(max(0.0, square))
    return GatedDifference(name, against, gate, up, rms, rms / size)


def _same(f: Curve, g: Curve) -> Interval | None:
    """Return the interval around 0 in which f and g are the same; None if they differ next to 0."""

    def apart(x: float) -> float:
        return abs(f.f(x) - g.f(x)) - _SAME * abs(g.f(x))

    ends = []
    for sign in (-1.0, 1.0):
        inside, end = 0.0, sign * math.inf
        for x in (sign * x for x in _OUTWARD):
            if apart(x) > 0:
                end = bisect(apart, inside, x)
                break
            inside = x
        ends.append(end)
    low, high = ends
    return None if max(-low, high) < _NARROWEST else (low, high)
