"""`summarise` turns a case's measurements from all processes into rows; the same units always yield the same rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from statistics import median
from types import MappingProxyType
from typing import Any

from ffncli.bench.judge import roofline, statistics, warnings
from ffncli.bench.judge.ratios import Means, judged, log_times, paired, verdict
from ffncli.bench.judge.roofline import communication_bytes
from ffncli.bench.judge.statistics import exp_or_inf
from ffncli.bench.judge.warnings import Code
from ffncli.bench.records import (
    ANCHOR,
    COLLECTIVES,
    COMPUTE,
    GEMM,
    GRAVEST,
    HOST_SECONDS,
    STEP,
    TWIN,
    Case,
    CaseReport,
    Finding,
    Method,
    Outcome,
    Roof,
    TimedBlock,
    TimedUnit,
)
from ffncli.bench.results.row import MACHINE, BenchWarning, ResultRow, case_columns
from ffncli.bench.verdict import WrongCode
from ffncli.show.text import finite

_EARLY = 0.6  # share of --max-time; processes that took less time ended early
_PROCESSES = 3  # after which a slow kernel with a certain verdict is left out
_SLOW = 0.1  # s of a call from which a kernel takes much of the time that the others need
_FAULTS = 1.0  # difference between arms, in page faults per call, that is worth a note


def summarise(case: Case, units: Sequence[TimedUnit], method: Method, run: Mapping[str, str]) -> tuple[ResultRow, ...]:
    """Return a row for every kernel, in the order of the first unit's outcomes. `run` holds `run_id` and `started_utc`.

    `placements` and `rounds` of a row are counts over all processes. A kernel that is not ok in every process has a
    row with its most serious status and no time.
    """
    if not units:
        return ()
    stored = _CaseUnits.of(case, sorted(units, key=lambda u: u.process), method)
    row = _of_case(stored, run)
    names = dict.fromkeys(outcome.kernel for unit in stored.units for outcome in unit.outcomes)
    return tuple(_of_kernel(stored, row, name) for name in names)


def certain(case: Case, units: Sequence[TimedUnit], method: Method) -> dict[str, Outcome]:
    """Return the outcomes, by kernel, of the slow kernels whose verdict is certain after these units: the processes to
    come leave them out."""
    if len(units) < _PROCESSES or method.by_step or method.in_model:
        return {}
    stored, out = _CaseUnits.of(case, units, method), {}
    for outcome in units[0].outcomes:
        name, blocks = outcome.kernel, stored.blocks(outcome.kernel)
        if name == stored.baseline or not blocks or median(block.per_call for block in blocks) < _SLOW:
            continue
        ratio = stored.ratio(name, stored.baseline)
        if ratio and statistics.certain(ratio.interval.value, ratio.interval.half_width, method.margin):
            out[name] = replace(outcome, note="")
    return out


@dataclass(frozen=True)
class _CaseUnits:
    """The units of a case from all processes, with the blocks of each arm and the warnings for all rows."""

    case: Case
    units: tuple[TimedUnit, ...]
    method: Method
    arms: Mapping[str, tuple[TimedBlock, ...]]
    aa: Means | None
    warnings: tuple[BenchWarning, ...]

    @classmethod
    def of(cls, case: Case, units: Sequence[TimedUnit], method: Method) -> "_CaseUnits":
        baseline = units[0].baseline
        not_ok = {outcome.kernel for unit in units for outcome in unit.outcomes if outcome.status != "ok"}
        if baseline in not_ok:  # the baseline's fault was found only after timing: nothing is compared with it
            not_ok.add(TWIN)
        arms: dict[str, list[TimedBlock]] = {}
        for unit in units:
            for block in unit.blocks:
                if block.kernel not in not_ok:
                    arms.setdefault(block.kernel, []).append(block)
        aa = paired([*arms.get(TWIN, ()), *arms.get(baseline, ())], TWIN, baseline)
        signal = arms.get(ANCHOR) or arms.get(baseline, [])
        warned = warnings.of_case(signal, aa.interval if aa else None, method, len(units)) if arms else []
        differing = [c for c in MACHINE if len({u.environment.get(c, "") for u in units}) > 1]
        differing += ["cache"] * (len({u.cache for u in units}) > 1)
        differing += ["launch"] * (len({u.launch for u in units if u.launch}) > 1)
        if differing:
            warned.append(BenchWarning(Code.ENVIRONMENT, ", ".join(differing)))
        return cls(case, tuple(units), method, {n: tuple(b) for n, b in arms.items()}, aa, tuple(warned))

    @property
    def baseline(self) -> str:
        return self.units[0].baseline

    def outcomes(self, kernel: str) -> list[Outcome]:
        return [outcome for unit in self.units for outcome in unit.outcomes if outcome.kernel == kernel]

    def blocks(self, *kernels: str) -> list[TimedBlock]:
        return [block for kernel in dict.fromkeys(kernels) for block in self.arms.get(kernel, ())]

    def ratio(self, kernel: str, to: str) -> Means | None:
        ratio = paired(self.blocks(kernel, to), kernel, to)
        return ratio and judged(ratio, self.aa, self.blocks(kernel, to), self.method.margin)

    @property
    def early(self) -> bool:
        """Whether the processes ended before --max-time because each was precise enough by itself."""
        measured = sum(u.spent.get(name, 0.0) for u in self.units for name in ("blocks", "lead_in", "placing"))
        return 0 < measured < _EARLY * self.method.max_time

    @property
    def roof(self) -> Roof:
        """The best rates that any process measured."""
        flops = [u.roof.flops_per_s for u in self.units if u.roof.flops_per_s]
        moved = [u.roof.bytes_per_s for u in self.units if u.roof.bytes_per_s]
        caches = [u.roof.llc_bytes for u in self.units if u.roof.llc_bytes is not None]
        return Roof(max(flops, default=None), max(moved, default=None), max(caches, default=None))

    @property
    def tokens_per_expert(self) -> tuple[float, ...]:
        """The number of tokens of each expert: the mean over the processes that counted them."""
        loads = [unit.tokens_per_expert for unit in self.units if unit.tokens_per_expert]
        return tuple(sum(tokens) / len(loads) for tokens in zip(*loads, strict=False))

    @property
    def experts_touched(self) -> float | None:
        """The mean number of experts that received tokens, over the processes that counted them."""
        counts = [unit.experts_touched for unit in self.units if unit.experts_touched is not None]
        return sum(counts) / len(counts) if counts else None


def _of_case(stored: _CaseUnits, run: Mapping[str, str]) -> ResultRow:
    """Return a row with the columns that all rows of a case share."""
    case = stored.case
    environment = stored.units[0].environment
    anchor, aa = log_times(stored.blocks(ANCHOR), ANCHOR), stored.aa.interval.map(exp_or_inf) if stored.aa else None
    row = ResultRow(
        run_id=run.get("run_id", ""),
        started_utc=run.get("started_utc", ""),
        commit=run.get("commit", ""),
        baseline=stored.baseline,
        processes=len(stored.units),
        aa_ratio=aa.value if aa else None,
        aa_low=finite(aa.low) if aa else None,
        aa_high=finite(aa.high) if aa else None,
        baseline_error_rel=_worst(o.error_rel for o in stored.outcomes(stored.baseline)),
        seed=stored.method.seed,
        process_anchors_s=tuple(exp(v) for v in anchor.of_processes.values()) if anchor else (),
        precision=stored.method.precision,
        launch=next((u.launch for u in stored.units if u.launch), ""),
        tokens_per_expert=stored.tokens_per_expert,
        referee="worker" if any(u.referee == "worker" for u in stored.units) else "process",
        isolated=min(u.isolated for u in stored.units),  # empty unless all were
        communication_bytes=communication_bytes(case) if case.layout else None,
        **case_columns(case) | {"cache": stored.units[0].cache},  # the cache mode actually used
    )
    columns: dict[str, Any] = {column: environment[column] for column in MACHINE if column in environment}
    if limit := columns.pop("power_limit_w", ""):  # the only numeric column of these
        columns["power_limit_w"] = float(limit)
    return replace(row, **columns)


def _of_kernel(stored: _CaseUnits, row: ResultRow, kernel: str) -> ResultRow:
    """Return a kernel's row: its outcome, and its time if its outcome is ok in all processes."""
    outcomes = stored.outcomes(kernel)
    gravest = min(outcomes, key=lambda o: GRAVEST.index(o.status))
    ok = gravest.status == "ok" and len(outcomes) == len(stored.units)
    notes = [gravest.note] if gravest.note else []
    if len(outcomes) < len(stored.units):
        notes.append(f"measured in only {len(outcomes)} of {len(stored.units)} processes")
    if ok:  # a unit's notes say how its kernels were timed
        notes += dict.fromkeys(note for unit in stored.units for note in unit.notes)
    row = replace(
        row,
        kernel=kernel,
        status="failed" if gravest.status == "ok" and not ok else gravest.status,
        peak_memory_bytes=max((o.peak_memory_bytes for o in outcomes if o.peak_memory_bytes is not None), default=None),
        compile_s=_worst(o.compile_s for o in outcomes),
        error_max=_worst(o.error_max for o in outcomes),
        error_rel=_worst(o.error_rel for o in outcomes),
        computes=gravest.computes,
        logits_error=_worst(o.logits_error for o in outcomes),
        logits_limit=_worst(o.logits_limit for o in outcomes),
    )
    time = log_times(stored.blocks(kernel), kernel) if ok else None
    row = _with_figures(row, stored, exp(time.interval.value) if time else None)
    if time is None:
        return replace(row, note="; ".join(notes))
    if time.units < len(stored.units):
        notes.append(f"timed in {time.units} of {len(stored.units)} processes: its verdict was certain by then")
    row, notes = _with_ratio(_with_time(row, stored, time), stored, notes)
    return replace(row, note="; ".join(notes))


def _with_figures(row: ResultRow, stored: _CaseUnits, time_s: float | None) -> ResultRow:
    """Add FLOPs, bytes and the fraction of the roof; they apply to the whole block, not to a single step."""
    if stored.method.in_model:
        return replace(row, tokens_per_s=stored.case.tokens / time_s if time_s else None)
    if row.kernel.startswith(STEP):
        return row
    figures = roofline.figures(
        replace(stored.case, cache=stored.units[0].cache),
        time_s,
        stored.roof,
        row.device_name,
        tf32=" tf32=on" in row.math_mode,
        experts_touched=stored.experts_touched,
    )
    if row.computes:  # the roof was measured in the case's dtype
        figures = replace(figures, roof_fraction=None, datasheet_fraction=None)
    return replace(row, **asdict(figures))


def _with_time(row: ResultRow, stored: _CaseUnits, time: Means) -> ResultRow:
    seconds = time.interval.map(exp_or_inf)
    blocks = stored.blocks(row.kernel)
    launching = [value / block.inner for block in blocks for value in warnings.figures([block], HOST_SECONDS)]
    return replace(
        row,
        placements=time.placements,
        rounds=time.rounds,
        inner=min(block.inner for block in blocks),
        time_s=seconds.value,
        time_low_s=finite(seconds.low),
        time_high_s=finite(seconds.high),
        process_times_s=tuple(exp(v) for v in time.of_processes.values()),
        page_faults_per_call=_faults(blocks),
        launch_s=median(launching) if launching else None,
        **_apart(stored, row.kernel, seconds.value),
    )


def _apart(stored: _CaseUnits, kernel: str, together: float) -> dict[str, Any]:
    """Return, for a case over ranks, the times of computing alone and of the collectives alone, and the share of the
    collectives' time that is hidden behind computing."""
    alone = {arm: log_times(stored.blocks(arm), arm) for arm in (kernel + COMPUTE, COLLECTIVES)}
    compute, communication = (exp(one.interval.value) if one else None for one in alone.values())
    hidden = None
    if compute is not None and communication:
        hidden = (compute + communication - together) / communication
    return {"compute_s": compute, "communication_s": communication, "overlap": hidden}


def _with_ratio(row: ResultRow, stored: _CaseUnits, notes: list[str]) -> tuple[ResultRow, list[str]]:
    """Add the ratio, its verdict, and the warnings about it."""
    is_baseline = row.kernel == stored.baseline
    ratio, gemm = stored.ratio(row.kernel, stored.baseline), stored.ratio(row.kernel, GEMM)
    if gemm:
        bare = gemm.interval.map(exp_or_inf)
        row = replace(row, gemm_ratio=bare.value, gemm_low=finite(bare.low), gemm_high=finite(bare.high))
    blocks = stored.blocks(row.kernel, stored.baseline)
    warned = [
        *stored.warnings,
        *warnings.of_blocks(blocks, ratio.clock if ratio else "wall"),
        *warnings.of_roof(row.roof_fraction, row.datasheet_fraction),
    ]
    if is_baseline:
        ones = (1.0,) * len(stored.units)
        row = replace(row, ratio=1.0, ratio_low=1.0, ratio_high=1.0, verdict="same", process_ratios=ones)
    elif ratio is None:
        notes = [*notes, f"no ratio: the baseline {stored.baseline} was not timed"]
    else:
        warned += warnings.of_ratio(ratio, stored.method, stored.early)
        shown = ratio.interval.map(exp_or_inf)
        row = replace(
            row,
            ratio=shown.value,
            ratio_low=finite(shown.low),
            ratio_high=finite(shown.high),
            verdict=verdict(ratio.interval, stored.method.margin),
            process_ratios=tuple(exp(v) for v in ratio.of_processes.values()),
        )
        mine, base = row.page_faults_per_call or 0.0, _faults(stored.blocks(stored.baseline)) or 0.0
        if row.device == "cpu" and abs(mine - base) >= _FAULTS and max(mine, base) >= 2 * min(mine, base):
            text = f"{mine:.0f} page faults per call (baseline {base:.0f}): part of the ratio is mapping memory"
            notes = [*notes, text]
    order: list[str] = list(Code)
    return replace(row, warnings=tuple(sorted(warned, key=lambda warning: order.index(warning.code)))), notes


def _faults(blocks: Sequence[TimedBlock]) -> float | None:
    """Return the page faults per call; None if nothing was timed."""
    calls = sum(block.inner for block in blocks)
    return sum(warnings.figures(blocks, "faults")) / calls if calls else None


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


# --- a unit and its referee's report ----------------------------------------------------------------------------------


def agreed(
    unit: TimedUnit, report: CaseReport | None, left_out: Mapping[str, Outcome] = MappingProxyType({})
) -> TimedUnit:
    """Return the unit with its final outcomes. A kernel is ok if both its worker and the referee report ok, and if the
    referee received as many samples as blocks were timed. Without a report, no kernel is ok. Kernels that the worker
    was to leave out keep their earlier outcome.

    The worker has loaded users' files, so any part of its Python may be patched. The referee has not loaded them, and
    its report comes over a separate connection.
    """
    if report is None:
        why = "the referee's report on this case did not arrive"
        outcomes = (replace(o, status="failed", note=why) if o.status == "ok" else o for o in unit.outcomes)
        return replace(unit, outcomes=tuple(outcomes))
    findings = {finding.outcome.kernel: finding for finding in report.findings}
    blocks = Counter(block.kernel for block in unit.blocks)
    twin = findings.get(TWIN, Finding(Outcome(TWIN))).outcome

    def stands(outcome: Outcome) -> Outcome:
        if outcome.kernel in left_out:
            return left_out[outcome.kernel]
        finding = findings.get(outcome.kernel, Finding(Outcome(outcome.kernel)))
        if outcome.kernel == unit.baseline and twin.status == "wrong" and finding.outcome.status == "ok":
            finding = replace(finding, outcome=replace(finding.outcome, status="wrong", note=twin.note))
        return _confirmed(outcome, finding, blocks[outcome.kernel])

    return replace(unit, outcomes=tuple(map(stands, unit.outcomes)))


def _confirmed(outcome: Outcome, finding: Finding, blocks: int) -> Outcome:
    """Return the worker's outcome, unless the referee found a different outcome or did not receive an answer from every
    timed block."""
    known = finding.outcome
    outcome = replace(outcome, computes=known.computes or outcome.computes)
    if outcome.status == "wrong":  # the worker searched for the cause, so its note may name the cause
        return outcome
    if known.status == "wrong":
        differs = f"{WrongCode.PATCHED_FFN}: the worker found it correct, but the referee did not: "
        note = (differs if outcome.status == "ok" else "") + known.note
        return replace(outcome, status="wrong", note=note, error_max=known.error_max, error_rel=known.error_rel)
    if outcome.status != "ok":
        return outcome
    if not finding.answers or finding.samples < blocks:
        seen = f"{finding.samples} samples of {blocks} timed blocks" if finding.answers else "no answer"
        return replace(outcome, status="wrong", note=f"{WrongCode.PATCHED_FFN}: the referee was shown {seen}")
    return outcome
