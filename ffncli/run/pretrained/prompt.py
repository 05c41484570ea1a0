"""A model's text input, under the command line's names; torch is not imported for it."""

from __future__ import annotations

from collections.abc import Mapping

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError


@dataclass(frozen=True)
class Prompt:
    """The model's input: a prompt, or token ids; and the positions to trace (None: all)."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    positions: str | None = None

    @property
    def option(self) -> str:
        """The option that it came from, for errors."""
        return "--prompt" if self.ids is None else "--input-ids"

    def check(self, made: Mapping[str, object]) -> None:
        """Raises FFNError for a prompt together with token ids, or with an option of `made` that sets the input."""
        if self.text is not None and self.ids is not None:
            raise FFNError("--prompt contradicts --input-ids", "give one")
        if option := next((option for option, value in made.items() if value is not None), None):
            raise FFNError(f"{option} contradicts {self.option}", "the model makes the FFN's input")


def prompt_of(text: str | None, ids: tuple[int, ...] | None, positions: str | None) -> Prompt | None:
    """The prompt from these options; None if no model is to be run."""
    return None if text is None and ids is None else Prompt(text, ids, positions)
