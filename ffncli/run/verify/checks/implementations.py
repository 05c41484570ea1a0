"""Checks that other ways to compute the block agree with its steps: an nn.Module, kernels, shards."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import AllReduce, Dropout, ffn_steps, shapes, walk
from ffncli.errors import FFNError
from ffncli.kernels import built_in
from ffncli.kernels.kernel import Kernel
from ffncli.run.engine.execute import Mode, run
from ffncli.run.engine.reference import in_float64, output_and_experts, same_experts, steady_tokens
from ffncli.run.engine.sharded import summed
from ffncli.run.user.time_limit import loading
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow, Judge
from ffncli.run.verify.checks.causes import Trial, explained
from ffncli.run.verify.checks.trial import counts_to_try
from ffncli.run.verify.module import block_module
from ffncli.show.text import counted

_NAIVE = "each call draws its own dropout mask, so two calls in train mode differ this much; with one mask they agree"


@dataclass(frozen=True)
class Subject:
    """A module that should equal the block, its label, and a function that runs it on the block's inputs."""

    label: str
    module: nn.Module
    call: Callable[[nn.Module], Tensor]


def module(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check the steps against torch's own layers, and against the user's module if there is one."""
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
    """Return the spec whose steps the case runs: the layer's spec, without the norms if its file does not describe
    them. None if no such spec has these steps."""
    spec = case.layer.spec
    bare = replace(spec, residual=False, parallel=False)
    if case.steps == ffn_steps(steps(spec)) and not spec.sub_norm:
        return replace(bare, norm_position="branch") if spec.post_norm_inside else replace(bare, norm="none")
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
    """Check train mode: the module's nn.Dropout draws a mask, and the steps run with the same mask."""
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
        yield judge.skips(label, "the block has no dropout, so train mode equals eval mode")
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


# Kernels compared with the reference in float64, and the packed kernel with the eager kernel.


class BrokenContract(Exception):
    """Raised if a kernel breaks its contract; the message describes the fault."""


def fused(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check that gate and up packed in one matrix equal gate and up as separate matrices, in the same dtype."""
    judge, packed = case.judge("fused"), built_in("packed")
    reason = packed.refuses(case.ffn) or built_in("eager").refuses(case.ffn)
    if reason:
        yield judge.skips("packed = eager", reason)
        return
    one, two = (compute(case, kernel) for kernel in (packed, built_in("eager")))
    yield judge.equal("packed = eager", one, two, "gate and up as one matrix")


def kernels(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check every kernel in the case's dtype against the steps in float64; a user's kernel also on every token count
    that the referee tries."""
    given = _Tokens.of(case, case.x)
    drawn = None
    for kernel in case.kernels:
        judge = replace(case, computes=kernel.computes).judge("kernels")
        reason = kernel.refusal(case.ffn, case.device, case.dtype)
        if reason:
            yield judge.skips(kernel.name, reason)
            continue
        if not given.reference.any():  # as with a down projection that starts at 0
            why = "the block's output is 0, which a kernel without any computation has, too: give other weights"
            yield judge.fails(kernel.name, why) if kernel.origin else judge.skips(kernel.name, why)
            continue
        if kernel.origin and drawn is None:
            drawn = _drawn(case)
        with loading(kernel.name, "return") if kernel.origin else nullcontext():
            row = _tried(case, kernel, judge, [given, *(drawn if kernel.origin and drawn else [])])
        yield row


@dataclass(frozen=True)
class _Tokens:
    """Tokens x [tokens, d_model], the block's output in float64, a mask of the tokens that rounding sends to the same
    experts, and a remark on the others."""

    x: Tensor
    reference: Tensor
    same: Tensor
    remark: str

    @classmethod
    def of(cls, case: CheckedBlock, x: Tensor) -> "_Tokens":
        reference, went = in_float64(case.ffn, case.ffn_weights, {case.entry: x})
        _, near = output_and_experts(case.ffn, case.ffn_weights, {case.entry: x})
        return cls(x, reference, *same_experts(near, went, len(x)))

    def first(self, count: int) -> "_Tokens":
        return _Tokens(self.x[:count], self.reference[:count], self.same[:count], "")


def _drawn(case: CheckedBlock) -> list[_Tokens]:
    """Draw tokens, and return as many of them as each count of the referee."""
    counts = counts_to_try(case.ffn)
    x = torch.randn(counts[-1], case.x.shape[-1], generator=case.generator(), dtype=torch.float64)
    tokens = _Tokens.of(case, x.to(case.x.device, case.dtype))
    return [part for part in map(tokens.first, counts) if part.same.any()]


def _tried(case: CheckedBlock, kernel: Kernel, judge: Judge, tried: Sequence[_Tokens]) -> CheckRow:
    """Return the row of a kernel: of the first tokens on which it is wrong, else of the first tokens of all."""
    declared = kernel.computes and f"computes in {kernel.computes}"
    trials: list[Trial] = []
    call: Callable[[Tensor], Tensor] | None = None
    for tokens in tried:
        count = f"first wrong with {counted(len(tokens.x), 'token')}" if trials else ""
        try:
            call = call or called(case, kernel)
            output = call(tokens.x)
        except (FFNError, BrokenContract) as error:
            if any(one.row.passed is False for one in trials):  # the first tokens on which it is wrong tell more
                break
            why = error.message if isinstance(error, FFNError) else str(error)
            return judge.fails(kernel.name, ": ".join(filter(None, (count, why))))
        output, reference = output[tokens.same], tokens.reference[tokens.same]
        row = judge.equal(kernel.name, output, reference)
        # Where a file comes from matters once its kernel is right.
        remarks = ("" if row.passed else count, kernel.origin if row.passed else "", declared, row.note, tokens.remark)
        row = replace(row, note="; ".join(filter(None, remarks)))
        trials.append(Trial(row, tokens.x[tokens.same], output, reference))
    rows = explained(case, trials) if kernel.origin else [one.row for one in trials]
    return next((row for row in rows if row.passed is False), rows[0])


def compute(case: CheckedBlock, kernel: Kernel) -> Tensor:
    """Return a kernel's output for the case's x [tokens, d_model]; raise BrokenContract if the kernel breaks its
    contract."""
    return called(case, kernel)(case.x)


def called(case: CheckedBlock, kernel: Kernel) -> Callable[[Tensor], Tensor]:
    """Build a kernel; return a function of x [tokens, d_model] that raises BrokenContract if the kernel breaks its
    contract.

    The kernel is called with other tokens first, which exposes a kernel that caches its first result.
    """
    weights = dict(case.ffn_weights)
    if kernel.origin:  # a user's kernel, which may write where it should not
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    before = {name: tensor._version for name, tensor in weights.items()}
    params = kernel.prepare(case.ffn, weights)
    call = kernel.build(case.ffn, case.device, case.dtype)

    def output(given: Tensor) -> Tensor:
        call(given.flip(0), params)
        x = given.clone()
        out: object = call(x, params)
        if not isinstance(out, Tensor):
            raise BrokenContract(f"returns a {type(out).__name__}, not a tensor")
        if out.shape != given.shape:
            raise BrokenContract(f"returns shape {list(out.shape)}, expected {list(given.shape)}")
        if out.dtype != case.dtype:
            dtypes = [str(dtype).removeprefix("torch.") for dtype in (out.dtype, case.dtype)]
            raise BrokenContract(f"returns {dtypes[0]}, expected {dtypes[1]}")
        if not torch.equal(x, given):
            raise BrokenContract("changes its input x")
        changed = [name for name, tensor in weights.items() if tensor._version != before[name]]
        if changed:
            raise BrokenContract(f"changes the weight {changed[0]}")
        return out

    return output


# Tensor parallelism: the sum of the n ranks' outputs equals the output of the whole block.

RANKS = (2, 3, 4, 8)


def shards(case: CheckedBlock) -> Iterator[CheckRow]:
    """Check the block split over 2, 3, 4 and 8 ranks; a rank count that does not divide d_ff is skipped."""
    judge = case.judge("shards")
    whole = run(case.steps, case.weights, case.inputs)
    for ranks in RANKS:
        try:
            first = rank_steps(case.steps, 0, Ranks(ranks))
        except FFNError as error:
            yield judge.skips(f"{ranks} ranks", error.message)
            continue
        reduced = [n.removesuffix(".sum") for n, step in walk(first) if isinstance(step.op, AllReduce)]
        widths = f"d_ff {case.layer.spec.d_ff:,} → {case.layer.spec.d_ff // ranks:,}"
        note = f"collectives: {len(reduced)} (all-reduce of {', '.join(reduced)})"
        output = summed(case.steps, case.weights, case.inputs, Ranks(ranks))
        yield judge.equal(f"{ranks} ranks, {widths}", output, whole, note)
