"""One fact of a text, and the measures that several texts need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ffncli.block.steps import Step, block_inputs
from ffncli.run.execute import EVAL, Mode, execute, run
from ffncli.run.prepare import Prepared

Verdict = Literal["", "holds", "depends", "wrong"]
Block = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fact:
    """`found` is computed. `said` is what the text says, "" where it says nothing that can be checked.

    `command` shows `found` too, where another than the text's own example does.
    """

    topic: str
    found: str
    said: str = ""
    verdict: Verdict = ""
    note: str = ""
    command: str = ""


def compared(topic: str, said: str, found: str, note: str = "", command: str = "") -> Fact:
    """A fact whose verdict is whether the text's words are what is found, to the digits that it gives."""
    return Fact(topic, found, said, "holds" if said == found else "wrong", note, command)


def number(value: float, digits: int = 4) -> str:
    """Fixed digits, without a sign before a zero."""
    return f"{value:.{digits}f}".replace("-0." + "0" * digits, "0." + "0" * digits)


def error(value: float, bound: float) -> str:
    """An error that rounding alone makes reads `below 1e-12`: what exactly it is depends on the machine."""
    return f"below {bound:g}" if value < bound else f"{value:.3g}"


def agrees(value: float, bound: float) -> Verdict:
    """Whether an error is rounding's alone."""
    return "holds" if value < bound else "wrong"


def double(ready: Prepared) -> dict[str, Tensor]:
    """The weights in float64 on the CPU, so that what is shown is the block's and not rounding's."""
    return {name: tensor.double().cpu() for name, tensor in ready.weights.items()}


def function(steps: Sequence[Step], weights: Mapping[str, Tensor], mode: Mode = EVAL) -> Block:
    """A block of one input as a function of it."""
    (entry,) = block_inputs(steps)
    return lambda x: run(steps, weights, {entry: x}, mode)


def intermediates(ready: Prepared, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the run by its name, in the weights' dtype, in the prepared mode."""
    like = next(iter(weights.values()))
    known = {name: tensor.to(like.device, like.dtype) for name, tensor in ready.inputs.items()}
    with torch.no_grad():
        return known | {e.name: e.tensor for e in execute(ready.steps, weights, known, ready.mode) if e.expert is None}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def departure(f: Block, a: Tensor, b: Tensor) -> float:
    """max |f(a + b) - f(a) - f(b) + f(0)|: 0 for every affine map, whatever its bias."""
    return float((f(a + b) - f(a) - f(b) + f(torch.zeros_like(a))).abs().max())


def farthest(a: Tensor, b: Tensor) -> float:
    """max |a - b|."""
    return float((a - b).abs().max())


def relative(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b|."""
    return farthest(a, b) / float(b.abs().max())


def table(values: Sequence[Sequence[float]] | Tensor, digits: int = 4) -> str:
    """Numbers as nested brackets: `[[-2.2255, -0.1673], [-3.7350, 0.6146]]`."""
    if isinstance(values, Tensor):
        values = values.tolist()
    return "[" + ", ".join(number(v, digits) if isinstance(v, float) else table(v, digits) for v in values) + "]"
