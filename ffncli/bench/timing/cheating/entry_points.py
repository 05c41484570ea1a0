"""Entry points: functions, modules and settings recorded before a user's file is loaded. Whatever the file then
replaces is reported and restored.

The recorded entry points are the attributes of the modules and classes that kernels, checks and clocks use (compared by
identity; Python functions also by their code), the kernels of this package, torch's operators, and the settings that
all kernels share. A new attribute does not count as a change, since modules are imported lazily, unless it hides an
inherited or built-in attribute.
"""

import builtins
import functools
import gc
import inspect
import itertools
import math
import multiprocessing.connection
import operator
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy
import torch

from ffncli.bench.timing.cheating.instances import replaced_in_instances
from ffncli.bench.timing.cheating.settings import settings
from ffncli.bench.verdict import WrongCode
from ffncli.kernels import BUILT_IN, built_in
from ffncli.kernels.kernel import REGISTERED
from ffncli.show.text import plural

Namespace: TypeAlias = ModuleType | type

_PACKAGE = "ffncli"
_CLOCKS = ("ffncli.bench.timing.clock", "ffncli.bench.timing.gpu.cuda_clock")
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
# _FREE has hooks that programs set for their own reports. _BY_TORCH maps attributes of torch that torch.compile
# replaces to the module whose code replaces them.
_FREE = frozenset(
    {"sys.excepthook", "sys.unraisablehook", "sys.displayhook", "sys.breakpointhook", "torch.manual_seed"}
)
_BY_TORCH = {
    "torch.nn.Module.__init__": "torch._dynamo.mutation_guard",
    "torch.nn.Module.__setstate__": "torch._dynamo.mutation_guard",
}
# Operators that no block of a benchmark calls, and lines of a dispatch table that are not used to compute.
_OTHER_OPERATORS = re.compile(
    r"aten::(_?foreach|_?fft|_?sparse|_?nested|_?linalg|_?cudnn|_?miopen|_?mps|_?quantiz|_?fake_quant|_?fused|special_"
    r"|[a-z_0-9]*(pool|lstm|gru|rnn|loss|upsample|conv|pad|dropout|sparse|distance|_copy)[a-z_0-9]*)"
)
_OTHER_LINES = (
    "name",
    "schema",
    "debug",
    "alias",
    "Meta",
    "Tracer",
    "Sparse",
    "Quantized",
    "Nested",
    "Func",
    "Batched",
)
_MISSING = object()
_all, _map, _is = all, map, operator.is_  # a user's file may replace the built-in ones


@dataclass(frozen=True)
class Change:
    """One changed entry point. `value` is the new value, which shows the file that the change came from."""

    code: WrongCode
    text: str
    value: object = None


class EntryPoints:
    """The recorded state of everything that a user's file could replace; recording and `changes` take milliseconds."""

    def __init__(self) -> None:
        self.users: Mapping[str, str] = {}  # the paths of users' files, by the labels of their kernels
        for kernel in BUILT_IN:
            built_in(kernel)  # imports the kernel
        unlike: dict[int, tuple[str, Namespace]] = {}
        for name, space in _namespaces():
            unlike.setdefault(id(space), (name, space))
        self._namespaces = [(name, space, dict(vars(space))) for name, space in unlike.values()]
        self._modules = {name: module for name, module in sys.modules.items() if _watched(name)}
        values = {id(value): value for _, _, before in self._namespaces for value in before.values()}
        self._codes = {value: _code_of(value) for value in values.values() if isinstance(value, FunctionType)}
        self._kernels = {name: (kernel, dict(vars(kernel))) for name, kernel in REGISTERED.items()}
        self._kept: list[tuple[weakref.ref[object], dict[str, object]]] = []
        self._operators = _operators()
        self._settings = settings()
        self._values: list[Any] = []
        self.accept_settings()

    def accept_settings(self) -> None:
        """Accept the current settings as right, after the threads and the math mode of a case have been set."""
        self._values = [setting.now() for setting in self._settings]

    def add(self, function: object) -> None:
        """Record one more function, and the functions in its closure; used for a kernel's function once it is built."""
        todo: list[Any] = [function]
        while todo:
            one = todo.pop()
            if not isinstance(one, FunctionType) or one in self._codes:
                continue
            self._codes[one] = _code_of(one)
            todo += [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]

    def keep(self, thing: object) -> None:
        """Record an object's attributes that are functions, to put them back if a user's file replaces them. The object
        is not kept alive."""
        self._kept = [one for one in self._kept if one[0]() is not None]
        self._kept.append((weakref.ref(thing), {key: value for key, value in vars(thing).items() if callable(value)}))

    def changes(self) -> list[Change]:
        """Return every change since the recording."""
        return [*self.quick_changes(), *self._slow_changes()]

    def quick_changes(self) -> Iterator[Change]:
        """Yield the changes that are found within some 10 ms."""
        for setting, value in zip(self._settings, self._values, strict=True):  # they may change attributes
            if setting.now() != value:
                yield Change(setting.code, f"{setting.name} changed")
        for name, module in self._modules.items():
            if (now := sys.modules.get(name)) is not module:
                yield Change(_code(name, ""), f"{name} was replaced", now)
        for name, space, attributes in self._namespaces:
            for key, value in _different(name, space, attributes):
                what = "was hidden" if value is _MISSING else "was replaced"
                yield Change(_code(name, key), f"{name}.{key} {what}", vars(space).get(key))
        for function, (code, defaults, keywords) in self._codes.items():
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keywords
            ):
                name = f"{function.__module__}.{function.__qualname__}"
                yield Change(_code(function.__module__ or "", ""), f"the code of {name} was replaced", function)
        for name, (kernel, fields) in self._kernels.items():
            registered = REGISTERED.get(name)
            if registered is not kernel or any(vars(kernel)[key] is not value for key, value in fields.items()):
                what = f"the kernel {name} was replaced"
                yield Change(WrongCode.PATCHED_FFN, what, getattr(registered, "build", None))

    def _slow_changes(self) -> Iterator[Change]:
        for thing, key, value in self._instances():
            what = f"{key} of an object {type(thing).__qualname__} was replaced"
            yield Change(WrongCode.PATCHED_FFN, what, value)
        operators = _operators()
        for name, dispatched in self._operators.items():
            if operators[name] != dispatched:
                yield Change(WrongCode.PATCHED_TORCH, f"the operator {name} was replaced")

    def _instances(self) -> Iterator[tuple[object, str, object]]:
        folders = {os.path.join(os.path.dirname(path), "") for path in self.users.values()}
        return replaced_in_instances(folders) if folders else iter(())

    def restore(self) -> None:
        """Restore everything that Python can restore; afterwards, `changes` returns only what could not be restored."""
        # Modules are restored before their contents. Settings are restored last, because that calls functions that must
        # already be restored.
        for name, module in self._modules.items():
            sys.modules[name] = module
        for name, space, before in self._namespaces:
            for key, value in list(_different(name, space, before)):
                _put(space, key, value)
        for function, (code, defaults, keywords) in self._codes.items():
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keywords
        for thing, key, _ in self._instances():
            before = next((fields for one, fields in self._kept if one() is thing), {})
            if key == "__class__":
                ours = next(base for base in type(thing).__mro__ if base.__module__.startswith(_PACKAGE))
                object.__setattr__(thing, "__class__", ours)  # also of a frozen dataclass
            elif key in before:
                vars(thing)[key] = before[key]
            else:  # the method of its class is found again; arms get their functions whenever they are placed
                vars(thing).pop(key, None)
        for name, (kernel, fields) in self._kernels.items():
            REGISTERED[name] = kernel
            vars(kernel).update(fields)
        if _operators() != self._operators:
            _forget_libraries()
        for setting, before in zip(self._settings, self._values, strict=True):
            if setting.write is not None and setting.now() != before:
                setting.write(before)


def files_of(changes: Sequence[Change]) -> set[str]:
    """Return the source files of the replacing functions, as far as they are known."""
    codes = (getattr(change.value, "__code__", None) for change in changes)
    return {code.co_filename for code in codes if code is not None}


def in_words(changes: Sequence[Change]) -> str:
    """Describe the first change in words, and count the other changes."""
    more = len(changes) - 1
    return changes[0].text + (f", and {more} more {plural('thing', more)}" if more else "")


# --- attributes -------------------------------------------------------------------------------------------------------


def _watched(name: str) -> bool:
    return (
        name.partition(".")[0] == _PACKAGE or name in _TORCH or name in ("time", "os", "sys", "gc", "builtins", "numpy")
    )


def _namespaces() -> Iterator[tuple[str, Namespace]]:
    """Yield every module and class to compare, with its name; some have several names."""
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
    """Return a module such as torch._C._nn, which is an attribute and may not be in sys.modules."""
    first, *rest = name.split(".")
    value: Any = sys.modules.get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value


def _different(name: str, space: Namespace, before: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield (attribute, previous value) for every changed attribute; for a new attribute the value is _MISSING."""
    now = vars(space)
    if now.keys() == before.keys() and _all(_map(_is, now.values(), before.values())):  # as nearly always, and quick
        return
    ours = name.partition(".")[0] == _PACKAGE
    for key, value in before.items():
        current = now.get(key, _MISSING)
        if current is not value and (_is_code(value) or _is_code(current) or (ours and _is_constant(key, value))):
            place = f"{name}.{key}"
            if place not in _FREE and getattr(current, "__module__", None) != _BY_TORCH.get(place, _MISSING):
                yield key, value
    for key in list(now.keys() - before.keys()):
        if _hides(space, key):
            yield key, _MISSING


def _is_code(value: object) -> bool:
    """Return True if the value is code. Other attributes (counters, caches, values of options) change in normal use."""
    return callable(value) or isinstance(value, (ModuleType, property, staticmethod, classmethod)) or value is _MISSING


def _is_constant(key: str, value: object) -> bool:
    """Return True if the value is a constant by its name, such as a limit, and by its type."""
    return key.isupper() and isinstance(value, (int, float, str, bytes, tuple, frozenset))


def _hides(space: Namespace, key: str) -> bool:
    """Return True if a new attribute hides another: an inherited one in a class, or a built-in one in our modules."""
    if isinstance(space, type):
        inherited = any(key in vars(base) for base in space.__mro__[1:])
        return inherited and not key.startswith("__abstract") and key not in ("__doc__", "__module__")
    return space.__name__.partition(".")[0] == _PACKAGE and key in vars(builtins) and not key.startswith("__")


def _put(space: Namespace, key: str, value: object) -> None:
    try:
        if value is _MISSING:
            delattr(space, key)
        else:
            setattr(space, key, value)
    except (AttributeError, TypeError):  # an attribute that cannot be set here cannot have been set by a file
        return


def _code_of(function: FunctionType) -> tuple[Any, Any, Any]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _code(name: str, key: str) -> WrongCode:
    """Return the code for a replaced attribute `key` of the module or class `name`."""
    top = name.partition(".")[0]
    if top == "time" or name.startswith(_CLOCKS):
        return WrongCode.PATCHED_CLOCK
    if name.startswith("torch.cuda") and _CUDA_CLOCK & {key, *name.split(".")}:
        return WrongCode.PATCHED_CLOCK
    return {"torch": WrongCode.PATCHED_TORCH, _PACKAGE: WrongCode.PATCHED_FFN}.get(top, WrongCode.PATCHED_LIBRARY)


# --- torch's operators ------------------------------------------------------------------------------------------------


def _operators() -> dict[str, tuple[str, ...]]:
    """Return, as strings, the functions that torch's dispatcher calls for the operators that a block may need, for
    every dispatch key: operators call others, and keys defer to others."""
    return {name: _table(torch._C._dispatch_dump(name)) for name in _operator_names()}


@functools.cache
def _operator_names() -> tuple[str, ...]:
    every = torch._C._dispatch_get_all_op_names()
    return tuple(name for name in every if name.startswith("aten::") and not _OTHER_OPERATORS.match(name))


def _table(dump: str) -> tuple[str, ...]:
    return tuple(line for line in dump.splitlines() if not line.startswith(_OTHER_LINES))


def _forget_libraries() -> None:
    """Undo what files registered for torch's own operators."""
    for thing in gc.get_objects():
        if isinstance(thing, torch.library.Library) and thing.ns == "aten" and len(thing._op_impls) < 50:
            thing._destroy()  # type: ignore[no-untyped-call]  # torch's own libraries register hundreds
