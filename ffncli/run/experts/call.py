"""`ffncli.experts`: what `ffn experts` does, as a call with the command line's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.experts.question import ExpertsQuestion, check_experts
from ffncli.run.user.arguments import Number, Source, converted
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.experts.figures import ExpertsSurvey


def experts(
    source: Source,
    prompts: str | os.PathLike[str] | Iterable[str],
    *,
    layer: Number | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    ablate_texts: int | None = None,
    save_routes: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> ExpertsSurvey:
    """Run a mixture on many texts and return how its experts are used and what each is worth, as `ffn experts` does.

    `source` is a model's directory or GGUF file; `prompts` is a file's name or a list of texts, as in `ffncli.corpus`.
    `layers` has a record for each layer with experts: the load of each, pairs that are chosen together, how many had
    been chosen after so many tokens, and the hit rate of a cache of n experts; `frame()` has a row for each expert.
    `ablate_texts` texts (4) are read once more without each expert, for what it is worth to the predictions; 0 leaves
    that out. `save_routes` writes the routes of the one `layer` for `ffn bench --routing`. Raises FFNError for whatever
    the command line refuses, and for an argument of another type, naming the accepted.
    """
    return experts_for(ExpertsQuestion(**converted(locals(), "experts")))


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
        checked = check_experts(question)
    set_threads(question.threads)
    from ffncli.run.experts.run import experts_of

    return experts_of(checked, note, advance)
