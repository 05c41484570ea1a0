"""Test the gate on known differences: the gate must fire on a real slowdown, and only then."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ffncli.bench.judge.gate import gate
from ffncli.bench.machine.devices import default_device
from ffncli.bench.records import Method
from ffncli.bench.request.grid import BenchRequest, Grid, build_request
from ffncli.bench.request.options import require_compatible
from ffncli.bench.suite import RunProgress, new_run, run
from ffncli.errors import ExitCode, FFNError
from ffncli.options.accept import listed

KERNELS = ("eager", "again=slowed:1:eager", "slowed=slowed:1.05:eager")
ALLOWED = 0.02
_LONG, _LONG_TOKENS = "2048x8192:swiglu", 512  # 52 GFLOP: 50 µs at 1 PFLOP/s
TRUTHS = {"again": 1.0, "slowed": 1.05}


@dataclass(frozen=True)
class KnownDifference:
    """A kernel whose true ratio to eager is `truth`, with the measured ratio. `flagged` is true if the gate called it
    slower, and `passed` if the gate was right."""

    case: str
    kernel: str
    truth: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    flagged: bool
    passed: bool


@dataclass(frozen=True)
class SelfTest:
    """Every known difference; `reasons` lists why rows were not gated."""

    allowed: float
    rows: tuple[KnownDifference, ...]
    reasons: tuple[str, ...]

    @property
    def failed(self) -> tuple[KnownDifference, ...]:
        """The kernels that were wrongly flagged, or wrongly not flagged."""
        return tuple(row for row in self.rows if not row.passed)


def selftest_request(grid: Grid, method: Method) -> BenchRequest:
    """Return a request with a known answer: eager, eager again, and eager slowed by 5 %. The defaults are one thread
    and, on a GPU, a block so large that 5 % of its time exceeds the time of the shortest kernel.

    Raises FFNError for an unsupported method.
    """
    require_compatible(grid, {"selftest": True, "processes": method.processes})
    grid = replace(grid, threads=grid.threads or 1, device=grid.device or default_device())
    if grid.source is None and not grid.any_set() and not grid.token_counts and listed(grid.device)[0] != "cpu":
        grid = replace(grid, source=_LONG, tokens=_LONG_TOKENS)
    return build_request(grid, KERNELS, "eager", method, fail_if_slower=ALLOWED)[0]


def selftest(request: BenchRequest, progress: RunProgress | None = None) -> SelfTest:
    """Measure the known differences, and check whether the gate finds them. Nothing is kept.

    Raises FFNError if a kernel is wrong or could not be measured.
    """
    with tempfile.TemporaryDirectory() as folder, new_run(Path(folder, "selftest.csv"), request) as journal:
        rows = run(journal, progress or RunProgress()).rows
    if bad := next((row for row in rows if row.status != "ok"), None):
        code = ExitCode.FAILED if bad.status == "wrong" else ExitCode.ENVIRONMENT
        raise FFNError(f"selftest: {bad.kernel} is {bad.status}: {bad.note}", code=code)
    allowed = request.fail_if_slower or ALLOWED
    judged = gate(rows, allowed)
    flagged = {(j.row.case, j.row.kernel) for j in judged.slower}
    known = []
    for row in rows:
        if row.kernel in TRUTHS:
            fired = (row.case, row.kernel) in flagged
            passed = fired == (TRUTHS[row.kernel] > 1 + allowed)
            read = (row.ratio, row.ratio_low, row.ratio_high)
            known.append(KnownDifference(row.case, row.kernel, TRUTHS[row.kernel], *read, fired, passed))
    return SelfTest(allowed, tuple(known), tuple(dict.fromkeys(reason for _, reason in judged.not_gated)))
