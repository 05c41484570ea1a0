"""The texts of a corpus: lines of a text file, objects of a .jsonl file, standard input, or a list."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ffncli.errors import FFNError, option, shown, shown_path
from ffncli.system.files import open_to_read

KEYS = ("text", "prompt", "content")  # keys under which an object may hold its text, in order of preference
_MOST_BYTES = 10_000_000  # per text; exceeds every model's context
_PIECE = 1 << 20
_IN_MEMORY = 64 << 20  # bytes of standard input kept in memory; a longer input goes to a file


@dataclass(frozen=True)
class Text:
    """A text of a corpus: its index `number` among the nonempty texts, and the byte offset of its `end`."""

    number: int
    text: str
    end: int


@dataclass(frozen=True)
class Corpus:
    """Texts that can be read repeatedly, at `most` so many. `size` is its number of bytes, `sha256` its hash; messages
    contain `where`."""

    where: str
    size: int
    sha256: str
    lines: Callable[[], Iterator[bytes]]
    as_json: bool = False
    most: int | None = None

    def __iter__(self) -> Iterator[Text]:
        """Yield the nonempty texts in order. Raises FFNError with the line's number for a line that is not a text."""
        number = end = 0
        for at, line in enumerate(self.lines(), 1):
            end += len(line)
            text = _text(line, f"{self.where}:{at}", self.as_json)
            if text.strip():
                if number == self.most:
                    return
                yield Text(number, text, end)
                number += 1

    def texts(self, numbers: Sequence[int]) -> dict[int, str]:
        """Read the corpus again, and return a mapping from these indices to their texts."""
        wanted = frozenset(numbers)
        return {one.number: one.text for one in self if one.number in wanted}


@contextmanager
def opened(source: str | os.PathLike[str] | Sequence[str]) -> Iterator[Corpus]:
    """Open a corpus: a file's name, `-` (standard input), or a list of texts.

    Each line of a .jsonl file is a JSON string, or an object with the key `text`, `prompt` or `content`; in other files
    each line is a text.
    """
    if not isinstance(source, (str, os.PathLike)):
        yield _given(source)
        return
    name = os.fspath(source)
    if name == "-":
        import tempfile

        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as kept:
            _copy_stdin(kept)  # type: ignore[arg-type]
            yield _of_file(kept, "standard input", False)  # type: ignore[arg-type]
        return
    path = Path(os.path.expanduser(name))
    try:
        file = open_to_read(path)
    except OSError as error:
        raise FFNError(f"{option('prompts')}: cannot read {shown_path(path)}: {error.strerror or error}") from None
    with file:
        yield _of_file(file, shown_path(path), path.suffix.lower() in (".jsonl", ".ndjson"))


def _given(texts: Sequence[str]) -> Corpus:
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    digest = hashlib.sha256(b"\0".join(raw)).hexdigest()
    return Corpus("--prompt", sum(map(len, raw)), digest, lambda: iter(raw))


def _copy_stdin(kept: BinaryIO) -> None:
    try:
        while piece := sys.stdin.buffer.read(_PIECE):
            kept.write(piece)
    except (OSError, AttributeError, ValueError) as error:  # a closed stdin is None, which has no buffer
        why = error.strerror if isinstance(error, OSError) else "it is closed"
        raise FFNError(f"{option('prompts')}: cannot read standard input: {why}") from None


def _of_file(file: BinaryIO, where: str, as_json: bool) -> Corpus:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(_PIECE):
        digest.update(piece)

    def lines() -> Iterator[bytes]:
        file.seek(0)
        while line := file.readline(_MOST_BYTES + 1):
            yield line

    return Corpus(where, file.tell(), digest.hexdigest(), lines, as_json)


def _text(line: bytes, where: str, as_json: bool) -> str:
    """Return a line's text. Raises FFNError for a line that is not a text."""
    if len(line) > _MOST_BYTES:
        raise FFNError(f"{where}: the text is longer than {_MOST_BYTES:,} bytes")
    try:
        text = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise FFNError(f"{where}: not UTF-8 text") from None
    return _of_json(text, where) if as_json and text.strip() else text


def _of_json(line: str, where: str) -> str:
    keys = ", ".join(KEYS)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise FFNError(f"{where}: not JSON: {shown(line)}", f"each line is a string or an object with {keys}") from None
    if isinstance(value, dict):
        value = next((value[key] for key in KEYS if key in value), None)
    if not isinstance(value, str):
        raise FFNError(f"{where}: no text in {shown(line)}", f"each line is a string or an object with {keys}")
    return value
