"""`ffncli.approximate`: what `ffn approximate` does, as a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ffncli.run.approximate.question import FitQuestion, cases
from ffncli.run.engine.threads import set_threads
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.approximate.approximate import Fit


@package_errors()
def approximate(question: FitQuestion | None = None, **choices: Any) -> tuple[Fit, ...]:
    """Train every requested block: `approximate(targets=("sin",), activations=("gelu",), widths=("1", "16"))`.

    Raises FFNError as `FitQuestion` and `cases`.
    """
    question = question or FitQuestion(**choices)
    fit_cases = cases(question)
    set_threads()
    from ffncli.run.approximate.approximate import fits

    return tuple(fits(question, fit_cases))
