"""noise: the smallest difference that this machine can resolve. A small matrix product is timed against itself, as in
`ffn bench`.

Fresh processes run one after another. In each process, two arms that run the same code are timed in interleaved rounds,
in several placements. The interval of their time ratio should contain 1, and its width is the machine's noise. The
parent needs no torch.

The whole bench is not used here: its verification, roof, anchor and bare matrix products take 4.6 to 5.2 s of CPU time
per process, where 3.0 s are enough, and a run takes 46 to 73 s instead of 22 to 32 s (measured). The bench would also
measure less, because it times no small matrix product against itself; `sequential_difference` needs such blocks of
identical code.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import expm1, isfinite, log, sqrt

from ffncli.bench.judge import ratios, statistics
from ffncli.bench.launch import environment
from ffncli.bench.records import TWIN, TimedBlock
from ffncli.bench.timing.rounds import BLOCK_SECONDS, Arm, Plan, measure

TOKENS, D_MODEL, D_FF = 32, 512, 2048  # 67 MFLOP, 4.5 MB: a few tenths of a millisecond, in most caches
GEMM = "gemm"
_PROCESSES, _FEWER, _SHORT = 5, 3, 6.0  # _PROCESSES processes, or _FEWER if less than _SHORT seconds are requested
_OVERDUE = 1.2  # after this many times the requested seconds, no further process starts
_LEAST = 0.3  # minimum s of measuring in a process, even if it started slowly
_TROUBLED = 0.1  # fraction of the blocks
_PATIENCE = 120.0  # s, for a process to start and measure


@dataclass(frozen=True)
class Noise:
    """The result of the noise test; differences and fractions are relative to 1 (0.01: 1 %).

    `resolvable_difference` is the half-width of the 95 % interval of the A/A ratio over processes or, if the interval
    does not contain 1, the larger of the distances of its ends from 1. `sequential_difference` is the same figure for a
    method that times one arm after the other in the same total time; it is computed from the same blocks.
    `sequential_times_longer` is how many times longer that method would have to run for the same resolution, if its
    errors averaged out. `troubled` is the fraction of blocks that were preempted, throttled or stolen from.
    """

    resolvable_difference: float
    aa_ratio: float
    aa_low: float
    aa_high: float
    sequential_difference: float
    sequential_times_longer: float
    troubled: float
    processes: int
    rounds: int
    threads: int
    seconds: float

    @property
    def is_troubled(self) -> bool:
        """Whether other work disturbed more than a few of the blocks."""
        return self.troubled > _TROUBLED


def measure_noise(
    seconds: float,
    threads: int,
    tell: Callable[[int], None] = lambda done: None,
    run: Callable[[int, int, float], Sequence[TimedBlock]] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Noise | None:
    """Measure for about `seconds`, including the start of the processes; return None if fewer than two of them
    succeeded.

    `tell` is called after each process. `run(process, threads, until)` measures in a separate process. If processes
    start too slowly, no more are started after the third.
    """
    run = run or _in_a_process
    count, began = processes_for(seconds), now()
    blocks: list[TimedBlock] = []
    for process in range(count):
        if process >= _FEWER and now() - began > _OVERDUE * seconds:
            break
        blocks += run(process, threads, began + seconds * (process + 1) / count)
        tell(1)
    return judged(blocks, threads, now() - began)


def processes_for(seconds: float) -> int:
    """Return the number of processes for this many seconds."""
    return _PROCESSES if seconds >= _SHORT else _FEWER


def judged(blocks: Sequence[TimedBlock], threads: int, seconds: float) -> Noise | None:
    """Compute the noise from the blocks of all processes; None if fewer than two processes have blocks."""
    twin = ratios.paired(blocks, TWIN, GEMM)
    if twin is None or twin.one_process or not twin.interval.bounded:
        return None
    interval = twin.interval
    holds_one = interval.low <= 0 <= interval.high
    half_width = interval.half_width if holds_one else max(abs(interval.low), abs(interval.high))
    one_after_another = _sequential(blocks)
    return Noise(
        resolvable_difference=expm1(half_width),
        aa_ratio=statistics.exp_or_inf(interval.value),
        aa_low=statistics.exp_or_inf(interval.low),
        aa_high=statistics.exp_or_inf(interval.high),
        sequential_difference=expm1(min(one_after_another, 700.0)),
        sequential_times_longer=(one_after_another / half_width) ** 2 if half_width else float("inf"),
        troubled=ratios.disturbed_share(blocks),
        processes=len(twin.of_processes),
        rounds=twin.rounds,
        threads=threads,
        seconds=seconds,
    )


def _sequential(blocks: Sequence[TimedBlock]) -> float:
    """Return the half-width of the log ratio that a sequential timer would report: one that, in each process, times one
    arm and then the other.

    All blocks of a process run the same code and are in chronological order. As the ratio, such a timer would have
    reported the median of the first half divided by the median of the second half. The true ratio is 1, so the errors
    scatter around 0.
    """
    errors = []
    for process in sorted({block.process for block in blocks}):
        times = [block.per_call for block in blocks if block.process == process]
        half = len(times) // 2
        if half:
            errors.append(log(statistics.median(times[:half]) / statistics.median(times[half:])))
    n = len(errors)
    rms = sqrt(sum(error * error for error in errors) / n)
    return statistics.t_quantile(0.975, n) * rms / sqrt(n)  # n degrees of freedom, as the true mean is known: 0


# --- a process --------------------------------------------------------------------------------------------------------


def _in_a_process(process: int, threads: int, until: float) -> Sequence[TimedBlock]:
    """Return the blocks of a separate process; none if it failed."""
    command = [sys.executable, "-m", "ffncli.bench.doctor.noise", str(process), str(threads), repr(until)]
    try:
        done = subprocess.run(
            command,
            env=environment(threads, "fixed"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=max(0.0, until - time.monotonic()) + _PATIENCE,
            check=False,
        )
        rows = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return [TimedBlock(**{**row, "flags": tuple(row["flags"])}) for row in rows]


def main(process: int, threads: int, until: float) -> None:
    """Measure in this process until `until` on the monotonic clock, and print the blocks as JSON."""
    import torch

    from ffncli.bench.machine.counters import SystemCounters
    from ffncli.bench.timing.clock import CpuClock

    torch.set_num_threads(threads)
    budget = max(_LEAST, until - time.monotonic())
    plan = Plan(GEMM, (TWIN,), BLOCK_SECONDS["cpu"], 3, 4, 1e-9, budget, seed=0, processes=_PROCESSES, threads=threads)
    with torch.inference_mode():
        measured = measure(process, GEMM, _arms, CpuClock(threads), SystemCounters(threads=threads), plan)
    rows = [asdict(block) for block in measured.blocks]
    assert all(isfinite(row["seconds"]) for row in rows)
    json.dump(rows, sys.stdout)


def _arms(placement: int) -> Sequence[Arm]:
    """Return both arms, each with its own buffers at random places in memory."""
    return [_arm(name) for name in (GEMM, TWIN)]


def _arm(name: str) -> Arm:
    from random import SystemRandom

    import torch

    spaces = [torch.empty(64 * SystemRandom().randrange(1, 4096), dtype=torch.uint8) for _ in range(3)]
    x, w, out = (torch.randn(shape) for shape in ((TOKENS, D_MODEL), (D_FF, D_MODEL), (TOKENS, D_FF)))
    del spaces  # so that later tensors get other addresses
    return Arm(name, lambda: torch.mm(x, w.t(), out=out))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
