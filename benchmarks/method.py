"""Does the method of `ffn bench` hold on this machine? Its verdicts and intervals are checked where the truth is known.

What, on three shapes each, every invocation with fresh processes:

- `aa`: at most 5 % of the verdicts call identical code faster or slower, and --fail-if-slower never fails on it (at
  least 100 repeats)
- `slower`: in at least 95 % of 40 repeats, a kernel that takes 1.05 times as long gets the verdict slower, is listed by
  the gate, and the exit code is 1
- `lead-in`: in 19 of 20 cases, adding a kernel that sweeps three times the last-level cache, or that wakes every core,
  leaves the others' ratios unchanged: their intervals contain the median ratio of the runs without it
- `cache`: cold weights are never faster than warm ones with disjoint intervals
- `agreement`: at least 80 % (48 of 60) of the intervals of packed's ratio to base contain the median of the other
  invocations, and no verdict is faster if another is slower

How: invocations are shared. Each `plain` one (base, same, slow, packed; --fail-if-slower 2%) gives rows for `aa` and
`agreement` in every shape; `sweep` and `threads` ones also time the disturbing kernel; `slower` ones time only base and
slow, for longer; `cache` ones time base warm and cold. base, same and slow are those of benchmarks/known.py.

Limits: the shapes of one invocation share its worker processes, but no measurement.

    python -m benchmarks.method [--save FILE] [--repeats N] ...    # continues FILE where a run has ended; about an hour
    python -m benchmarks.method --summary FILE                     # the figures of FILE as Markdown

--repeats, --disturbed and --slower-repeats count the plain invocations, those with a disturbing kernel, and those of
base and slow alone; --slower-time and --max-time limit a case, in seconds; --small is the block for `cache`, several
copies of which fit in the cache.

The exit code is 1 if a target is missed.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict

from benchmarks import script
from benchmarks.script import KNOWN, Answer, Kept, Mark, Row, Rows, number

COLUMNS = (
    "date", "invocation", "repeat", "case", "kernel", "cache", "status", "ratio", "low", "high", "verdict", "fired",
    "time_s", "time_low_s", "time_high_s", "aa_low", "aa_high", "exit", "wall_s", "loadavg", "warnings",
)  # fmt: skip
TRUTHS = {"same": 1.0, "slow": 1.05}
LIMIT = "2%"  # of the gate: the margin of the verdicts
FALSE, POWER, INSIDE, AGREE = 0.05, 0.95, 0.95, 0.8


def kernels(*names: str) -> list[str]:
    """Return the options that choose these kernels of known.py (`packed` is built in), with base as the baseline."""
    chosen = ",".join(name if name == "packed" else f"{name}={KNOWN}:{name}" for name in names)
    return ["--kernel", chosen, "--baseline", "base"]


def invocation(kind: str, at: int, options: argparse.Namespace) -> Answer:
    """Run an invocation of a kind: plain, slower, sweep, threads or cache."""
    if kind == "slower":
        options = argparse.Namespace(**vars(options) | {"max_time": options.slower_time})
    method = script.how(options, seed=at)
    shapes = ["--tokens", options.tokens, "--threads", str(options.threads)]
    if kind == "cache":
        return script.bench(options.small, *shapes, "--cache", "warm,cold-weights", *kernels("base", "same"), *method)
    if kind == "slower":
        return script.bench(
            options.source, *shapes, "--cache", "warm", *kernels("base", "slow"), "--fail-if-slower", LIMIT, *method
        )
    more = {"plain": (), "sweep": ("sweep",), "threads": ("threaded",)}[kind]
    chosen = kernels("base", "same", "slow", "packed", *more)
    return script.bench(options.source, *shapes, "--cache", "warm", *chosen, "--fail-if-slower", LIMIT, *method)


def fired(answer: Answer) -> set[tuple[str, str]] | None:
    """Return each (case, kernel) that --fail-if-slower failed, from `gate` in the JSON; None without the option."""
    gate = answer.json.get("gate")
    if not isinstance(gate, dict):
        return None
    return {(row["case"], row["kernel"]) for row in gate["rows"] if row["result"] == "slower"}


def rows_of(answer: Answer) -> list[dict[str, object]]:
    """Return a row for each case and kernel, with the keys in COLUMNS."""
    regressions = fired(answer)
    return [
        {
            "case": row["case"], "kernel": row["kernel"], "cache": row["cache"], "status": row["status"],
            "ratio": number(row, "ratio"), "low": number(row, "ratio_low"), "high": number(row, "ratio_high"),
            "verdict": row["verdict"], "time_s": number(row, "time_s"), "time_low_s": number(row, "time_low_s"),
            "time_high_s": number(row, "time_high_s"), "aa_low": number(row, "aa_low"),
            "aa_high": number(row, "aa_high"), "exit": answer.code, "wall_s": answer.wall_s,
            "fired": None if regressions is None else (row["case"], row["kernel"]) in regressions,
            "warnings": row["warnings"],
        }
        for row in answer.rows
    ]  # fmt: skip


def plan(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the invocations with kinds mixed, so that an interrupted run has some of each kind."""
    counts = {
        "plain": options.repeats, "sweep": (options.disturbed + 1) // 2, "threads": options.disturbed // 2,
        "cache": options.cache_repeats, "slower": options.slower_repeats,
    }  # fmt: skip
    places = [((at + 0.5) / count, kind, at) for kind, count in counts.items() for at in range(count)]
    return [(kind, at) for _, kind, at in sorted(places)]


def holds(row: Row, truth: float) -> bool:
    """Return whether the interval of a row contains a ratio."""
    low, high = number(row, "low"), number(row, "high")
    return low is not None and high is not None and low <= truth <= high


def aa(rows: Rows) -> list[Mark]:
    """Judge identical code: count false verdicts and failed gates."""
    mine = [row for row in rows if row["invocation"] == "plain" and row["kernel"] == "same"]
    if not mine:
        return [("A/A", "", "", None)]
    wrong, gates = sum(row["verdict"] in ("faster", "slower") for row in mine), [row["fired"] for row in mine]
    known = [gate for gate in gates if gate]
    same, held = sum(row["verdict"] == "same" for row in mine), sum(holds(row, 1.0) for row in mine)
    n = len(mine)
    return [
        ("A/A: false faster or slower", f"{wrong} of {n}", f"at most {FALSE:.0%}", wrong <= FALSE * n),
        ("A/A: the gate fires", f"{known.count('true')} of {len(known)}", "never",
         "true" not in known if known else None),
        ("A/A: reported as the same", f"{same} of {n}", "", True),
        ("A/A: 95 % intervals that contain 1", f"{held} of {n}", "", True),
    ]  # fmt: skip


def slower(rows: Rows) -> list[Mark]:
    """Judge the slower kernel: count runs with the right verdict, gate and exit code, also in shorter plain runs."""
    mine = [row for row in rows if row["invocation"] == "slower" and row["kernel"] == "slow"]
    plain = [row for row in rows if row["invocation"] == "plain" and row["kernel"] == "slow"]
    if not mine:
        return [("x1.05", "", "", None)]
    caught = sum(row["verdict"] == "slower" and row["exit"] == "1" and row["fired"] == "true" for row in mine)
    held, early = sum(holds(row, 1.05) for row in (*mine, *plain)), sum(row["verdict"] == "slower" for row in plain)
    return [
        (
            "x1.05: reported as slower, with exit code 1",
            f"{caught} of {len(mine)}",
            f"at least {POWER:.0%}",
            caught >= POWER * len(mine),
        ),
        ("x1.05: reported as slower in plain runs of half the length", f"{early} of {len(plain)}", "", True),
        ("x1.05: 95 % intervals that contain 1.05", f"{held} of {len(mine) + len(plain)}", "", True),
    ]


def undisturbed(rows: Rows) -> list[Mark]:
    """Judge runs with a disturbing kernel: count ratios that are inside their intervals."""
    alone = defaultdict(list)
    for row in rows:
        if row["invocation"] == "plain" and row["ratio"]:
            alone[row["case"], row["kernel"]].append(float(row["ratio"]))
    found: list[Mark] = []
    for kind, said in (("sweep", "sweeps 3 x the last-level cache"), ("threads", "uses every core")):
        mine = [row for row in rows if row["invocation"] == kind and row["kernel"] in (*TRUTHS, "packed")]
        known = [
            holds(row, statistics.median(alone[row["case"], row["kernel"]]))
            for row in mine if alone[row["case"], row["kernel"]]
        ]  # fmt: skip
        inside = sum(known)
        reached = inside >= INSIDE * len(known) if known else None
        found.append(
            (f"ratios inside their intervals if a kernel {said}", f"{inside} of {len(known)}", "19 of 20", reached)
        )
    return found


def cold(rows: Rows) -> list[Mark]:
    """Judge cold weights compared with warm ones, of the same block in the same invocation."""
    times: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["invocation"] == "cache" and row["time_low_s"] and row["kernel"] == "base":
            wanted = "cold-weights" if ", cold-weights," in row["case"] else "warm"
            if (row["cache"] == "cold-weights") == (wanted == "cold-weights"):  # else memory was short: renamed
                times[row["repeat"], row["case"].replace(f", {wanted},", ",")][wanted] = row
    both = [pair for pair in times.values() if len(pair) == 2]
    if not both:
        return [("cold weights", "", "", None)]
    over = statistics.median(float(pair["cold-weights"]["time_s"]) / float(pair["warm"]["time_s"]) for pair in both)
    faster = sum(float(pair["cold-weights"]["time_high_s"]) < float(pair["warm"]["time_low_s"]) for pair in both)
    said = f"{faster} of {len(both)}; cold over warm {over:.2f} in the median"
    return [("cold weights faster than warm ones, with disjoint intervals", said, "none", faster == 0)]


def agreement(rows: Rows) -> list[Mark]:
    """Judge packed: compare each interval with the median of the other invocations, and count contradictions."""
    groups = defaultdict(list)
    for row in rows:
        if row["invocation"] == "plain" and row["kernel"] == "packed" and row["ratio"]:
            groups[row["case"]].append(row)
    groups = {case: mine for case, mine in groups.items() if len(mine) > 1}
    if not groups:
        return [("agreement", "", "", None)]
    held = sum(
        holds(row, statistics.median(float(other["ratio"]) for other in mine if other is not row))
        for mine in groups.values() for row in mine
    )  # fmt: skip
    total = sum(map(len, groups.values()))
    torn = sum({"faster", "slower"} <= {row["verdict"] for row in mine} for mine in groups.values())
    return [
        ("packed: intervals that contain the median of the other runs", f"{held} of {total}",
         f"at least {AGREE:.0%} (48 of 60)", held >= AGREE * total),
        ("packed: shapes reported both as faster and as slower", f"{torn} of {len(groups)}", "none", torn == 0),
    ]  # fmt: skip


def summary(rows: Rows) -> tuple[str, bool]:
    """Return the Markdown, and whether every target is reached."""
    found = [*aa(rows), *slower(rows), *undisturbed(rows), *cold(rows), *agreement(rows)]
    text = script.marks(found)
    if rows:
        text += f"\n\nMeasured {script.about_line(rows, 'cpu', 'python', 'torch', 'numpy')}."
    return text, all(reached for *_, reached in found)


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Run every invocation that has no rows yet."""
    for kind, at in plan(options):
        if kept.has(invocation=kind, repeat=at):
            continue
        start = time.perf_counter()
        answer = invocation(kind, at, options)
        place = {"date": script.now(), "invocation": kind, "repeat": at, "loadavg": os.getloadavg()[0]}
        kept.add_all({**place, **row} for row in rows_of(answer))
        print(f"{kind} {at + 1}: {time.perf_counter() - start:.0f} s, exit {answer.code}", flush=True)


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch", "numpy"), COLUMNS, measure, summary, repeats=34, disturbed=8, cache_repeats=3,
        slower_repeats=14, slower_time=14.0, tokens="1,4,16", source="256x1024:swiglu", small="256x1024:swiglu",
        threads=1, processes=5, max_time=7.0, precision="1%",
    )  # fmt: skip
