"""A user's function that needs a weight which no case has is refused before anything runs, by what its file says."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ffncli.bench.records import Case
from ffncli.bench.request.kernel_names import ChosenKernels
from ffncli.block.recipe import steps
from ffncli.errors import FFNError
from ffncli.kernels.argument_names import missing_weight
from ffncli.kernels.kernel import kernel_steps


def require_arguments(chosen: ChosenKernels, cases: Sequence[Case]) -> None:
    """Raises FFNError (exit 2) for a function that no case can call. What only running the file shows comes later."""
    specs = dict.fromkeys(case.spec for case in cases)
    for where, function in chosen.functions:
        required = _required(function.args)
        refusals = [missing_weight(required, kernel_steps(steps(spec))) for spec in specs]
        if refusals and (first := refusals[0]) and all(refusals):
            why, hint = first
            raise FFNError(f"{where}: {function.name}({ast.unparse(function.args)}) {why}", hint)


def _required(arguments: ast.arguments) -> list[str]:
    """The names of the arguments without a default, but for the first, which is x."""
    places = [*arguments.posonlyargs, *arguments.args]
    names = [one.arg for one in places[1 : max(1, len(places) - len(arguments.defaults))]]
    return names + [
        one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
