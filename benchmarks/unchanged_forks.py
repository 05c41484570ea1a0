"""Run command lines and calls of one checkout's ffncli, each in a fork of a process that has made the slow imports.

    PYTHONPATH=CHECKOUT python -P unchanged_forks.py CHECKOUT < requests

A request is a line of JSON on stdin: the `words` of a command line or the Python expression of a `call`, the files for
`stdout` and `stderr`, and the time limit in `seconds`. The answer, a line on stdout, is the exit code (negative: the
signal that ended it). A command's changes to its process end with the fork. This file imports nothing from its own
checkout, because ffncli must come from the other one.
"""

import contextlib
import dataclasses
import json
import os
import pkgutil
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

# Values that are wrong for nearly every argument: out of range, not a whole number, an unknown name, another type.
WRONG = (-1, 1.5, "x?", object)


def serve(checkout: str) -> None:
    """Answer requests until stdin ends."""
    import ffncli.cli.main

    if not Path(ffncli.__file__).is_relative_to(Path(checkout).resolve()):
        raise SystemExit(f"ffncli comes from {ffncli.__file__}, not from {checkout}")
    _import_early()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        answers.write(f"{_forked(**json.loads(line))}\n")


def _import_early() -> None:
    """Import the modules that commands import late and that take seconds."""
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
            with contextlib.suppress(ImportError):  # it needs a package that is not installed here
                import_module(module.name)


def _forked(stdout: str, stderr: str, seconds: int, words: Sequence[str] = (), call: str = "") -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run(words, call, stdout, stderr, seconds)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):  # the workers of a command that was ended
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def _run(words: Sequence[str], call: str, stdout: str, stderr: str, seconds: int) -> NoReturn:
    """Run the command or the call in the fork; never return."""
    code = 70
    try:
        os.setsid()
        signal.alarm(seconds)
        for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, stdout, os.O_WRONLY), (2, stderr, os.O_WRONLY)):
            os.dup2(os.open(name, flags | (os.O_CREAT if flags else 0), 0o644), number)
        if call:
            code = _called(call)
        else:
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


# --- calls of the library ---------------------------------------------------------------------------------------------


def _called(expression: str) -> int:
    """Print the expression's value or error as JSON; return the error's exit code, or 0."""
    import torch
    import transformers

    import ffncli

    transformers.logging.disable_progress_bar()  # because the bar shows times
    names = {
        "ffncli": ffncli, "torch": torch, "Path": Path, "wrong": _wrong,
        "model": lambda path: transformers.AutoModelForCausalLM.from_pretrained(path).eval(),
    }  # fmt: skip
    answer = _answer(lambda: eval(expression, names))
    print(json.dumps(answer, indent=1, ensure_ascii=False, default=repr))
    return answer.get("code", 0)


def _answer(call: Callable[[], object]) -> dict[str, Any]:
    """Return the `value` of a call, or the `error`'s class, exit `code` and `message`."""
    try:
        return {"value": plain(call())}
    except Exception as error:
        return {"error": type(error).__name__, "code": int(getattr(error, "code", 70)), "message": str(error)}


def _wrong(name: str, arguments: str, *given: object, **also: object) -> dict[str, Any]:
    """Return the answers of the library call `name` to wrong values for each of the `arguments`."""
    import ffncli

    call = getattr(ffncli, name)

    def answer(argument: str, value: object) -> dict[str, Any]:
        outcome = _answer(lambda: call(*given, **{**also, argument: value}))
        return outcome if "error" in outcome else {"value": "accepted"}

    return {f"{argument}={value!r}": answer(argument, value) for argument in arguments.split() for value in WRONG}


def plain(value: Any) -> Any:
    """Convert a value to JSON types: records to public fields, tensors to lists, tables to CSV, others to repr."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return {name: plain(getattr(value, name)) for name in names}
    if hasattr(value, "to_csv"):
        return value.to_csv(index=False)
    return value.tolist() if hasattr(value, "tolist") else re.sub(r" at 0x\w+", "", repr(value))


if __name__ == "__main__":
    serve(sys.argv[1])
