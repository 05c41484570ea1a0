"""Sweeps such as `--sweep d_ff=1x,2x,4x`: one block or model for every combination of the requested values."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, TypeAlias

from ffncli.block import activations
from ffncli.block.recipe import NormKind, NormPosition, one_of
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.models.dimensions import Dimensions, merged, whole, with_dimensions
from ffncli.models.model import Resolved
from ffncli.models.source import load

MAX_ROWS = 10_000
_NAMES = (*(field.name for field in fields(Dimensions)), "tokens")
_EXAMPLES = {"d_ff": "1x,2x,4x", "activation": "relu,swiglu", "gated": "yes,no", "bias": "yes,no"}
_FLAGS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_CHOICES: Mapping[str, Any] = {"norm": NormKind, "norm_position": NormPosition}


@dataclass(frozen=True)
class Point:
    """One combination: the values of the swept dimensions as typed, in the order of the sweeps."""

    values: tuple[tuple[str, str], ...]
    dimensions: Dimensions
    tokens: int | None = None

    @property
    def label(self) -> str:
        """Return text such as `d_ff=4x activation=gelu`."""
        return " ".join(f"{name}={text}" for name, text in self.values)


def points(sweeps: Sequence[str]) -> tuple[Point, ...]:
    """Return every combination of the sweeps' values; the last sweep varies fastest. Raises FFNError above MAX_ROWS
    combinations.

    A sweep is `NAME=VALUE,...`. A value has the form that the dimension's option accepts (yes or no for a flag); whole
    numbers may also be a range `FROM:TO:STEP`, which includes TO if a step reaches it.
    """
    parsed: dict[str, list[str]] = {}
    for text in sweeps:
        name, values = _sweep(text)
        if name in parsed:
            raise FFNError(f"{option('sweep')}: {name} is swept twice", "give all its values at once")
        parsed[name] = values
        _bounded(prod(len(values) for values in parsed.values()))
    choices = [[(name, text, _checked(name, text)) for text in values] for name, values in parsed.items()]
    return tuple(_point(combination) for combination in product(*choices))


Load: TypeAlias = Callable[[str | None, Dimensions | None], Resolved]


def swept(
    source: str | None, options: Dimensions, points: Sequence[Point], load: Load = load
) -> Iterator[tuple[Point, Resolved]]:
    """Yield each point with its model: the SOURCE, changed by the dimension options and then by the point's dimensions.

    The source is read once, with `load`. Errors name the point.
    """
    change = _changer(source, load)
    for point in points:
        try:
            yield point, change(merged(options, point.dimensions))
        except FFNError as error:
            raise error.within(option("sweep", point.label)) from None


def _changer(source: str | None, load: Load) -> Callable[[Dimensions], Resolved]:
    """Return a function from dimensions to a model; defaults of a block follow the swept values."""
    if source is None:
        return partial(load, None)
    if source.partition(":")[0].endswith(".py"):
        return partial(load, source)  # a user's class is rebuilt, since it may use its arguments in any way
    resolved = load(source, None)
    return partial(load, source) if resolved.model.bare else partial(with_dimensions, resolved)


def _point(combination: Sequence[tuple[str, str, Any]]) -> Point:
    values = {name: value for name, _, value in combination}
    tokens = values.pop("tokens", None)
    point = Point(tuple((name, text) for name, text, _ in combination), Dimensions(), tokens)
    try:
        return replace(point, dimensions=Dimensions(**values))
    except FFNError as error:
        raise error.within(option("sweep", point.label)) from None


def _sweep(text: str) -> tuple[str, list[str]]:
    name, equals, listed = text.partition("=")
    name = name.strip().lower().lstrip("-").replace("-", "_")
    if not equals:
        raise FFNError(f"{option('sweep')} {shown(text)} has no '='", "write it as d_ff=1x,2x,4x")
    if name not in _NAMES:
        hint = did_you_mean(name, [*_NAMES], f"use one of {', '.join(_NAMES)}")
        raise FFNError(f"{option('sweep')}: unknown dimension {shown(name)}", hint)
    values: list[str] = []
    for item in listed.split(","):
        values += _values(name, item.strip())
        _bounded(len(values))
    return name, values


def _bounded(rows: int) -> None:
    if rows > MAX_ROWS:
        raise FFNError(
            f"{option('sweep')} needs {rows} rows or more, but the limit is {MAX_ROWS}", "sweep fewer values"
        )


def _values(name: str, item: str) -> list[str]:
    """Expand one item of the list, which is a value or a range of whole numbers."""
    if not item:
        raise FFNError(f"{option('sweep')} {name}: an empty value", f"write it as {name}={_EXAMPLES.get(name, '1,2')}")
    match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10}):([0-9]{1,10})", item)
    if not match:
        return [item]
    first, last, step = (int(number) for number in match.groups())
    if step < 1 or last < first:
        raise FFNError(
            f"{option('sweep')} {name}: {item} is an empty range", "write it as FROM:TO:STEP, as in 512:4096:512"
        )
    numbers = range(first, last + 1, step)
    _bounded(len(numbers))
    return [str(number) for number in numbers]


def _checked(name: str, text: str) -> Any:
    """Check values that can be checked in isolation; `Dimensions` converts the others (`4x` requires d_model)."""
    label = f"{option('sweep')} {name}"
    if name in ("gated", "bias", "residual"):
        if text.lower() not in _FLAGS:
            raise FFNError(f"{label} must be yes or no, got {shown(text)}")
        return _FLAGS[text.lower()]
    if name == "activation":
        activations.resolve(text, label)
    if name in _CHOICES:
        return one_of(label, text, _CHOICES[name])
    return whole(label, text) if name in ("d_model", "tokens") else text
