"""Parts method and repeat: does `ffn bench` keep its promises on this GPU, and does it say the same twice?"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu_first.probe import Answer, Figures, Probe, bench, rows_of, statuses

LLAMA = ("llama-2-7b", "--dtype", "bf16")
SMALL = ("512x2048:swiglu", "--dtype", "bf16")
MAX_TIME_S, TOKENS = 20, (1, 32, 512, 4096)
REPEATS = 8  # of the same code against itself
_REPEATS_S = 150.0


# --- method -----------------------------------------------------------------------------------------------------------


def measure_selftest() -> Figures:
    """`ffn bench --selftest`."""
    return bench("--selftest")


def judge_selftest(figures: Figures) -> Answer:
    return Answer(figures["code"] == 0, f"exit {figures['code']}; {statuses(figures['rows'])}")


def measure_llama() -> Figures:
    """The kernels of one model, from decode to prefill."""
    tokens = ",".join(map(str, TOKENS))
    kernels = "eager,module,packed,inplace,compiled"
    return bench(*LLAMA, "--tokens", tokens, "--kernel", kernels, "--max-time", f"{MAX_TIME_S}s")


def judge_llama(figures: Figures) -> Answer:
    rows = figures["rows"]
    over = figures["wall_s"] / (MAX_TIME_S * len(TOKENS))
    bound = sum("launch-bound" in row["warnings"] for row in rows)
    roofs = [float(row["roof_fraction"]) for row in rows if row["roof_fraction"]]
    top = max(roofs, default=0.0)
    fine = figures["code"] == 0 and bool(roofs) and over <= 2 and top <= 1.02
    text = (
        f"{over:.1f} times the requested time; at most {100 * top:.0f} % of roof; {bound} of {len(rows)} launch-bound"
    )
    return Answer(fine, f"exit {figures['code']}; {text}")


def measure_caches() -> Figures:
    """One token through a small block, by all three states of the cache."""
    words = ("--tokens", "1", "--cache", "cold-weights,flush,warm", "--kernel", "eager,packed", "--max-time", "8s")
    return bench(*SMALL, *words)


def judge_caches(figures: Figures) -> Answer:
    times = {row["cache"]: float(row["time_s"]) for row in rows_of(figures, "eager") if row["time_s"]}
    text = ", ".join(f"{name} {1e6 * seconds:.3g} µs" for name, seconds in times.items())
    if set(times) != {"cold-weights", "flush", "warm"}:
        return Answer(False, f"exit {figures['code']}: {text or statuses(figures['rows'])}")
    apart = times["flush"] / times["cold-weights"]
    return Answer(times["warm"] < times["cold-weights"] and 0.9 < apart < 1.1, text)


# --- repeat -----------------------------------------------------------------------------------------------------------


def measure_again() -> Figures:
    """One comparison, twice."""
    words = (*LLAMA, "--tokens", "1,512", "--kernel", "eager,module,packed", "--max-time", "10s")
    return {"runs": [bench(*words)["rows"] for _ in range(2)]}


def judge_again(figures: Figures) -> Answer:
    first, second = ({(r["case"], r["kernel"]): r for r in rows if r["ratio_low"]} for rows in figures["runs"])
    both = sorted(set(first) & set(second))
    turned = [key for key in both if {first[key]["verdict"], second[key]["verdict"]} == {"faster", "slower"}]
    overlap = sum(_overlap(first[key], second[key]) for key in both)
    text = f"{len(turned)} of {len(both)} turned round; {overlap} of {len(both)} intervals overlap"
    return Answer(bool(both) and not turned and overlap == len(both), text)


def _overlap(a: dict[str, str], b: dict[str, str]) -> bool:
    return float(a["ratio_low"]) <= float(b["ratio_high"]) and float(b["ratio_low"]) <= float(a["ratio_high"])


def measure_same_code() -> Figures:
    """eager against itself, as often as time allows."""
    rows: list[dict[str, Any]] = []
    until, words = time.perf_counter() + _REPEATS_S, ("--kernel", "eager,again=slowed:1:eager")
    for number in range(REPEATS):
        began = time.perf_counter()
        done = bench(*SMALL, "--tokens", "1", "--processes", "3", "--max-time", "5s", "--seed", str(number), *words)
        rows += rows_of(done, "again")
        if 2 * time.perf_counter() - began > until:
            break
    return {"rows": rows}


def judge_same_code(figures: Figures) -> Answer:
    verdicts = [row["verdict"] for row in figures["rows"] if row["verdict"]]
    wrong = sum(verdict in ("faster", "slower") for verdict in verdicts)
    return Answer(bool(verdicts) and not wrong, f"{wrong} of {len(verdicts)} runs called it faster or slower")


def measure_reach(*words: str) -> Figures:
    """A large case."""
    return bench(*words, "--dtype", "bf16", "--kernel", "eager,packed", "--max-time", "8s", "--processes", "2")


def judge_reach(figures: Figures) -> Answer:
    fine = bool(figures["rows"]) and all(row["status"] in ("ok", "skipped") for row in figures["rows"])
    return Answer(fine, f"exit {figures['code']} after {figures['wall_s']:.0f} s: {statuses(figures['rows'])}")


_MEASURE_CASE = "ffncli/bench/timing/measure_case.py"
METHOD = (
    Probe("selftest", "C3", "Does ffn bench recognise a kernel of known slowness?", 120, measure_selftest,
          judge_selftest, True, "ffncli/bench/selftest.py"),
    Probe("llama-7b", "B2", "Does a run take at most twice its time, and stay below its roof?", 330, measure_llama,
          judge_llama, True, "spent in the JSON: placing is drawing, rest is start-up"),
    Probe("caches", "A8", "Are cold weights cold, and as cold as flush?", 140, measure_caches, judge_caches, True,
          "ffncli/bench/timing/placement.py"),
)  # fmt: skip
REPEAT = (
    Probe("again", "-", "Do two runs agree?", 150, measure_again, judge_again, True, "rows of both runs, in the log"),
    Probe("same-code", "-", "Is the same code never called faster or slower?", 180, measure_same_code, judge_same_code,
          True, "the verdicts, in the log"),
    Probe("backward", "B4", "Is Llama-2-7B's backward pass timed?", 60,
          lambda: measure_reach("llama-2-7b", "--tokens", "2048", "--pass", "forward+backward"), judge_reach, True,
          _MEASURE_CASE),
    Probe("llama-70b", "B4", "Is Llama-2-70B's block timed?", 80,
          lambda: measure_reach("llama-2-70b", "--tokens", "1,2048"), judge_reach, True, _MEASURE_CASE),
    Probe("mixtral", "B4", "Is Mixtral's layer timed?", 60,
          lambda: measure_reach("mixtral-8x7b", "--tokens", "32"), judge_reach, True, _MEASURE_CASE),
    Probe("sustained", "A9", "Are long turns timed?", 50,
          lambda: measure_reach("llama-2-7b", "--tokens", "4096", "--sustained"), judge_reach, True,
          "ffncli/bench/timing/modes/sustained.py"),
)  # fmt: skip
