"""How a process behaves as one of several ranks, and how local ranks are started.

Only rank 0 prints; if several ranks have an error, only one prints it. Local ranks are processes with the same command,
started by torch's elastic launcher, as torchrun does.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ffncli.errors import ExitCode, FFNError, Terminated
from ffncli.run.ranks.environment import Place
from ffncli.system.child import end_with_parent, ending
from ffncli.system.files import remove_process_folders
from ffncli.system.host import available_memory, default_threads
from ffncli.system.packages import logs_disabled, require_installed

_HEAD_START = 1.0  # s that the other ranks wait for rank 0 to report an error that all ranks have
_PATIENCE, _LONGER = 2.0, 10.0  # s to reach the store of an agent, or of rank 0, which may still be starting


def follow(place: Place) -> None:
    """Close stdout except on rank 0, and end this process when its agent ends. Call before torch is loaded."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hides torch's log of every attempt to reach another rank
    if place.has_agent:
        end_with_parent()
    if not place.first:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def error_line(place: Place, text: str) -> str | None:
    """Return the line that this rank prints for an error; None if another rank reports the error, and for Ctrl-C, which
    the launcher reports. If the ranks never met, one rank per machine prints."""
    if text == "interrupted":
        return None
    if place.first and "MASTER_PORT" in text:  # the port is in use by an unknown process, so the ranks never met
        return text
    ignore_termination()
    from ffncli.run.ranks.store import open_store

    try:
        patience = _PATIENCE if place.has_agent or place.first else _LONGER
        store = open_store(place, patience, opens=False)
        if not (place.first or store.reported()):
            time.sleep(_HEAD_START)
        mine = store.may_report()
    except Exception:
        mine = place.local_rank == 0
    if not mine or place.first or text.startswith("error: rank"):
        return text if mine else None
    return text.replace("error: ", f"error: rank {place.rank}: ", 1)


def ignore_termination() -> None:
    """Ignore SIGTERM while this rank reports why it ends, because the agent terminates all ranks when one ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave(code: int) -> NoReturn:
    """End this rank immediately: the threads of torch's process group can abort a normal shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    remove_process_folders(os.getpid())
    os._exit(code)


_GRACE = 5  # s; the time that ranks have to end before they are killed
_OF_ONE = 300 << 20  # bytes of memory for a process that imports torch


def run_ranks(count: int, command: Sequence[str]) -> int:
    """Run the command (a program and its arguments) in `count` processes, and return their common exit code.

    Output of the ranks is passed through immediately. Every rank computes with its share of the cores, unless
    OMP_NUM_THREADS is set. Raises FFNError (exit 3) if a signal kills a rank; Ctrl-C and SIGTERM are raised again after
    all ranks have ended.
    """
    _require_memory(count)
    require_installed("torch")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=f"ffn-{os.getpid()}", rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0, shutdown_timeout=_GRACE,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )  # fmt: skip
    program, *arguments = command
    try:
        with logs_disabled(), _threads(count):
            # $$, because the launcher expands templates that begin with $.
            elastic_launch(config, program)(*(word.replace("$", "$$") for word in arguments))
    except ChildFailedError as error:
        return common_exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as stop:
        raise (KeyboardInterrupt if stop.sigval == signal.SIGINT else Terminated)() from None
    except (RendezvousError, OSError) as error:
        raise FFNError(f"{count} ranks cannot be started: {error}", code=ExitCode.ENVIRONMENT) from None
    return ExitCode.OK


def common_exit_code(codes: Mapping[int, int]) -> int:
    """Return the exit code of a run, given the exit codes of its failed ranks; a negative code is a signal.

    A rank that exits with a positive code has reported the reason, or knows that another rank has reported it. The code
    of the actual cause is preferred over 143, the code of ranks that end after another rank has failed, and over 3, the
    code of ranks that lost another rank. If all ranks were killed by signals, no rank has reported an error, so this
    raises FFNError (exit 3).
    """
    exits = sorted((code for code in codes.values() if code > 0), key=lambda c: (c == ExitCode.TERMINATED, c == 3))
    killed = {rank: code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    if killed and all(code == ExitCode.TERMINATED for code in exits):
        rank = min(killed)
        raise FFNError(f"rank {rank} {ending(killed[rank])}", code=ExitCode.ENVIRONMENT)
    return exits[0] if exits else ExitCode.TERMINATED


def _require_memory(count: int) -> None:
    free = available_memory()
    if free is not None and count * _OF_ONE > free:
        raise FFNError(
            f"{count} ranks need about {count * _OF_ONE / 1e9:.0f} GB of memory, but only {free / 1e9:.0f} GB are free",
            "use fewer ranks, or several machines with torchrun",
            ExitCode.ENVIRONMENT,
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set OMP_NUM_THREADS, which the ranks inherit, to their share of the cores."""
    name = "OMP_NUM_THREADS"
    given = os.environ.get(name)
    os.environ[name] = given or str(max(1, default_threads() // count))
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]
