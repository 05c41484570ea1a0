"""Kernels on one rank's part of a block, with and without the collectives that complete the block.

A kernel that computes any block also computes a rank's part of one, because `block/shard.py` splits a block into
smaller blocks and one all-reduce of their outputs. `dtensor` is the block as split by `run/ranks/parallel.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ffncli.bench.records import Case, Outcome
from ffncli.bench.timing.arms import kernels_by_label
from ffncli.bench.timing.outcomes import Skipped, verdict_of
from ffncli.bench.timing.ranks.channel import RankChannel
from ffncli.bench.verdict import Ruling
from ffncli.block.recipe import steps as steps_of
from ffncli.block.shard import shard
from ffncli.block.steps import AllReduce, Experts, Linear, Step, parameters
from ffncli.errors import FFNError
from ffncli.kernels import OVER_RANKS
from ffncli.kernels.choice import KernelChoice
from ffncli.kernels.kernel import Computes, Kernel, Params, Steps, kernel_steps
from ffncli.run.engine.sharded import share_of
from ffncli.run.ranks.parallel import ParallelBlock

(DTENSOR,) = OVER_RANKS
Result = TypeVar("Result")


class KernelOverRanks:
    """A kernel over ranks in the form of a Kernel of the whole block: `whole.prepare` receives the whole block's
    weights.

    `alone` is the call without its collectives, if there is one; it is set when the kernel is built. While `careful` is
    set, every call first makes sure that all ranks have computed their part, before any rank waits for the others.
    """

    def __init__(self, whole: Kernel, channel: RankChannel) -> None:
        self.whole, self.channel = whole, channel
        self.careful = True
        self.alone: Computes | None = None


class SplitKernel(KernelOverRanks):
    """A kernel for any block, run on this rank's part of one."""

    def __init__(self, kernel: Kernel, channel: RankChannel) -> None:
        self.kernel = kernel
        whole = replace(kernel, prepare=self._prepared, build=self._built, refuses=self._refuses, trains=False)
        super().__init__(whole, channel)

    def _refuses(self, steps: Steps) -> str | None:
        """Return the reason why some rank cannot compute its part."""
        try:
            reason = self.kernel.refuses(part_of(steps, self.channel))
        except Skipped as skipped:
            reason = str(skipped)
        return next((reasons for reasons in self.channel.all(reason) if reasons), None)

    def _prepare(self, steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        program = part_of(steps, self.channel)
        return self.kernel.prepare(program, weights_of(weights, steps, program, self.channel))

    def _build(self, steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        alone = self.alone = self.kernel.build(part_of(steps, self.channel), device, dtype)
        over = self.channel.group.mesh["tp"].get_group()

        def checked(x: Tensor, params: Params) -> Tensor:
            assert self.alone is not None
            out = self.alone(x, params)
            if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
                form = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
                raise TypeError(f"returns {form.removeprefix('torch.')}, expected {x.dtype} {list(x.shape)}")
            return out

        def compute(x: Tensor, params: Params) -> Tensor:
            # While `careful` is set, no rank sums until every rank has a part that can be summed.
            part = in_step(self.channel, lambda: checked(x, params)) if self.careful else alone(x, params)
            out = part.contiguous()
            dist.all_reduce(out, group=over)
            return out

        return compute

    def _prepared(self, steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        return in_step(self.channel, lambda: self._prepare(steps, weights))

    def _built(self, steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        return in_step(self.channel, lambda: self._build(steps, device, dtype))


def split_kernels(
    choices: Sequence[KernelChoice],
    case: Case,
    channel: RankChannel,
    gone: Mapping[str, Outcome] = MappingProxyType({}),
    replaced: Callable[[], Ruling] = Ruling,
) -> dict[str, KernelOverRanks | Outcome]:
    """Load the kernels by label, in order, as `kernels_by_label` does, each for this rank's part.

    A kernel that is unavailable on some rank is replaced by an Outcome, its status and note.
    """
    whole = kernel_steps(steps_of(case.spec))
    part: tuple[Step, ...] = whole
    with suppress(Skipped):
        part = part_of(whole, channel)
    narrow = replace(case.spec, d_ff=case.spec.d_ff // channel.group.ranks.tp)
    spec = narrow if _without_bias(kernel_steps(steps_of(narrow))) == _without_bias(part) else case.spec
    plain = [choice for choice in choices if choice.kernel != DTENSOR]
    loaded = kernels_by_label(plain, part, spec, gone, replaced)
    reasons = channel.all({name: one.note for name, one in loaded.items() if isinstance(one, Outcome)})
    out: dict[str, KernelOverRanks | Outcome] = {}
    for choice in choices:
        name, one = choice.label, loaded.get(choice.label)
        failed = next((f"rank {rank}: {texts[name]}" for rank, texts in enumerate(reasons) if name in texts), "")
        if one is None:
            out[name] = DTensorKernel(channel)
        elif isinstance(one, Outcome):
            out[name] = one
        else:
            out[name] = Outcome(name, "failed", failed) if failed else SplitKernel(one, channel)
    return out


def in_step(channel: RankChannel, act: Callable[[], Result]) -> Result:
    """Return the result of `act`. If `act` raises on any rank, every rank raises: its own error, or else the error of
    the first failing rank."""
    error: BaseException | None = None
    try:
        result = act()
    except BaseException as raised:  # SystemExit too: it may run a user's code
        error = raised
    reasons = channel.all(None if error is None else verdict_of(error)[1])
    if error is not None:
        raise error
    if failed := next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None), None):
        raise FFNError(failed)
    return result


def part_of(steps: Sequence[Step], channel: RankChannel) -> tuple[Step, ...]:
    """Return the steps of one rank, up to the all-reduce of the output. Raises Skipped if there are other collectives.

    If only rank 0 adds a bias, the other ranks get a bias of zeros in its place, so that a kernel is the same on all
    ranks.
    """
    ranks = channel.group.ranks
    if ranks.ep > 1:
        raise Skipped("tokens are sent to the ranks of their experts, which only dtensor does")
    try:
        program, first = (shard(steps, place, ranks.tp) for place in (ranks.place(channel.rank)[1], 0))
    except FFNError as error:
        raise Skipped(error.message) from None
    *part, last = first if _without_bias(first) == _without_bias(program) else program
    inner = [inner for step in part if isinstance(step.op, Experts) for inner in step.op.program]
    if not isinstance(last.op, AllReduce) or any(isinstance(step.op, AllReduce) for step in (*part, *inner)):
        raise Skipped("its split needs a sum over ranks in the middle of the block, which only dtensor does")
    return tuple(part)


def weights_of(
    weights: Mapping[str, Tensor], steps: Sequence[Step], program: Sequence[Step], channel: RankChannel
) -> dict[str, Tensor]:
    """Return this rank's weights for `program`, contiguous; a bias that another rank adds is zero."""
    place = channel.group.ranks.place(channel.rank)[1]
    mine = share_of(weights, tuple(steps), tuple(program), place)
    added = parameters(shard(steps, place, channel.group.ranks.tp))
    return {name: (t if name in added else torch.zeros_like(t)).contiguous() for name, t in mine.items()}


def _without_bias(program: Sequence[Step]) -> list[Step]:
    def plain(step: Step) -> Step:
        match step.op:
            case Linear():
                return replace(step, op=replace(step.op, bias=False))
            case Experts():
                return replace(step, op=replace(step.op, program=tuple(_without_bias(step.op.program))))
        return step

    return [plain(step) for step in program]


class DTensorKernel(KernelOverRanks):
    """`run/ranks/parallel.py` as a kernel: torch's DTensor splits the weights, and its collectives complete the output.

    `alone` skips the reduction, leaving every rank's part as it is; it is None if some experts are on other ranks.
    """

    def __init__(self, channel: RankChannel) -> None:
        self._block: ParallelBlock | None = None
        self._params: Params = ()
        super().__init__(Kernel(DTENSOR, self._build, self._prepare, refuses=self._refuses, trains=False), channel)

    def _refuses(self, steps: Steps) -> str | None:
        """Return the reason why the block cannot be split."""
        ranks = self.channel.group.ranks
        try:
            shard(steps, ranks.place(self.channel.rank)[1], ranks.tp)
        except FFNError as error:
            return error.message
        return None

    def _prepare(self, steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        def split() -> Params:
            self._block = ParallelBlock(steps, weights, self.channel.group)
            return tuple(map(_local, self._block.parts.parameters()))

        return in_step(self.channel, split)

    def _build(self, steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        block = self._block
        assert block is not None, "a kernel is built after its weights are prepared"
        complete = block.reduce
        if self.channel.group.ranks.ep == 1:
            self.alone = self._call(block, lambda part: part)
        return self._call(block, complete)

    def _call(self, block: ParallelBlock, reduce: Callable[[Tensor], Tensor]) -> Computes:
        def compute(x: Tensor, params: Params) -> Tensor:
            if params is not self._params:  # from now on, the tensors that an arm has placed are this rank's weights
                for parameter, tensor in zip(block.parts.parameters(), params, strict=True):
                    if isinstance(parameter, DTensor):
                        parameter._local_tensor = tensor
                    else:
                        parameter.data = tensor
                self._params = params
            block.reduce = reduce
            out: Tensor = block(x)
            return out

        return compute


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().contiguous()
