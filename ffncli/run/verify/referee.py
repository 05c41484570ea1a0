"""The referee: a verdict on one kernel before it is timed. REFEREE_CHECKS lists its checks in order."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ffncli.errors import FFNError, shown
from ffncli.kernels.choice import KernelChoice
from ffncli.models.model import Resolved
from ffncli.options.shared import Pass
from ffncli.run.engine.prepare import block_summary, device_of, dtype_name, prepare
from ffncli.run.user.hosted import HostedKernel, KernelFailure, TimeLimits, hosted
from ffncli.run.user.surroundings import file_digests, value_digest
from ffncli.run.verify.certificate import Certificate, findings, first_reason
from ffncli.run.verify.checks import drawn, elsewhere, gradients, judged, precision
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow
from ffncli.run.verify.checks.trial import KernelTrial
from ffncli.run.verify.question import REFEREE_STATEMENTS
from ffncli.run.verify.verify import Verdict, environment, file_digest, now_utc

# The last three checks take other weights or load the kernel for another block, so they must come last.
REFEREE_CHECKS: Mapping[str, Callable[[KernelTrial], Iterator[CheckRow]]] = {
    "shapes": judged.shapes,
    "repeats": judged.repeats,
    "state": judged.state,
    "special": judged.special,
    "isolation": judged.isolation,
    "batch": judged.batch,
    "precision": precision.precision,
    "gradients": gradients.values,
    "gradient-class": gradients.error_class,
    "gradient-batch": gradients.batch,
    "threads": judged.threads,
    "untouched": judged.untouched,
    "replay": judged.replay,
    "drawn": drawn.drawn,
    "calls": drawn.calls,
    "elsewhere": elsewhere.elsewhere,
    "weights": judged.weights,
    "widths": judged.widths,
    "experts": judged.experts,
}
assert list(REFEREE_CHECKS) == list(REFEREE_STATEMENTS)
_SEEDS = 2**31


def certify(
    model: Resolved,
    kernel: KernelChoice,
    layer: int | str | None = None,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    tolerance: float | None = None,
    batch_invariant: bool = False,
    passes: Pass | None = None,
    threads: int | None = None,
    limits: TimeLimits | None = None,
    isolate: bool = False,
    tokens: tuple[int, ...] = (),
) -> Verdict:
    """Judge one kernel and issue a certificate. The reference is computed in this process, the kernel's output in
    another.

    If `seed` is None, a seed is drawn; the certificate records it. `batch_invariant` turns the reported batch
    invariance into a demand; `passes` leaves the backward pass out, or demands it, and None judges it if the kernel has
    one. `threads` is torch's thread count in the kernel's process, which `isolate` takes rights from. `tokens` are more
    token counts to try. A fault of the kernel is a failed row, not an exception.
    """
    seed = secrets.randbelow(_SEEDS) if seed is None else seed
    started, digest = now_utc(), file_digest(kernel)
    threads = threads or torch.get_num_threads()
    ready = prepare(model, layer, seed=seed, dtype=dtype, leading=(1,), input="zeros")
    computed = next(iter(ready.inputs.values())).dtype
    block = CheckedBlock(model, ready.layer, ready.steps, ready.weights, ready.inputs, computed, "cpu", seed, tolerance)
    generator = torch.Generator().manual_seed(seed + 1)
    hosting = hosted(kernel, device_of(device), threads, limits or TimeLimits(), isolate)
    with torch.no_grad(), hosting as host:
        rows = tuple(_rows(KernelTrial(host, block, generator, batch_invariant, passes, tokens)))
        files, variables = _surroundings(host, rows)
        protected = None if host.reads_memory is None else not host.reads_memory
        if kernel.file is not None and not kernel.attribute:
            kernel = kernel.with_attribute(host.name.rpartition(":")[2])  # the kernel's name in `mine.py:mlp`
    if file_digest(kernel) != digest:
        raise FFNError(f"{shown(kernel.kernel)} changed while it was being judged", "run it again")
    certificate = Certificate(
        **findings(rows),
        kernel=kernel.label,
        attribute=kernel.attribute,
        file=None if kernel.file is None else kernel.kernel,
        sha256=digest,
        files=files,
        variables=variables,
        memory_protected=protected,
        isolated=host.isolated or None,
        batch_invariance_demanded=batch_invariant,
        dtype=dtype_name(computed),
        device=device,
        threads=threads,
        seed=seed,
        tolerance=tolerance,
        started_utc=started,
        environment=environment(device),
    )
    return Verdict(rows, model, ready, block_summary(model, ready, device), certificate)


def _surroundings(host: HostedKernel, rows: Sequence[CheckRow]) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Return the files that the kernel's code has read and the variables, each with its digest; none for a kernel that
    is refused, whose process may have ended."""
    if host.choice.file is None or first_reason(rows):
        return {}, {}
    files, variables = host.surroundings()
    return file_digests(files, host.choice.file), {name: value_digest(name) for name in variables}


def _rows(trial: KernelTrial) -> Iterator[CheckRow]:
    """Yield the rows of every check. Once the kernel's process has ended, the remaining checks are not run."""
    try:
        refusal = trial.load()
    except KernelFailure as failure:
        refusal = None
        yield trial.judge("shapes").fails("loading", str(failure))
        gone = failure.gone
    else:
        gone = False
    if refusal is not None:
        raise FFNError(f"{trial.host.choice.label}: {refusal}", "give a block that the kernel supports")
    trial = trial.declared()
    for name, check in REFEREE_CHECKS.items():
        if gone:
            if name != "shapes":
                yield CheckRow(name, "all", note="not run: its process has ended")
            continue
        try:
            yield from check(trial)
        except KernelFailure as failure:
            yield trial.judge(name).fails("a call", str(failure))
            gone = failure.gone
