"""What a kernel's code consists of besides its own file: the other files that its process reads, and the environment
variables that its code reads.

Python reports opened files to an audit hook, which cannot be removed. Code in C reports nothing.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

from ffncli.errors import shown
from ffncli.system.files import sha256_of

MOST_FILES = 200
_SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
_CACHES = ("~/.cache", "~/.triton", "~/.nv")
_VARIABLES_OF_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
_DIGITS = 4  # of a value's hash: enough to see a change, too few to find out the value


class Surroundings:
    """Records the files and variables that user's code reads, from `begin` on."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.variables: dict[str, None] = {}
        self._ours: tuple[str, ...] = ()
        self._begun = False

    def begin(self, kernel: Path | None) -> None:
        """Start to record. The kernel's own file is not recorded; None is a kernel without a file that can have
        neighbours, for which nothing is."""
        self._kernel = None if kernel is None else os.path.realpath(kernel)
        if kernel is None:
            return
        if self._begun:
            return
        self._begun, self._ours = True, tuple(_installed())
        sys.addaudithook(self._heard)
        sys.path_hooks.insert(0, self._finder)
        sys.path_importer_cache.clear()
        recorder = self

        class Recorded(type(os.environ)):  # type: ignore[misc]
            def __getitem__(self, key: str) -> str:
                recorder._read(key)
                value: str = super().__getitem__(key)
                return value

        os.environ.__class__ = Recorded

    def _heard(self, event: str, arguments: Sequence[Any]) -> None:
        if event == "open":
            path, mode, flags = arguments
            reads = not set(mode) & set("wax") if isinstance(mode, str) else not flags & os.O_WRONLY
            self._add(path if reads else None)
        elif event == "import":
            self._add(arguments[1])
        elif event in ("ctypes.dlopen", "subprocess.Popen"):
            self._add(arguments[0])

    def _add(self, path: object) -> None:
        if not isinstance(path, (str, bytes)) or len(self.files) > MOST_FILES:
            return
        where = os.path.realpath(os.fsdecode(path))
        known = where in self.files or where == self._kernel
        if not known and not self._is_installed(where) and os.path.isfile(where):
            self.files[where] = None

    def _is_installed(self, where: str) -> bool:
        return where.startswith(self._ours)

    def _finder(self, folder: str) -> FileFinder:
        """Return a finder of the modules in a user's folder that reads their source."""
        if self._is_installed(os.path.realpath(folder) + os.sep) or not os.path.isdir(folder):
            raise ImportError(folder)
        from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader

        return FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES), (FromSource, SOURCE_SUFFIXES))

    def _read(self, variable: str) -> None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(("<frozen", os.__file__)):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or len(self.variables) > MOST_FILES:
            return
        where = frame.f_code.co_filename
        if not self._is_installed(os.path.realpath(where)) and not where.startswith("<frozen"):
            self.variables[variable] = None


class FromSource(SourceFileLoader):
    """A loader that never reads a cache of compiled code, whose code may be another than the source's."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module's source."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def packages() -> list[str]:
    """Return the folders of the standard library, of ffn, and of the packages next to torch, which may lie in a folder
    that only PYTHONPATH names, or in a user's project."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths.append(str(Path(__file__).parents[2]))
    if torch := find_spec("torch"):
        paths.append(str(Path(torch.origin or "").parents[1]))
    return [os.path.join(os.path.realpath(path), "") for path in paths]


def _installed() -> list[str]:
    """Return the folders of the standard library, of installed packages, of the system and of compilers' caches, each
    with a separator at its end."""
    paths = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages(), *packages()]
    paths += [sys.prefix, sys.base_prefix, *_SYSTEM, *map(os.path.expanduser, _CACHES)]
    paths += [os.path.join(tempfile.gettempdir(), f"torchinductor_{os.environ.get('USER') or 'root'}")]
    paths += [os.environ[name] for name in _VARIABLES_OF_CACHES if name in os.environ]
    whole = (os.path.realpath(path) for path in paths if path)
    return sorted({os.path.join(path, "") for path in whole if path != os.sep})


# --- in other processes -----------------------------------------------------------------------------------------------


def file_digests(paths: Collection[str], kernel: Path) -> dict[str, str | None]:
    """Return the sha256 of every file, None if it cannot be read. Files in the kernel's folder, or below it, are named
    relative to that folder."""
    folder = os.path.realpath(kernel.parent)
    names = {
        path: os.path.relpath(path, folder) if path.startswith(os.path.join(folder, "")) else path for path in paths
    }
    return {name: _digest(Path(path)) for path, name in sorted(names.items())}


def _digest(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except (OSError, ValueError):
        return None


def value_digest(variable: str) -> str | None:
    """Return the first digits of the sha256 of a variable's value in this process; None if it is not set."""
    value = os.environ.get(variable)
    return None if value is None else hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()[:_DIGITS]


def changed(files: Mapping[str, str | None], variables: Mapping[str, str | None], kernel: Path) -> str:
    """Return what differs from a certificate's `files` and `variables`, in words; empty if nothing does."""
    folder = Path(os.path.realpath(kernel.parent))
    if name := next((name for name, digest in files.items() if _digest(folder / name) != digest), ""):
        return f"the file {shown(name)}"
    name = next((name for name, digest in variables.items() if value_digest(name) != digest), "")
    return f"the environment variable {shown(name)}" if name else ""
