"""A Python file that the user named: it is executed, and its errors are shortened to one line."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from torch import nn

from ffncli.errors import FFNError, Terminated, did_you_mean, shown, shown_path
from ffncli.run.user.time_limit import OutOfTime

_TRITON_WITHOUT_GPU = "0 active drivers"
_ON_A_CPU = "Triton sees no GPU; with TRITON_INTERPRET=1 in the environment, ffn verify runs its kernels on a CPU"


@contextmanager
def user_code(path: Path, doing: str) -> Iterator[None]:
    """Run the user's code in `path`: neighbouring files can be imported, output goes to stderr, exceptions become one
    FFNError.

    That includes file descriptor 1, to which C code and child processes write. Nothing remains afterwards: neither the
    directory on sys.path nor the neighbours in sys.modules, since another source's neighbours may have the same names.
    A lack of memory is not converted.
    """
    folder, before = str(path.parent), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        with _descriptor_1_to_2(), redirect_stdout(sys.stderr):
            yield
    except (MemoryError, FFNError, KeyboardInterrupt, Terminated, OutOfTime):
        raise
    except BaseException as error:  # SystemExit, and anything else that the file raises
        if "can't allocate memory" in str(error):
            raise
        raise FFNError(_located(error, path), doing) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        _forget_neighbours(Path(folder), before)


@contextmanager
def _descriptor_1_to_2() -> Iterator[None]:
    """Redirect file descriptor 1 to 2, or to nothing if 2 is closed; afterwards restore it, even if it was closed."""
    _flush()
    open_1, open_2 = _is_open(1), _is_open(2)
    if not open_2:  # first, so that the copy below does not get this number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        if nowhere != 2:
            os.close(nowhere)
    before = os.dup(1) if open_1 else None
    os.dup2(2, 1)
    try:
        yield
    finally:
        _flush()
        if before is None:
            os.close(1)
        else:
            os.dup2(before, 1)
            os.close(before)
        if not open_2:
            os.close(2)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _flush() -> None:
    """Write out what Python and C have buffered for descriptor 1, to its present target."""
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(OSError, ValueError):  # reported when the answer is written
            if stream is not None:
                stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def import_file(path: Path, form: str = "my.py:ClassName") -> ModuleType:
    """The file as a module, under a name that no import statement can use.

    Raises FFNError for any failure; for a missing file the hint shows the `form` of a name.
    """
    where = shown_path(path)
    if not path.is_file():
        raise FFNError(f"{where} " + ("is a directory" if path.is_dir() else "does not exist"), f"give {form}")
    name = "ffn source " + re.sub(r"\W", "_", str(path))
    spec = spec_from_file_location(name, path)
    assert spec is not None  # true for every name that ends in .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it runs
    with user_code(path, "raised while it was imported"):
        spec.loader.exec_module(module)
    return module


def pick(module: ModuleType, name: str | None, path: Path) -> type[nn.Module] | nn.Module:
    """The object `name` in the user's file; without a name, its one nn.Module class.

    Raises FFNError, with the file's names, for an unknown name or one that is not an nn.Module.
    """
    where = shown_path(path)
    classes = [n for n, value in vars(module).items() if _is_class(value) and value.__module__ == module.__name__]
    there = "its nn.Module classes: " + ", ".join(classes) if classes else "it has no nn.Module class"
    if name is None:
        if not classes:
            raise FFNError(f"{where} has no nn.Module class", "give my.py:ClassName")
        if len(classes) > 1:
            raise FFNError(
                f"{where} has {len(classes)} nn.Module classes", f"name one, as in {path.name}:{classes[0]}; {there}"
            )
        name = classes[0]
    if name not in vars(module):
        lower = {n.lower(): n for n in classes}
        near = did_you_mean(name, list(lower), there)
        raise FFNError(f"{where} has no {shown(name)}", re.sub(r"'(\w+)'", lambda m: f"'{lower[m[1]]}'", near))
    target = vars(module)[name]
    if not (_is_class(target) or isinstance(target, nn.Module)):
        raise FFNError(f"{where}: {name} is not an nn.Module class (it is a {type(target).__name__})", there)
    return target  # type: ignore[no-any-return]


def _is_class(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _located(error: BaseException, path: Path) -> str:
    """`my.py, line 7: ValueError: d_model must be even`."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    at = f", line {lines[-1]}" if lines else ""
    if _TRITON_WITHOUT_GPU in str(error):
        return f"{shown_path(path)}{at}: {_ON_A_CPU}"
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    text = text if len(text) <= 200 else text[:199] + "…"
    return f"{shown_path(path)}{at}: {type(error).__name__}" + (f": {text}" if text else "")


def _forget_neighbours(folder: Path, before: set[str]) -> None:
    """Remove new modules directly in `folder` from sys.modules, with their submodules; nothing deeper."""
    new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in before}
    tops = {name for name in new if "." not in name and _home(sys.modules[name]) == folder}
    for name in new:
        if name.partition(".")[0] in tops:
            del sys.modules[name]


def _home(module: ModuleType) -> Path | None:
    """The directory from which a module was imported: for a package, its parent."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    return Path(file).parents[1 if os.path.basename(file) == "__init__.py" else 0]
