"""What a model is given to read, under the command line's names; torch is not imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ffncli.errors import FFNError


@dataclass(frozen=True)
class Prompt:
    """What the model is to be given: a prompt, or token ids; and which positions to look at (None: all)."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    positions: str | None = None

    @property
    def option(self) -> str:
        """The option that it comes from, for errors."""
        return "--prompt" if self.ids is None else "--input-ids"

    def check(self, made: Mapping[str, object]) -> None:
        """Raises FFNError for a prompt beside token numbers, or beside an option of `made`, which make the input."""
        if self.text is not None and self.ids is not None:
            raise FFNError("--prompt contradicts --input-ids", "give one")
        if option := next((option for option, value in made.items() if value is not None), None):
            raise FFNError(f"{option} contradicts {self.option}", "the model makes the FFN's input")


def prompt_of(text: str | None, ids: tuple[int, ...] | None, positions: str | None) -> Prompt | None:
    """The prompt that these options are; None where no model is to be run."""
    return None if text is None and ids is None else Prompt(text, ids, positions)
