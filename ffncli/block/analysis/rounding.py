"""Number formats on Python floats: rounding, the steps between neighbouring values, and each value's probability under
a normal distribution. Also bounds how far rounding alone may move a block's output from its float64 value. Needs no
torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from ffncli.block.dtypes import DType, dtype
from ffncli.errors import FFNError, option

# exponents of the inputs tested: closer to 0, f is a line; farther out, it follows its asymptote
_LEAST, _MOST = -14, 6
# for fp32, only every 16,411th number is tested; this is a prime, so that the low bits of the tested numbers vary
_STRIDE = 16_411


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format (IEEE 754): `precision` bits of significand, exponents `lowest` to `highest` of
    normal numbers.

    Every number of the format is a Python float and has an ordinal: its rank in order of size, with 0 at rank 0.
    """

    name: str
    precision: int
    lowest: int  # exponent of the smallest normal number
    highest: int
    stride: int = 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return math.ldexp(2.0 - 2.0 ** (1 - self.precision), self.highest)

    @cached_property
    def _exponents(self) -> tuple[int, ...]:
        """The frexp exponents of all floats, ordered so that a tuple built from them can be indexed by exponent; a
        negative exponent counts from the tuple's end."""
        return (*range(1025), *range(-1080, 0))

    @cached_property
    def _spacing(self) -> tuple[float, ...]:
        """The distance between neighbouring numbers, indexed by exponent."""
        return tuple(math.ldexp(1.0, max(e, self.lowest + 1) - self.precision) for e in self._exponents)

    @cached_property
    def _end(self) -> float:
        """The threshold above which a float rounds to infinity: half a step beyond the largest number."""
        return self.largest + 0.5 * self.ulp(self.largest)

    def ulp(self, x: float) -> float:
        """Return the distance from |x| to the next larger number of the format, ignoring the format's upper limit."""
        return self._spacing[math.frexp(x)[1] if x else self.lowest]

    def nearest(self, x: float) -> float:
        """Return the nearest number of the format, ties to even; ±inf beyond the largest. The result is never -0.0."""
        if not -self._end < x < self._end:
            return math.copysign(math.inf, x) if x == x else x
        step = self.ulp(x)
        return round(x / step) * step  # exact: step is a power of two, and Python's round takes ties to even

    @cached_property
    def ordinal(self) -> Callable[[float], int]:
        """A function of x that returns the number of steps from 0 to the nearest number, negative below 0; infinity is
        the step after the largest number."""
        spacing, frexp, end, half = self._spacing, math.frexp, self._end, 1 << (self.precision - 1)
        below = tuple(max(e - 1 - self.lowest, 0) * half for e in self._exponents)
        last = (self.highest - self.lowest + 2) * half

        def ordinal(x: float) -> int:
            if not -end < x < end:
                return int(math.copysign(last, x))
            if x == 0.0:
                return 0
            e = frexp(x)[1]
            return round(x / spacing[e]) + (below[e] if x > 0 else -below[e])

        return ordinal

    def value(self, ordinal: int) -> float:
        """Return the number with that ordinal; ±inf for the ordinal after the largest number."""
        half, n = 1 << (self.precision - 1), abs(ordinal)
        e = max(n // half - 1, 0)
        size = math.ldexp(n - e * half, self.lowest + 1 - self.precision + e)
        return math.copysign(size if size <= self.largest else math.inf, ordinal)


_ALL = (
    NumberFormat("bf16", 8, -126, 127),
    NumberFormat("fp16", 11, -14, 15),
    NumberFormat("fp32", 24, -126, 127, _STRIDE),
)
FORMATS = {form.name: form for form in _ALL}


@cache
def inputs(form: NumberFormat, std: float = 1.0) -> tuple[float, ...]:
    """Return 0 and every number of a format (for fp32, every _STRIDE-th number) with a magnitude from 2^-14 to 64, in
    ascending order.

    A std below 1 lowers the lower bound to 2^-14 std; a std above 1 raises the upper bound to 64 std.
    """
    scale = math.frexp(std)[1]
    low = max(math.ldexp(1.0, _LEAST + min(scale - 1, 0)), form.value(1))
    high = min(math.ldexp(1.0, _MOST + max(scale, 0)), form.largest)
    above = [form.value(n) for n in range(form.ordinal(low), form.ordinal(high) + 1, form.stride)]
    return (*(-x for x in reversed(above)), 0.0, *above)


@cache
def shares(form: NumberFormat, std: float = 1.0) -> tuple[float, ...]:
    """Return, for each of `inputs`, the probability that x ~ N(0, std²) is rounded to it; the two outermost inputs
    include the tails."""
    above = [x for x in inputs(form, std) if x >= 0]
    unit = 1.0 / (std * math.sqrt(2.0))
    beyond = [0.5 * math.erfc(0.5 * (a + b) * unit) for a, b in pairwise(above)] + [0.0]
    cells = [a - b for a, b in pairwise(beyond)]
    return (*reversed(cells), 1.0 - 2.0 * beyond[0], *cells)


def formats(text: str, field: str = option("dtype")) -> tuple[NumberFormat, ...]:
    """Parse a comma-separated list of formats in any usual spelling, dropping duplicates.

    Raises FFNError for an unknown name, and for fp64, which is the reference for the others.
    """
    names = [dtype(part, field).name for part in text.split(",")]
    if "fp64" in names:
        raise FFNError(f"{field} fp64 is the reference", f"compare it with one of {', '.join(FORMATS)}")
    return tuple(FORMATS[name] for name in dict.fromkeys(names))


_FACTOR = 4
EPS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}  # the spacing of numbers at 1


def rounding_bound(eps: float, sums: float, width: int) -> float:
    """Return the error that rounding may cause, relative to the largest value; `eps` is that of the values' format,
    `sums` that of the format in which sums are computed."""
    return _FACTOR * (eps + sums * math.sqrt(width))


def block_bound(dtype: DType, width: int, fp32_scores: bool) -> float:
    """Return the rounding bound of a block in that format, whose sums are at least float32; a router may compute its
    scores in float32."""
    eps = EPS[dtype.name]
    return rounding_bound(max(eps, EPS["fp32"] if fp32_scores else 0.0), min(eps, EPS["fp32"]), width)
