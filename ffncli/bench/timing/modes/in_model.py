"""`ffn bench --in-model`: a whole model's forward pass, with its own FFNs and with kernels in their place.

Every arm calls the same model; before each call, the kernels are put in place or removed, which is not timed. Each
placement gives all parameters new memory; the kernels then prepare their weights again during the untimed lead-in
calls.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ffncli.bench.machine import machine
from ffncli.bench.records import MODEL, TWIN, Case, Job, Outcome, TimedUnit, model_with
from ffncli.bench.timing.arms import anchor_of
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.gpu.cuda_clock import clock_for, counters_for
from ffncli.bench.timing.measure_case import apply_settings
from ffncli.bench.timing.modes.auto import fastest
from ffncli.bench.timing.outcomes import BrokenArm, Skipped, verdict_of
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import Arm, Measured, measure, plan_of
from ffncli.bench.verdict import Ruling, WrongResult
from ffncli.block.recipe import FFNSpec
from ffncli.errors import ExitCode, FFNError
from ffncli.kernels import AUTO
from ffncli.kernels.choice import KernelChoice
from ffncli.models.model import Resolved
from ffncli.run.engine.prepare import dtype_of
from ffncli.run.in_model.find import answer_of, load_whole, random_tokens
from ffncli.run.in_model.replace import NothingReplaced, Replaced, replace_ffns
from ffncli.run.measure.gap import gap
from ffncli.run.pretrained.loading import Pretrained, demanding, offline
from ffncli.run.user.load import load
from ffncli.show.text import bytes_text, plural

_BOTH = 2  # the model's FFN and the kernel may each deviate from float64 by as much as rounding allows


def measure_model(case: Case, job: Job, clock: Clock | None = None, start: float = 0.0) -> TimedUnit:
    """Measure one case in this process: the model on the case's number of random tokens, unchanged and with every
    kernel of the job.

    A kernel that cannot be put in place, is wrong or fails gets a row without a time, as in `measure_case`. Raises
    FFNError for a model that transformers cannot load or run.
    """
    apply_settings(case, job)
    clock = clock or clock_for(case.device, case.threads)
    began = time.perf_counter()
    with torch.no_grad(), offline():
        resolved, loaded = _loaded(case.source, case.dtype, case.device)
        try:
            run = _TimedModel(case, job, clock, resolved, loaded)
        except FFNError as error:  # the case has more tokens than the model has positions
            names = (MODEL, *(model_with(choice.label) for choice in job.kernels))
            failed = (Outcome(name, *verdict_of(error)) for name in names)
            return TimedUnit(job.process, case.key, MODEL, "warm", tuple(failed), ())
        with demanding(loaded):
            run.check()
        verified = time.perf_counter()
        REPORTER.stage("timing")
        measured = run.measured()
    spent = {"start": start, "verify": verified - began, **measured.spent}
    return TimedUnit(
        process=job.process, case=case.key, baseline=MODEL, cache="warm", outcomes=tuple(run.outcomes.values()),
        blocks=measured.blocks, environment=machine.environment(case.device), notes=run.notes, spent=spent,
        launch="plain" if case.device.startswith("cuda") else "",
    )  # fmt: skip


@lru_cache(maxsize=1)
def _loaded(source: str, dtype: str, device: str) -> tuple[Resolved, Pretrained]:
    """Load the model, once for consecutive cases that use the same model."""
    resolved = load(source)
    return resolved, load_whole(resolved, dtype_of(dtype), device)


class _TimedModel:
    """The state of one `measure_model`: the verified kernels, and the FFNs that each kernel replaced."""

    def __init__(self, case: Case, job: Job, clock: Clock, resolved: Resolved, loaded: Pretrained) -> None:
        self.case, self.job, self.clock, self.module = case, job, clock, loaded.module
        inputs = random_tokens(loaded, resolved, case.tokens, job.method.seed)
        self.arguments, self.notes = inputs.arguments, inputs.notes
        self.mixture = any(group.spec.moe for group in resolved.model.groups)
        self.outcomes: dict[str, Outcome] = {MODEL: Outcome(MODEL)}
        self.replaced: dict[str, Replaced] = {}
        self.place_of: Replaced | None = None  # the kernels now in place

    def check(self) -> None:
        """Verify every kernel in the model, and compare the model's answers with and without the kernel."""
        alone = answer_of(self.forward())
        if not alone.isfinite().all():
            raise FFNError("the model's answer is not finite", "use another --dtype", ExitCode.FAILED)
        gone = self.job.gone_in(self.case)
        for choice in self.job.kernels:
            name = model_with(choice.label)
            if outcome := gone.get(choice.label):
                self.outcomes[name] = replace(outcome, kernel=name)
                continue
            REPORTER.stands_for(name, choice.label)
            REPORTER.stage("checking", choice.label)
            REPORTER.first_call(choice.label)
            try:
                self.outcomes[name] = self._checked(name, choice, alone)
            except NothingReplaced as error:
                self.outcomes[name] = Outcome(name, *verdict_of(Skipped(error.message)))
            except Exception as error:  # a user's kernel may raise anything
                wrong = error.message if isinstance(error, FFNError) and error.code == ExitCode.FAILED else ""
                self.outcomes[name] = Outcome(name, *verdict_of(WrongResult(Ruling(wrong)) if wrong else error))
            finally:
                REPORTER.rests()
                self.use(None)

    def _checked(self, name: str, choice: KernelChoice, alone: Tensor) -> Outcome:
        def kernel_for(spec: FFNSpec, dtype: torch.dtype, device: str) -> tuple[KernelChoice, str]:
            if choice.kernel != AUTO:
                return choice, ""
            return fastest(spec, self.case.tokens, dtype, device, self.job.method.calibrate)

        replaced = replace_ffns(self.module, kernel_for, (1, self.case.tokens))
        self.place_of = replaced
        apart = gap(answer_of(self.forward()), alone)
        others = {reason: count for reason, count in replaced.calls.items() if reason != "kernel"}
        if others:
            reason = max(others, key=lambda text: others[text])
            raise FFNError(f"the model itself computed {sum(others.values())} FFN calls: {reason}")
        error = float("inf") if apart.unlike else apart.relative
        # The errors of the FFNs are independent, so their sum grows with the square root of the number of FFNs.
        limit = _BOTH * max(ffn.tolerance for ffn in replaced.ffns) * sqrt(len(replaced.ffns))
        if not self.mixture and not error <= limit:
            raise WrongResult(Ruling(f"logits differ from the model's by {error:.1e}, more than {limit:.1e}"))
        self.replaced[name] = replaced
        base = self.outcomes[MODEL]
        alone_error = max(base.error_max or 0.0, *(ffn.model_error for ffn in replaced.ffns))
        self.outcomes[MODEL] = replace(base, error_max=alone_error)
        return Outcome(
            name, note=_note(replaced), error_max=max(ffn.error for ffn in replaced.ffns), logits_error=error,
            logits_limit=None if self.mixture else limit,
        )  # fmt: skip

    def forward(self) -> Any:
        """Run one forward pass."""
        return self.module(**self.arguments)

    def use(self, replaced: Replaced | None) -> None:
        """Put these kernels in place; if `replaced` is None, restore the model's own FFNs."""
        if replaced is self.place_of:
            return
        if self.place_of is not None:
            self.place_of.restore()
        if replaced is not None:
            replaced.apply()
        self.place_of = replaced

    def measured(self) -> Measured:
        """Time the model with and without kernels; if a kernel raises, leave it out and time the others again."""
        while True:
            try:
                return self._measured()
            except BrokenArm as broken:
                cause = broken.__cause__ or broken
                if broken.name not in self.replaced:
                    raise cause from None
                status, note = verdict_of(cause)
                before = self.outcomes[broken.name]
                self.outcomes[broken.name] = replace(
                    before, status=status, note=note, error_max=None, logits_error=None
                )
                del self.replaced[broken.name]

    def _call(self, name: str) -> Any:
        try:
            return self.forward()
        except Exception as error:  # a user's kernel may raise anything
            raise BrokenArm(name) from error

    def _measured(self) -> Measured:
        names = tuple(self.replaced)
        plan = plan_of(self.job.method, MODEL, names, self.case.device, self.case.threads)
        draw = random.Random(f"{self.job.method.seed} {self.job.process}")
        arms = [
            Arm(MODEL, self.forward, partial(self.use, None)),
            Arm(TWIN, self.forward, partial(self.use, None)),
            *(Arm(name, partial(self._call, name), partial(self.use, one)) for name, one in self.replaced.items()),
            anchor_of(self.case.device, draw),
        ]
        counters = counters_for(self.clock, self.case.threads)
        try:
            return measure(self.job.process, self.case.key, partial(self._placed, arms), self.clock, counters, plan)
        finally:
            REPORTER.rests()
            self.use(None)

    def _placed(self, arms: Sequence[Arm], number: int) -> Sequence[Arm]:
        """Move all parameters to new memory; return the same arms."""
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()
        return arms


def _note(replaced: Replaced) -> str:
    """Return a note such as `24 FFNs replaced; 2 kept (packed: cannot compute experts); 1.2 GB of weights copied`."""
    count = len(replaced.ffns)
    words = [f"{count} {plural('FFN', count)} replaced", *replaced.notes]
    if replaced.kept:
        words.append(f"{len(replaced.kept)} kept ({replaced.kept[0].reason})")
    if copied := sum(ffn.copied_bytes for ffn in replaced.ffns):
        words.append(f"{bytes_text(copied)} of weights copied")
    return "; ".join(words)
