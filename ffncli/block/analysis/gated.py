"""Gated units as functions of two numbers: y = a(gate) ⊙ b(up), where a and b are `steps.Activation`s.

The units of GATED have no limits; `block/limits.py` has those that limit gate or up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ffncli.block.activations import CANONICAL, GATED, LIMITED, TABLE, ActivationRow, known_names, spelled
from ffncli.block.analysis.curve import Curve, curve
from ffncli.block.analysis.operations import COUNTING, Operations, counted
from ffncli.block.analysis.shape import bisect
from ffncli.block.limited import clipped, slope, unlimited, value
from ffncli.block.limits import UNITS_WITH_LIMITS
from ffncli.block.recipe import FFNSpec, unit_ops
from ffncli.block.scalar import SCALAR
from ffncli.block.steps import Activation
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, did_you_mean, shown

_IDENTITY = Activation("identity")
_SHAZEER = "Shazeer 2020, arXiv:2002.05202"


@dataclass(frozen=True)
class GatedUnit:
    """y = gate(g) ⊙ up(u). No unit here has a gate function with learned parameters."""

    name: str
    gate: Activation
    up: Activation = _IDENTITY
    used_by: str = ""
    source: str = _SHAZEER

    @property
    def formula(self) -> str:
        """`silu(gate) ⊙ up`, `quick_gelu(min(gate, 7)) ⊙ (clip(up, -7, 7) + 1)`."""
        up = _formula(self.up, "up")
        several = self.up.plus or self.up.soft_cap is not None
        return f"{_formula(self.gate, 'gate')} ⊙ {f'({up})' if several else up}"

    def value(self, gate: float, up: float) -> float:
        """y."""
        return float(self.f(gate, up, SCALAR))

    def slopes(self, gate: float, up: float) -> tuple[float, float]:
        """(∂y/∂gate, ∂y/∂up); at a kink or a limit, torch's value."""
        a, b = factor(self.gate), factor(self.up)
        return a.slope(gate) * b.f(up), a.f(gate) * b.slope(up)

    def f(self, gate: Any, up: Any, m: Any) -> Any:
        """y over a namespace (`block/scalar.py`, torch)."""
        return value(self.gate, gate, m) * value(self.up, up, m)

    def over_gate(self, up: float) -> Curve:
        """y as a curve of the gate at one value of up."""
        row = ActivationRow(
            self.name, self.formula, lambda x, m: self.f(x, up, m), lambda x, m: self.slopes(x, up)[0],
            kinks=factor(self.gate).row.kinks,
        )  # fmt: skip
        return Curve(row, lambda x: self.value(x, up), lambda x: self.slopes(x, up)[0])

    def operations(self) -> Operations:
        """The operations of one element of y, the product included."""
        return counted(lambda gate, up: self.f(gate, up, COUNTING), inputs=2)

    def spec(self, d_model: int, d_ff: int) -> FFNSpec:
        """The gated block without biases that has this unit."""
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
    """(canonical names of plain functions, names of gated units), in order, no duplicates; in any spelling.

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
    """The step as a curve, its limits among the kinks."""
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
    """Where the function passes `most`; the functions of gated units rise from 0 on. None if it never does."""
    if op.most is None:
        return None

    def over(x: float) -> float:
        return float(unlimited(op, clipped(op, x, SCALAR), SCALAR)) - (op.most or 0.0)

    high = next((high for high in (2.0**n for n in range(-20, 100)) if over(high) > 0), None)
    return None if high is None else bisect(over, 0.0, high)


def _formula(op: Activation, name: str) -> str:
    return name if op == _IDENTITY else op.formula((name,), str)
