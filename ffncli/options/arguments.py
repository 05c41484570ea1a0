"""The arguments of the library's calls: bound to a signature, and converted before anything is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.options.accept import Accepts, converted

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def bound(
    signature: inspect.Signature, name: str, args: Any, kwargs: Mapping[str, Any], elsewhere: Mapping[str, str]
) -> inspect.BoundArguments:
    """Bind the arguments of the library's `name`. Raises FFNError if there are too many, one is missing or unknown.

    `elsewhere` maps an argument that belongs to another function to a hint.
    """
    known = list(signature.parameters)
    if unknown := next((word for word in kwargs if word not in known), None):
        hint = elsewhere.get(unknown) or did_you_mean(unknown, known, f"see help(ffncli.{name})")
        raise FFNError(f"no argument {shown(unknown)}", hint)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise FFNError(f"{name}: {error}", f"see help(ffncli.{name})") from None


def checked(**accepts: Accepts[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of the library: `accepts` converts its arguments, by parameter, before it is called.

    A default is passed as it is. Raises FFNError for an argument that is not accepted.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def ask(*args: P.args, **kwargs: P.kwargs) -> R:
            given = bound(signature, function.__name__, args, kwargs, {})
            for name, value in given.arguments.items():
                if value is not signature.parameters[name].default:
                    given.arguments[name] = converted(name, value, accepts[name])
            return function(*given.args, **given.kwargs)

        return ask

    return decorate


def checked_record(record: type[T]) -> type[T]:
    """Decorate a dataclass of the library, such as FFNSpec: creating it raises FFNError for arguments that do not fit
    its fields. Its `__post_init__` calls `check_types`."""
    create, signature = record.__init__, inspect.signature(record)

    @wraps(create)
    def checked_create(self: T, *args: Any, **kwargs: Any) -> None:
        try:
            create(self, *args, **kwargs)
        except TypeError:
            bound(signature, record.__name__, args, kwargs, {})
            raise

    record.__init__ = checked_create  # type: ignore[assignment, method-assign]
    return record


def check_types(record: Any) -> None:
    """Raise FFNError for the first field whose value does not have the type that its dataclass declares.

    A float may be an int; no number may be a bool.
    """
    kind: Any = type(record)
    for name, (kinds, words) in _declared(kind).items():
        value = getattr(record, name)
        if type(value) not in kinds and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise FFNError(f"{name} must be {words}, got {shown(value)}")


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", NoneType: "None"}


@cache
def _declared(record: type[Any]) -> Mapping[str, tuple[tuple[type[Any], ...], str]]:
    """Return the classes that each field of a dataclass accepts, and the words for them."""
    return {name: (_kinds(hint), _words(hint)) for name, hint in get_type_hints(record).items() if _kinds(hint)}


def _kinds(hint: Any) -> tuple[type[Any], ...]:
    """Return the classes of a declared type; none for Any."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for one in get_args(hint) for kind in _kinds(one))
    if get_origin(hint) is Literal:
        return tuple({type(one) for one in get_args(hint)})
    if hint is float:
        return (float, int)
    kind = get_origin(hint) or hint  # of tuple[str, ...], tuple
    return (kind,) if isinstance(kind, type) else ()


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    return "a string" if get_origin(hint) is Literal else _WORDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"
