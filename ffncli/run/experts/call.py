"""`ffncli.experts`: what `ffn experts` does, as a call with the fields of its question."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ffncli.options.opt import call
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.experts.question import ExpertsQuestion, mixture
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.experts.run import ExpertsSurvey


@package_errors()
def experts_for(
    question: ExpertsQuestion,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], Any] = lambda size: None,
) -> ExpertsSurvey:
    """Check a question about experts, then run it. `note` gets every remark at once, `advance` the bytes of the corpus
    that have been read since its last call.

    Raises FFNError for what cannot be, and (exit 3) without torch.
    """
    with sleep_while_waiting():
        reading = mixture(question)
    set_threads(question.threads)
    from ffncli.run.experts.run import experts_of

    return experts_of(question, reading, note, advance)


experts = call(ExpertsQuestion, experts_for, "experts")
