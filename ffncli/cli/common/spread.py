"""`spread` lets a command's signature name an options dataclass; Typer sees its fields as the command's own options.

-h and --help are the last options of every command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, get_type_hints

from ffncli.cli.common.help import HELP_OPTIONS


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with every parameter whose type is an options dataclass replaced by that class's fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    bundles: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if hasattr(hints[name], "__dataclass_fields__"):
            bundles[name] = hints[name]
            types = get_type_hints(hints[name], include_extras=True)
            parameters += [_parameter(f.name, types[f.name], f.default) for f in fields(hints[name])]
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))

    parameters += [_parameter(name, hint, False) for name, hint in HELP_OPTIONS.items()]

    @wraps(command)
    def run(**values: Any) -> None:
        for name in HELP_OPTIONS:  # their callbacks have already run
            values.pop(name, None)
        for name, bundle in bundles.items():
            values[name] = bundle(**{f.name: values.pop(f.name) for f in fields(bundle)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # or Typer would inspect the original
    return run


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=empty if default is MISSING else default, annotation=annotation
    )
