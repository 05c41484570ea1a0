"""Options that run a real model: its input, and the part that `ffn trace` examines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

from ffncli.cli.common.option import INPUT, option
from ffncli.cli.common.parsers import flat, joined, natural
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, clean, shown
from ffncli.errors import option as option_text
from ffncli.options.conflicts import Conflict
from ffncli.options.shared import Path as FilePath
from ffncli.run.pretrained.prompt import Prompt, prompt_of
from ffncli.system.files import open_to_read

_input = partial(option, INPUT)
_MOST_IDS = 1_000_000
_MOST_BYTES = 10_000_000  # of a prompt in a file: more than any model's context

CORPUS = ("prompts", "batch_size", "max_tokens", "top_contexts", "outliers", "resume")
ONE_OR_MANY = (
    Conflict("prompt", contradicts="prompts", why="give one"),
    Conflict(" ".join(CORPUS[1:]), needs="prompts prompt"),
)


def _ids(text: str) -> tuple[int, ...]:
    """Token numbers, `1,2,3`."""
    words = [word for word in str(text).replace(" ", ",").split(",") if word]
    if not words or len(words) > _MOST_IDS:
        raise FFNError(f"--input-ids must be token numbers like 1,2,3, got {shown(text)}")
    return tuple(map(natural("--input-ids", 2**31 - 1), words))


def prompt_text(text: str) -> str:
    """The prompt that `--prompt` names: `-` is standard input, `@FILE` a file (without its final newline).

    Raises FFNError for a file that cannot be read or is not UTF-8 text.
    """
    if text != "-" and not text.startswith("@"):
        return text
    where = "standard input" if text == "-" else shown(text[1:])
    try:
        if text == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open_to_read(Path(os.path.expanduser(text[1:])), pipe=True) as file:
                data = file.read(_MOST_BYTES + 1)
        read = data[:_MOST_BYTES].decode(errors="strict" if len(data) <= _MOST_BYTES else "ignore")
    except (OSError, AttributeError, ValueError) as error:  # closed: None has no buffer; not UTF-8: a ValueError
        why = error.strerror if isinstance(error, OSError) else "it is closed" if not sys.stdin else "not UTF-8 text"
        hint = "--prompt @FILE reads a file; for a text that starts with @, pipe it to --prompt -"
        raise FFNError(f"--prompt: cannot read {where}: {why}", "" if text == "-" else hint) from None
    if len(data) > _MOST_BYTES:
        raise FFNError(f"--prompt: {where} is longer than {_MOST_BYTES:,} bytes")
    return read.removesuffix("\n").removesuffix("\r")


@dataclass(frozen=True)
class GivenOptions:
    """--prompt, --input-ids and --position: what the model reads, and which tokens are examined."""

    prompt: Annotated[
        list[str] | None,
        _input(
            "-p",
            "--prompt",
            metavar="TEXT",
            daily=True,
            help="Run the model on TEXT, and use the real input of its FFN.",
        ),
    ] = None
    input_ids: Annotated[
        list[Any] | None,
        _input("--input-ids", metavar="N,...", parser=_ids, help="Run the model on these token ids instead."),
    ] = None
    position: Annotated[
        list[str] | None,
        _input("--position", metavar="N,...", help="Tokens to show: -1 (the last), 0,3 or 2:5. [default: all]"),
    ] = None

    @cached_property
    def model_input(self) -> dict[str, Any]:
        """The three as the library's arguments: the text itself, even if --prompt names a file or standard input."""
        if self.prompt and len(self.prompt) > 1:
            raise FFNError(f"--prompt takes one text, got {len(self.prompt)}", "ffn trace takes several")
        text = prompt_text(self.prompt[0]) if self.prompt else None
        return {"prompt": text, "input_ids": flat(self.input_ids), "position": joined(self.position)}

    @property
    def notes(self) -> tuple[str, ...]:
        """A remark on a file or standard input of several lines, which is one prompt all the same."""
        text = self.model_input["prompt"]
        name = self.prompt[0] if self.prompt else ""
        lines = len(text.splitlines()) if text is not None and text != name else 0
        return (f"--prompt {clean(name)}: its {lines:,} lines are read as one prompt",) if lines > 1 else ()

    @property
    def model_prompt(self) -> Prompt | None:
        """The same as one record; None if transformers need not run the model."""
        return prompt_of(*self.model_input.values())

    def values(self) -> dict[str, Any]:
        """Every option by name, those three as the library's arguments."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | self.model_input


def lines_note(typed: str, text: str) -> tuple[str, ...]:
    """A remark on a file or standard input of several lines, which is one prompt all the same."""
    lines = len(text.splitlines()) if text != typed else 0
    return (f"{option_text('prompt', typed)}: its {lines:,} lines are read as one prompt",) if lines > 1 else ()


def corpus_size(prompts: FilePath | Sequence[str] | None) -> int:
    """The corpus's bytes, for a progress bar; 0 if they are not known."""
    if prompts is None or isinstance(prompts, str | os.PathLike):
        try:
            return os.path.getsize(os.path.expanduser(prompts or "-")) if prompts != "-" else 0
        except OSError:  # an error of its own follows
            return 0
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in prompts)
