"""What a sweep of `ffn bench` costs, where its time goes, and whether it survives being killed.

What: tiny blocks (tokens x d_model x d_ff), eager and packed.

- `cost`: seconds for each case of 20 and of 200, beyond what one case alone takes (starting, importing torch, the
  roof); they differ by at most 10 %
- `share`: of the time after start, verification and warm-up, at least 80 % is spent in timed blocks and their lead-in
  (`spent` of the JSON, all workers together), in the sweeps and in `ffn bench` without arguments
- `kill`: 20 sweeps are killed (SIGKILL, the parent alone) at a random moment and resumed with --resume; the cases are
  complete, no row and no block is there twice, none is damaged, and no worker outlives its parent by 5 seconds

    python -m benchmarks.sweep [--save FILE] [--cases 20,200] [--kills 20] ...    # continues FILE
    python -m benchmarks.sweep --summary FILE

0 of --cases is `ffn bench` without arguments; killed sweeps have --kill-cases, and 1, 2 and 3 processes in turn. The
exit code is 1 where a mark is missed.
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
    """SOURCE and options of a grid of that many cases: 1 to 9, or a multiple of 20."""
    if cases < 10:
        return ["16x32:swiglu", "--tokens", _upto(cases)]
    d_model, d_ff = (",".join(map(str, widths)) for widths in DIMS)
    return ["16x32:swiglu", "--d-model", d_model, "--d-ff", d_ff, "--tokens", _upto(cases // 20)]


def _upto(n: int) -> str:
    return ",".join(str(at + 1) for at in range(n))


def method(processes: int, options: argparse.Namespace) -> list[str]:
    """The other options: as little as one case may take."""
    time_limit = ["--max-time", f"{options.max_time:g}s", "--precision", "1%", "--processes", str(processes)]
    return ["--kernel", "eager,packed", "--threads", "1", "--cache", "warm", *time_limit]


def cost(cases: int, processes: int, options: argparse.Namespace) -> dict[str, object]:
    """One sweep: its seconds, and what they were spent on. 0 cases: `ffn bench` without arguments."""
    answer = bench(*(grid(cases) + method(processes, options) if cases else []))
    found = len({row["case"] for row in answer.rows})
    if cases and found != cases:
        raise SystemExit(f"{cases} cases asked for, {found} measured: {answer.command}")
    return {"cases": cases, "processes": processes, "wall_s": answer.wall_s, "exit": answer.code, **answer.spent}


def killed(moment: float, processes: int, cases: int, options: argparse.Namespace) -> dict[str, object]:
    """Start a sweep, kill it after that many seconds, resume it, look at what there is."""
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
            # Killed before it had written its request, a sweep has nothing to resume: it starts anew.
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
    """complete: every case with both kernels, ok, of all processes; doubled, damaged: how many rows and blocks are."""
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
    # What reads as CSV from its first byte to its last: a torn line at the end is damage too.
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
    """Every process below `pid` → when it started, as /proc has it."""
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
    """How many of these processes are still there after 5 seconds; zombies are not."""
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
    """Cases → seconds for each beyond the first, where one alone was measured with as many processes."""
    alone = {row["processes"]: float(row["wall_s"]) for row in rows if row["what"] == "cost" and row["cases"] == "1"}
    return {
        int(row["cases"]): (float(row["wall_s"]) - alone[row["processes"]]) / (int(row["cases"]) - 1)
        for row in rows
        if row["what"] == "cost" and int(row["cases"]) > 1 and row["processes"] in alone
    }


def share(row: Row) -> float | None:
    """Blocks and lead-in over all that is not preparing; None where nothing is known of it."""
    spent = {name: number(row, name) or 0.0 for name in SPENT}
    rest = sum(seconds for name, seconds in spent.items() if name not in PREPARING)
    return (spent["blocks"] + spent["lead_in"]) / rest if rest else None


def summary(rows: Rows) -> tuple[str, bool]:
    """(Markdown, whether every mark is reached)."""
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
    """Every row that is not there yet."""
    for cases in options.cases:
        if not kept.has(what="cost", cases=cases):
            row = cost(cases, options.processes, options)
            kept.add({**row, "date": script.now(), "what": "cost"})
            print(json.dumps(row), flush=True)
    draw = random.Random(0)
    lengths: dict[int, float] = {}  # processes → seconds of the sweep undisturbed
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
