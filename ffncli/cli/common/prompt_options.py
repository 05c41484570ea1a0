"""The text of --prompt: typed, in a file, or on standard input; and the rules of one text and many."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ffncli.errors import FFNError, option, shown
from ffncli.options.conflicts import Conflict
from ffncli.options.shared import Path as FilePath
from ffncli.system.files import open_to_read

_MOST_BYTES = 10_000_000  # of a prompt in a file: more than any model's context

CORPUS = ("prompts", "batch_size", "max_tokens", "top_contexts", "outliers", "resume")
ONE_OR_MANY = (
    Conflict("prompt", contradicts="prompts", why="give one"),
    Conflict(" ".join(CORPUS[1:]), needs="prompts prompt"),
)


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


def lines_note(typed: str, text: str) -> tuple[str, ...]:
    """A remark on a file or standard input of several lines, which is one prompt all the same."""
    lines = len(text.splitlines()) if text != typed else 0
    return (f"{option('prompt', typed)}: its {lines:,} lines are read as one prompt",) if lines > 1 else ()


def corpus_size(prompts: FilePath | Sequence[str] | None) -> int:
    """The corpus's bytes, for a progress bar; 0 if they are not known."""
    if prompts is None or isinstance(prompts, str | os.PathLike):
        try:
            return os.path.getsize(os.path.expanduser(prompts or "-")) if prompts != "-" else 0
        except OSError:  # an error of its own follows
            return 0
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in prompts)
