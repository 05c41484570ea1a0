"""Objects of the benchmark whose methods or functions a user's file has replaced, one object at a time. Their classes
and modules, which `entry_points.py` compares, stay as they were."""

import gc
import os
import sys
from collections.abc import Collection, Iterator
from types import FunctionType, MethodType
from typing import Any

from ffncli.run.user.surroundings import packages

_MEASURES, _JUDGES = ("ffncli.bench.timing", "ffncli.bench.referee"), "ffncli.bench.timing.cheating"


def replaced_in_instances(users: Collection[str]) -> Iterator[tuple[object, str, object]]:
    """Yield (object, attribute, value) for every function of the benchmark's objects that hides a method of their
    class, or comes from one of the folders of `users`; for an object of such a file's subclass, `__class__`.
    The objects of users' kernels hold their functions.
    """
    folders, installed = tuple(users), tuple(packages())
    watched: dict[int, bool] = {}  # by the id of the type, which a user's metaclass cannot change
    for thing in gc.get_objects():
        kind = type(thing)
        if id(kind) not in watched:
            homes = [str(base.__module__) for base in kind.__mro__]
            watched[id(kind)] = any(home.startswith(_MEASURES) for home in homes) and not any(
                home.startswith(_JUDGES) for home in homes
            )
        if not watched[id(kind)]:
            continue
        if _is_from(kind, folders, installed):
            yield thing, "__class__", kind
        kernel = getattr(getattr(thing, "built", thing), "kernel", None)
        if getattr(kernel, "origin", ""):
            continue
        for key, value in list(getattr(thing, "__dict__", {}).items()):
            if _hides_method(kind, key) or _is_from(value, folders, installed):
                yield thing, key, value


def _hides_method(kind: type, key: str) -> bool:
    if key in getattr(kind, "__dataclass_fields__", {}):
        return False
    return any(isinstance(vars(base).get(key), (FunctionType, classmethod, staticmethod)) for base in kind.__mro__)


def _is_from(value: Any, folders: tuple[str, ...], installed: tuple[str, ...]) -> bool:
    """Return whether a function, a method, a class, or an object with `__call__`, is defined in one of the folders, but
    not in an installed package: a project may have its environment, with ffn, in its own folder."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        return _is_users(value.__code__.co_filename, folders, installed)
    if not callable(value):
        return False
    home = sys.modules.get((value if isinstance(value, type) else type(value)).__module__)
    return _is_users(str(getattr(home, "__file__", "") or ""), folders, installed)


def _is_users(path: str, folders: tuple[str, ...], installed: tuple[str, ...]) -> bool:
    return path.startswith(folders) and not os.path.realpath(path).startswith(installed)
