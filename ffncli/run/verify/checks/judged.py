"""The referee's checks of a kernel's outputs: correct, reproducible, and free of side effects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import Experts, Route, Step
from ffncli.errors import FFNError
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.weights import random_weights
from ffncli.run.user.hosted import KernelFailure
from ffncli.run.verify.checks import gradients
from ffncli.run.verify.checks.case import CheckRow, Judge
from ffncli.run.verify.checks.causes import Trial, explained
from ffncli.run.verify.checks.trial import KernelTrial, equal_bits, reported
from ffncli.show.text import counted, percent, time_text
from ffncli.system.host import available_memory, busy_threads

_FEW = 5  # tokens of a special input
_ODD_WIDTHS = ((33, 70), (19, 101))  # d_model, d_ff
_LOG2_SCALES, _LARGER = (-3.0, 2.0), 16.0  # of other weights, and how much larger a few values are
_COPIES = 4  # of the weights, here and in the kernel's process
_SOME = 17  # tokens in checks for which the token count does not matter


def shapes(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check the output for every number of tokens in `token_counts`."""
    judge, tried = trial.judge("shapes"), list[Trial]()
    try:
        for count in trial.token_counts:
            x = trial.draw(count)
            output, reference = trial.call(x), trial.reference(x)
            tried.append(Trial(judge.equal(counted(count, "token"), output, reference), x, output, reference))
    except KernelFailure:
        yield from explained(trial.block, tried)
        raise
    yield from explained(trial.block, tried)


def weights(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check the loaded kernel with other weights, as of another layer: each matrix at a drawn scale, with a few large
    values."""
    judge, subject = trial.judge("weights"), "each at another scale"
    size, free = sum(tensor.nbytes for tensor in trial.block.ffn_weights.values()), available_memory()
    if free is not None and _COPIES * size > free:
        yield judge.skips(subject, "there is no memory for more weights")
        return
    other = trial.with_block(trial.block.ffn, _rescaled(trial))
    x = other.draw(_SOME)
    reference = other.reference(x)
    if not float(reference.abs().max()) <= torch.finfo(trial.block.dtype).max / 4:
        yield judge.skips(subject, "the output would be too large for the dtype")
        return
    trial.host.take_weights(other.block.ffn_weights)
    yield judge.equal(subject, other.call(x), reference)


def _rescaled(trial: KernelTrial) -> dict[str, Tensor]:
    """Return the weights with the values of each in another order, and matrices multiplied by a drawn power of 2. A
    thousandth of their values is larger, as in trained models, except for a kernel of fewer bits."""
    changed, generator = dict[str, Tensor](trial.block.ffn_weights), trial.generator
    for name, tensor in changed.items():
        if not tensor.is_floating_point():
            continue
        values = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)]
        if tensor.ndim > 1:
            low, high = _LOG2_SCALES
            values *= 2.0 ** (low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64)))
            if not trial.block.computes:
                values[::1000] *= _LARGER
        changed[name] = values.reshape(tensor.shape)
    return changed


def widths(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check the block at odd widths, with random weights. A kernel may refuse such widths when it is loaded."""
    for d_model, d_ff in _ODD_WIDTHS:
        subject, spec = f"{d_model}x{d_ff}", replace(trial.spec, d_model=d_model, d_ff=d_ff)
        ffn = kernel_steps(steps(spec))
        other = trial.with_block(ffn, random_weights(ffn, trial.generator, trial.block.dtype), spec)
        judge = other.judge("widths")
        try:
            refusal = other.load()
        except FFNError as error:
            refusal = error.message
        if refusal is not None:
            yield judge.skips(subject, refusal)
            continue
        for count in (3, _SOME):
            x = other.draw(count)
            yield judge.equal(f"{subject}, {counted(count, 'token')}", other.call(x), other.reference(x))
        if not other.without_backward:
            yield gradients.judged(other, "widths", f"{subject}, gradients", gradients.drawn(other, _SOME))


def special(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check inputs on which shortcuts go wrong. An error within 4 times the smallest normal number passes, since some
    hardware flushes subnormal numbers to zero."""
    judge = trial.judge("special")
    numbers = torch.finfo(trial.block.dtype)
    for subject, x in _special_inputs(trial).items():
        reference = trial.reference(x)
        if not float(reference.abs().max()) <= numbers.max / 4:
            yield judge.skips(subject, "the output would be too large for the dtype")
            continue
        yield off_by_subnormals(judge.equal(subject, trial.call(x), reference), numbers)


def off_by_subnormals(row: CheckRow, numbers: torch.finfo) -> CheckRow:
    """Return the row, passed if the error is within 4 times the smallest normal number."""
    if row.passed is False and row.max_error is not None and row.max_error <= 4 * numbers.tiny:
        return replace(row, passed=True, note="off by less than the smallest normal number")
    return row


def _special_inputs(trial: KernelTrial) -> Mapping[str, Tensor]:
    """Return a mapping from names to inputs [few tokens, d_model]; with a router, none on which experts could tie."""
    dtype, d_model = trial.block.dtype, trial.spec.d_model
    drawn, numbers = trial.draw(_FEW), torch.finfo(dtype)
    past_overflow = math.log(numbers.max)  # exp overflows beyond this; drawn |x| reaches about 4 times as far
    inputs = {"equal tokens": drawn[:1].repeat(_FEW, 1), "large numbers": trial.draw(_FEW, past_overflow)}
    if trial.routed:
        return inputs
    alone = torch.zeros(_FEW, d_model, dtype=dtype)
    alone[torch.arange(_FEW), torch.arange(_FEW) % d_model] = 1.0
    return inputs | {
        "one value per token": drawn[:, :1].repeat(1, d_model),
        "one nonzero number": alone,
        "zeros": torch.zeros(_FEW, d_model, dtype=dtype),
        "-0": -torch.zeros(_FEW, d_model, dtype=dtype),
        "subnormal numbers": (drawn.double() * numbers.tiny / 8).to(dtype),
    }


def isolation(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check that NaN in a token is NaN in its output, as in the reference, and that NaN or infinity in a token changes
    neither the other tokens nor the next call."""
    judge, x = trial.judge("isolation"), trial.draw(_FEW)
    reference = trial.reference(x)
    at = _FEW // 2
    others = [token for token in range(_FEW) if token != at]
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = x.clone()
        spoiled[at, 0] = bad
        output = trial.call(spoiled)
        if math.isnan(bad):
            yield _not_hidden(judge, output[at], trial.reference(spoiled)[at])
        yield judge.equal(f"{bad:g} in another token", output[others], reference[others])
    yield judge.equal("after NaN", trial.call(x), reference)


def _not_hidden(judge: Judge, output: Tensor, reference: Tensor) -> CheckRow:
    """Return a row that passes if every value that is NaN in the reference is NaN in the output."""
    must = reference.isnan()
    hidden, of = int((must & ~output.isnan()).sum()), int(must.sum())
    note = f"{hidden} of {counted(of, 'value')} that must be NaN are not" if hidden else f"{of} NaN in its output"
    return CheckRow(judge.check, "nan in the token itself", passed=not hidden, note=note)


def experts(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check that the output stays the same if the experts, with their rows of the router, are put in another order."""
    judge = trial.judge("experts")
    ffn = trial.block.ffn
    route = next((step for step in ffn if isinstance(step.op, Route)), None)
    if route is None or not isinstance(route.op, Route):
        yield judge.skips("in another order", "the block has no experts")
        return
    if route.op.groups > 1:
        yield judge.skips("in another order", "its experts are in groups, so their order matters")
        return
    x = trial.draw(_SOME)
    reference = trial.reference(x)
    other = trial.with_block(ffn, _reordered(ffn, route, trial.block.ffn_weights, trial.generator))
    if (refusal := other.load()) is not None:
        yield judge.skips("in another order", refusal)
        return
    yield judge.equal("in another order", other.call(x), reference)


def _reordered(
    ffn: tuple[Step, ...], route: Step, weights: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the weights with their experts in another order; identity experts stay last."""
    holder = next(step for step in ffn if isinstance(step.op, Experts) and not step.op.always)
    assert isinstance(holder.op, Experts)
    count = holder.op.experts.size
    order = torch.randperm(count, generator=generator)
    of_router = {"router.weight", "router.bias", *route.parameters()}
    of_experts = {name for name in holder.op.parameters() if not holder.op.is_common(name)}
    changed = dict(weights)
    for name, tensor in weights.items():
        if name in of_experts:
            changed[name] = tensor[order].contiguous()
        elif name in of_router:
            changed[name] = torch.cat([tensor[:count][order], tensor[count:]])
    return changed


# A kernel compared with itself bit by bit: called again, in another order, from other buffers, in other batches.

_AGAIN = 2  # calls after the first


def repeats(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check that the same input gives the same bits several times in a row."""
    for count in (1, _SOME, trial.most_tokens):
        x = trial.draw(count)
        first = trial.call(x)
        rows = [equal_bits("repeats", counted(count, "token"), trial.call(x), first) for _ in range(_AGAIN)]
        yield next((row for row in rows if not row.passed), rows[0])


def state(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check new contents in a used buffer, the same contents in another buffer, and the same calls in another order."""
    judge = trial.judge("state")
    x, y = trial.draw(_SOME), trial.draw(_SOME)
    first, second = trial.call(x), trial.call(y)
    yield judge.equal("other numbers in the same buffer", second, trial.reference(y))
    yield equal_bits("state", "the same numbers in another buffer", trial.call(x, place=1), first)
    try:
        yield judge.equal("grad mode on", trial.host.call(x, grad=True), trial.reference(x))
    except KernelFailure as failure:  # users see that, as with a buffer that was made in inference mode
        if failure.gone:
            raise
        yield judge.skips("grad mode on", str(failure))
    inputs = [trial.draw(count) for count in trial.token_counts]
    outputs = [trial.call(tensor) for tensor in inputs]
    for count, tensor, output in reversed(list(zip(trial.token_counts, inputs, outputs, strict=True))):
        yield equal_bits("state", f"in another order, {counted(count, 'token')}", trial.call(tensor), output)


def batch(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check that tokens of a large batch give the same bits alone, in smaller batches from several positions, and in
    another order.

    Unless batch invariance is demanded, a difference is reported but does not fail: even torch's own matrix products
    round a token differently in batches of other sizes.
    """
    most = trial.most_tokens
    x = trial.draw(most)
    whole = trial.call(x)
    for count in trial.token_counts[:-1]:
        starts = sorted({0, most // 3, most - count})
        parts = [slice(start, start + count) for start in starts]
        outputs = torch.cat([trial.call(x[part]) for part in parts])
        there = torch.cat([whole[part] for part in parts])
        yield reported(trial, equal_bits("batch", f"{counted(count, 'token')} of {most}", outputs, there))
    order = torch.randperm(most, generator=trial.generator)
    yield reported(trial, equal_bits("batch", f"all {most} in another order", trial.call(x[order]), whole[order]))


# Side effects of a kernel's calls: threads that keep running, a changed input, changed weights.

_CALLS = 8


def threads(trial: KernelTrial) -> Iterator[CheckRow]:
    """Compare the process's thread counts before and after some calls; a first call creates the thread pools."""
    judge, x = trial.judge("threads"), trial.draw(_SOME)
    trial.call(x)
    before = trial.host.threads()
    for _ in range(_CALLS):
        trial.call(x)
    after = trial.host.threads()
    if before is None or after is None:
        yield judge.skips("its process", "this system does not show the threads of a process")
        return
    more = after - before
    note = f"{more} more threads after {_CALLS} calls" if more > 0 else f"{after} threads, as before"
    yield CheckRow("threads", "its process", passed=more <= 0, note=note)


def untouched(trial: KernelTrial) -> Iterator[CheckRow]:
    """Check that no call so far has changed its input, and that the weights are unchanged."""
    trial.host.inspect()
    changed = sorted(trial.host.changed)
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    yield CheckRow("untouched", "input and weights", passed=not changed, note=f"changes {names}" if changed else "")


# Whether a kernel caches its answers. Cached answers are correct, so only the work of a call reveals a cache. The
# judging process reads the processor time of the kernel's process from the system; the kernel's own clock is not
# trusted.

_REPEATS = 4  # calls per series on new inputs, and on one repeated input; the fastest counts
_SERIES = 5  # a cache is reported only if every series shows it; a disturbance would affect only some
_LEAST = 2e-3  # s; in a shorter call, transfers between the processes are too large a part
_KEPT = 0.7  # fraction of the work for a new input; if a call takes less, part of the answer was cached
# Relative distance of new inputs: small enough that the same experts are chosen, so their weights are in the caches.
_NEAR = 2.0**-6


def replay(trial: KernelTrial) -> Iterator[CheckRow]:
    """Compare the processor time of calls on new inputs with the time of calls on an input seen before."""
    judge, subject = trial.judge("replay"), counted(trial.most_tokens, "token")
    x = trial.draw(trial.most_tokens)
    if trial.host.device != "cpu" or _work(trial, x) is None:
        yield judge.skips(subject, "the work of a call cannot be measured here")
        return
    share = 0.0
    for _ in range(_SERIES):
        # Use the minimum of several calls, because disturbances only add to a call's work.
        other = min(_work(trial, _near(trial, x)) or 0.0 for _ in range(_REPEATS))
        same = min(_work(trial, x) or 0.0 for _ in range(1 + _REPEATS))
        if other < _LEAST:
            yield judge.skips(subject, f"a call of {time_text(other)} is too short to tell whether answers are cached")
            return
        share = max(share, same / other)
        if share >= _KEPT:
            break
    note = f"an input seen before takes {percent(share)} of the work of a new input"
    yield CheckRow("replay", subject, passed=share >= _KEPT, note=note)


def _near(trial: KernelTrial, x: Tensor) -> Tensor:
    return x + _NEAR * x * torch.randn(x.shape, generator=trial.generator).to(x.dtype)


def _work(trial: KernelTrial, x: Tensor) -> float | None:
    """Return the processor seconds of one call, summed over the threads of the kernel's process; None if unknown."""
    number = str(trial.host.process.pid)
    before = busy_threads(number)
    trial.call(x)
    after = busy_threads(number)
    if not before:
        return None
    return 1e-9 * sum(time - before.get(thread, 0) for thread, time in after.items())
