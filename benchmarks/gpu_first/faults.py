"""Part faults: does a kernel that goes wrong cost its own row only, and is memory counted right?"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu_first.probe import KERNELS, Answer, Figures, Probe, bench, rows_of, statuses

BLOCK = "512x2048:swiglu"
PEAK_TOKENS = 2048
_QUICK = ("--tokens", "16", "--dtype", "bf16", "--cache", "warm", "--processes", "2", "--max-time", "4s")


def faulty(name: str) -> Callable[[], Figures]:
    """A run with that kernel of faulty.py between two good ones."""
    return lambda: bench(BLOCK, "--kernel", f"eager,bad={KERNELS}:{name},packed", *_QUICK)


def judge_own_row(figures: Figures) -> Answer:
    good = [row["status"] for name in ("eager", "packed") for row in rows_of(figures, name)]
    bad = [row["status"] for row in rows_of(figures, "bad")]
    lone = good == ["ok", "ok"] and bool(bad) and "ok" not in bad
    return Answer(lone, f"exit {figures['code']}: {statuses(figures['rows'])}")


def judge_launch(figures: Figures) -> Answer:
    ways = sorted({row["launch"] for row in figures["rows"]})
    timed = bool(figures["rows"]) and all(row["status"] == "ok" for row in figures["rows"])
    text = f"exit {figures['code']}: {statuses(figures['rows'])}; launch: {', '.join(filter(None, ways)) or 'not said'}"
    return Answer(timed and ways not in ([], [""]), text)


def measure_reserved() -> Figures:
    """Bytes free for the driver, reserved and allocated by torch, after each of four cases in one process."""
    import torch

    from ffncli.bench.records import Case, Job, Method
    from ffncli.bench.timing.measure_case import measure_case
    from ffncli.block.recipe import FFNSpec
    from ffncli.kernels.choice import choices

    spec = FFNSpec(4096, 11008, "silu", gated=True)
    after = []
    for number, tokens in enumerate((1, 32, 512, 2048)):
        case = Case("4096x11008:swiglu", "4096x11008:swiglu", spec, tokens, "bf16", device="cuda")
        method = Method(processes=1, max_time=3.0, placements=2, rounds=2)
        measure_case(case, Job(number, (case,), choices(["eager,packed"]), "eager", method))
        free, total = torch.cuda.mem_get_info()
        after.append(
            {"free": free, "reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
        )
    return {"total": total, "after": after}


def judge_reserved(figures: Figures) -> Answer:
    kept = [(case["reserved"] - case["allocated"]) / 1e9 for case in figures["after"]]
    text = ", ".join(f"{size:.1f}" for size in kept)
    return Answer(max(kept) * 1e9 > 0.1 * figures["total"], f"reserved, not used, after each case: {text} GB")


def measure_peak() -> Figures:
    """The peak memory of eager with many tokens."""
    words = ("--kernel", "eager", "--dtype", "bf16", "--processes", "2", "--max-time", "4s", "--cache", "warm")
    return bench("4096x11008:swiglu", "--tokens", str(PEAK_TOKENS), *words)


def judge_peak(figures: Figures) -> Answer:
    by_hand = 4 * PEAK_TOKENS * 11008 * 2
    peaks = [float(row["peak_memory_bytes"]) for row in rows_of(figures, "eager") if row["peak_memory_bytes"]]
    if not peaks:
        return Answer(False, f"exit {figures['code']}: {statuses(figures['rows'])}")
    return Answer(abs(peaks[0] / by_hand - 1) < 0.01, f"{peaks[0] / 1e6:.1f} MB, by hand {by_hand / 1e6:.1f} MB")


def measure_compiled() -> Figures:
    """A run with `compiled`, which may be captured on another stream than it was compiled on."""
    return bench(BLOCK, "--kernel", "eager,compiled", *_QUICK)


def judge_compiled(figures: Figures) -> Answer:
    """Is the kernel timed? One for which torch compiles during the timing fails."""
    rows = rows_of(figures, "compiled")
    fine = bool(rows) and all(row["status"] == "ok" for row in rows)
    return Answer(fine, f"exit {figures['code']}: {statuses(figures['rows'])}")


_MEASURE_CASE = "ffncli/bench/timing/measure_case.py"
_OWN_ROW = "costs its own row only?"
PROBES = (
    Probe("assert-first", "B1", f"A device-side assertion at the first call {_OWN_ROW}", 75, faulty("assert_first"),
          judge_own_row, True, f"an exception on a GPU, in {_MEASURE_CASE}"),
    Probe("assert-later", "B1", f"A device-side assertion at call 50 {_OWN_ROW}", 75, faulty("assert_later"),
          judge_own_row, True, f"an exception while timing, in {_MEASURE_CASE}"),
    Probe("out-of-memory", "B4", f"A kernel that asks for too much {_OWN_ROW}", 60, faulty("too_large"),
          judge_own_row, True, "memory is freed after a kernel fails"),
    Probe("waits", "A2", "With a kernel that waits, do rows say how they were launched?", 60, faulty("waits"),
          judge_launch, True, "the column launch"),
    Probe("spoiled-capture", "B7", "After a spoiled capture, are all kernels timed with plain launches?", 75,
          faulty("spoils_a_capture"), judge_launch, True, "a worker should end after a spoiled capture"),
    Probe("other-stream", "A5", f"A kernel on a stream of its own {_OWN_ROW}", 60, faulty("other_stream"),
          judge_own_row, True, "events against a full wait, in ffncli/bench/timing"),
    Probe("reserved", "B3", "Does a case leave much memory reserved?", 60, measure_reserved, judge_reserved, False,
          "the cache is not emptied after a case"),
    Probe("peak", "A1", "Is peak_memory_bytes the count by hand?", 50, measure_peak, judge_peak, True,
          "what the last call's output does to it"),
    Probe("recompile", "-", "Is `compiled` timed without compiling again?", 80, measure_compiled, judge_compiled,
          True, "a capture on a side stream compiles again"),
)  # fmt: skip
