"""A zero input: the output is 0 without biases, not 0 with them, and the same for every token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.rewrite import with_biases
from ffncli.block.steps import Step, parameters
from ffncli.run.engine.execute import run
from ffncli.run.engine.functions import function
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow


def zero(case: CheckedBlock) -> Iterator[CheckRow]:
    """The FFN of zeros, without biases, with random ones, and row by row."""
    judge = case.judge("zero")
    nothing = torch.zeros_like(case.x)
    bare, biased = with_biases(case.ffn, False), with_biases(case.ffn, True)
    without = run(bare, _kept(bare, case.ffn_weights), {case.entry: nothing})
    expected, note = _without_biases(case, without)
    yield judge.equal("without biases", without, expected, note)
    out = run(biased, _with_drawn(case, biased), {case.entry: nothing})
    size = float(out.abs().max())
    note = "the largest output, with random biases: must not be 0"
    yield CheckRow(judge.check, "with biases", size, tolerance=0.0, passed=size > 0, note=note)
    note = "in eval; in train mode dropout makes equal tokens differ"
    yield judge.equal("equal tokens", out, out[:1].expand_as(out), note)


def _without_biases(case: CheckedBlock, out: Tensor) -> tuple[Tensor, str]:
    """The expected output, and why: 0, unless f(0) is not 0 and there is no gate to multiply it by."""
    act = next((step for step in case.ffn if step.output == "act"), None)
    expected, note = torch.zeros_like(out), "0, exactly"
    if act is None or case.layer.spec.gated or case.layer.spec.sub_norm:
        return expected, note
    learned = {name.removeprefix("act."): t for name, t in case.ffn_weights.items() if name.startswith("act.")}
    at_zero = function(case.layer.spec.activation, learned)(torch.zeros(1, dtype=case.dtype, device=case.device))
    if float(at_zero) == 0:
        return expected, note
    down = case.ffn_weights["down.weight"]
    rise = at_zero.expand(len(out), down.shape[1])
    return functional.linear(
        rise, down
    ), f"{case.layer.spec.activation}(0) = {float(at_zero):.4g}, so it is W2 times that"


def _kept(steps: tuple[Step, ...], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weights[name] for name in parameters(steps)}


def _with_drawn(case: CheckedBlock, steps: tuple[Step, ...]) -> dict[str, Tensor]:
    """The weights with random biases of every Linear."""
    generator = case.generator()
    out = {}
    for name, axes in parameters(steps).items():
        shape = [axis.size for axis in axes]
        linear = name.endswith(".bias") and "norm" not in name
        drawn = torch.randn(shape, generator=generator).to(case.device, case.dtype) if linear else None
        out[name] = case.ffn_weights[name] if drawn is None else drawn
    return out
