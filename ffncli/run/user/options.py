"""The options that name a model and its input, as types of the fields of questions."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeGuard

from ffncli.models.model import Resolved
from ffncli.options.accept import Accepts, text
from ffncli.options.opt import INPUT, SOURCE, Opt
from ffncli.options.shared import KINDS_OF_SOURCE

if TYPE_CHECKING:
    from torch import nn

    from ffncli.run.engine.inputs import InputSource

    Source: TypeAlias = str | os.PathLike[str] | Resolved | nn.Module
    Values: TypeAlias = InputSource
else:
    Source = Values = Any  # `get_type_hints` reads these at runtime, when torch must not be imported


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Return whether this is an nn.Module, without importing torch: a caller that has a module has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _values(value: Any) -> Any:
    """Accept a string as typed, or an array, which is read later, when torch is imported."""
    if isinstance(value, (str, os.PathLike)):
        return text(value)
    if not (isinstance(value, (list, tuple)) or hasattr(value, "__array__") or hasattr(value, "__dlpack__")):
        raise TypeError
    return value


MODEL = Accepts[Any](
    "a string such as '512x2048:gelu', a path, a model from ffncli.load, or an nn.Module",
    lambda value: value if isinstance(value, Resolved) or is_module(value) else text(value),
    metavar="SOURCE",
)
VALUES = Accepts[Any](
    "values [tokens, d_model] (a list, a NumPy array, a tensor), or a string: arange, randn, zeros, ones, '0.1,0.2', "
    "or a file's path",
    _values,
    metavar="VALUES",
)


def source(default: str) -> Opt:
    """Return the SOURCE argument of a command; `default` describes the source used if the argument is left out."""
    return Opt(metavar="SOURCE", accepts=MODEL, completes="models", help=f"{KINDS_OF_SOURCE} [default: {default}]")


ModelSource = Annotated[Source | None, source("a small built-in demo")]
Against = Annotated[
    Source | None,
    Opt(
        "--against", accepts=MODEL, group=SOURCE, daily=True, completes="models",
        help="Compare with the same layer of this model.",
    ),
]  # fmt: skip
Input = Annotated[
    Values | None,
    Opt(
        "--input", accepts=VALUES, group=INPUT, daily=True,
        help="arange, randn, zeros, ones, numbers (0.1,0.2,...), a FILE, or - for stdin.",
    ),
]  # fmt: skip
