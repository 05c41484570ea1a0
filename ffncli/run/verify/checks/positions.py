"""The FFN treats every token alike and separately: as a convolution of width 1, in any order, in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Linear
from ffncli.kernels import built_in
from ffncli.run.engine.execute import execute, run
from ffncli.run.engine.reference import output_and_experts, same_experts
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow

_ALONE = 4  # tokens that are run one at a time: each reads all weights


def convolution(case: CheckedBlock) -> Iterator[CheckRow]:
    """Every Linear is a Conv1d with kernel 1 over [1, d_in, tokens], and so is the whole FFN."""
    judge, dense = case.judge("convolution"), case.dense
    inside = "" if dense.label == "the FFN" else f"{dense.label}, "
    tensors = {dense.entry: dense.x}
    for event in execute(dense.steps, dense.weights, tensors):
        tensors[event.name] = event.tensor
        if isinstance(event.step.op, Linear):
            weight, bias = dense.weights[f"{event.name}.weight"], dense.weights.get(f"{event.name}.bias")
            turned = functional.conv1d(tensors[event.step.inputs[0]].T[None], weight[..., None], bias)
            yield judge.equal(f"{inside}{event.name}", turned[0].T, event.tensor)
    conv = built_in("conv1x1")
    reason = conv.refuses(case.ffn)
    if reason:
        yield judge.skips("whole FFN", f"conv1x1 {reason}")
        return
    output = conv.build(case.ffn, case.device, case.dtype)(case.x, conv.prepare(case.ffn, case.ffn_weights))
    yield judge.equal("whole FFN", output, run(case.ffn, case.ffn_weights, {case.entry: case.x}))


def tokens(case: CheckedBlock) -> Iterator[CheckRow]:
    """A token's output depends neither on other tokens nor on its position."""
    judge, n = case.judge("tokens"), case.tokens
    if n < 2:
        yield judge.skips("permuted", "only one token: give --tokens 2 or more")
        return
    whole, went = output_and_experts(case.steps, case.weights, case.inputs)

    def compared(subject: str, order: Tensor, parts: list[Tensor]) -> CheckRow:
        """The tokens `parts`, each run together, against the same tokens in the full run, listed by `order`."""
        made = [
            output_and_experts(case.steps, case.weights, {k: t[part] for k, t in case.inputs.items()}) for part in parts
        ]
        output = torch.cat([tensor for tensor, _ in made])
        there = torch.cat([e for _, e in made if e is not None]) if went is not None else None
        same, note = same_experts(there, None if went is None else went[order], len(order))
        return judge.equal(subject, output[same], whole[order][same], note)

    shuffled = torch.randperm(n, generator=case.generator()).to(case.device)
    every = torch.arange(n, device=case.device)
    yield compared("permuted", shuffled, [shuffled])
    yield compared("split in two", every, [every[: n // 2], every[n // 2 :]])
    few = every[:_ALONE]
    label = "one at a time" if n <= _ALONE else f"first {_ALONE}, one at a time"
    yield compared(label, few, [token[None] for token in few])
