"""What a run could decide, and the command that would decide more."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ffncli.bench.judge.warnings import resolvable_difference
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.row import ResultRow
from ffncli.cli.common.results.command_line import command_line
from ffncli.show.text import percent, plural

_MORE = 4  # times the time, or the processes: intervals half as wide, if noise is all there is


def closing(rows: Sequence[ResultRow], request: BenchRequest) -> list[str]:
    """Nothing where every verdict is decided; else which differences could be resolved, and the longer command.

    More time where the intervals are too wide; more processes where each of them was sure and they differ.
    """
    compared = [row for row in rows if row.status == "ok" and row.kernel != row.baseline]
    if not any(row.verdict == "inconclusive" for row in compared):
        return []
    sizes = [(row.kernel, resolvable_difference(row, request.method.margin)) for row in compared]
    resolved = sorted((size, kernel) for kernel, size in sizes if size is not None)
    lines = []
    if resolved:
        (least, best), (most, worst) = resolved[0], resolved[-1]
        text = f"this run could resolve differences of {percent(least, 2)} or more"
        if percent(most, 2) != percent(least, 2):
            text += f" ({best}); of {percent(most, 2)} or more where it was least certain ({worst})"
        lines.append(text)
    left = len(sizes) - len(resolved)
    if left:
        lines.append(f"other work left {left} of {len(sizes)} {plural('row', len(sizes))} without any verdict")
    before = "" if resolved else "without that work, "
    early = any("--processes" in warning.figures for row in compared for warning in row.warnings)
    return [*lines, f"{before}a longer run: {longer_command(request, early)}"]


def longer_command(request: BenchRequest, more_processes: bool = False) -> str:
    """The command of this run with four times the time for each case; or with as many more processes.

    --quick is left out, and so is --processes 1, whose interval holds for that process only. The kernel's own options
    stay as they were typed.
    """
    left_out = ("--quick", *(["--processes"] if request.method.processes == 1 else []))
    options = {name: value for name, value in request.asked.items() if name not in left_out}
    if more_processes and request.method.processes > 1:
        options["--processes"] = str(_MORE * request.method.processes)
    else:
        seconds = _MORE * request.method.max_time
        options["--max-time"] = f"{seconds:g}s" if seconds < 100 else f"{seconds / 60:.0f}m"
    command = command_line(options)
    if (cluster := request.cluster) is None:
        return command
    words = ["--launcher", cluster.launcher, *(["--slots", str(cluster.slots)] if cluster.slots else [])]
    words += [word for key, value in cluster.options.items() for word in ("--launcher-option", f"{key}={value}")]
    return f"{command} {shlex.join(words)}"
