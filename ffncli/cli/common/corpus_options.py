"""The texts of a corpus, as `ffn trace` and `ffn experts` read them: --prompts, --batch-size, --max-tokens."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from functools import partial
from typing import Annotated, Any

from ffncli.cli.common.option import INPUT, option
from ffncli.cli.common.parsers import positive
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.run.corpus.question import BATCH_SIZE
from ffncli.run.corpus.texts import OPTION

MANY = "Many prompts"
_corpus = partial(option, MANY)


@dataclass(frozen=True)
class ReadingOptions:
    """--prompts, --batch-size and --max-tokens."""

    prompts: Annotated[
        str | None,
        option(INPUT, OPTION, metavar="FILE|-",
               help="Run the model on every line of FILE (.jsonl: its text) and show figures of all layers."),
    ] = None  # fmt: skip
    batch_size: Annotated[
        int | None,
        _corpus("--batch-size", metavar="N", parser=positive("--batch-size", 4096),
                help=f"Texts that run together. [default: {BATCH_SIZE}, or fewer that fit in memory]"),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int | None,
        _corpus("--max-tokens", metavar="N", parser=positive("--max-tokens"),
                help="Cut every text to N tokens. [default: as many as the model takes]"),
    ] = None  # fmt: skip

    def source_of(self, prompt: list[str] | None, least: int = 2) -> str | tuple[str, ...] | None:
        """The corpus: a file's name, or prompts, at least so many (one, with an option of a corpus); None for fewer.

        Raises FFNError for both, and for an option of a corpus without one.
        """
        least = 1 if first_chosen(self) else least
        several = tuple(prompt) if prompt and len(prompt) >= least else None
        if self.prompts is not None and prompt:
            raise FFNError(f"--prompt contradicts {OPTION}", "give one")
        if self.prompts is None and several is None and (name := first_chosen(self)):
            raise FFNError(f"{name} needs {OPTION} or --prompt")
        return self.prompts if several is None else several


def first_chosen(options: Any, shared: frozenset[str] = frozenset()) -> str:
    """The first option that is not at its default, as typed; "" for none. Those of `shared` are not looked at."""
    for one in fields(options):
        default = None if one.default is MISSING else one.default
        if one.name not in shared and getattr(options, one.name) != default:
            return "--" + one.name.replace("_", "-")
    return ""


def corpus_size(prompts: str | tuple[str, ...]) -> int:
    """The corpus's bytes, for a progress bar; 0 if they are not known."""
    if isinstance(prompts, tuple):
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in prompts)
    try:
        return os.path.getsize(os.path.expanduser(prompts)) if prompts != "-" else 0
    except OSError:  # an error of its own follows
        return 0
