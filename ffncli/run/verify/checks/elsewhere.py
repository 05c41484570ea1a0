"""The referee's check in a process that does not look like the referee's: another command line, parent and environment.

A kernel can be right only where it is judged. What it looks for there, this process does not have.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ffncli.errors import clean
from ffncli.kernels.choice import by_argument
from ffncli.run.user import plain_call
from ffncli.run.verify.checks.case import CheckRow
from ffncli.run.verify.checks.precision import classified, error_bounds, rms_error
from ffncli.run.verify.checks.trial import KernelTrial
from ffncli.show.text import counted, seconds_text
from ffncli.system.child import is_running
from ffncli.system.isolation import isolated_in

_TOKENS = 64
_NEEDED = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|TMPDIR|SHELL|LD_.*|DYLD_.*|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|CC|CXX"
    "|(CUDA|NVIDIA|TRITON|TORCH|OMP|GOMP|KMP|MKL|OPENBLAS|XDG)_?.*"
)
_NAMES = ("generate", "main", "model", "predict", "run", "serve", "train")
_MOMENT = 0.02  # s
_MOST_SHOWN = 2000  # characters


class _Raised(Exception):
    """Raised with the last line that the process printed, if it leaves no outputs."""


def elsewhere(trial: KernelTrial) -> Iterator[CheckRow]:
    """Compare the kernel's outputs in such a process with float64, and their precision with its own in its host.

    A kernel that raises without an environment variable is run again with all variables.
    """
    judge, choice = trial.judge("elsewhere"), trial.host.choice
    if choice.file is None or choice.ref is not None or os.name != "posix":
        yield judge.skips("another process", "the kernel is in no file, or in a git commit")
        return
    inputs = [trial.draw(count) for count in (1, min(_TOKENS, trial.most_tokens), trial.further_counts[0])]
    try:
        try:
            outputs = _outputs(trial, inputs, {n: v for n, v in os.environ.items() if _NEEDED.fullmatch(n)})
        except _Raised:
            outputs = _outputs(trial, inputs, os.environ)
    except _Raised as raised:
        yield judge.fails("another process", str(raised))
        return
    for x, output in zip(inputs, outputs, strict=True):
        if output is None or output.dtype != x.dtype:
            kind = "no tensor" if output is None else str(output.dtype).removeprefix("torch.")
            yield judge.fails(counted(len(x), "token"), f"returns {kind}")
            return
        yield judge.equal(counted(len(x), "token"), output, trial.reference(x))
    if trial.block.tolerance is None and not trial.block.computes and outputs[1] is not None:
        error = rms_error(outputs[1], trial.reference(inputs[1]))
        yield classified(trial, "elsewhere", error, error_bounds(trial, inputs[1]))


def _outputs(trial: KernelTrial, inputs: Sequence[Tensor], variables: Mapping[str, str]) -> list[Tensor | None]:
    """Return the kernel's outputs in a new process with these environment variables."""
    limits, choice = trial.host.limits, trial.host.choice
    attribute = choice.attribute or trial.host.name.rpartition(":")[2]
    with tempfile.TemporaryDirectory(prefix="tmp") as folder:
        script = Path(folder) / f"{secrets.choice(_NAMES)}_{secrets.token_hex(2)}.py"
        script.write_bytes(Path(plain_call.__file__).read_bytes())
        job, outputs, printed = (Path(folder) / secrets.token_hex(4) for _ in range(3))
        named = {name: argument for argument, name in by_argument(trial.block.ffn).items()}
        block = (choice.with_attribute(attribute), trial.block.ffn, trial.spec, named)
        torch.save(
            {
                "kernel": str(choice.file),
                "attribute": attribute,
                "inputs": list(inputs),
                "outputs": str(outputs),
                "weights": {named[name]: weight for name, weight in trial.block.ffn_weights.items() if name in named},
                "block": pickle.dumps(block),
                "device": trial.host.device,
                "threads": trial.host.torch_threads or torch.get_num_threads(),
            },
            job,
        )
        before = isolated_in(folder) if trial.host.isolated else ()
        _run(before, script, job, printed, variables, outputs, limits.load + limits.call)
        given = torch.load(outputs, weights_only=True)
    if not isinstance(given, list) or len(given) != len(inputs):
        raise _Raised("unexpected reply from its process")
    return [one if isinstance(one, Tensor) else None for one in given]


def _run(
    before: Sequence[str],
    script: Path,
    job: Path,
    printed: Path,
    variables: Mapping[str, str],
    outputs: Path,
    seconds: float,
) -> None:
    """Run the script until its outputs are there; `before` comes before its command. A shell starts it and ends, so
    that its parent is not this process."""
    shell_script = 'job=$0 printed=$1; shift; "$@" <"$job" >"$printed" 2>&1 & echo $!'
    words = ["/bin/sh", "-c", shell_script, str(job), str(printed), *before, sys.executable, str(script)]
    shell = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, start_new_session=True)
    pid, until = int(shell.communicate()[0]), time.monotonic() + seconds
    try:
        while not outputs.exists():
            if not is_running(pid) and not outputs.exists():
                lines = printed.read_text("utf-8", "replace")[-_MOST_SHOWN:].strip().splitlines()
                raise _Raised(clean(lines[-1])[:200] if lines else "its process ended")
            if time.monotonic() > until:
                raise _Raised(f"did not return within {seconds_text(seconds)}")
            time.sleep(_MOMENT)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(shell.pid, signal.SIGKILL)
