"""A formula of the activation table as a tree: its `f(x, m)` is called on a term, over a namespace of terms.

One formula then prints as torch code, and becomes nodes of an ONNX graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from ffncli.block import value as limited
from ffncli.block.formulas import SCALAR, with_learned
from ffncli.block.steps import Activation

_BINARY = {"+": 2, "-": 2, "*": 3, "/": 3, "<": 1, "<=": 1, ">": 1, ">=": 1, "==": 1}  # sign → how tightly it binds
_ATOM = 5


class FormulaTerm:
    """A number of a formula: a function's name or a sign, and what it is applied to; `value` for a leaf."""

    def __init__(self, name: str, *of: FormulaTerm, value: object = None) -> None:
        self.name, self.of, self.value = name, of, value

    __hash__ = None  # type: ignore[assignment]  # == makes a term

    def __add__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("+", self, term(other))

    def __radd__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("+", term(other), self)

    def __sub__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("-", self, term(other))

    def __rsub__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("-", term(other), self)

    def __mul__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("*", self, term(other))

    def __rmul__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("*", term(other), self)

    def __truediv__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("/", self, term(other))

    def __neg__(self) -> FormulaTerm:
        return FormulaTerm("-", term(0.0), self)

    def __lt__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("<", self, term(other))

    def __le__(self, other: Any) -> FormulaTerm:
        return FormulaTerm("<=", self, term(other))

    def __gt__(self, other: Any) -> FormulaTerm:
        return FormulaTerm(">", self, term(other))

    def __ge__(self, other: Any) -> FormulaTerm:
        return FormulaTerm(">=", self, term(other))

    def __eq__(self, other: object) -> FormulaTerm:  # type: ignore[override]
        return FormulaTerm("==", self, term(other))


def term(value: Any) -> FormulaTerm:
    """A term as it is; a number as a leaf."""
    return value if isinstance(value, FormulaTerm) else FormulaTerm("number", value=float(value))


def leaf(value: object) -> FormulaTerm:
    """What a printer or a graph knows by this value: the input, or a learned parameter."""
    return FormulaTerm("leaf", value=value)


def _call(name: str, *of: Any) -> FormulaTerm:
    return FormulaTerm(name, *map(term, of))


_NAMESPACE = SimpleNamespace(**{name: partial(_call, name) for name in vars(SCALAR)})


def formula_of(op: Activation, x: FormulaTerm, learned: Mapping[str, FormulaTerm]) -> FormulaTerm:
    """What an activation computes without its limits, a soft cap included."""
    out: FormulaTerm = limited.unlimited(op, x, with_learned(_NAMESPACE, learned))
    return out


def as_torch(node: FormulaTerm) -> str:
    """The formula as an expression over torch; leaves print as they are."""
    return _printed(node)[0]


def _printed(node: FormulaTerm) -> tuple[str, int]:
    """(the text, how tightly it binds)."""
    if node.name == "leaf":
        text = str(node.value)
        return text, _ATOM
    if node.name == "number":
        return repr(node.value), _ATOM
    if node.name not in _BINARY:
        return f"torch.{node.name}({', '.join(as_torch(part) for part in node.of)})", _ATOM
    binds = _BINARY[node.name]
    (a, left), (b, right) = _printed(node.of[0]), _printed(node.of[1])
    a = f"({a})" if left < binds else a
    b = f"({b})" if right <= binds else b
    return f"{a} {node.name} {b}", binds
