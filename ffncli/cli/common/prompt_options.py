"""Options that run a real model: what it is given, and what `ffn trace` looks at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from ffncli.cli.common.option import INPUT, option
from ffncli.cli.common.parsers import natural, positive
from ffncli.errors import FFNError, shown
from ffncli.run.pretrained.prompt import Prompt, prompt_of

_input = partial(option, INPUT)
_unembed = partial(option, "Tokens that the output promotes")
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
        str | None,
        _input(
            "-p",
            "--prompt",
            metavar="TEXT",
            daily=True,
            help="Run the model on TEXT, and use the real input of its FFN.",
        ),
    ] = None
    input_ids: Annotated[
        Any, _input("--input-ids", metavar="N,...", parser=_ids, help="Run the model on these token ids instead.")
    ] = None
    position: Annotated[
        str | None,
        _input("--position", metavar="N,...", help="Tokens to show: -1 (the last), 0,3 or 2:5. [default: all]"),
    ] = None

    @property
    def model_prompt(self) -> Prompt | None:
        """The same as one record; None where transformers is not to run the model."""
        return prompt_of(self.prompt, self.input_ids, self.position)


@dataclass(frozen=True)
class PromptOptions(GivenOptions):
    """The same, and --unembed and its kin."""

    unembed: Annotated[
        bool, _unembed("--unembed", daily=True, help="Show the tokens that the FFN's output promotes.")
    ] = False
    neuron: Annotated[
        int | None,
        _unembed(
            "--neuron",
            metavar="N",
            parser=natural("--neuron"),
            help="With --unembed: the tokens that hidden unit N promotes.",
        ),
    ] = None
    top_tokens: Annotated[
        int | None,
        _unembed(
            "--top-tokens",
            metavar="N",
            parser=positive("--top-tokens"),
            help="With --unembed: how many tokens to show. [default: 10]",
        ),
    ] = None
