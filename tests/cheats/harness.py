"""What `ffn bench` makes of the kernel in a file: a worker's own path, in a forked process.

The process that forks has imported torch but computed nothing, so that a kernel costs the time of its calls alone, and
what it replaces ends with its process. Time is the real clock's.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401  # before the fork

from ffncli.bench.records import Case, Job, Method, Outcome, TimedUnit
from ffncli.bench.timing.measure_case import measure_case
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels.choice import choices

HERE = Path(__file__).parent
KERNEL = "mine"
_LONGEST = 60  # s; a child that takes longer is killed
_METHOD = Method(processes=3, max_time=0.3, placements=2, rounds=3)
_NO_ROOF = 2  # the number of a process that does not measure the roof, which is nothing of a kernel's


@dataclass(frozen=True)
class Header:
    """What the text at the top of a file says: which code it deserves (any of several), and of which case."""

    does: str
    codes: tuple[str, ...]
    case: dict[str, str]


def header(path: Path) -> Header:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    does = text.split("\n", 1)[0]
    fields = dict(re.findall(r"^(code|case): (.*)$", text, re.MULTILINE))
    codes = tuple(code.strip() for code in fields.get("code", "").split("|") if code.strip())
    case = dict(pair.split("=", 1) for pair in fields.get("case", "").split())
    return Header(does, codes, case)


def case_of(fields: dict[str, str]) -> Case:
    """A small gated block, one thread; `fields` as in a header: `tokens=1 dtype=bf16 passes=forward+backward`."""
    fields = dict(fields)
    fields.pop("kernel", None)
    activation = fields.pop("activation", "swiglu")
    width, hidden = int(fields.pop("d_model", 64)), int(fields.pop("d_ff", 192))
    moe = MoE(4, 2) if fields.pop("moe", "") else None
    tokens, threads = int(fields.pop("tokens", 16)), int(fields.pop("threads", 1))
    spec = FFNSpec(width, hidden, activation, bias=False, moe=moe)
    return Case("s", "s", spec, tokens, threads=threads, **fields)


def unit_of(kernels: str, case: Case, baseline: str | None = None) -> TimedUnit:
    return measure_case(case, Job(_NO_ROOF, (case,), choices(kernels.split(",")), baseline, _METHOD))


def judged(path: Path, fields: dict[str, str] | None = None, first: bool = False) -> dict[str, Outcome]:
    """The outcomes of eager and of the kernel in the file, by name; the ratio of their times is in `ratio`."""
    fields = header(path).case if fields is None else fields
    kernels = f"{KERNEL}={path},eager" if first else f"eager,{KERNEL}={path}"
    return {outcome.kernel: outcome for outcome in forked(kernels, case_of(fields)).outcomes}


def forked(kernels: str, case: Case) -> TimedUnit:
    """The unit that a forked process makes of these kernels. Raises AssertionError where it dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            signal.alarm(_LONGEST)
            answer: object = unit_of(kernels, case)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert data, f"the process ended with status {status}"
    answer = pickle.loads(data)
    assert isinstance(answer, TimedUnit), answer
    return answer
