"""Step by step = nn.Module, in eval mode and, with the same dropout mask, in train mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Dropout, ffn_steps, shapes
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.run.engine.execute import Mode, run
from ffncli.run.engine.reference import steady_tokens
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow
from ffncli.run.verify.module import block_module

_NAIVE = "each call draws its own dropout mask, so two calls in train mode differ by this; with one mask they agree"


@dataclass(frozen=True)
class Subject:
    """A module that should equal the block: its label, the module, and how to run it on the block's inputs."""

    label: str
    module: nn.Module
    call: Callable[[nn.Module], Tensor]


def module(case: CheckedBlock) -> Iterator[CheckRow]:
    """The reference execution, against torch's own layers, and against the user's module if there is one."""
    spec, subjects = _spec_of(case), []
    if spec is None:
        yield case.judge("module").skips("torch.nn", "the file's norms are not known")
    else:
        built = block_module(spec, case.weights)
        subjects.append(Subject("torch.nn", built, lambda m: m(*case.inputs.values())))
    if case.user_module is not None:
        twin, runner = copy.deepcopy(case.user_module.module).to(case.device, case.dtype), case.user_module.runner
        subjects.append(Subject(type(twin).__name__, twin.eval(), lambda m: runner(m, case.inputs["x"])))
    for subject in subjects:
        try:
            yield from _eval(case, subject)
            yield from _train(case, subject)
        except FFNError as error:  # the user's forward, in this dtype
            yield case.judge("module").fails(subject.label, error.message)


def _spec_of(case: CheckedBlock) -> FFNSpec | None:
    """The spec whose steps the case runs: the layer's, without norms that its file does not describe."""
    spec = case.layer.spec
    bare = replace(spec, residual=False, parallel=False)
    if case.steps == ffn_steps(steps(spec)) and not spec.sub_norm:
        return replace(bare, norm="none")
    return next(
        (candidate for candidate in (spec, replace(bare, norm_position="pre")) if steps(candidate) == case.steps), None
    )


def _eval(case: CheckedBlock, subject: Subject) -> Iterator[CheckRow]:
    ours, theirs = run(case.steps, case.weights, case.inputs), subject.call(subject.module)
    same, remark = steady_tokens(case.steps, case.weights, case.inputs, case.dtype)
    if not same.any():
        yield case.judge("module").skips(f"{subject.label}, eval", remark)
        return
    if remark and ours.shape == theirs.shape:
        ours, theirs = ours[same], theirs[same]
    yield case.judge("module").equal(f"{subject.label}, eval", ours, theirs, remark)


def _train(case: CheckedBlock, subject: Subject) -> Iterator[CheckRow]:
    """The module's nn.Dropout draws a mask, and the steps run with the same mask."""
    judge, label = case.judge("module"), f"{subject.label}, train"
    dropouts = [step for step in case.steps if isinstance(step.op, Dropout)]
    parts = [part for part in subject.module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
    if case.layer.spec.moe and case.layer.spec.dropout:
        yield judge.skips(label, "every expert draws its own mask")
        return
    if len(dropouts) != len(parts):
        yield judge.skips(label, "the module has dropout in a place other than before the down projection")
        return
    if not dropouts:
        yield judge.skips(label, "the block has no dropout: train is eval")
        return
    (step,) = dropouts
    width = shapes(case.steps, {n: tuple(t.shape) for n, t in case.inputs.items()})[step.output]
    assert isinstance(step.op, Dropout)
    with torch.random.fork_rng(devices=[case.device] if case.device != "cpu" else []):
        torch.manual_seed(case.seed)
        ones = torch.ones(width, dtype=case.dtype, device=case.device)
        mask = nn.functional.dropout(ones, step.op.p, training=True) != 0
        torch.manual_seed(case.seed)
        theirs = subject.call(subject.module.train())
        again = subject.call(subject.module)
        subject.module.eval()
    ours = run(case.steps, case.weights, case.inputs, Mode(train=True, masks={step.output: mask}))
    note = f"mask drops {int((~mask).sum())} of {mask.numel()}"
    yield judge.equal(f"{label}, same mask", ours, theirs, note)
    yield judge.figure(f"{label}, called twice", again, theirs, _NAIVE)
