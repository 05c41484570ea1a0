"""Estimate the device memory that a case needs from its sizes, and find options that would fit if that is too much."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ffncli.bench.records import Case, Outcome
from ffncli.block.cost import cost
from ffncli.block.dtypes import dtype as dtype_named
from ffncli.block.recipe import steps as steps_of
from ffncli.block.steps import Experts
from ffncli.kernels.choice import KernelChoice
from ffncli.show.text import bytes_text, plural

_WIDE = 8  # bytes of a float64


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that a case needs: for `copies` copies of the weights, for activations and, in a backward pass, for the
    gradients and their reference."""

    weights: int  # bytes of one copy of the weights
    copies: int
    activations: int
    gradients: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return self.weights * self.copies + self.activations + self.gradients


def memory_need(case: Case, copies: int) -> MemoryNeed:
    """Return a lower bound on the memory that a case needs: it excludes workspaces and a kernel's other tensors.

    `activations` includes every intermediate once (twice in a backward pass, with its gradient). `gradients` includes
    the weights' gradients in the case's dtype and the reference in float64: all gradients, and the weights of one
    expert at a time.
    """
    needed, width = cost(steps_of(case.spec), case.tokens), dtype_named(case.dtype).bytes
    weights, activations = needed.weight_bytes(width), needed.activation_bytes(width)
    if case.passes == "forward":
        return MemoryNeed(weights, copies, activations)
    in_float64 = _WIDE * sum(
        prod(axis.size for axis in axes) // (step.op.experts.size if isinstance(step.op, Experts) else 1)
        for step in steps_of(case.spec)
        for axes in step.parameters().values()
    )
    return MemoryNeed(weights, copies, 2 * activations, weights + needed.weight_bytes(_WIDE) + in_float64)


def memory_text(case: Case, arms: int, each: int, free: int | None) -> str:
    """Return one line with the memory that the case needs, the memory that was free, and the options that would make
    the case fit.

    Each of `arms` arms (timed calls) has `each` copies of the weights, besides the drawn weights; `free` bytes were
    free before the case began (None: unknown).
    """
    need = memory_need(case, 1 + arms * each)
    rest = f"{bytes_text(need.activations)} of activations"
    if need.gradients:
        rest += f" and {bytes_text(need.gradients)} of gradients"
    size = bytes_text(need.weights)
    weights = f"{need.copies:,} copies of its weights, {size} each" if arms else f"1 copy of its weights, {size}"
    text = f"{case.label} with {case.tokens:,} {plural('token', case.tokens)} needs at least {bytes_text(need.total)}: "
    text += f"{weights}, and {rest}"
    if free is None:
        return text
    text += f"; {bytes_text(free)} was free"
    if need.total <= free:
        return text
    fitting = list(_fitting(case, arms, each, free))
    return f"{text}; {' or '.join(fitting)} would fit" if fitting else f"{text}; take a smaller block"


def holders(kernels: Sequence[KernelChoice], each: int, referee: bool) -> int:
    """Return how many kernels and processes need copies of the weights besides the drawn weights.

    If `each` is above 1, every arm needs copies, including the twin and the bare matrix products. Otherwise only users'
    kernels need copies (each counts twice, because its `prepare` received a second copy), and the `referee` if it is a
    process of its own.
    """
    if each > 1:
        return len(kernels) + 2
    return 2 * sum(choice.file is not None for choice in kernels) + referee


def explained(outcome: Outcome, case: Case, arms: int, each: int, free: int | None) -> Outcome:
    """Add the memory that the case needs to the note of an `oom` outcome; return other outcomes unchanged."""
    if outcome.status != "oom":
        return outcome
    return replace(outcome, note=f"{outcome.note}; {memory_text(case, arms, each, free)}")


def _fitting(case: Case, arms: int, each: int, free: int) -> Iterator[str]:
    """Yield the options that would each make the case fit."""

    def fits(changed: Case, each: int = each) -> bool:
        return memory_need(changed, 1 + arms * each).total <= free

    tokens = 1 << max(0, (case.tokens - 1).bit_length() - 1)  # smaller powers of two
    while tokens and not fits(replace(case, tokens=tokens)):
        tokens //= 2
    if tokens and tokens < case.tokens:
        yield f"--tokens {tokens}"
    if dtype_named(case.dtype).bytes > 2 and fits(replace(case, dtype="bf16")):
        yield "--dtype bf16"
    if case.passes != "forward" and fits(replace(case, passes="forward")):
        yield "--pass forward"
    if each > 1 and fits(case, 1):
        yield "--cache warm"
