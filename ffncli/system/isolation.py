"""Runs a command with fewer rights, because it will run other people's code: it can write only below a folder of its
own, and cannot signal, read or change other processes.

`python -I isolation.py FOLDER COMMAND...` gives up its rights, then becomes the command. Without a command it prints
the kinds of isolation that this system allows. As root, the process gets the uid of nobody and keeps a single
capability, to read every file: the command may lie in a folder of root's. For any user, Landlock (Linux 5.13) forbids
writing outside of the folder, and reading the memory of processes that are not isolated; from Linux 6.12 on, it also
forbids signals to them.

It runs alone, before Python could load a module from the user's folder, so it imports only the standard library.
"""

import ctypes
import glob
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY, LANDLOCK = "user nobody", "landlock"
_NOBODY = 65534
_CAP_DAC_READ_SEARCH, _CAPABILITY_VERSION = 2, 0x20080522
_PR_SET_KEEPCAPS, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 28, 38, 47, 2
_KEEP_CAPS, _NO_SETUID_FIXUP = 1 << 4, 1 << 2  # the latter lets access(), as of git, see the capability too
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, the same on x86-64 and ARM64
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGE_FOLDER = sum(1 << right for right in range(4, 13))  # create and remove files, folders, links, devices, ...
_REFER = 1 << 13  # move a file to another folder
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets and signals
_DEVICES = ("/dev/null", "/dev/nvidia*")
_CACHES = (
    *("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
    *("CUDA_CACHE_PATH", "NUMBA_CACHE_DIR"),
)


def isolation() -> str:
    """Return what isolates a process here: `user nobody`, `landlock`, or both, with a comma. Raises FFNError (exit 3)
    if nothing does."""
    from ffncli.errors import ExitCode, FFNError, option

    kinds = ""
    if sys.platform == "linux":
        with tempfile.TemporaryDirectory(prefix="ffn-") as folder:
            asked = subprocess.run(isolated_in(folder), stdin=subprocess.DEVNULL, capture_output=True, check=False)
            kinds = asked.stdout.decode().strip()
    if kinds not in (NOBODY, LANDLOCK, f"{NOBODY}, {LANDLOCK}"):
        why = f"{option('isolate')}: this system can take no rights from a process"
        raise FFNError(why, "it needs Linux, and root or Landlock; or leave it out", ExitCode.ENVIRONMENT)
    return kinds


def isolated_in(folder: str) -> tuple[str, ...]:
    """Return what to put before a command so that it can write only to this folder, which it then owns."""
    return (sys.executable, "-I", __file__, folder)


@contextmanager
def isolated(wanted: bool) -> Iterator[tuple[str, ...]]:
    """Yield what to put before a command to isolate it, with a folder that is removed at the end; nothing if that is
    not wanted."""
    if not wanted:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="ffn-", ignore_cleanup_errors=True) as folder:
        yield isolated_in(folder)


# --- in the process that gives up its rights --------------------------------------------------------------------------


def main(folder: str, command: list[str]) -> int:
    """Give up rights, then become the command. Returns 3 if nothing could be given up."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # sudo and other programs give no rights back
    kinds = [kind for kind, works in ((NOBODY, _become_nobody), (LANDLOCK, _restrict)) if works(libc, folder)]
    if not command:
        print(", ".join(kinds))
    if not kinds:
        return 3
    if command:
        os.execvpe(command[0], command, {**os.environ, **_variables(folder)})
    return 0


def _variables(folder: str) -> dict[str, str]:
    """Return the environment variables for the command: caches in folders of its own, and git reads repositories of
    other users."""
    caches = {name: os.path.join(folder, name.lower()) for name in _CACHES}
    for path in caches.values():
        os.makedirs(path, exist_ok=True)
    count = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    names = ("GIT_CONFIG_COUNT", f"GIT_CONFIG_KEY_{count}", f"GIT_CONFIG_VALUE_{count}")
    return caches | dict(zip(names, (str(count + 1), "safe.directory", "*"), strict=True))


def _become_nobody(libc: ctypes.CDLL, folder: str) -> bool:
    """Change root to nobody, which can read all files, also in programs that it starts; return whether that is done."""
    if os.geteuid() != 0:
        return False
    try:
        os.chown(folder, _NOBODY, _NOBODY)
        libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_SECUREBITS, _KEEP_CAPS | _NO_SETUID_FIXUP, 0, 0, 0)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:  # a container without these capabilities, or without other users
        return False
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    sets[0] = sets[1] = sets[2] = 1 << _CAP_DAC_READ_SEARCH  # effective, permitted, inheritable
    if libc.capset(header, sets) != 0:  # a container whose root lacks it
        sets[0] = sets[1] = sets[2] = 0
        libc.capset(header, sets)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)
    return True


def _restrict(libc: ctypes.CDLL, folder: str) -> bool:
    """Let Landlock forbid all that this process shall not do; return whether it does."""
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version < 1:
        return False
    of_files = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    of_folders = of_files | _CHANGE_FOLDER | (_REFER if version >= 2 else 0)
    fields = (of_folders, 0, _SCOPES) if version >= 6 else (of_folders,)
    handled = (ctypes.c_uint64 * len(fields))(*fields)
    rules = libc.syscall(_CREATE_RULESET, handled, ctypes.sizeof(handled), 0)
    if rules < 0:
        return False
    devices = (path for pattern in _DEVICES for path in glob.glob(pattern) if not os.path.isdir(path))
    process = f"/proc/{os.getpid()}"  # CUDA names its threads there, and does not start if it cannot
    for path, rights in ((folder, of_folders), *((allowed, of_files) for allowed in (process, *devices))):
        number = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(rights.to_bytes(8, sys.byteorder) + number.to_bytes(4, sys.byteorder), 12)
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
        os.close(number)
    done: int = libc.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)
    return done == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
