"""Does a grid that is measured in parts, on machines that fail, have exactly the cases of an uninterrupted run?

What: 60 tiny cases of `ffn bench`, measured in four ways.

- `whole`: one run; the other ways must measure the same set of cases
- `8 shards`: `--shard 1/8` to `8/8`; two are killed (SIGKILL) midway; all are merged, resumed and merged again
- `ray`: `--launcher ray` on a local cluster of two nodes, one of which is killed midway
- `slurm`: `--launcher slurm` with submitit's local executor, interrupted (SIGINT) midway and then resumed

Limits: everything runs on one machine, without SLURM itself. Times include other work on the machine.

    python -m benchmarks.grid_over_machines [--save FILE] [--only WAY,...]   # ray and slurm need the extras

--only takes shards, ray and slurm; --whole FILE.csv is an existing result of `whole`; --cases is an even number.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks import script
from benchmarks.script import Kept, Rows, ended, environment, in_background, read
from ffncli.system.packages import installed

KERNELS, SHARDS, KILLED = 2, 8, (3, 6)


def grid(cases: int) -> tuple[str, ...]:
    """Return the options of a grid with this many cases, an even number."""
    tokens = ",".join(map(str, range(1, cases // 2 + 1)))
    return ("64x256", "--tokens", tokens, "--dtype", "fp32,fp64", "--kernel", "eager,numpy", "--processes", "1",
            "--max-time", "200ms", "--device", "cpu", "--threads", "1")  # fmt: skip


@dataclass(frozen=True)
class Way:
    """The result of one way of measuring: counts of cases, rows and faults, and exit codes.

    `missing` and `other` count cases that it lacks, or has in addition to the whole run; `doubled` counts repeated rows
    of a case and kernel; `mixed` counts cases whose rows come from several runs or machines. `before` is the exit code
    before the resume; `losses` counts cases that were lost with a machine and measured again.
    """

    way: str
    cases: int
    rows: int
    missing: int
    doubled: int
    other: int
    mixed: int
    exit: int
    before: int | None = None
    losses: int = 0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether each case of the whole run was measured once, and nothing else."""
        return not (self.missing or self.doubled or self.other or self.mixed or self.exit)


def compared(way: str, rows: Rows, whole: set[str], code: int) -> Way:
    """Compare the rows of a way with the cases of the whole run."""
    places: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        places.setdefault(row["case"], set()).add((row["run_id"], row["host"]))
    doubled = sum(count - 1 for count in Counter((row["case"], row["kernel"]) for row in rows).values())
    missing = {case for case in whole if sum(row["case"] == case for row in rows) < KERNELS}
    mixed = sum(len(one) > 1 for one in places.values())
    return Way(way, len(places), len(rows), len(missing), doubled, len(places.keys() - whole), mixed, code)


def finished(code: int) -> int:
    """Return 0 for a run that finished, even if verdicts are inconclusive, as on a busy machine."""
    return 0 if code in (0, 4) else code


def wait_for(path: Path, cases: int, process: subprocess.Popen[str]) -> None:
    """Wait until a result that is being written has this many cases."""
    until = time.monotonic() + 900
    while len({row["case"] for row in read(path)}) < cases:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{path.name} ended before {cases} cases: {ended(process)}")
        time.sleep(0.05)


def measure_whole(folder: Path, words: Sequence[str], there: str | None) -> tuple[Way, set[str]]:
    """Measure in one run; return its counts and its set of cases. `there` is an existing result to use instead."""
    path = Path(there or folder / "whole.csv")
    code = 0 if there else ended(in_background(*words, "--save", str(path)))[0]
    rows = read(path)
    cases = {row["case"] for row in rows}
    return compared("whole", rows, cases, finished(code)), cases


def measure_shards(folder: Path, words: Sequence[str], whole: set[str]) -> Way:
    """Measure in eight parts, of which two are killed and resumed."""
    parts = [folder / f"part-{index}.csv" for index in range(1, SHARDS + 1)]
    codes = []
    for index, path in enumerate(parts, 1):
        process = in_background(*words, "--shard", f"{index}/{SHARDS}", "--save", str(path))
        if index in KILLED:
            wait_for(path, 2, process)
            process.kill()
            ended(process)
        else:
            codes.append(finished(ended(process)[0]))
    before, missing = merged(parts, folder / "before.csv")
    print(f"merged before the resume: exit {before}, {missing} cases missing")
    codes += [finished(ended(in_background("--resume", str(parts[index - 1])))[0]) for index in KILLED]
    after, _ = merged(parts, folder / "all.csv")
    way = compared(f"{SHARDS} shards", read(folder / "all.csv"), whole, after or max(codes))
    return replace(way, before=before)


def merged(parts: Sequence[Path], into: Path) -> tuple[int, int]:
    """Merge the parts; return the exit code of `ffn merge` and the number of cases that it reports as missing."""
    words = script.command("merge", *map(str, parts), "-o", str(into), "--json")
    done = subprocess.run(words, capture_output=True, text=True, cwd=script.ROOT, env=environment(), check=False)
    return done.returncode, len(json.loads(done.stdout)["missing"])


@contextmanager
def two_nodes() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the address of a local Ray cluster of two nodes with a core each, and a function that kills one node."""
    # The nodes' processes load this working tree, at the usual priority.
    os.environ.update(environment() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
    node = cluster.add_node(**settings)
    try:
        yield cluster.address, lambda: cluster.remove_node(node, allow_graceful=False)
    finally:
        cluster.shutdown()


def measure_ray(folder: Path, words: Sequence[str], whole: set[str]) -> Way:
    """Measure on two nodes, one of which is killed."""
    path = folder / "ray.csv"
    with two_nodes() as (address, kill_node):
        process = in_background(
            *words, "--launcher", "ray", "--launcher-option", f"address={address}", "--save", str(path)
        )
        wait_for(path, len(whole) // 3, process)
        kill_node()
        code, errors = ended(process)
    way = compared("ray", read(path), whole, finished(code))
    return replace(way, losses=errors.count(" was lost with "))


def measure_slurm(folder: Path, words: Sequence[str], whole: set[str]) -> Way:
    """Measure with submitit's local executor, two jobs at once; interrupt the run once and resume it."""
    path = folder / "slurm.csv"
    process = in_background(*words, "--launcher", "slurm", "--launcher-option", "cluster=local", "--slots", "2",
                    "--save", str(path))  # fmt: skip
    wait_for(path, len(whole) // 3, process)
    process.send_signal(signal.SIGINT)
    before, _ = ended(process)
    code, errors = ended(in_background("--resume", str(path)))
    way = compared("slurm", read(path), whole, finished(code))
    return replace(way, before=before, losses=errors.count(" was lost with "))


WAYS: dict[str, Callable[[Path, Sequence[str], set[str]], Way]] = {
    "shards": measure_shards,
    "ray": measure_ray,
    "slurm": measure_slurm,
}


FIGURES = ("cases", "rows", "missing", "doubled", "other", "mixed", "exit", "before", "losses")


def page(ways: Sequence[Way]) -> str:
    """Return a table with every figure of these ways."""
    lines = [
        (way.way, *(getattr(way, name) for name in FIGURES), f"{way.seconds:.0f}", "yes" if way.holds else "**no**")
        for way in ways
    ]
    return script.table(("way", *FIGURES, "s", "holds"), lines)


def measure(kept: Kept, options: argparse.Namespace) -> list[Way]:
    """Measure the whole run, then every requested way."""
    words, ways, clock = grid(options.cases), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ffn-grid-") as folder:
        way, cases = measure_whole(Path(folder), words, options.whole)
        for measured in (None, *options.only):
            way = way if measured is None else WAYS[measured](Path(folder), words, cases)
            way = replace(way, seconds=time.monotonic() - clock)
            ways.append(way)
            clock = time.monotonic()
            if not kept.has(way=way.way) or measured:
                kept.add(vars(way) | {"holds": way.holds})
            print(page([way]), flush=True)
    return ways


def main() -> int:
    """Measure, print every figure; exit 1 if a way does not hold."""
    options = script.options_of(__doc__, only=tuple(WAYS), whole=None, cases=60)
    columns = (*(field.name for field in fields(Way)), "holds")
    about = script.machine("torch") | {name: installed(name) or "" for name in ("ray", "submitit")}
    kept = Kept(options.save, columns, about)
    ways = measure(kept, options)
    print(page(ways))
    print("; ".join(f"{name} {value}" for name, value in about.items()))
    return int(not all(way.holds for way in ways))


if __name__ == "__main__":
    sys.exit(main())
