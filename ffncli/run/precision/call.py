"""`ffncli.precision`, the call behind `ffn precision`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ffncli.options.opt import call
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.precision.question import PrecisionQuestion, subject_of
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.precision.results import Precision


@package_errors()
def precision_for(question: PrecisionQuestion, note: Callable[[str], None] = lambda text: None) -> Precision:
    """Check a question about precision, then run it; `note` is called with every remark as it arises."""
    with sleep_while_waiting():  # loading a user's module imports torch
        subject = subject_of(question)
    set_threads(question.threads)
    from ffncli.run.precision.measure import precision_of

    return precision_of(question, subject, note)


precision = call(PrecisionQuestion, precision_for, "precision")
