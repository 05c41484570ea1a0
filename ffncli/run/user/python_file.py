"""A Python file that the user named: executed, because that was asked for; what goes wrong in it is one line."""

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


@contextmanager
def user_code(path: Path, doing: str) -> Iterator[None]:
    """Run what the user wrote in `path`: neighbours import, what it writes goes to stderr, exceptions are one FFNError.

    That holds for file descriptor 1 too, to which C code writes, and the programs that it starts. Nothing stays behind:
    neither the directory on sys.path nor the neighbours in sys.modules, whose names another source's neighbours may
    have too. A lack of memory stays what it is.
    """
    folder, before = str(path.parent), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        with _descriptor_1_to_2(), redirect_stdout(sys.stderr):
            yield
    except (MemoryError, FFNError, KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # SystemExit, and whatever else the file makes up
        if "can't allocate memory" in str(error):
            raise
        raise FFNError(_located(error, path), doing) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        _forget_neighbours(Path(folder), before)


@contextmanager
def _descriptor_1_to_2() -> Iterator[None]:
    """Make file descriptor 1 mean what 2 means, or nothing where 2 is closed; then what it was, closed included."""
    _flush()
    open_1, open_2 = _is_open(1), _is_open(2)
    if not open_2:  # first, so that the copy below is not given this number
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
    """Write out what Python and C hold back for descriptor 1, to wherever it leads now."""
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(OSError, ValueError):  # what cannot be written now is said where the answer is written
            if stream is not None:
                stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def import_file(path: Path, form: str = "my.py:ClassName") -> ModuleType:
    """The file as a module, under a name that no import statement can ask for.

    Raises FFNError for any failure; where there is no such file, it says in which `form` one is named.
    """
    where = shown_path(path)
    if not path.is_file():
        raise FFNError(f"{where} " + ("is a directory" if path.is_dir() else "does not exist"), f"give {form}")
    name = "ffn source " + re.sub(r"\W", "_", str(path))
    spec = spec_from_file_location(name, path)
    assert spec is not None  # true of every name that ends in .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it runs
    with user_code(path, "raised while it was imported"):
        spec.loader.exec_module(module)
    return module


def pick(module: ModuleType, name: str | None, path: Path) -> type[nn.Module] | nn.Module:
    """What `name` is in the user's file; without a name, its one nn.Module class.

    Raises FFNError, with the names there are, for a name that is not there or is no nn.Module.
    """
    where = shown_path(path)
    own = [n for n, value in vars(module).items() if _is_class(value) and value.__module__ == module.__name__]
    there = "its nn.Module classes: " + ", ".join(own) if own else "it has no nn.Module class"
    if name is None:
        if not own:
            raise FFNError(f"{where} has no nn.Module class", "give my.py:ClassName")
        if len(own) > 1:
            raise FFNError(
                f"{where} has {len(own)} nn.Module classes", f"say which, as in {path.name}:{own[0]}; {there}"
            )
        name = own[0]
    if name not in vars(module):
        lower = {n.lower(): n for n in own}
        near = did_you_mean(name, list(lower), there)
        raise FFNError(f"{where} has no {shown(name)}", re.sub(r"'(\w+)'", lambda m: f"'{lower[m[1]]}'", near))
    found = vars(module)[name]
    if not (_is_class(found) or isinstance(found, nn.Module)):
        raise FFNError(f"{where}: {name} is no nn.Module class (it is a {type(found).__name__})", there)
    return found  # type: ignore[no-any-return]


def _is_class(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _located(error: BaseException, path: Path) -> str:
    """`my.py, line 7: ValueError: d_model must be even`."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    at = f", line {lines[-1]}" if lines else ""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    text = text if len(text) <= 200 else text[:199] + "…"
    return f"{shown_path(path)}{at}: {type(error).__name__}" + (f": {text}" if text else "")


def _forget_neighbours(folder: Path, before: set[str]) -> None:
    """Take new modules that lie right in `folder` out of sys.modules, with their submodules; nothing deeper."""
    new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in before}
    tops = {name for name in new if "." not in name and _home(sys.modules[name]) == folder}
    for name in new:
        if name.partition(".")[0] in tops:
            del sys.modules[name]


def _home(module: ModuleType) -> Path | None:
    """The directory from which a module was imported: of a package, the one that holds it."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    return Path(file).parents[1 if os.path.basename(file) == "__init__.py" else 0]
