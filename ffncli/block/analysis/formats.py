"""Number formats on Python floats: rounding, counting steps between numbers, and their inputs under a normal law."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

from ffncli.block.analysis.quadrature import normal_share
from ffncli.block.dtypes import dtype
from ffncli.errors import FFNError

_LEAST, _MOST = 2.0**-24, 2.0**16  # inputs looked at: all of fp16; closer to 0 f is linear, further out an asymptote
_STRIDE = 16_411  # every so-manieth number of fp32, prime so that all low bits occur


@dataclass(frozen=True)
class Format:
    """A binary floating-point format (IEEE 754): `precision` bits of significand, exponents of normal numbers.

    Every number of it is a Python float. Its numbers are counted from 0, negative ones downwards: `ordinal`.
    """

    name: str
    precision: int
    lowest: int  # exponent of the least normal number
    highest: int
    stride: int = 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return math.ldexp(2.0 - 2.0 ** (1 - self.precision), self.highest)

    @cached_property
    def _spacing(self) -> tuple[float, ...]:
        """The distance between numbers by frexp's exponent, counted from that of the least normal number."""
        return tuple(math.ldexp(1.0, e - self.precision + 1) for e in range(self.lowest, self.highest + 1))

    def ulp(self, x: float) -> float:
        """The distance from |x| to the next larger number; for x beyond the largest, the largest's."""
        e = math.frexp(x)[1] - 1 - self.lowest
        return self._spacing[min(max(e, 0), self.highest - self.lowest)]

    def round(self, x: float) -> float:
        """The nearest number, of two the even one; ±inf from half a step beyond the largest on. Loses the sign of 0."""
        if not math.isfinite(x):
            return x
        if abs(x) >= self.largest + 0.5 * self._spacing[-1]:
            return math.copysign(math.inf, x)
        spacing = self.ulp(x)
        return round(x / spacing) * spacing

    def ordinal(self, y: float) -> int:
        """How many steps of the format lie between 0 and one of its numbers; infinity is the one after the largest."""
        if math.isinf(y):
            return int(math.copysign(self.ordinal(self.largest) + 1, y))
        e = max(math.frexp(y)[1] - 1 - self.lowest, 0)
        return int(math.copysign(e * 2 ** (self.precision - 1) + abs(y) / self._spacing[e], y))

    def value(self, ordinal: int) -> float:
        """The number of an ordinal."""
        half = 2 ** (self.precision - 1)
        e = max(abs(ordinal) // half - 1, 0)
        return math.copysign((abs(ordinal) - e * half) * self._spacing[e], ordinal)

    def steps(self, a: float, b: float) -> int:
        """How many steps apart two numbers of the format are: 0 for equal ones, 1 for neighbours."""
        return abs(self.ordinal(a) - self.ordinal(b))


FORMATS = {f.name: f for f in (Format("bf16", 8, -126, 127), Format("fp16", 11, -14, 15), Format("fp32", 24, -126, 127, _STRIDE))}


@cache
def inputs(form: Format) -> tuple[float, ...]:
    """0 and the numbers of a format from 2^-24 to 2^16 by size, in order, with their negatives; of fp32 a part."""
    first, last = form.ordinal(_LEAST), form.ordinal(min(_MOST, form.largest))
    above = [form.value(n) for n in range(first, last + 1, form.stride)]
    return (*(-x for x in reversed(above)), 0.0, *above)


@cache
def shares(form: Format, std: float) -> tuple[float, ...]:
    """For each of `inputs` the probability that x ~ N(0, std²) is nearest to it; what lies beyond is the last one's."""
    above = [x for x in inputs(form) if x >= 0]
    edges = [0.5 * (a + b) for a, b in zip(above, above[1:], strict=False)]
    cells = [normal_share(a, b, std) for a, b in zip(edges, [*edges[1:], math.inf], strict=True)]
    return (*reversed(cells), normal_share(-edges[0], edges[0], std), *cells)


def formats(text: str, field: str = "--dtype") -> tuple[Format, ...]:
    """The formats of a comma list in any usual spelling, each once.

    Raises FFNError for a name that is unknown, and for fp64, which is what the others are measured against.
    """
    names = [dtype(part, field).name for part in text.split(",")]
    if "fp64" in names:
        raise FFNError(f"{field} fp64 is the reference", f"compare with it one of {', '.join(FORMATS)}")
    return tuple(FORMATS[name] for name in dict.fromkeys(names))
