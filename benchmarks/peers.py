"""How long counting one FFN takes with `ffn params` and with other counters, and which of them count correctly.

What: Llama-2-7B's FFN, one SwiGLU block of 4096 × 11008 on one token: 135,266,304 parameters, as many multiply-adds
(MACs), and twice as many FLOPs. `ffn params llama-2-7b`, `ffn params 4096x11008:swiglu` and each counter run in fresh
processes. A counter's process builds the block on the meta device (no weights are allocated), counts it as the
counter's documentation says, and prints the counts. `bare` is a program with one Typer command that prints a rich
table. Targets: every counter takes at least 8 times the wall time and 7 times the memory of `ffn`.

How: every round runs every command once, in random order, one process at a time (wait4). Figures are medians over
rounds; ratios are medians over rounds of the ratio to `ffn params llama-2-7b` in the same round. Two rounds before that
fill caches. A counter's result is stored with the true count, in the counter's own unit.

Limits: warm caches. Nearly all of a counter's time is importing torch, which every user of a counter has to do.

    python -m benchmarks.peers [--rounds N] [--save FILE]

A counter that is not installed or does not run is reported and left out. The exit code is 1 if a target is missed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import script
from benchmarks.script import Run, ffn, median, ratio, run

PARAMS = 3 * 4096 * 11008
MACS, FLOPS = PARAMS, 2 * PARAMS
FASTER, SMALLER = 8.0, 7.0
WARM_UPS = 2

BLOCK = """
import json
import torch
from torch import nn


class SwiGLU(nn.Module):
    def __init__(self, d_model=4096, d_ff=11008):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


with torch.device("meta"):
    block, x = SwiGLU(), torch.empty(1, 4096)
"""


class Peer(NamedTuple):
    """A counter: its package, the code that follows BLOCK and prints [parameters, operations], and its unit."""

    package: str
    program: str
    unit: str


PEERS: Mapping[str, Peer] = {
    "torchinfo": Peer(
        "torchinfo",
        "from torchinfo import summary\n"
        "found = summary(block, input_data=x, device='meta', verbose=0)\n"
        "print(json.dumps([found.total_params, found.total_mult_adds]))\n",
        "MACs",
    ),
    "calflops": Peer(
        "calflops",
        "from calflops import calculate_flops\n"
        "flops, macs, params = calculate_flops(\n"
        "    block, args=[x], print_results=False, output_as_string=False, include_backPropagation=False\n"
        ")\n"
        "print(json.dumps([params, macs]))\n",
        "MACs",
    ),
    "fvcore": Peer(
        "fvcore",
        "from fvcore.nn import FlopCountAnalysis, parameter_count\n"
        "print(json.dumps([parameter_count(block)[''], FlopCountAnalysis(block, x).total()]))\n",
        "MACs",
    ),
    "FlopCounterMode": Peer(
        "torch",
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    block(x)\n"
        "print(json.dumps([sum(p.numel() for p in block.parameters()), counter.get_total_flops()]))\n",
        "FLOPs",
    ),
}
OURS = {"ffn params llama-2-7b": "llama-2-7b", "ffn params 4096x11008:swiglu": "4096x11008:swiglu"}
FIRST, *_ = OURS


def said(name: str, done: Run) -> tuple[int | None, int | None, str]:
    """Return the parameters, operations and unit that a program printed; None for the program that counts nothing."""
    if name in PEERS:
        params, operations = json.loads(done.output.splitlines()[-1])
        return int(params), int(operations), PEERS[name].unit
    if name in OURS:
        row = json.loads(run(ffn("params", OURS[name], "--json")).output)["rows"][0]
        return row["ffn_params_per_layer"], row["matmul_flops_per_token"], "FLOPs"
    return None, None, ""


def installed(peer: Peer) -> str:
    """Return the version of a counter's package, or an empty string if it is not installed."""
    try:
        return version(peer.package)
    except PackageNotFoundError:
        return ""


def usable(name: str, peer: Peer, command: Sequence[str]) -> bool:
    """Return whether a counter runs here; print the reason if it does not."""
    if not installed(peer):
        print(f"{name}: {peer.package} is not installed; `make bench-peers` installs it")
        return False
    done = run(command)
    if done.code or not done.output.strip():
        last = (done.errors.strip().splitlines() or ["it printed nothing"])[-1]
        print(f"{name} {installed(peer)} does not run here: {last[:200]}")
        return False
    return True


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every program that runs, all measured in the same rounds."""
    with script.scratch("peers") as folder:
        commands: dict[str, list[str]] = {name: ffn("params", source) for name, source in OURS.items()}
        commands["bare"] = written(folder / "bare.py", script.BARE)
        for number, (name, peer) in enumerate(PEERS.items()):
            command = written(folder / f"peer_{number}.py", BLOCK + peer.program)
            if usable(name, peer, command):
                commands[name] = command
        runs = script.runs_of(commands, options.rounds, WARM_UPS)
    for name, done in runs.items():
        yield row(name, done, runs)


def written(path: Path, program: str) -> list[str]:
    """Write a program to `path`, and return the command that runs it."""
    path.write_text(program, "utf-8")
    return [sys.executable, str(path)]


def row(name: str, runs: Sequence[Run], everyone: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return a program's row; ratios are to `ffn params llama-2-7b`, and `right` says whether both counts are true."""
    params, operations, unit = said(name, runs[-1])
    truth = {"MACs": MACS, "FLOPs": FLOPS}.get(unit)
    passed = None
    if name in PEERS:  # compared with both of our commands
        pairs = [(ratio(runs, everyone[ours], "wall_s"), ratio(runs, everyone[ours], "peak_bytes")) for ours in OURS]
        passed = all(wall >= FASTER and peak >= SMALLER for wall, peak in pairs)
    of = installed(PEERS[name]) if name in PEERS else version("ffncli" if name in OURS else "typer")
    ratios = {f"{what}_ratio": ratio(runs, everyone[FIRST], figure)
              for what, figure in (("wall", "wall_s"), ("cpu", "cpu_s"), ("peak", "peak_bytes"))}  # fmt: skip
    return {
        "program": name, "version": of, "wall_s": median(runs, "wall_s"), "cpu_s": median(runs, "cpu_s"),
        "peak_bytes": int(median(runs, "peak_bytes")), **ratios, "params": params,
        "true_params": None if params is None else PARAMS, "operations": operations, "true_operations": truth,
        "unit": unit, "right": None if params is None else (params, operations) == (PARAMS, truth), "passed": passed,
        "rounds": len(runs),
    }  # fmt: skip


if __name__ == "__main__":
    script.main_once(__doc__, ("typer", "rich", "torch"), measure, rounds=11)
