"""A result of `ffn bench --by-step` in Chrome's Trace Event Format, which Perfetto opens too: complete events ("X"),
times in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffncli.bench.records import BLOCK, STEP
from ffncli.bench.results.row import ResultRow
from ffncli.errors import FFNError

_ABOUT = (
    "each step's time by itself, laid end to end; the block above them is its own time, which need not be their sum"
)


def timeline(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """The events of every case, a process each: the block, and its steps in their order. Steps inside experts lie under
    those of the block.

    Raises FFNError for a result without steps.
    """
    cases: dict[str, list[ResultRow]] = {}
    for row in rows:
        if row.time_s is not None and (row.kernel == BLOCK or row.kernel.startswith(STEP)):
            cases.setdefault(row.case, []).append(row)
    if not any(row.kernel.startswith(STEP) for group in cases.values() for row in group):
        raise FFNError(
            "a trace of events is made of steps, and this result has none", "measure with ffn bench --by-step"
        )
    events: list[dict[str, Any]] = []
    for process, (case, group) in enumerate(cases.items(), 1):
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": case}})
        ends = [0.0, 0.0, 0.0]  # of the block, its steps, the steps inside experts
        for row in group:
            name = row.kernel.removeprefix(STEP)
            thread = 0 if row.kernel == BLOCK else 2 if "[e]." in name else 1
            lasts = 1e6 * (row.time_s or 0.0)
            share = {"share": row.ratio, "share_low": row.ratio_low, "share_high": row.ratio_high}
            event = {"name": name, "ph": "X", "pid": process, "tid": thread, "ts": ends[thread], "dur": lasts}
            events.append({**event, "args": {**share, "flops": row.flops}})
            ends[thread] += lasts
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"about": _ABOUT}}
