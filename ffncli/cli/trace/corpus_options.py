"""What `ffn trace --prompts` is asked of a corpus: contexts, outlier dimensions, going on after a break."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from ffncli.cli.common.corpus_options import MANY, ReadingOptions, first_chosen
from ffncli.cli.common.option import option
from ffncli.cli.common.parsers import above_zero, positive
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.run.corpus.question import LIMIT
from ffncli.run.corpus.texts import OPTION

_corpus = partial(option, MANY)


@dataclass(frozen=True)
class CorpusOptions(ReadingOptions):
    """--prompts and related options, --top-contexts, --outliers and --resume."""

    top_contexts: Annotated[
        int | None,
        _corpus("--top-contexts", metavar="N", parser=positive("--top-contexts", 100),
                help="Keep each unit's N largest values with the text around them."),
    ] = None  # fmt: skip
    outliers: Annotated[
        float | None,
        _corpus("--outliers", metavar="SIZE", parser=above_zero("--outliers"),
                help=f"From which size on a dimension of an FFN's input is an outlier. [default: {LIMIT:g}]"),
    ] = None  # fmt: skip
    resume: Annotated[
        str | None,
        _corpus("--resume", metavar="FILE", help="Keep the run's state in FILE, and go on from it after a break."),
    ] = None

    def values(self) -> dict[str, Any]:
        """The options of a question about a corpus, without its texts."""
        return {name: value for name, value in vars(self).items() if name != "prompts"}


# Options of other bundles that a question about a corpus has too.
_SHARED = frozenset({"layer", "dtype", "device", "threads", "digits", "prompt", "save"})


def refuse(*bundles: Any) -> None:
    """Raises FFNError for an option of one block, one prompt or one layer together with a corpus."""
    for options in bundles:
        if name := first_chosen(options, _SHARED):
            raise FFNError(f"{name} contradicts {OPTION}", "it is about one text or one block")
