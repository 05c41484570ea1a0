"""What a sweep of `ffn bench` costs, where its time goes, and whether it can be resumed after being killed.

What: tiny blocks (tokens x d_model x d_ff), eager and packed.

- `cost`: the seconds per case in sweeps of 20 and of 200 cases, minus the time for a single case (which includes the
  start, importing torch and the roof); the two differ by at most 10 %
- `share`: of the time after start, verification and warm-up, at least 80 % is spent in timed blocks and their lead-in
  (`spent` in the JSON, all workers together), in the sweeps and in `ffn bench` without arguments
- `kill`: the parents of 20 sweeps are killed (SIGKILL) at a random moment, and the sweeps continued with --resume; then
  all cases are complete, no row or block is repeated or damaged, and no worker outlives its parent by 5 seconds

    python -m benchmarks.sweep [--save FILE] [--cases 20,200] [--kills 20] ...    # continues FILE
    python -m benchmarks.sweep --summary FILE

The value 0 in --cases means `ffn bench` without arguments; killed sweeps have --kill-cases cases, and 1, 2 or 3
processes. The exit code is 1 if a target is missed.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import script
from benchmarks.script import Kept, Mark, Row, Rows, bench, ended, in_background, number, read

COLUMNS = (
    "date", "what", "repeat", "processes", "cases", "wall_s", "start", "verify", "warm_up", "blocks", "lead_in",
    "placing", "rest", "moment_s", "rows_before", "blocks_before", "complete", "doubled", "damaged", "survivors",
    "exit", "note",
)  # fmt: skip
SPENT = ("start", "verify", "warm_up", "blocks", "lead_in", "placing", "rest")
PREPARING = ("start", "verify", "warm_up")
LINEAR, SHARE, GONE_S = 0.10, 0.80, 5.0
DIMS = ((16, 24, 32, 48), (32, 64, 96, 128, 192))  # d_model, d_ff: every combination
BLOCK_KEY = ("process", "case", "placement", "round", "position")


def grid(cases: int) -> list[str]:
    """Return SOURCE and options of a grid of `cases` cases: 1 to 9, or a multiple of 20."""
    if cases < 10:
        return ["16x32:swiglu", "--tokens", _upto(cases)]
    d_model, d_ff = (",".join(map(str, widths)) for widths in DIMS)
    return ["16x32:swiglu", "--d-model", d_model, "--d-ff", d_ff, "--tokens", _upto(cases // 20)]


def _upto(n: int) -> str:
    return ",".join(str(at + 1) for at in range(n))


def method(processes: int, options: argparse.Namespace) -> list[str]:
    """Return the other options, which make a case as short as possible."""
    time_limit = ["--max-time", f"{options.max_time:g}s", "--precision", "1%", "--processes", str(processes)]
    return ["--kernel", "eager,packed", "--threads", "1", "--cache", "warm", *time_limit]


def cost(cases: int, processes: int, options: argparse.Namespace) -> dict[str, object]:
    """Run a sweep; return its seconds, and how they were spent. 0 cases: `ffn bench` without arguments."""
    answer = bench(*(grid(cases) + method(processes, options) if cases else []))
    found = len({row["case"] for row in answer.rows})
    if cases and found != cases:
        raise SystemExit(f"{cases} cases asked for, {found} measured: {answer.command}")
    return {"cases": cases, "processes": processes, "wall_s": answer.wall_s, "exit": answer.code, **answer.spent}


def killed(moment: float, processes: int, cases: int, options: argparse.Namespace) -> dict[str, object]:
    """Start a sweep, kill it after `moment` seconds, resume it, and inspect the result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sweep.csv")
        words = [*grid(cases), *method(processes, options), "--save", str(path), "-q"]
        process = in_background(*words)
        time.sleep(moment)
        children = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        code, errors = process.wait(), ""  # its workers may still have its stderr
        left = survivors(children)
        before, blocks = len(read(path)), len(read(path.with_suffix(".rounds.csv")))
        if code == -signal.SIGKILL:
            # A sweep that was killed before it wrote its request has nothing to resume, so it starts again.
            begun = any(Path(folder).glob("sweep*.jsonl"))
            code, errors = ended(in_background(*(["--resume", str(path), "-q"] if begun else [*words, "--force"])))
        elif process.stderr:  # it was quicker than the moment
            errors = process.stderr.read()
        said = (errors.strip().splitlines() or [""])[-1] if code else ""
        seen = inspected(path, cases, processes)
    return {
        "cases": cases, "processes": processes, "moment_s": moment, "rows_before": before,
        "blocks_before": blocks, "survivors": left, "exit": code, "note": said, **seen,
    }  # fmt: skip


def inspected(path: Path, cases: int, processes: int) -> dict[str, object]:
    """Return `complete`: whether every case has ok rows of both kernels from all processes; and counts of faulty lines.

    `doubled` and `damaged` count rows and blocks.
    """
    rows, blocks = read(path), read(path.with_suffix(".rounds.csv"))
    keys = [(row["case"], row["kernel"]) for row in rows]
    places = [tuple(block[name] for name in BLOCK_KEY) for block in blocks]
    complete = len(set(keys)) == 2 * cases and {(row["status"], row["processes"]) for row in rows} == {
        ("ok", str(processes))
    }
    of_case = {(block["case"], block["process"]) for block in blocks}
    complete = complete and len(of_case) == cases * processes
    doubled = len(keys) - len(set(keys)) + len(places) - len(set(places))
    damaged = sum(_damaged(row, ("time_s", "ratio")) for row in rows)
    damaged += sum(_damaged(block, ("seconds", "inner")) for block in blocks)
    # An incomplete last line is damage, too.
    damaged += sum(not p.read_bytes().endswith(b"\n") for p in (path, path.with_suffix(".rounds.csv")) if p.exists())
    return {"complete": complete, "doubled": doubled, "damaged": damaged}


def _damaged(row: Mapping[str | None, str | None], numbers: Sequence[str]) -> bool:
    if None in row or None in row.values():  # a line with more or fewer cells than columns
        return True
    try:
        return not all(float(row[name] or "") > 0 for name in numbers)
    except ValueError:
        return True


def descendants(pid: int) -> dict[int, str]:
    """Return a mapping from every descendant process of `pid` to its start time in /proc."""
    parents: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            after = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(after[1]), []).append(int(entry.name))
        started[int(entry.name)] = after[19]
    found, todo = {}, [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            found[child] = started[child]
            todo.append(child)
    return found


def survivors(children: Mapping[int, str]) -> int:
    """Return how many of these processes are still alive after 5 seconds; zombies do not count."""
    end = time.monotonic() + GONE_S
    while True:
        there = sum(_alive(pid, started) for pid, started in children.items())
        if not there or time.monotonic() > end:
            return there
        time.sleep(0.05)


def _alive(pid: int, started: str) -> bool:
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return after[0] not in "ZX" and after[19] == started


def each_case(rows: Rows) -> dict[int, float]:
    """Return a mapping from a sweep's number of cases to its seconds per case after the first.

    Only sweeps are included for which a single case was measured with the same number of processes.
    """
    alone = {row["processes"]: float(row["wall_s"]) for row in rows if row["what"] == "cost" and row["cases"] == "1"}
    return {
        int(row["cases"]): (float(row["wall_s"]) - alone[row["processes"]]) / (int(row["cases"]) - 1)
        for row in rows
        if row["what"] == "cost" and int(row["cases"]) > 1 and row["processes"] in alone
    }


def share(row: Row) -> float | None:
    """Return the share of blocks and lead-in in the time after the preparation, or None if it is not known."""
    spent = {name: number(row, name) or 0.0 for name in SPENT}
    rest = sum(seconds for name, seconds in spent.items() if name not in PREPARING)
    return (spent["blocks"] + spent["lead_in"]) / rest if rest else None


def summary(rows: Rows) -> tuple[str, bool]:
    """Return the Markdown, and whether every target is reached."""
    found: list[Mark] = []
    each = each_case(rows)
    if len(each) > 1:
        few, many = each[min(each)], each[max(each)]
        said = f"{few:.3f} s of {min(each)}, {many:.3f} s of {max(each)}: {many / few - 1:+.1%}"
        found.append(("seconds for each case", said, f"within {LINEAR:.0%}", abs(many / few - 1) <= LINEAR))
    else:
        found.append(("seconds for each case", "", "", None))
    for row in rows:
        if row["what"] == "cost" and row["cases"] != "1":
            what = f"{row['cases']} cases" if row["cases"] != "0" else "ffn bench without arguments"
            part = share(row)
            said = "" if part is None else f"{part:.1%}, {float(row['wall_s']):.0f} s in all"
            reached = None if part is None else part >= SHARE
            found.append((f"{what}: in timed blocks and lead-in", said, f"at least {SHARE:.0%}", reached))
    kills = [row for row in rows if row["what"] == "kill"]
    n = len(kills)
    if kills:
        whole = sum(row["complete"] == "true" and row["exit"] == "0" for row in kills)
        found.append(("killed and resumed: every case is there", f"{whole} of {n}", "all", whole == n))
        for name, said in (("doubled", "rows or blocks twice"), ("damaged", "rows or blocks damaged"),
                           ("survivors", f"workers alive {GONE_S:g} s later")):  # fmt: skip
            total = sum(int(row[name]) for row in kills)
            found.append((f"killed and resumed: {said}", str(total), "none", total == 0))
        some = sum(int(row["blocks_before"]) > 0 for row in kills)
        found.append(("killed with blocks already written", f"{some} of {n}", "", True))
    text = script.marks(found)
    if rows:
        text += f"\n\nMeasured {script.about_line(rows, 'cpu', 'python', 'torch')}."
    return text, all(reached for *_, reached in found)


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Measure every row that the file lacks."""
    for cases in options.cases:
        if not kept.has(what="cost", cases=cases):
            row = cost(cases, options.processes, options)
            kept.add({**row, "date": script.now(), "what": "cost"})
            print(json.dumps(row), flush=True)
    draw = random.Random(0)
    lengths: dict[int, float] = {}  # number of processes → seconds of an undisturbed sweep
    for at in range(options.kills):
        processes, moment = at % 3 + 1, draw.random()
        if kept.has(what="kill", repeat=at):
            continue
        if processes not in lengths:
            lengths[processes] = bench(*grid(options.kill_cases), *method(processes, options)).wall_s
        row = killed(moment * lengths[processes], processes, options.kill_cases, options)
        kept.add({**row, "date": script.now(), "what": "kill", "repeat": at})
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    script.main(
        __doc__, ("ffncli", "torch", "numpy"), COLUMNS, measure, summary, cases=(1, 20, 200, 0), processes=1,
        max_time=0.5, kills=20, kill_cases=6,
    )  # fmt: skip
