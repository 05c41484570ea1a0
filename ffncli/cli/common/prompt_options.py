"""Options that run a real model: what it is given, and what `ffn trace` looks at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from ffncli.cli.common.parsers import natural, positive
from ffncli.errors import FFNError, shown
from ffncli.run.pretrained.prompt import Prompt, prompt_of

_model = partial(typer.Option, rich_help_panel="A real model, run by transformers")
_MOST_IDS = 1_000_000


def _ids(text: str) -> tuple[int, ...]:
    """Token numbers, `1,2,3`."""
    words = [word for word in str(text).replace(" ", ",").split(",") if word]
    if not words or len(words) > _MOST_IDS:
        raise FFNError(f"--input-ids must be token numbers like 1,2,3, got {shown(text)}")
    return tuple(map(natural("--input-ids", 2**31 - 1), words))


@dataclass(frozen=True)
class GivenOptions:
    """--prompt, --input-ids and --position: what the model reads, and which of that is looked at."""

    prompt: Annotated[
        str | None, _model("--prompt", metavar="TEXT", help="Run the model on it: what then enters its FFN.")
    ] = None
    input_ids: Annotated[
        Any, _model("--input-ids", metavar="N,...", parser=_ids, help="Token numbers instead of a prompt.")
    ] = None
    position: Annotated[
        str | None, _model("--position", metavar="I,...", help="Which tokens: -1 (the last), 0,3 or 2:5; default all.")
    ] = None

    @property
    def model_prompt(self) -> Prompt | None:
        """The same as one record; None where transformers is not to run the model."""
        return prompt_of(self.prompt, self.input_ids, self.position)


@dataclass(frozen=True)
class PromptOptions(GivenOptions):
    """The same, and --unembed and its kin."""

    unembed: Annotated[bool, _model("--unembed", help="The tokens that the FFN's output promotes.")] = False
    neuron: Annotated[
        int | None,
        _model("--neuron", metavar="I", parser=natural("--neuron"), help="With --unembed: of one hidden unit."),
    ] = None
    top_tokens: Annotated[
        int | None,
        _model("--top-tokens", metavar="N", parser=positive("--top-tokens"), help="With --unembed: how many, 10."),
    ] = None
