"""Operations per element, counted by running a formula of the table on operands that record every operation.

A repeated expression is counted once. `where` counts both of its branches, since tensors compute both. Constants are
folded: values that do not depend on the input (a learned α, and whatever is computed from it once per tensor) cost
nothing per element. Multiplying by 1, adding 0 and testing for NaN (x == x) cost nothing, too. A fused kernel may need
fewer or more operations, for example a max instead of a comparison and a selection. `block/cost.py` counts 1 FLOP per
element for any activation; this module refines that figure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias

from ffncli.block.activations import TABLE
from ffncli.block.formulas import SCALAR, with_learned

CONVENTION = (
    "per element, as the table's formula computes it: a repeated expression is counted once, a selection computes both"
    " sides, constants and learned parameters are not per element; a max is a comparison and a selection; an abs or a"
    " negation is `sign`; exp, erf, tanh, sigmoid and similar functions count as one; fused kernels may differ"
)


@dataclass(frozen=True)
class Operations:
    """Counts per element. `add` includes subtractions, `compare` includes logical ands, `sign` is abs and negation."""

    multiply: int = 0
    add: int = 0
    divide: int = 0
    compare: int = 0
    select: int = 0
    sign: int = 0
    functions: Mapping[str, int] = field(default_factory=dict)  # exp, erf, tanh, ... → count

    @property
    def total(self) -> int:
        """The total number of operations, in which each function call counts as one."""
        return sum(count for _, count in self._kinds()) + self.transcendental

    @property
    def transcendental(self) -> int:
        """The number of function calls (exp, erf, ...), including square roots."""
        return sum(self.functions.values())

    @property
    def text(self) -> str:
        """The counts as text, such as `3 mul, 1 add, 1 erf`; `none` for the identity."""
        counts = [*self._kinds(), *self.functions.items()]
        return ", ".join(f"{count} {name}" for name, count in counts if count) or "none"

    def record(self) -> dict[str, Any]:
        """Return the counts for JSON: every kind of operation, `functions` by name, `total`, `text`."""
        kinds = {kind: getattr(self, kind) for kind in _SHORT}
        return {**kinds, "functions": dict(self.functions), "total": self.total, "text": self.text}

    def _kinds(self) -> list[tuple[str, int]]:
        return [(short, getattr(self, kind)) for kind, short in _SHORT.items()]


_SHORT = {"multiply": "mul", "add": "add", "divide": "div", "compare": "compare", "select": "select", "sign": "sign"}


@cache
def operations(name: str, slope: bool = False) -> Operations:
    """Return the operations per element of f, given by its canonical name (a key of `activations.TABLE`); with `slope`,
    the operations of the slope alone."""
    row = TABLE[name]
    m = with_learned(COUNTING, row.learned)
    function = row.slope if slope else row.f
    return counted(lambda x: function(x, m))


def counted(function: Callable[..., Any], inputs: int = 1) -> Operations:
    """Count the operations of a function of `inputs` elements. It may call only the functions in `COUNTING`."""
    tape = _Tape()
    function(*(tape.value(("input", (i,))) for i in range(inputs)))
    kinds = [key[0] for key in tape.values if key[0] != "input"]
    plain = {kind: kinds.count(kind) for kind in _SHORT}
    return Operations(**plain, functions={k: kinds.count(k) for k in dict.fromkeys(kinds) if k not in _SHORT})


# --- operands that record ---------------------------------------------------------------------------------------------

_Key: TypeAlias = tuple[str, tuple[Hashable, ...]]  # (kind, operation and operands)


class _Tape:
    """Every distinct value computed so far, identified by its operation and operands."""

    def __init__(self) -> None:
        self.values: dict[_Key, _Operand] = {}

    def value(self, key: _Key) -> _Operand:
        return self.values.setdefault(key, _Operand(self, len(self.values)))

    def do(self, kind: str, how: str, *operands: Any) -> _Operand:
        parts = (("value", o.index) if isinstance(o, _Operand) else ("constant", o) for o in operands)
        return self.value((kind, (how, *parts)))


def _operator(
    kind: str, how: str, unchanged_by: float | None = None, reflected: bool = False
) -> Callable[[_Operand, Any], _Operand]:
    """Return a method that records an operation, except with the constant that leaves a value unchanged."""

    def record(operand: _Operand, other: Any) -> _Operand:
        if unchanged_by is not None and not isinstance(other, _Operand) and other == unchanged_by:
            return operand
        return operand.tape.do(kind, how, *((other, operand) if reflected else (operand, other)))

    return record


class _Operand:
    """A value, or a boolean, that depends on the input."""

    def __init__(self, tape: _Tape, index: int) -> None:
        self.tape, self.index = tape, index

    __add__ = _operator("add", "+", unchanged_by=0.0)
    __radd__ = _operator("add", "+", unchanged_by=0.0, reflected=True)
    __sub__ = _operator("add", "-", unchanged_by=0.0)
    __rsub__ = _operator("add", "-", reflected=True)
    __mul__ = _operator("multiply", "*", unchanged_by=1.0)
    __rmul__ = _operator("multiply", "*", unchanged_by=1.0, reflected=True)
    __truediv__ = _operator("divide", "/", unchanged_by=1.0)
    __rtruediv__ = _operator("divide", "/", reflected=True)
    __lt__ = _operator("compare", "<")
    __le__ = _operator("compare", "<=")
    __gt__ = _operator("compare", ">")
    __ge__ = _operator("compare", ">=")
    __and__ = _operator("compare", "&")

    def __neg__(self) -> _Operand:
        return self.tape.do("sign", "-", self)

    def __abs__(self) -> _Operand:
        return self.tape.do("sign", "abs", self)

    def __eq__(self, other: Any) -> Any:
        same = isinstance(other, _Operand) and other.index == self.index  # a test for NaN, which counts as true
        return same or self.tape.do("compare", "==", self, other)

    def __bool__(self) -> bool:
        raise TypeError("a formula of the table branches with where, not with if")


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, _Operand):
        return a if condition else b
    return condition.tape.do("select", "where", condition, a, b)


def _function(name: str) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        return x.tape.do(name, name, x) if isinstance(x, _Operand) else getattr(SCALAR, name)(x)

    return call


_REPLACED = {"abs": abs, "where": _where}
COUNTING: Any = SimpleNamespace(**{name: _REPLACED.get(name) or _function(name) for name in vars(SCALAR)})
