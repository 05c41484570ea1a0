"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from ffncli.errors import ExitCode, FFNError, clean

_PROCESS_FOLDER = "ffn-{}-"
TENSOR_SUFFIXES = (".safetensors", ".npz", ".json")  # of files that tensors can be written to


def check_writable(path: str, force: bool, option: str) -> None:
    """Raises FFNError for a file that cannot be written, before anything is computed for it.

    That is a directory, an empty name, a folder that is missing or not writable (exit 3); or an existing file without
    `force`.
    """
    if why := _cannot_be_written(path):
        raise FFNError(f"cannot write {clean(path) or '.'}: {why}", code=ExitCode.ENVIRONMENT)
    if not force and _would_be_lost(path):
        raise FFNError(f"{clean(path)} exists already", f"choose another {option} FILE, or give --force")


def _cannot_be_written(path: str) -> str:
    """Why no file can be created there; empty if one can, as far as can be told without writing."""
    if "\0" in path:
        return "no file has such a name"
    if not path or path.endswith(os.sep) or os.path.isdir(path):
        return "it is a directory"
    if path == "-" or (os.path.exists(path) and not os.path.isfile(path)):  # a device or a pipe is opened directly
        return ""
    folder = os.path.dirname(os.path.realpath(path))  # of a link, its target's folder
    if not os.path.isdir(folder):
        where = clean(folder)
        return f"{where} is not a directory" if os.path.exists(folder) else f"there is no directory {where}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{clean(folder)} is not writable"


def _would_be_lost(path: str) -> bool:
    """Whether writing there would replace something: a pipe or a device has nothing to replace."""
    return path != "-" and os.path.lexists(path) and (os.path.isfile(path) or not os.path.exists(path))


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to: a temporary one in the same folder, then a rename. Devices and pipes are written directly.

    A link stays a link to the file that is written, and a file keeps its permissions. Raises FFNError (exit 3) where
    the system refuses: a full disk, no such directory, no permission.
    """
    import tempfile

    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                yield device
            return
        target = path.resolve()
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield cast(BinaryIO, file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, mode)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise FFNError(f"cannot write {clean(str(path))}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def results_folder(here: Path) -> Path:
    """Where results go that no option names: a checkout's `benchmarks/results`, where `here` has it, else the user's.

    That is $XDG_STATE_HOME/ffn/results, by default ~/.local/state/ffn/results.
    """
    checkout = here / "benchmarks" / "results"
    if checkout.is_dir():
        return checkout.relative_to(here) if here == Path.cwd() else checkout
    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()  # relative ones do not count
    return root / "ffn" / "results"


def process_folder() -> Path:
    """A new private folder of this process, removed when it ends; see `remove_process_folders` where it is killed."""
    import atexit
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix=_PROCESS_FOLDER.format(os.getpid()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def remove_process_folders(process: int) -> None:
    """Remove what `process_folder` made in a process that was killed."""
    import shutil
    import tempfile

    for folder in Path(tempfile.gettempdir()).glob(_PROCESS_FOLDER.format(process) + "*"):
        shutil.rmtree(folder, ignore_errors=True)
