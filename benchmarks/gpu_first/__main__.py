"""python -m benchmarks.gpu_first PART: the first 50 minutes on a GPU that this code has not seen, in six parts.

facts: the machine, and the tests that need a GPU. device: what ffn sees of it, alone, busy and full. clock: what a
time contains besides the work. faults: what kills a run. method: the promises of `ffn bench`. repeat: the same twice,
and large blocks. A part takes less than ten minutes. Every probe runs in a process of its own with a time limit and
answers one question with yes or no and its figure; FINDING names the hypothesis it decides. `--list` shows them all and
needs no GPU. Exit code 1: a probe gave no answer, whatever the others say; 3: no GPU here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu_first.run import COLUMNS, PARTS, listing, run_part
from benchmarks.script import ROOT, Kept, environment, machine
from ffncli.errors import ExitCode, clean

SCRATCH = ROOT / "benchmarks" / "scratch"
_START_S = 120  # for torch to start and to reach the GPU
_LOOK = """
import json, torch
cuda = torch.cuda.is_available()
about = {"torch": torch.__version__, "device_name": torch.cuda.get_device_name(0) if cuda else ""}
if cuda:
    torch.zeros(1, device="cuda").item()
print(json.dumps(about))
"""


def device() -> tuple[str, str]:
    """(the GPU's name; why there is none). Asked in another process: this one must not hold any of its memory."""
    words = [sys.executable, "-c", _LOOK]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_START_S, env=environment(), check=False)
    except subprocess.TimeoutExpired:
        return "", f"torch did not reach it within {_START_S} s"
    try:
        about = json.loads(done.stdout.strip().splitlines()[-1])
        name, build = str(about["device_name"]), str(about["torch"])
    except (ValueError, LookupError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return "", clean(last)[:200]
    return name, f"torch {build} sees none"


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts that were named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first", description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=[*PARTS, "all"], help="which part, or all of them")
    parser.add_argument("--list", action="store_true", help="show every probe, run nothing")
    parser.add_argument("--save", metavar="FOLDER", type=Path, help="where the CSV and the logs go")
    options = parser.parse_args(words)
    if options.list:
        with contextlib.suppress(BrokenPipeError):  # `| head`
            print(listing(), flush=True)
        return 0
    if options.part is None:
        parser.error(f"name a part: {', '.join(PARTS)} or all")
    name, why = device()
    if not name:
        print(f"error: there is no GPU to probe here: {why}", file=sys.stderr)
        return int(ExitCode.ENVIRONMENT)
    folder = options.save or SCRATCH / f"gpu_first-{slug(name)}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    kept = Kept(str(folder / "gpu_first.csv"), COLUMNS, {"device_name": name} | machine("torch", "numpy"))
    unanswered = 0
    for part in PARTS if options.part == "all" else (options.part,):
        print(f"{part} on {name}, at most {sum(probe.limit_s for probe in PARTS[part])} s", flush=True)
        with open(folder / f"{part}.log", "a+b") as log:
            unanswered += run_part(part, PARTS[part], kept, log)
    print(f"results: {os.path.relpath(folder)} (gpu_first.csv, and a log for each part)")
    return int(bool(unanswered))


def slug(name: str) -> str:
    """A device's name as part of a folder's: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


if __name__ == "__main__":
    sys.exit(main())
