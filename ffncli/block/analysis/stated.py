"""Values stated for a function, and whether they are right to their stated digits."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from ffncli.block.analysis.curve import curve
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown


@dataclass(frozen=True)
class Claim:
    """The statement that f(x) is `stated`, accurate to `half_unit`, half a unit of its last decimal.

    `text` is that number as it was written: 0.150 is more precise than 0.15.
    """

    x: float
    stated: float
    half_unit: float
    text: str


@dataclass(frozen=True)
class Checked:
    """A claim with the actual f(x); `ratio` is f(x) / x, None at 0. The claim is right where f(x) rounds to it."""

    name: str
    x: float
    stated: float
    value: float
    ratio: float | None
    right: bool
    text: str


def claim(text: str, option: str) -> Claim:
    """The claim of `X=Y`. Raises FFNError, naming the option, if it is not a pair of finite numbers."""
    x, equals, y = text.partition("=")
    try:
        at, stated = Decimal(x.strip()), Decimal(y.strip())
        exponent = stated.as_tuple().exponent
        if not (equals and at.is_finite() and isinstance(exponent, int) and abs(exponent) < 300 and len(text) < 400):
            raise InvalidOperation
        if max(abs(at), abs(stated)) > 10**9:
            raise InvalidOperation
    except InvalidOperation:
        raise FFNError(f"{option}: {shown(text)} is not X=Y, two numbers", "for example 0.12=0.066") from None
    return Claim(float(at), float(stated), 0.5 * 10.0**exponent, y.strip())


def check(name: str, claims: Sequence[Claim]) -> tuple[Checked, ...]:
    """The claims checked for the activation of that canonical name."""
    c, out = curve(name), []
    for one in claims:
        value = c.f(one.x)
        right = abs(value - one.stated) <= one.half_unit * (1 + 1e-9)  # allows for the claim's rounding to binary
        out.append(Checked(name, one.x, one.stated, value, value / one.x if one.x else None, right, one.text))
    return tuple(out)
