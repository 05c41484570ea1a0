"""One fact stated by a founding text, and the functions shared by several files of this folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ffncli.block.steps import Step, block_inputs
from ffncli.run.engine.execute import EVAL, Mode, execute, run
from ffncli.run.engine.prepare import Prepared

Verdict = Literal["", "holds", "depends", "wrong"]
Block = Callable[[Tensor], Tensor]
ROUNDING = 1e-12  # smaller errors in float64 are only rounding


@dataclass(frozen=True)
class Fact:
    """A computed figure, `found`, and a `verdict` on a founding text's statement (empty if it cannot be checked).

    `said` is the founding text's wording (empty if `topic` already contains the claim). `command` is a command that
    shows `found`, if the example does not show it.
    """

    topic: str
    found: str
    said: str = ""
    verdict: Verdict = ""
    note: str = ""
    command: str = ""


def compared(topic: str, stated: str, figure: str, note: str = "", command: str = "") -> Fact:
    """Return a fact that holds if the stated figure equals the computed figure to the stated digits."""
    return Fact(topic, figure, stated, "holds" if stated == figure else "wrong", note, command)


def number(value: float, digits: int = 4) -> str:
    """Format a number with a fixed number of decimals; zero has no sign."""
    return f"{value:.{digits}f}".replace("-0." + "0" * digits, "0." + "0" * digits)


def error(value: float, bound: float) -> str:
    """Format an error; rounding errors become `below 1e-12`, because their exact value depends on the machine."""
    return f"below {bound:g}" if value < bound else f"{value:.3g}"


def agrees(value: float, bound: float) -> Verdict:
    """Return the verdict: `holds` if the error `value` is so small that rounding explains it."""
    return "holds" if value < bound else "wrong"


def doubled(ready: Prepared) -> Prepared:
    """Return the same run in float64 on the CPU, so that the figures are free of rounding."""
    masks = {name: mask.cpu() for name, mask in ready.mode.masks.items()}
    return replace(
        ready,
        weights={name: tensor.double().cpu() for name, tensor in ready.weights.items()},
        inputs={name: tensor.double().cpu() for name, tensor in ready.inputs.items()},
        mode=replace(ready.mode, masks=masks),
    )


def function(steps: Sequence[Step], weights: Mapping[str, Tensor], mode: Mode = EVAL) -> Block:
    """Convert a block with one input to a function of that input."""
    (entry,) = block_inputs(steps)
    return lambda x: run(steps, weights, {entry: x}, mode)


def intermediates(ready: Prepared) -> dict[str, Tensor]:
    """Run in the prepared mode, and return a mapping from the tensors' names to the tensors."""
    events = execute(ready.steps, ready.weights, ready.inputs, ready.mode)
    return dict(ready.inputs) | {event.name: event.tensor for event in events if event.expert is None}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal values in float64, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def departure(f: Block, a: Tensor, b: Tensor) -> float:
    """Return max |f(a + b) - f(a) - f(b) + f(0)|: 0 for every affine map, whatever its bias."""
    return float((f(a + b) - f(a) - f(b) + f(torch.zeros_like(a))).abs().max())


def table(values: Tensor, digits: int = 4) -> str:
    """Format values as nested brackets: `[[-2.2255, -0.1673], [-3.7350, 0.6146]]`."""
    if values.dim() == 0:
        return number(float(values), digits)
    return "[" + ", ".join(table(inner, digits) for inner in values) + "]"
