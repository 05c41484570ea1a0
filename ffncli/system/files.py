"""Opens files only if they are regular files, and writes files completely or not at all. Also reads a file as it is in
a git commit, through git, without touching the working tree."""

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from ffncli.errors import ExitCode, FFNError, clean, did_you_mean, shown, shown_path

_PROCESS_FOLDER = "ffn-{}-"
TENSOR_SUFFIXES = (".safetensors", ".npz", ".json")  # formats in which tensors can be written


def open_to_read(path: Path, pipe: bool = False) -> BinaryIO:
    """Open a file for reading. Raises OSError for anything but a regular file, before a byte is read.

    A device may have no end, and opening a named pipe waits for its writer. `pipe` allows a pipe, if the user names
    one, as in `--prompt @<(...)`.
    """
    _require_file(os.stat(path), pipe)  # before opening, because opening some devices has side effects
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | (0 if pipe else getattr(os, "O_NONBLOCK", 0)))
    try:
        _require_file(os.fstat(handle), pipe)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _require_file(status: os.stat_result, pipe: bool) -> None:
    """Raise OSError for anything but a regular file; the error's message names the kind of file."""
    mode = status.st_mode
    if stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode)):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise OSError(errno.EINVAL, f"it is {kind}, not a file")


def read_whole(path: Path, most: int, pipe: bool = False) -> bytes:
    """Return the bytes of a file opened by `open_to_read`. Raises OSError if there are more than `most`."""
    with open_to_read(path, pipe) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return raw


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file of any size. Raises OSError."""
    import hashlib

    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # BinaryIO omits readinto


def check_writable(path: str, force: bool, option: str) -> None:
    """Raise FFNError for a file that cannot be written; called before anything is computed.

    It refuses a directory, an empty path, a path in a missing or read-only folder (all exit 3), and an existing file
    without `force`.
    """
    if why := _cannot_be_written(path):
        raise FFNError(f"cannot write {clean(path) or '.'}: {why}", code=ExitCode.ENVIRONMENT)
    if not force and _would_be_lost(path):
        raise FFNError(f"{clean(path)} exists already", f"choose another {option} FILE, or give --force")


def _cannot_be_written(path: str) -> str:
    """Return the reason why no file can be created at the path, or "" if a file can be created; writes nothing."""
    if "\0" in path:
        return "no file can have such a name"
    if not path or path.endswith(os.sep) or os.path.isdir(path):
        return "it is a directory"
    if path == "-" or (os.path.exists(path) and not os.path.isfile(path)):  # a device or a pipe is opened directly
        return ""
    if os.path.islink(os.path.realpath(path)):
        return "it is a link that leads back to itself"
    folder = os.path.dirname(os.path.realpath(path))  # for a link, the folder of its target
    if not os.path.isdir(folder):
        where = clean(folder)
        return f"{where} is not a directory" if os.path.exists(folder) else f"there is no directory {where}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{clean(folder)} is not writable"


def _would_be_lost(path: str) -> bool:
    """Return True if writing there would replace a file; a pipe or a device is not replaced."""
    return path != "-" and os.path.lexists(path) and (os.path.isfile(path) or not os.path.exists(path))


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to: a temporary file in the same folder, renamed at the end. Devices and pipes are written
    directly.

    A link remains a link, now to the new file, and a file keeps its permissions. Raises FFNError (exit 3) if the system
    refuses: a full disk, a missing directory, no permission.
    """
    import tempfile

    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                yield device
            return
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
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


@contextmanager
def written_together(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Yield a file to write to for each path, as `written_whole` does. None is moved into place unless all are complete
    on the disk; the first is moved last."""
    with ExitStack() as stack:
        files = tuple(stack.enter_context(written_whole(path)) for path in paths)
        yield files
        for file in files:
            file.flush()
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fsync(file.fileno())


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def results_folder(here: Path) -> Path:
    """Return the default folder for results: `benchmarks/results` in a checkout at `here` if that folder exists, else
    the user's folder.

    The user's folder is $XDG_STATE_HOME/ffn/results, by default ~/.local/state/ffn/results.
    """
    checkout = here / "benchmarks" / "results"
    if checkout.is_dir():
        return checkout.relative_to(here) if here == Path.cwd() else checkout
    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()  # relative paths are ignored
    return root / "ffn" / "results"


def cache_folder() -> Path:
    """Return the user's folder for data that can be recomputed: $XDG_CACHE_HOME/ffn, by default ~/.cache/ffn."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()) / "ffn"


def process_folder() -> Path:
    """Create a private folder for this process, which is removed when the process ends. If the process is killed, the
    folder stays until `remove_process_folders` is called."""
    import atexit
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix=_PROCESS_FOLDER.format(os.getpid()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def remove_process_folders(process: int) -> None:
    """Remove the folders that `process_folder` created in a process that was killed."""
    import shutil
    import tempfile

    for folder in Path(tempfile.gettempdir()).glob(_PROCESS_FOLDER.format(process) + "*"):
        shutil.rmtree(folder, ignore_errors=True)


_PATIENCE = 30.0  # seconds, enough for a repository on a slow disk


@dataclass(frozen=True)
class FileAtCommit:
    """The full hash of a commit, and a file's bytes at that commit."""

    commit: str
    data: bytes


def file_at(ref: str, path: Path, option: str) -> FileAtCommit:
    """Return a file as it is at `ref` (a branch, a tag, a commit, `HEAD~2`) in the repository that contains the path.

    The file, and folders on its path, need not exist in the working tree. Raises FFNError, which names `option`, for a
    missing ref or file and for a path outside of any repository; exit 3 if git cannot be run.
    """
    folder = next(parent for parent in path.parents if parent.is_dir())
    answer = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if answer.returncode == 1:
        raise FFNError(f"{option}: git has no commit {shown(ref)}", did_you_mean(ref, _refs(folder), "see git log"))
    if answer.returncode:
        raise FFNError(f"{option}: {shown_path(path)} at {shown(ref)}: {_reason(answer)}")
    commit = answer.stdout.decode("ascii", "replace").strip()
    blob = _git(folder, "cat-file", "blob", f"{commit}:./{path.relative_to(folder).as_posix()}")
    if blob.returncode:
        raise FFNError(f"{option}: {shown_path(path)} is not a file at {shown(ref)} (commit {commit[:12]})")
    return FileAtCommit(commit, blob.stdout)


def head_commit(folder: Path) -> str:
    """Return the hash of the commit that is checked out, with `+` if tracked files were changed since; "" outside of a
    repository, and without git."""
    try:
        head = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no").stdout if not head.returncode else b""
    except FFNError:
        return ""
    return head.stdout.decode("ascii", "replace").strip() + "+" * bool(changed.strip())


def _refs(folder: Path) -> list[str]:
    """Return the branches and tags, by the names that users type."""
    return _git(folder, "for-each-ref", "--format=%(refname:short)").stdout.decode("utf-8", "replace").split()


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in this folder, with English messages. Raises FFNError (exit 3) if git cannot be run."""
    environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], stdin=subprocess.DEVNULL, capture_output=True, env=environment,
            timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "it is not installed" if isinstance(error, FileNotFoundError) else clean(str(error))
        raise FFNError(f"cannot run git: {why}", "git reads the file at a commit", ExitCode.ENVIRONMENT) from None
    except ValueError:
        raise FFNError("a name in git cannot contain a NUL character") from None


def _reason(failed: subprocess.CompletedProcess[bytes]) -> str:
    """Return the first line that git printed on stderr, without its `fatal:`."""
    lines = failed.stderr.decode("utf-8", "replace").strip().splitlines()
    return clean(lines[0].removeprefix("fatal: ")) if lines else f"git ended with exit code {failed.returncode}"
