"""Run command lines of one checkout's ffncli, each in a fork of one process that has imported what takes long.

    PYTHONPATH=CHECKOUT python -P unchanged_forks.py CHECKOUT < requests

A request is a line of JSON on stdin: `words`, where `stdout` and `stderr` go, and after how many `seconds` the command
is ended; the answer, a line on stdout, is the exit
code (negative: the signal that ended it). What a command changes in its process is gone with the fork. This file
imports nothing of the checkout that it lies in, for ffncli is the other's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn


def serve(checkout: str) -> None:
    """Answer requests until there are no more."""
    import ffncli.cli.main

    if not Path(ffncli.__file__).is_relative_to(Path(checkout).resolve()):
        raise SystemExit(f"ffncli comes from {ffncli.__file__}, not from {checkout}")
    _import_early()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        answers.write(f"{_forked(**json.loads(line))}\n")


def _import_early() -> None:
    """What commands import late, and take seconds for."""
    import ffncli

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pandas  # noqa: F401
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
        from transformers.modeling_utils import PreTrainedModel  # noqa: F401
    torch.set_num_threads(1)  # no pool of threads, which a fork would lose
    for module in pkgutil.walk_packages(ffncli.__path__, "ffncli."):
        if not module.name.startswith("ffncli.bench") and not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # needs what is not installed here
                import_module(module.name)


def _forked(words: Sequence[str], stdout: str, stderr: str, seconds: int) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run(words, stdout, stderr, seconds)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):  # the workers of a command that was ended
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def _run(words: Sequence[str], stdout: str, stderr: str, seconds: int) -> NoReturn:
    """The command, in the fork: never returns."""
    code = 70
    try:
        os.setsid()
        signal.alarm(seconds)
        for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, stdout, os.O_WRONLY), (2, stderr, os.O_WRONLY)):
            os.dup2(os.open(name, flags | (os.O_CREAT if flags else 0), 0o644), number)
        sys.argv = ["ffn", *words]
        from ffncli.cli.main import main

        main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
