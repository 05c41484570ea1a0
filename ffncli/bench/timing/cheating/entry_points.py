"""Entry points that are fixed before a user's file is loaded: what it replaces afterwards is named, and put back.

Compared are the attributes of the modules and classes that kernels, checks and clocks use (by identity; of Python
functions the code too), the kernels of this package, torch's operators, and settings that all kernels share. New
attributes do not count as changes, since modules are imported lazily, unless they hide an inherited or built-in one.
"""

from __future__ import annotations

import builtins
import functools
import gc
import inspect
import itertools
import math
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy
import torch

from ffncli.bench.timing.cheating.settings import settings
from ffncli.bench.verdict import WrongCode
from ffncli.dataclass import dataclass
from ffncli.kernels import BUILT_IN, built_in
from ffncli.kernels.kernel import REGISTERED
from ffncli.show.text import plural

Namespace: TypeAlias = ModuleType | type

_PACKAGE = "ffncli"
_CLOCKS = ("ffncli.bench.timing.clock", "ffncli.bench.timing.cuda_clock")
_CUDA_CLOCK = frozenset({"synchronize", "Event", "Stream", "current_stream", "default_stream"})
_LIBRARY = (
    builtins, functools, gc, inspect, itertools, math, multiprocessing.connection,
    multiprocessing.connection.Connection, numpy, os, pickle, random, random.Random, signal, sys, threading,
    threading.Thread, weakref,
)  # fmt: skip
_TORCH = (
    "torch", "torch._C", "torch._C._nn", "torch._C._linalg", "torch._C._special", "torch._VF", "torch._tensor",
    "torch.autograd", "torch.autograd.function", "torch.autograd.grad_mode", "torch.cuda", "torch.cuda.graphs",
    "torch.cuda.streams", "torch.library", "torch.linalg", "torch.nn", "torch.nn.functional",
    "torch.nn.modules.activation", "torch.nn.modules.linear", "torch.nn.modules.module",
    "torch.nn.modules.normalization", "torch.overrides", "torch.special",
)  # fmt: skip
# Hooks that programs set for their own reports; and what torch.compile replaces of torch, by the module it does so in.
_FREE = frozenset(
    {"sys.excepthook", "sys.unraisablehook", "sys.displayhook", "sys.breakpointhook", "torch.manual_seed"}
)
_BY_TORCH = {
    "torch.nn.Module.__init__": "torch._dynamo.mutation_guard",
    "torch.nn.Module.__setstate__": "torch._dynamo.mutation_guard",
}
_OPERATORS = (
    "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "relu", "silu", "gelu", "sigmoid", "tanh", "mul.Tensor",
    "add.Tensor", "clone", "copy_", "equal", "empty.memory_format",
)  # fmt: skip
_DISPATCH_KEYS = (
    "CPU",
    "CUDA",
    "AutogradCPU",
    "AutogradCUDA",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
)
_MISSING = object()


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was. `value` is what stands there now, for whose file it came from."""

    code: WrongCode
    text: str
    value: object = None


class EntryPoints:
    """What a user's file could replace, as it is when this is made; some milliseconds, and as many for `changes`."""

    def __init__(self) -> None:
        for kernel in BUILT_IN:
            built_in(kernel)  # which imports it
        self._namespaces = [(name, space, dict(vars(space))) for name, space in _namespaces()]
        self._modules = {name: module for name, module in sys.modules.items() if _watched(name)}
        functions = {id(f): f for _, _, before in self._namespaces for f in before.values() if _has_code(f)}
        self._functions = [(f, *_code_of(f)) for f in functions.values()]
        self._kernels = {name: (kernel, dict(vars(kernel))) for name, kernel in REGISTERED.items()}
        self._operators = _operators()
        self._settings = settings()
        self._values: list[Any] = []
        self.settle()

    def settle(self) -> None:
        """Take the settings as they are now for right: the threads and the arithmetic of a case have been set."""
        self._values = [setting.read() for setting in self._settings]

    def add(self, function: object) -> None:
        """Fix one more function, with the functions in its closure: a kernel's, once it is built."""
        todo: list[Any] = [function]
        known = {id(f) for f, *_ in self._functions}
        while todo:
            one = todo.pop()
            if not _has_code(one) or id(one) in known:
                continue
            known.add(id(one))
            self._functions.append((one, *_code_of(one)))
            todo += [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]

    def changes(self) -> list[Change]:
        """Everything that is not as it was."""
        return [
            *self._changed_settings(),  # first: they may have changed attributes
            *self._replaced_modules(),
            *self._replaced_attributes(),
            *self._replaced_code(),
            *self._replaced_kernels(),
            *self._replaced_operators(),
        ]

    def restore(self) -> None:
        """Put everything back as far as Python can; `changes` then says what is left."""
        for name, module in self._modules.items():
            sys.modules[name] = module
        for name, space, before in self._namespaces:
            for key, value in list(_different(name, space, before)):
                _put(space, key, value)
        for function, code, defaults, keywords in self._functions:
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keywords
        for name, (kernel, fields) in self._kernels.items():
            REGISTERED[name] = kernel
            vars(kernel).update(fields)
        if _operators() != self._operators:
            _forget_libraries()
        for setting, before in zip(self._settings, self._values, strict=True):
            if setting.write is not None and setting.read() != before:
                setting.write(before)

    def _replaced_modules(self) -> Iterator[Change]:
        for name, module in self._modules.items():
            if (now := sys.modules.get(name)) is not module:
                yield Change(_code(name, ""), f"{name} was replaced", now)

    def _replaced_attributes(self) -> Iterator[Change]:
        for name, space, before in self._namespaces:
            for key, value in _different(name, space, before):
                what = "was hidden" if value is _MISSING else "was replaced"
                yield Change(_code(name, key), f"{name}.{key} {what}", vars(space).get(key))

    def _replaced_code(self) -> Iterator[Change]:
        for function, *before in self._functions:
            if any(a is not b for a, b in zip(_code_of(function), before, strict=True)):
                name = f"{function.__module__}.{function.__qualname__}"
                yield Change(_code(function.__module__ or "", ""), f"the code of {name} was replaced", function)

    def _replaced_kernels(self) -> Iterator[Change]:
        for name, (kernel, fields) in self._kernels.items():
            now = REGISTERED.get(name)
            if now is not kernel or any(vars(kernel)[key] is not value for key, value in fields.items()):
                yield Change(WrongCode.PATCHED_FFN, f"the kernel {name} was replaced", getattr(now, "build", None))

    def _replaced_operators(self) -> Iterator[Change]:
        now = _operators()
        for name, before in self._operators.items():
            if now[name] != before:
                yield Change(WrongCode.PATCHED_TORCH, f"the operator aten::{name} was replaced")

    def _changed_settings(self) -> Iterator[Change]:
        for setting, before in zip(self._settings, self._values, strict=True):
            if setting.read() != before:
                yield Change(setting.code, f"{setting.name} changed")


def files_of(changes: Sequence[Change]) -> set[str]:
    """The files that the functions come from which stand there now, as far as they say so."""
    codes = (getattr(change.value, "__code__", None) for change in changes)
    return {code.co_filename for code in codes if code is not None}


def in_words(changes: Sequence[Change]) -> str:
    """The first change and how many more there are."""
    more = len(changes) - 1
    return changes[0].text + (f", and {more} more {plural('thing', more)}" if more else "")


# --- attributes -------------------------------------------------------------------------------------------------------


def _watched(name: str) -> bool:
    return (
        name.partition(".")[0] == _PACKAGE or name in _TORCH or name in ("time", "os", "sys", "gc", "builtins", "numpy")
    )


def _namespaces() -> Iterator[tuple[str, Namespace]]:
    """Every module and class that is compared, once, with its name."""
    known: set[int] = set()
    for name, space in _candidates():
        if id(space) not in known:
            known.add(id(space))
            yield name, space


def _candidates() -> Iterator[tuple[str, Namespace]]:
    yield "time", time
    for space in _LIBRARY:
        yield (space.__name__ if isinstance(space, ModuleType) else f"{space.__module__}.{space.__qualname__}"), space
    ours = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    for name in (*_TORCH, *sorted(ours)):
        module = sys.modules.get(name) or _attribute(name)
        if not isinstance(module, (ModuleType, type)):
            continue
        yield name, module
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__.partition(".")[0] in ("torch", _PACKAGE):
                yield f"{name}.{key}", value


def _attribute(name: str) -> object:
    """torch._C._nn and the like, which are attributes and may not be in sys.modules."""
    first, *rest = name.split(".")
    value: Any = sys.modules.get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value


def _different(name: str, space: Namespace, before: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(attribute, what it was) for all that are not what they were; what it was is missing for a new one."""
    now = vars(space)
    for key, value in before.items():
        current = now.get(key, _MISSING)
        if current is not value and (_is_code(value) or _is_code(current)) and not _free(f"{name}.{key}", current):
            yield key, value
    for key in list(now.keys() - before.keys()):
        if _hides(space, key):
            yield key, _MISSING


def _free(name: str, value: object) -> bool:
    return name in _FREE or (name in _BY_TORCH and getattr(value, "__module__", None) == _BY_TORCH[name])


def _is_code(value: object) -> bool:
    """Whether an attribute is something that runs: what is counted, cached or chosen by an option may change."""
    return callable(value) or isinstance(value, (ModuleType, property, staticmethod, classmethod)) or value is _MISSING


def _hides(space: Namespace, key: str) -> bool:
    """Whether a new attribute stands in front of another: of a class what it inherits, of our modules a built-in."""
    if isinstance(space, type):
        return not key.startswith("__abstract") and key not in ("__doc__", "__module__") and _inherited(space, key)
    return space.__name__.partition(".")[0] == _PACKAGE and key in vars(builtins) and not key.startswith("__")


def _inherited(space: type, key: str) -> bool:
    return any(key in vars(base) for base in space.__mro__[1:])


def _put(space: Namespace, key: str, value: object) -> None:
    try:
        if value is _MISSING:
            delattr(space, key)
        else:
            setattr(space, key, value)
    except (AttributeError, TypeError):  # what cannot be set was not set by a file either
        return


def _has_code(value: object) -> bool:
    return isinstance(value, FunctionType)


def _code_of(function: Any) -> tuple[object, object, object]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _code(name: str, key: str) -> WrongCode:
    """The code for a replaced attribute `key` of the module or class `name`."""
    top = name.partition(".")[0]
    if top == "time" or name.startswith(_CLOCKS):
        return WrongCode.PATCHED_CLOCK
    if name.startswith("torch.cuda") and _CUDA_CLOCK & {key, *name.split(".")}:
        return WrongCode.PATCHED_CLOCK
    return {"torch": WrongCode.PATCHED_TORCH, _PACKAGE: WrongCode.PATCHED_FFN}.get(top, WrongCode.PATCHED_LIBRARY)


# --- torch's operators ------------------------------------------------------------------------------------------------


def _operators() -> dict[str, tuple[str, ...]]:
    """What torch's dispatcher calls for the operators of a block, as text."""
    dumps = {name: torch._C._dispatch_dump(f"aten::{name}") for name in _OPERATORS}
    return {
        name: tuple(line for line in dump.splitlines() if line.partition(":")[0].partition("[")[0] in _DISPATCH_KEYS)
        for name, dump in dumps.items()
    }


def _forget_libraries() -> None:
    """Take back what files registered for torch's own operators."""
    for thing in gc.get_objects():
        if isinstance(thing, torch.library.Library) and thing.ns == "aten" and _of_a_file(thing):
            thing._destroy()  # type: ignore[no-untyped-call]


def _of_a_file(library: Any) -> bool:
    """Whether a library was not made by torch itself: those have a dispatch key, and registrations of hundreds."""
    return len(library._op_impls) < 50
