"""`ffncli.approximate`: `ffn approximate` as a function call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffncli.options.opt import call
from ffncli.run.approximate.question import FitQuestion, cases
from ffncli.run.engine.threads import set_threads
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.approximate.approximate import Fit


@package_errors()
def fitted(question: FitQuestion) -> tuple[Fit, ...]:
    """Train every block that the question compares."""
    planned = cases(question)
    set_threads()
    from ffncli.run.approximate.approximate import fits

    return tuple(fits(question, planned))


approximate = call(FitQuestion, fitted, "approximate")
