"""The formats that tensors can be quantized to: what one value stores, which values share a scale, and how both are
rounded. Also the grammar of their names. Needs no torch.

A name is a format's name in any spelling of `dtypes`, then words after colons, in any order: which values share a scale
(`tensor`, `channel` for a row, `g128` for 128 values of a row, `block128` for a tile of 128 × 128), `pow2` for scales
that are powers of two, `asymmetric` for integers with zero points, and the rule of rounding where libraries differ.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from ffncli.block.dtypes import find_storage
from ffncli.errors import FFNError, did_you_mean, shown

_POW2_RULES = ("transformers", "torchao")  # how scales become powers of two: rounded up, to the nearest
_LEAST_GROUP = 16  # values of a group that is worth its scale
_SHARED = re.compile(r"tensor|channel|(?:g|block)[1-9]\d{0,8}")


@dataclass(frozen=True)
class Format:
    """A format with all choices made: `bits` per value without scales; the values of its codes, before scaling, range
    from `lowest` to `largest`, and `smallest` is the smallest above 0.

    `element` is what a code means: a float's exponent and mantissa bits (`e4m3`), or `int`. `shared` says which values
    share a scale of type `scale`; it is empty for formats without scales, and cannot be chosen if `fixed`. `rule` is
    one of `rules`; the first is the default. An integer format stores code + `zero`.
    """

    name: str
    element: str
    bits: float
    largest: float
    smallest: float
    lowest: float
    shared: str = ""
    scale: str = ""
    rules: tuple[str, ...] = ()
    fixed: bool = False
    zero: int = 0
    rule: str = ""
    pow2: bool = False
    asymmetric: bool = False

    def __str__(self) -> str:
        words = ("pow2" * self.pow2, "asymmetric" * self.asymmetric, self.rule if len(self.rules) > 1 else "")
        return ":".join(filter(None, (self.name, "" if self.fixed else self.shared, *words)))

    @cached_property
    def group(self) -> int:
        """The number of adjacent values of a row that share a scale; 0 if it depends on the tensor."""
        return int(self.shared[1:]) if re.fullmatch(r"g\d+", self.shared) else 0

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many values of each axis share a scale. At the end of an axis, a tile may be smaller.

        Raises FFNError if the format does not fit the shape.
        """
        if not shape or 0 in shape:
            raise FFNError(f"a tensor of shape {list(shape)} has no rows to store as {self}")
        ones = (1,) * len(shape)
        if self.group and shape[-1] % self.group:
            what = f"{self} needs rows of whole blocks of {self.group} values, got rows of {shape[-1]}"
            fits = 1 if self.fixed else gcd(self.group, shape[-1])
            other = "fp8 or bf16" if fits < _LEAST_GROUP else f"{self.name}:g{fits}"
            raise FFNError(what, f"choose a format whose blocks fit, such as {other}")
        if self.shared.startswith("block"):
            if len(shape) < 2:
                raise FFNError(f"{self} needs a matrix, got a tensor of shape {list(shape)}")
            return (*ones[2:], *[int(self.shared.removeprefix("block"))] * 2)
        return shape if self.shared == "tensor" else (*ones[1:], self.group or shape[-1])

    def choice(self, word: str) -> tuple[str, object]:
        """Return the field that a word sets, and its value. Raises FFNError if the format does not take the word."""
        integers, free = self.name in ("int8", "int4"), bool(self.shared) and not self.fixed
        powers = bool(set(self.rules) & set(_POW2_RULES))
        if word in self.rules:
            return "rule", word
        if free and _SHARED.fullmatch(word):
            return "shared", word
        if (word == "pow2" and powers) or (word == "asymmetric" and integers):
            return word, True
        words = ["tensor", "channel", "g128", "block128"] * free + ["pow2"] * powers + ["asymmetric"] * integers
        words += self.rules if len(self.rules) > 1 else ()
        hint = f"it takes {', '.join(words)}" if words else "it takes no words"
        raise FFNError(f"{self.name} does not take the word {shown(word)}", hint)


def _float(name: str, exponent: int, mantissa: int, largest: float, smallest: float, **more: Any) -> Format:
    bits = 1 + exponent + mantissa
    return Format(name, f"e{exponent}m{mantissa}", bits, largest, smallest, -largest, **more)


def _ggml(name: str, bits: float, lowest: int, largest: int, group: int = 32, scale: str = "fp16") -> Format:
    zero = -lowest if name != "q8_0" else 0  # q8_0 stores signed integers
    return Format(name, "int", bits, largest, 1, lowest, f"g{group}", scale, ("gguf",), True, zero)


_CT = "compressed-tensors"
_MX = ("floor", "even", "rceil", "ceil", _CT)
_ALL = (
    _float("bf16", 8, 7, 255 * 2.0**120, 2.0**-133),
    _float("fp16", 5, 10, 65504, 2.0**-24),
    _float("fp8", 4, 3, 448, 2.0**-9, shared="channel", scale="fp32", rules=(_CT, "torchao", "transformers")),
    _float("fp8_e5m2", 5, 2, 57344, 2.0**-16, shared="channel", scale="fp32", rules=("torchao",)),
    _float("mxfp8", 4, 3, 448, 2.0**-9, shared="g32", scale="e8m0", rules=_MX, fixed=True),
    _float("mxfp4", 2, 1, 6, 0.5, shared="g32", scale="e8m0", rules=(*_MX, "gguf"), fixed=True),
    _float("nvfp4", 2, 1, 6, 0.5, shared="g16", scale="e4m3", rules=("torchao", _CT), fixed=True),
    Format("int8", "int", 8, 127, 1, -128, "channel", "fp32", (_CT,)),
    Format("int4", "int", 4, 7, 1, -8, "g128", "fp32", (_CT,)),
    _ggml("q8_0", 8, -127, 127),
    _ggml("q4_0", 4, -8, 7),
    _ggml("q4_1", 4, 0, 15, scale="fp16 + fp16"),
    _ggml("q5_0", 5, -16, 15),
    _ggml("q5_1", 5, 0, 31, scale="fp16 + fp16"),
    _ggml("tq1_0", 1.625, -1, 1, 256),
    _ggml("tq2_0", 2, -1, 1, 256),
)
FORMATS: Mapping[str, Format] = {row.name: row for row in _ALL}


def format_of(text: str) -> Format:
    """Parse a name such as `fp8`, `fp8:block128:pow2`, `int4:g64:asymmetric` or `nvfp4:compressed-tensors`.

    Raises FFNError for an unknown format, a word that it does not take, and two words that contradict each other.
    """
    name, *words = text.strip().lower().split(":")
    known = find_storage(name)
    row = FORMATS.get(known.name) if known else None
    if row is None:
        hint = did_you_mean(name, [*FORMATS], f"use one of {', '.join(FORMATS)}")
        raise FFNError(f"no tensor can be quantized to {shown(name)}", hint)
    chosen: dict[str, Any] = {}
    for word in words:
        field, value = row.choice(word)
        if field in chosen:
            raise FFNError(f"{shown(text)} has two words for the same choice, {shown(word)} is the second")
        chosen[field] = value
    form = replace(row, **chosen)
    rules = [rule for rule in (_POW2_RULES if form.pow2 else form.rules) if rule in form.rules]
    if form.rule not in ("", *rules):
        raise FFNError(f"{form.name}: {form.rule} does not write powers of two", f"use {' or '.join(rules)}")
    return replace(form, rule=form.rule or (rules or [""])[0])


def float_values(exponent: int, mantissa: int) -> tuple[float, ...]:
    """Return the value of each code of a float without infinities and NaN, such as E2M1 and E2M3 of OCP Microscaling
    Formats 1.0; the highest bit of a code is the sign."""
    steps, bias = 1 << mantissa, (1 << (exponent - 1)) - 1
    positive = [
        ((power > 0) * steps + step) * 2.0 ** (max(power, 1) - bias - mantissa)
        for power in range(1 << exponent)
        for step in range(steps)
    ]
    return (*positive, *(-value for value in positive))
