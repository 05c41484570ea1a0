"""Gated units as functions of two numbers: y = a(gate) ⊙ b(up), where a and b are `steps.Activation`s.

The units of GATED are already in this one table; a unit that limits its gate or its up is a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ffncli.block.activations import CANONICAL, GATED, LIMITED, TABLE, ActivationRow, known_names
from ffncli.block.analysis.curve import Curve, curve
from ffncli.block.analysis.operations import COUNTING, Operations, counted
from ffncli.block.recipe import FFNSpec
from ffncli.block.scalar import SCALAR
from ffncli.block.steps import Activation
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
        return f"{_formula(self.gate, 'gate')} ⊙ {f'({up})' if self.up.plus else up}"

    def value(self, gate: float, up: float) -> float:
        """y."""
        return float(self.f(gate, up, SCALAR))

    def slopes(self, gate: float, up: float) -> tuple[float, float]:
        """(∂y/∂gate, ∂y/∂up); at a kink or a limit, torch's value."""
        a, b = factor(self.gate), factor(self.up)
        return a.slope(gate) * b.f(up), a.f(gate) * b.slope(up)

    def f(self, gate: Any, up: Any, m: Any) -> Any:
        """y over a namespace (`block/scalar.py`, torch)."""
        return applied(self.gate, gate, m) * applied(self.up, up, m)

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
        return FFNSpec(
            d_model, d_ff, self.gate.function, gated=True, bias=False, clamp=self.gate.high, up_plus=self.up.plus
        )


_USED_BY = {
    "swiglu": "Llama, Mistral, Mixtral, Qwen, DeepSeek, OLMo, Phi-3, Phi-4, Granite, PaLM",
    "geglu": "ModernBERT, Zamba",
    "geglu_tanh": "T5 v1.1, mT5, Gemma",
}
_SOURCE = {"glu": "Dauphin et al. 2016, arXiv:1612.08083"}

_LIMITED_UNITS = (
    GatedUnit(
        "swiglu_oai",
        Activation("quick_gelu", high=7.0),
        Activation("identity", -7.0, 7.0, 1.0),
        used_by="gpt-oss, MiniMax-M3",
        source="gpt-oss model card, arXiv:2508.10925; transformers GptOssExperts",
    ),
)
UNITS: dict[str, GatedUnit] = {
    name: GatedUnit(name, Activation(f), used_by=_USED_BY.get(name, ""), source=_SOURCE.get(name, _SHAZEER))
    for name, f in GATED.items()
} | {unit.name: unit for unit in _LIMITED_UNITS}


def split(names: Sequence[str], option: str = "NAME") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(canonical names of plain functions, names of gated units), in order, no duplicates; in any spelling.

    Raises FFNError for an unknown name, with the nearest known ones.
    """
    plain: dict[str, None] = {}
    gated: dict[str, None] = {}
    for name in (part for text in names for part in text.split(",")):
        key = name.strip().lower().replace("-", "_")
        key = LIMITED.get(key, key)
        if key in UNITS:
            gated[key] = None
        elif key in CANONICAL:
            plain[CANONICAL[key]] = None
        else:
            spellings = [*known_names(), *(n for n in UNITS if n not in GATED)]
            hint = did_you_mean(key, spellings, "known: " + ", ".join([*TABLE, *UNITS]))
            raise FFNError(f"{option}: unknown activation {shown(name)}", hint)
    return tuple(plain), tuple(gated)


def applied(op: Activation, x: Any, m: Any) -> Any:
    """The step's function, over a namespace. A limit lets NaN through, as torch's clamp does."""
    y = TABLE[op.function].f(_clipped(op, x, m), m)
    return y + op.plus if op.plus else y


def factor(op: Activation) -> Curve:
    """The step as a curve, its limits among the kinks."""
    inner = curve(op.function)
    if op.low is None and op.high is None and not op.plus:
        return inner
    low = float("-inf") if op.low is None else op.low
    high = float("inf") if op.high is None else op.high

    def slope(x: Any, m: Any) -> Any:
        return TABLE[op.function].slope(x, m) if low <= x <= high else 0.0  # torch's clamp passes on its limits

    limits = tuple((x, 1) for x in (op.low, op.high) if x is not None)
    kinks = tuple(sorted([*(k for k in inner.row.kinks if low < k[0] < high), *limits]))
    row = ActivationRow(op.function, _formula(op, "x"), lambda x, m: applied(op, x, m), slope, kinks=kinks)
    return Curve(row, lambda x: row.f(x, SCALAR), lambda x: row.slope(x, SCALAR))


def _clipped(op: Activation, x: Any, m: Any) -> Any:
    if op.low is not None:
        x = m.where(x < op.low, op.low, x)
    return x if op.high is None else m.where(x > op.high, op.high, x)


def _formula(op: Activation, name: str) -> str:
    return name if op == _IDENTITY else op.formula((name,), str)
