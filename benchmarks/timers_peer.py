"""The other timers of benchmarks/timers.py: each times one call after another in this process, as it documents.

The request is a JSON object on standard input, and the answer a JSON object on standard output; see `main`.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch

from benchmarks import known

Call = Callable[[], object]
Times = Mapping[str, float]


def torch_timer(call: Call, seconds: float, threads: int) -> Times:
    """Time with torch.utils.benchmark's Timer.blocked_autorange; the figure that it shows is the median over blocks."""
    from torch.utils.benchmark import Timer

    found = Timer("call()", globals={"call": call}, num_threads=threads).blocked_autorange(min_run_time=seconds)
    return _times(found.times)


def do_bench(call: Call, seconds: float, threads: int) -> Times:
    """Time as triton.testing.do_bench does, but without a GPU: estimate from 5 calls, warm up for a fifth of the time,
    then time as many single calls as fit, and report their median. Caches are not cleared between calls."""
    call()
    start = time.perf_counter()
    for _ in range(5):
        call()
    estimate = (time.perf_counter() - start) / 5
    for _ in range(max(1, int(0.2 * seconds / estimate))):
        call()
    found = []
    for _ in range(max(1, int(0.8 * seconds / estimate))):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return _times(found)


def pytest_benchmark(call: Call, seconds: float, threads: int) -> Times:
    """Time as pytest-benchmark's fixture does in a test, with its default options, for `seconds`."""
    from pytest_benchmark.fixture import BenchmarkFixture
    from pytest_benchmark.utils import NameWrapper

    silent = SimpleNamespace(debug=lambda *_, **__: None, info=lambda *_, **__: None)
    fixture = BenchmarkFixture(
        SimpleNamespace(name="arm", nodeid="arm"), disable_gc=False, timer=NameWrapper(time.perf_counter),
        min_rounds=5, min_time=5e-6, max_time=seconds, precision=None, confidence=None, warmup=False,
        warmup_iterations=100_000, calibration_precision=10, add_stats=lambda _: None, logger=silent,
        warner=lambda *_: None, disabled=False, cprofile=None, cprofile_loops=None, cprofile_dump=None,
    )  # fmt: skip
    fixture(call)
    return _times([seconds / fixture.stats.iterations for seconds in fixture.stats.stats.data])


PEERS: Mapping[str, Callable[[Call, float, int], Times]] = {
    "torch Timer": torch_timer,
    "do_bench": do_bench,
    "pytest-benchmark": pytest_benchmark,
}


def _times(found: Sequence[float]) -> Times:
    return {"median": statistics.median(found), "mean": statistics.fmean(found), "min": min(found), "n": len(found)}


def arms(tokens: int, d_model: int, d_ff: int, gated: bool) -> dict[str, Call]:
    """Return calls of base, same and slow on the same input and weights, drawn as nn.Linear draws them."""
    x = torch.randn(tokens, d_model)
    names = ("gate", "up", "down") if gated else ("up", "down")
    wide = {name: (d_model, d_ff) if name == "down" else (d_ff, d_model) for name in names}
    weights = {name: (torch.rand(shape) * 2 - 1) * shape[1] ** -0.5 for name, shape in wide.items()}
    if not gated:
        weights |= {f"{name}_bias": (torch.rand(wide[name][0]) * 2 - 1) * wide[name][1] ** -0.5 for name in names}

    def arm(name: str) -> Call:
        function = getattr(known, name if gated else f"{name}_plain")
        return lambda: function(x, **weights)

    return {name: arm(name) for name in ("base", "same", "slow")}


def measure(tool: str, shape: Mapping[str, int], seconds: float, threads: int, seed: int) -> dict[str, object]:
    """Time the three calls of a shape one after the other, each for a third of the time."""
    torch.manual_seed(seed)
    times, walls = {}, 0.0
    for name, call in arms(shape["tokens"], shape["d_model"], shape["d_ff"], bool(shape["gated"])).items():
        for _ in range(3):  # as a careful user does; some of the tools choose their number of calls by the first one
            call()
        start = time.perf_counter()
        times[name] = PEERS[tool](call, seconds / 3, threads)
        walls += time.perf_counter() - start
    return {"times": times, "measuring_s": walls}


def main() -> None:
    """Answer {tool, threads, seed, shapes: [{tokens, d_model, d_ff, gated, seconds}]} with {shapes, injected}."""
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    with torch.inference_mode():
        found = [measure(asked["tool"], s, s["seconds"], asked["threads"], asked["seed"]) for s in asked["shapes"]]
    json.dump({"shapes": found, "injected": known.injected()}, sys.stdout)


if __name__ == "__main__":
    main()
