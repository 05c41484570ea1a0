"""`ffncli.corpus` and `ffncli.experts`: `ffn trace --prompts` and `ffn experts` as function calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ffncli.errors import FFNError, option
from ffncli.options.opt import call
from ffncli.run.corpus.question import CorpusQuestion, ExpertsQuestion, check_files, mixture, reading_model, recorded
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.ranks.environment import torchrun
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.corpus.experts import ExpertsSurvey
    from ffncli.run.corpus.results import CorpusSurvey


@package_errors()
def corpus_for(
    question: CorpusQuestion,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], Any] = lambda size: None,
) -> CorpusSurvey:
    """Check a question about a corpus, then run it. `note` receives every note immediately; `advance` receives the
    number of bytes read since its last call."""
    if torchrun() is not None:
        raise FFNError(f"{option('prompts')} runs in one process", "start it without torchrun")
    with sleep_while_waiting():
        check_files(question)
        reading = reading_model(question)
    set_threads(question.threads)
    from ffncli.run.corpus.results import save_table
    from ffncli.run.corpus.run import corpus_of

    survey = corpus_of(question, reading, note, advance)
    if question.save_path is not None:
        save_table(survey.frame(), question.save_path)
    return survey


corpus = call(CorpusQuestion, corpus_for, "corpus")


@package_errors()
def experts_for(
    question: ExpertsQuestion,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], Any] = lambda size: None,
) -> ExpertsSurvey:
    """Check a question about experts, then run it; `note` and `advance` are as in `corpus_for`."""
    path = recorded(question)
    with sleep_while_waiting():
        reading = mixture(question) if path is None else None
    set_threads(question.threads)
    from ffncli.run.corpus.experts import experts_of, experts_of_routes

    if reading is None:
        assert path is not None
        return experts_of_routes(question, path, note)
    return experts_of(question, reading, note, advance)


experts = call(ExpertsQuestion, experts_for, "experts")
