"""The `ffn` command: assembles the commands, imports only the requested one, and catches every error in one place."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Collection
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from ffncli.errors import ExitCode, FFNError, Terminated, clean, did_you_mean, shown

if TYPE_CHECKING:
    from ffncli.run.ranks.environment import Place

OVER_RANKS = ("verify", "trace", "bench")  # under torchrun, all other commands run on rank 0 only
_place: Place | None = None  # this process's place among the ranks, under torchrun

# name → (module with a function `command`, the line shown by `ffn --help` and in the README)
COMMANDS: dict[str, tuple[str, str]] = {
    "explain": ("ffncli.cli.explain", "Explain gelu, gate, 4x, neuron, moe, ... in a few sentences."),
    "trace": ("ffncli.cli.trace.command", "Run a block step by step and print every intermediate."),
    "params": ("ffncli.cli.params.command", "Count parameters, FLOPs and bytes, per layer and in total."),
    "plan": ("ffncli.cli.plan.command", "Predict time, memory and communication on accelerators."),
    "activations": ("ffncli.cli.activations.command", "Compare activations: values, slopes, bounds, differences."),
    "experts": ("ffncli.cli.experts", "Show how a mixture's experts are used, and what each is worth."),
    "precision": ("ffncli.cli.precision", "Show where few bits hurt: a layer's error by format, and whose it is."),
    "approximate": ("ffncli.cli.approximate", "Train blocks of growing width to fit a function; show the error."),
    "verify": ("ffncli.cli.verify", "Prove that ways of computing a block agree."),
    "bench": ("ffncli.cli.bench.command", "Verify kernels, then time them: ratios that anyone can reproduce."),
    "merge": ("ffncli.cli.merge", "Merge results of ffn bench, such as the parts of a grid."),
    "export": ("ffncli.cli.export", "Write a block for torch, FlashInfer-Bench, ONNX or LaTeX."),
    "models": ("ffncli.cli.models", "List the known models, with their sources."),
    "compare": (
        "ffncli.cli.compare.command",
        "Compare two checkpoints, results of ffn bench, traces or routes.",
    ),
    "report": ("ffncli.cli.report", "Write an HTML page from results, traces and certificates."),
    "doctor": ("ffncli.cli.doctor", "Show what this machine can do, and how noisy it is."),
}


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. Errors leave this function only as an exit code and a line on stderr."""
    if arguments is None:  # the whole process is ours: its start-up objects stay, and scanning them costs 3 %
        gc.set_threshold(100_000, 20, 20)
    args = sys.argv[1:] if arguments is None else arguments
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    signal.signal(signal.SIGTERM, _terminated)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _terminated)
    if sys.stdout is None:
        print_error("error: standard output is closed")
        sys.exit(ExitCode.ENVIRONMENT)
    from ffncli.run.user.time_limit import limited_loading

    try:
        with limited_loading():
            code = _run(args) if _takes_part(args) else ExitCode.OK
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout is gone
        _discard_output()
        code = ExitCode.OK
    except Exception as error:
        code = _failed(error, args)
    except KeyboardInterrupt:
        print_error("interrupted")
        code = ExitCode.INTERRUPTED
    except Terminated:
        if _place is None:
            raise
        code = ExitCode.TERMINATED
    if arguments is None:
        gc.freeze()  # otherwise the interpreter scans everything again at exit: 10 % of `ffn params`
    _leave(int(code))


def _takes_part(args: list[str]) -> bool:
    """Return True if this process runs the command: commands in OVER_RANKS run on every rank, all other commands only
    on rank 0."""
    global _place
    _place = None
    from ffncli.run.ranks.environment import torchrun

    _place = torchrun()
    if _place is not None:
        from ffncli.run.ranks.process import follow

        follow(_place)
    return _place is None or _place.first or _asked_for(args) in OVER_RANKS


def _run(args: list[str]) -> int:
    """Run the command in as many processes as its split needs."""
    try:
        return _run_here(args)
    except FFNError as error:
        from ffncli.run.ranks.environment import RanksNeeded

        if not isinstance(error, RanksNeeded):
            raise
        from ffncli.run.ranks.process import run_ranks

        return run_ranks(error.ranks.world_size, (sys.executable, "-m", "ffncli", *args))


def _run_here(args: list[str]) -> int:
    if "_FFN_COMPLETE" in os.environ and (code := _complete()) is not None:
        return code
    import typer

    if "_FFN_COMPLETE" not in os.environ:
        front = list(takewhile(lambda word: word in ("--debug", "--"), args))
        if front == args:
            from ffncli.cli.common.help import print_help

            print_help(load(None), "ffn", whole=False, stream=sys.stderr)
            return ExitCode.USAGE
        _require_command(args[len(front)])
    name = args[0] if args and args[0] in COMMANDS else None
    try:
        if name:  # the app has only that command
            app, words, program = _app([name], name), args[1:], f"ffn {name}"
        else:
            app, words, program = build(_asked_for(args)), args, "ffn"
        result = typer.main.get_command(app)(words, prog_name=program, standalone_mode=False)
    except typer.Abort:  # end of file on a terminal's input
        raise KeyboardInterrupt from None
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer would turn it into exit code 1
            raise BrokenPipeError from None
        raise
    if result == ExitCode.INTERRUPTED:  # typer's result for Ctrl-C
        raise KeyboardInterrupt
    return result if isinstance(result, int) else ExitCode.OK


def _require_command(name: str) -> None:
    """Raise FFNError for a word that is neither a command nor an option, with a guess at what was meant."""
    if name in COMMANDS or name.startswith("-"):
        return
    from ffncli.models import catalog
    from ffncli.run.topics.call import find_topic

    if catalog.find(name) is not None or os.path.exists(name):
        hint = f"to count that model: ffn params {clean(name)}"
    elif find_topic(name) is not None:
        hint = f"to read about it: ffn explain {clean(name)}"
    else:
        hint = did_you_mean(name, list(COMMANDS), f"commands: {', '.join(COMMANDS)}; see `ffn --help`")
    raise FFNError(f"No such command {shown(name)}", hint)


def build(asked_for: str | None) -> Any:
    """Build the Typer app. Only the module of `asked_for` is imported; other commands are names with a help line."""
    from ffncli.cli.common.root import root

    app = _app(COMMANDS, asked_for)
    app.callback(add_help_option=False)(root)
    return app


def load(name: str | None) -> Any:
    """Return the Typer command of that name; for None, `ffn` itself, without the options of its subcommands."""
    import typer

    return typer.main.get_command(build(None) if name is None else _app([name], name))


def _app(names: Collection[str], asked_for: str | None) -> Any:
    """Build a Typer app of these commands; if there is only one, Typer turns the app into that command."""
    import typer

    from ffncli.cli.common.root import OnceCommand

    app = typer.Typer(
        name="ffn",
        add_completion=len(names) > 1,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # we print help and errors ourselves
    )
    for name in names:
        module, summary = COMMANDS[name]
        function = import_module(module).command if name == asked_for else _placeholder
        help_text = None if name == asked_for else summary
        app.command(name, cls=OnceCommand, short_help=summary, help=help_text, add_help_option=False)(function)
    return app


def _complete() -> int | None:
    """Answer a shell's completion request; return None if the shell wants the script, which Typer provides."""
    from ffncli.cli.common.complete import completion

    answer = completion({name: summary for name, (_, summary) in COMMANDS.items()}, load)
    if answer is None:
        return None
    sys.stdout.write(answer[0])
    return answer[1]


def _placeholder() -> None:
    raise AssertionError("the command's module was not loaded")


def _asked_for(args: list[str]) -> str | None:
    """Return the command's name: the first word that is not an option."""
    return next((word for word in args if not word.startswith("-")), None)


def print_error(text: str) -> None:
    """Print one line on stderr, on one rank only; the modules for this are loaded only when needed."""
    from ffncli.show import output

    if _place is not None:
        from ffncli.run.ranks.process import error_line

        text = error_line(_place, text) or ""
    if text:
        output.print_error(text)


# --- errors -----------------------------------------------------------------------------------------------------------


def _failed(error: Exception, args: list[str]) -> int:
    """Print the one-line message for an error and return its exit code."""
    if "--debug" in args:
        import traceback

        traceback.print_exception(error)
    from ffncli.system.packages import package_error

    error = package_error(error) or error
    if isinstance(error, FFNError):
        from ffncli.options.opt import as_typed

        print_error(f"error: {error.in_words(as_typed)}")
        return error.code
    import typer

    if isinstance(error, typer.TyperException):
        return _usage(error, args)
    if isinstance(error, OSError) and error.filename is None:  # from stdout: errors on files are FFNErrors by now
        print_error(f"error: cannot write to standard output: {error.strerror}")
        return ExitCode.ENVIRONMENT
    if _out_of_memory(error):
        print_error("error: not enough memory; use fewer tokens, a smaller --dtype or a smaller block")
        return ExitCode.ENVIRONMENT
    from ffncli.system.gpu import gpu_failure

    if failure := gpu_failure(error, sys.modules.get("torch")):
        print_error(f"error: {failure}")
        return failure.code
    print_error(
        f"error: a bug in ffn: {type(error).__name__}: {str(error)[:200]}; "
        "please report it, with the output of the same command with --debug"
    )
    return ExitCode.BUG


def _usage(error: Any, args: list[str]) -> int:
    """Print Typer's own errors (unknown option, missing value) on one line."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    asked_for = _asked_for(args)
    program = f"ffn {asked_for}" if asked_for in COMMANDS else "ffn"
    print_error(f"error: {text}; see `{program} --help`")
    return ExitCode.USAGE


def _out_of_memory(error: Exception) -> bool:
    """Return True for any out-of-memory error: numpy and Python raise MemoryError; torch raises OutOfMemoryError on
    GPUs and a plain RuntimeError on CPUs."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error))
    )


def _terminated(number: int, frame: object) -> NoReturn:
    raise Terminated  # an exception, so that every `finally` runs


def _leave(code: int) -> NoReturn:
    """Exit without letting the interpreter print a second error about a closed stdout."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard_output()
    if _place is not None:
        from ffncli.run.ranks.process import leave

        leave(code)
    sys.exit(code)


def _discard_output() -> None:
    """Discard any output that is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
