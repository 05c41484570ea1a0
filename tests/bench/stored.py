"""Results as `ffn bench` stores them, made up: rows with chosen times, and CSV files of them."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffncli.bench.records import TimedBlock
from ffncli.bench.results.csv_file import HEADER, ROUNDS_HEADER, parse_rounds, row_lines
from ffncli.bench.results.row import ResultRow

ENVIRONMENT: dict[str, Any] = {
    "ffncli": "0.1.0", "torch": "2.13.0", "python": "3.12.1", "host": "ci-1", "cpu": "AMD EPYC 7B13", "isa": "avx2 fma",
    "device_name": "AMD EPYC 7B13", "blas": "torch: MKL 2024.2; numpy: openblas 0.3.31", "math_mode": "highest",
    "openmp": "OMP_PROC_BIND=true", "allocator": "glibc", "numpy": "2.4.0",
}  # fmt: skip


def row(times: Sequence[float] = (1.0,) * 5, anchors: Sequence[float] | None = None, **changes: Any) -> ResultRow:
    """A row that is ok: process_times_s and process_anchors_s (0.5 s each where not given), other fields by name."""
    asked: dict[str, Any] = {
        "run_id": "base", "device": "cpu", "threads": 2, "source": "512x2048:swiglu", "d_model": 512, "d_ff": 2048,
        "activation": "silu", "gated": True, "bias": False, "experts": 0, "top_k": 0, "shared_experts": 0, "tokens": 32,
        "dtype": "fp32", "passes": "forward", "cache": "warm", "kernel": "packed", "baseline": "eager", "status": "ok",
        "ratio": 0.9,
    }  # fmt: skip
    asked = {**ENVIRONMENT, **asked, **changes}
    case = (
        f"{asked['source']}, {asked['tokens']} tokens, {asked['dtype']}, {asked['passes']}, {asked['cache']}, "
        f"{asked['device']}, {asked['threads']} threads"
    )
    figures = {
        "processes": len(times), "process_times_s": tuple(times), "case": case,
        "process_anchors_s": tuple(anchors if anchors is not None else [0.5] * len(times)),
    }  # fmt: skip
    return ResultRow(**{**figures, **asked})


def around(mean: float, count: int, noise: float, seed: int) -> tuple[float, ...]:
    """`count` times around a geometric mean, with that standard deviation of the log; the same for a seed."""
    drawn = random.Random(seed)
    return tuple(mean * math.exp(drawn.gauss(0, noise)) for _ in range(count))


def table(
    slowdowns: Sequence[float], run: str, noise: float = 0.003, count: int = 5, **changes: Any
) -> list[ResultRow]:
    """A row per factor, for 1, 2, 4, ... tokens: times around 1 ms × tokens × factor."""
    seed = 1000 * (run == "new")
    return [
        row(
            around(1e-3 * 2**at * factor, count, noise, seed + at),
            around(0.01, count, noise, seed + at + 500),
            **{"run_id": run, "tokens": 2**at, **changes},
        )
        for at, factor in enumerate(slowdowns)
    ]


def blocks_in(path: Path) -> list[tuple[str, TimedBlock]]:
    """(run_id, block) for every line of a rounds file, whose header is checked."""
    raw, header = path.read_bytes(), ROUNDS_HEADER.encode()
    assert raw.startswith(header)
    return list(parse_rounds(raw.removeprefix(header), path.name))


def write(path: Path, rows: Sequence[ResultRow]) -> str:
    """The file's name, after writing it."""
    path.write_text(HEADER + row_lines(rows), encoding="utf-8")
    return str(path)
