"""The referee: one verdict on a kernel before anyone times it. This is the table of its checks, in their order."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace

import torch

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.kernels.choice import KernelChoice
from ffncli.models.examples import Example
from ffncli.models.model import Resolved
from ffncli.run.engine.block_summary import block_summary
from ffncli.run.engine.prepare import LayerRequest, device_of, prepare
from ffncli.run.user.hosted import KernelFailure, TimeLimits, hosted
from ffncli.run.verify.certificate import Certificate, environment, file_digest, first_reason, now_utc
from ffncli.run.verify.checks import aftermath, precision, replay, right, same_bits
from ffncli.run.verify.checks.case import CheckedBlock
from ffncli.run.verify.checks.row import CheckRow
from ffncli.run.verify.checks.trial import KernelTrial, dtype_name
from ffncli.run.verify.names import REFEREE_STATEMENTS
from ffncli.run.verify.verify import Verdict

# The last two have the host load the kernel for another block.
REFEREE_CHECKS: Mapping[str, Callable[[KernelTrial], Iterator[CheckRow]]] = {
    "shapes": right.shapes,
    "repeats": same_bits.repeats,
    "state": same_bits.state,
    "special": right.special,
    "isolation": right.isolation,
    "batch": same_bits.batch,
    "precision": precision.precision,
    "threads": aftermath.threads,
    "untouched": aftermath.untouched,
    "replay": replay.replay,
    "widths": right.widths,
    "experts": right.experts,
}
assert list(REFEREE_CHECKS) == list(REFEREE_STATEMENTS)
_SEEDS = 2**31


@dataclass(frozen=True)
class RefereeQuestion:
    """Which kernel, on which layer, in which dtype, where. `run.seed` None draws a seed, which the certificate has.

    `batch_invariant` demands what is else reported; `threads` are torch's in the kernel's process.
    """

    kernel: KernelChoice
    run: LayerRequest
    tolerance: float | None = None
    batch_invariant: bool = False
    threads: int | None = None
    limits: TimeLimits = field(default_factory=TimeLimits)


def certify(model: Resolved, question: RefereeQuestion, example: Example | None = None) -> Verdict:
    """The verdict on one kernel, with its certificate. The reference is computed here, the kernel in another process.

    Raises FFNError for a kernel that cannot be loaded or refuses the block; whatever it does wrong is a row.
    """
    choice, device = question.kernel, device_of(question.run.device)
    seed = secrets.randbelow(_SEEDS) if question.run.seed is None else question.run.seed
    started, digest = now_utc(), file_digest(choice)
    threads = question.threads or torch.get_num_threads()
    ready = prepare(model, replace(question.run, seed=seed, device="cpu", leading=(1,), input="zeros"), example)
    dtype = next(iter(ready.inputs.values())).dtype
    block = CheckedBlock(
        model, ready.layer, ready.steps, ready.weights, ready.inputs, dtype, "cpu", seed, question.tolerance
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad(), hosted(choice, device, threads, question.limits) as host:
        trial = KernelTrial(host, block, generator, question.batch_invariant)
        rows = tuple(_rows(trial))
        choice = choice if choice.attribute or choice.file is None else choice.with_attribute(_attribute(host.name))
    if file_digest(choice) != digest:
        raise FFNError(f"{shown(choice.kernel)} has changed while it was judged", "run it again")
    question = replace(question, kernel=choice, threads=threads)
    certificate = _certificate(question, block, rows, digest, started)
    return Verdict(rows, model, ready, block_summary(model, ready, question.run.device), certificate)


def _rows(trial: KernelTrial) -> Iterator[CheckRow]:
    """The rows of every check. Once the kernel's process is gone, the others are not run."""
    try:
        refusal = trial.load()
    except KernelFailure as failure:
        refusal = None
        yield trial.judge("shapes").fails("loading", str(failure))
        gone = failure.gone
    else:
        gone = False
    if refusal is not None:
        raise FFNError(f"{trial.host.choice.label}: {refusal}", "give a block that it computes")
    trial = trial.declared()
    for name, check in REFEREE_CHECKS.items():
        if gone:
            if name != "shapes":
                yield CheckRow(name, "all", note="not run: its process is gone")
            continue
        try:
            yield from check(trial)
        except KernelFailure as failure:
            yield trial.judge(name).fails("a call", str(failure))
            gone = failure.gone


def _certificate(
    question: RefereeQuestion, block: CheckedBlock, rows: tuple[CheckRow, ...], digest: str | None, started: str
) -> Certificate:
    """What the rows say of the kernel as a whole."""
    choice, reason = question.kernel, first_reason(rows)
    measured = next((row for row in rows if row.check == "precision" and row.relative_error is not None), None)
    batches = [row for row in rows if row.check == "batch" and row.max_error is not None]
    return Certificate(
        verdict="refused" if reason else "certified",
        reason=reason,
        kernel=choice.label,
        attribute=choice.attribute,
        file=None if choice.file is None else choice.kernel,
        sha256=digest,
        error_class=measured.subject if measured else None,
        error_rel=measured.relative_error if measured else None,
        batch_invariant=all(row.max_error == 0 and row.passed for row in batches) if batches else None,
        batch_invariance_demanded=question.batch_invariant,
        dtype=dtype_name(block.dtype),
        device=question.run.device,
        threads=question.threads or 1,
        seed=block.seed,
        tolerance=question.tolerance,
        started_utc=started,
        environment=environment(question.run.device),
    )


def _attribute(name: str) -> str:
    """The kernel's name in its file, from `mine.py:mlp`."""
    return name.rpartition(":")[2]
