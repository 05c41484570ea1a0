"""`ffncli.trace` and `ffncli.survey`, the calls behind `ffn trace`; their arguments are the fields of its questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ffncli.errors import FFNError, option
from ffncli.options.opt import call
from ffncli.run.corpus.question import UnitQuestion, reading_model
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.ranks.environment import device_of, split_over, torchrun
from ffncli.run.trace.question import Question, SurveyQuestion, model_of, subject_of
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.trace.session import Note, Session
    from ffncli.run.trace.survey import Survey
    from ffncli.run.trace.unit import UnitSurvey


@package_errors()
def session_for(question: Question, note: Note = lambda text: None, inside: bool = False) -> Session:
    """Check a question about one layer, then run it. torch is imported only after all checks that don't need it.

    `note` is called with every remark as it arises. With `inside`, the steps inside all experts are recorded, if there
    are any.
    """
    if question.layer == "all":
        hint = "call ffncli.survey, which accepts the same source"
        raise FFNError(f"{option('layer', 'all')} means one row per layer", hint)
    question = of_this_rank(question)
    with sleep_while_waiting():  # loading a user's module imports torch
        subject = subject_of(question)
    if inside:
        subject = replace(subject, experts=None)
    set_threads(question.threads)
    from ffncli.run.trace.session import session_of

    return session_of(question, subject, note)


@package_errors()
def survey_for(question: SurveyQuestion, note: Note = lambda text: None) -> Survey:
    """Check a question about all layers, then run it, as `session_for` does."""
    if torchrun() is not None:
        raise FFNError(f"{option('layer', 'all')} runs in one process", "give one layer, or start it without torchrun")
    with sleep_while_waiting():
        model, prompt = model_of(question)
    set_threads(question.threads)
    from ffncli.run.trace.survey import survey_of

    return survey_of(question, model, prompt, note)


@package_errors()
def unit_for(
    question: UnitQuestion, note: Note = lambda text: None, advance: Callable[[int], Any] = lambda size: None
) -> UnitSurvey:
    """Check a question about a unit over many texts, then run it; `note` and `advance` are as in `corpus_for`."""
    if torchrun() is not None:
        raise FFNError(f"{option('prompts')} runs in one process", "start it without torchrun")
    with sleep_while_waiting():
        reading = reading_model(question)
    set_threads(question.threads)
    from ffncli.run.trace.unit import unit_of

    return unit_of(question, reading, note, advance)


def of_this_rank(question: Question) -> Question:
    """Adapt the question to this process: under torchrun, the block is split over all ranks, and this rank uses its own
    device."""
    place = torchrun()
    if place is None:
        return question
    ranks = split_over(question.tp, question.ep, place.world_size)
    if isinstance(question.input, str) and question.input == "-":
        what = f"{option('input', '-')}: several ranks cannot read one standard input"
        raise FFNError(what, "write it to a file")
    saves: dict[str, Any] = {} if place.first else {"save": None, "save_weights": None}
    return replace(question, tp=ranks.tp, ep=ranks.ep, device=device_of(place, question.device), **saves)


_CORPUS = {"prompts": "for several texts, use ffncli.corpus"}
trace = call(Question, session_for, "trace", _CORPUS)
survey = call(SurveyQuestion, survey_for, "survey", _CORPUS)
unit = call(UnitQuestion, unit_for, "unit")
