"""recording only, for now"""
import argparse, json, os, random, subprocess, sys, time
from pathlib import Path
from benchmarks.loads import LOADS, under
from benchmarks.script import ROOT
from ffncli.bench.launch import environment
from ffncli.bench.records import ANCHOR, TWIN, Method
from ffncli.bench.results.csv_file import block_lines

BASE, UNITS = 20, {"x1.00": 20, "x1.05": 21, "x1.10": 22, "x1.30": 26, "x2": 40, "x24": 480}
TWINS = (TWIN, "(aa2)", "(aa3)")


def worker(process, threads, seconds, seed):
    import numpy, torch  # noqa
    from threadpoolctl import threadpool_limits
    from ffncli.bench.machine.counters import SystemCounters
    from ffncli.bench.timing.clock import CpuClock
    from ffncli.bench.timing.reference_arms import anchor
    from ffncli.bench.timing.rounds import Arm, measure, plan_of

    torch.set_num_threads(threads); threadpool_limits(threads)
    system = random.SystemRandom()

    def arm(name, units):
        spaces = [torch.empty(64 * system.randrange(1, 4096), dtype=torch.uint8) for _ in range(3)]
        x, w, out = torch.randn(32, 128), torch.randn(128, 256), torch.randn(32, 256)
        del spaces
        mm = torch.mm
        def call():
            for _ in range(units):
                mm(x, w, out=out)
        return Arm(name, call)

    def place(number):
        arms = [arm(n, BASE) for n in ("base", *TWINS)] + [arm(n, u) for n, u in UNITS.items()]
        random.shuffle(arms)
        return [*arms, Arm(ANCHOR, anchor(random).call) if False else anchor(random.Random(system.random()))]

    method = Method(processes=5, max_time=seconds * 5, seed=seed)
    plan = plan_of(method, "base", ("base", *UNITS), "cpu", threads)
    sys.stdin.readline()
    with torch.inference_mode():
        measured = measure(process, "case", place, CpuClock(), SystemCounters(), plan)
    sys.stdout.write(block_lines("r", measured.blocks))
    print("spent", json.dumps(measured.spent), file=sys.stderr)


def record(folder, load, threads, count, seconds, tuning):
    path = Path(folder, f"{'tune-' if tuning else ''}{load}-{threads}.csv")
    done = len({l.split(",")[1] for l in path.read_text().splitlines()}) if path.exists() else 0
    for p in range(done, count):
        words = [sys.executable, "-m", "benchmarks.under_load", "--worker", str(p), "--threads", str(threads), "--seconds", str(seconds)]
        child = subprocess.Popen(words, cwd=ROOT, env=environment(threads, "fixed") | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with under(load, child.pid, tuning, seed=1000 * p):
            time.sleep(0.5)
            out, err = child.communicate("\n")
        assert child.returncode == 0, err
        with open(path, "a") as file: file.write(out)
        print(load, threads, p, out.count("\n"), err.strip()[-200:], flush=True)


if __name__ == "__main__":
    q = argparse.ArgumentParser()
    q.add_argument("--worker", type=int); q.add_argument("--threads", default="1"); q.add_argument("--seconds", type=float, default=2.0)
    q.add_argument("--folder"); q.add_argument("--loads", default=",".join(LOADS)); q.add_argument("--count", type=int, default=60); q.add_argument("--tuning", action="store_true")
    o = q.parse_args()
    if o.worker is not None:
        worker(o.worker, int(o.threads), o.seconds, 0)
    else:
        os.makedirs(o.folder, exist_ok=True)
        for load in o.loads.split(","):
            for threads in map(int, o.threads.split(",")):
                record(o.folder, load, threads, o.count, o.seconds, o.tuning)
