"""Units as processes would hand them in, from a fake clock or from log times at block level."""

from collections.abc import Callable, Sequence
from math import exp

from ffncli.bench.records import ANCHOR, GEMM, TWIN, Case, Method, Outcome, TimedBlock, TimedUnit
from ffncli.bench.timing import rounds
from ffncli.block.recipe import FFNSpec
from tests.bench.fake_clock import FakeClock, FakeCounters, placing

CASE = Case("512x2048:swiglu", "512x2048:swiglu", FFNSpec(512, 2048, "swiglu"), tokens=32, threads=2)
TIMES = {"eager": 1e-3, "packed": 0.9e-3, TWIN: 1e-3, ANCHOR: 1.2e-3, GEMM: 0.8e-3}
QUICK = Method(precision=0.02, max_time=3.0)
RUN = {"run_id": "r1", "started_utc": "2026-01-02T03:04:05Z"}
ENVIRONMENT = {"torch": "2.13.0", "cpu": "a cpu", "device_name": "a cpu", "host": "here", "openmp": "true;cores"}


def units_of(
    times: dict[str, float] = TIMES,
    method: Method = QUICK,
    clock: Callable[[int], FakeClock] = lambda p: FakeClock(jitter=0.004, seed=p),
    flags: Callable[[int], Sequence[Sequence[str]]] = lambda p: (),
) -> list[TimedUnit]:
    """What `method.processes` processes measure of arms that take so many seconds."""
    kernels = [name for name in times if not name.startswith("(")]
    units = []
    for process in range(method.processes):
        own = clock(process)
        plan = rounds.plan_of(method, kernels[0], kernels)
        found = rounds.measure(process, CASE.key, placing(own, times), own, FakeCounters(flags(process)), plan)
        outcomes = tuple(Outcome(k, error_max=1e-7 * (process + 1), error_rel=2e-7) for k in kernels)
        units.append(
            TimedUnit(process, CASE.key, kernels[0], "shared", outcomes, found.blocks, environment=ENVIRONMENT)
        )
    return units


def blocks_of(kernel: str, logs: Sequence[Sequence[Sequence[float]]], inner: int = 8) -> list[TimedBlock]:
    """Blocks whose log seconds of a call are `logs[process][placement][round]`."""
    return [
        TimedBlock(process, CASE.key, placement, number, 0, kernel, inner, inner * exp(value))
        for process, placements in enumerate(logs)
        for placement, values in enumerate(placements)
        for number, value in enumerate(values)
    ]
