"""`ffncli.corpus`: what `ffn trace --prompts` does, as a call with the command line's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ffncli.errors import FFNError
from ffncli.run.corpus.question import CorpusQuestion, check_corpus
from ffncli.run.corpus.texts import OPTION
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.ranks.environment import torchrun
from ffncli.run.user.arguments import Number, Source, converted
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.corpus.figures import CorpusSurvey


def corpus(
    source: Source,
    prompts: str | os.PathLike[str] | Iterable[str],
    *,
    layer: Number | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    top_units: int | None = None,
    top_contexts: int | None = None,
    outliers: float | None = None,
    save: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> CorpusSurvey:
    """Run a model on many texts and return figures of every layer and hidden unit, as `ffn trace --prompts` does.

    `source` is a model's directory or GGUF file; `prompts` is a file's name (a text in each line; of a .jsonl file a
    JSON string, or an object with the key `text`, `prompt` or `content`) or a list of texts. The model is loaded once,
    and no activation is kept: memory does not grow with the corpus. `rows` has a record for each layer, `frame()` a row
    for each unit: share of tokens for which it is active, mean, extremes with their places, and its `top_contexts`
    largest values. `outliers` is the limit of an outlier dimension (6). `save` writes that table (.csv, .parquet);
    `resume` names a file from which an interrupted run goes on. The other arguments are the command line's options.
    Raises FFNError for whatever the command line refuses, and for an argument of another type, naming the accepted.
    """
    return corpus_for(CorpusQuestion(**converted(locals(), "corpus")))


@package_errors()
def corpus_for(
    question: CorpusQuestion,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], Any] = lambda size: None,
) -> CorpusSurvey:
    """Check a question about a corpus, then run it. `note` gets every remark at once, `advance` the bytes of the corpus
    that have been read since its last call.

    Raises FFNError for what cannot be, and (exit 3) without torch.
    """
    if torchrun() is not None:
        raise FFNError(f"{OPTION} runs in one process", "start it without torchrun")
    with sleep_while_waiting():
        checked = check_corpus(question)
    set_threads(question.threads)
    from ffncli.run.corpus.frame import save_table
    from ffncli.run.corpus.run import corpus_of

    survey = corpus_of(checked, note, advance)
    if question.save_path is not None:
        save_table(survey.frame(), question.save_path)
    return survey
