"""The one error for what users can cause, and the exit codes. `cli/main.py` is the only place that catches it.

Also what every message needs: text from files and arguments, escaped so that it cannot control a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

# C0, DEL, C1, and characters that hide or reorder text in a terminal: Unicode's format characters (marks of direction
# and of no width, soft hyphens, tags, the plane that tags are in), surrogates, line and paragraph separators.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)


class ExitCode(IntEnum):
    """What a shell or a CI job learns from `$?`."""

    OK = 0
    FAILED = 1  # a requested check failed
    USAGE = 2  # wrong options, or input that is not what it claims to be
    ENVIRONMENT = 3  # this machine cannot do it: no memory, disk full, a missing extra
    INCONCLUSIVE = 4
    BUG = 70
    INTERRUPTED = 130
    TERMINATED = 143


class Terminated(SystemExit):
    """SIGTERM as an exception, so that every `finally` runs; unlike a user's SystemExit, nothing catches it."""

    def __init__(self) -> None:
        super().__init__(int(ExitCode.TERMINATED))


def option(name: str, value: object = None) -> str:
    """A field, or a field with a value, as part of a message: `layer` and `norm='none'` in Python.

    The command line writes the same as it is typed there: `--layer` and `--norm none`.
    """
    return f"\ue000{name}\ue002" if value is None else f"\ue000{name}\ue001{value!r}\ue002"


_OPTION = re.compile("\ue000(\\w+)(?:\ue001([^\ue002]*))?\ue002")


def spelled(text: str, spell: Callable[[str, str | None], str] | None = None) -> str:
    """`text` with its options as Python writes them, or as `spell` does from a name and the repr of its value."""
    python: Callable[[str, str | None], str] = lambda name, value: name if value is None else f"{name}={value}"  # noqa: E731
    return _OPTION.sub(lambda match: (spell or python)(match[1], match[2]), text)


class FFNError(Exception):
    """Something the user can fix. `message` says what is wrong and where, `hint` what to do, in Python's names.

    A message names options by `option`, so that the command line can write them as they are typed (`in_words`).
    """

    def __init__(self, message: str, hint: str = "", code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self._message, self._hint = message, hint
        self.code = code

    @property
    def message(self) -> str:
        """What is wrong, and where."""
        return spelled(self._message)

    @property
    def hint(self) -> str:
        """What to do; "" if the message says it."""
        return spelled(self._hint)

    def in_words(self, spell: Callable[[str, str | None], str] | None = None) -> str:
        """Message and hint on one line, with options as `spell` writes them."""
        return spelled(f"{self._message}; {self._hint}" if self._hint else self._message, spell)

    def __str__(self) -> str:
        return self.in_words()

    def within(self, place: str, hint: str | None = None) -> FFNError:
        """The same error with its place before the message, and another hint if one is given."""
        return FFNError(f"{place}: {self._message}", self._hint if hint is None else hint, self.code)


def shown(value: object, limit: int = 60) -> str:
    """`value` as an error quotes it: its repr, short enough for one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print an integer of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean(text: str) -> str:
    """`text` with every control, reordering or hidden character written out (`\\x1b`), fit for any terminal or file."""
    return UNSAFE.sub(_written_out, text)


def shown_path(path: Path) -> str:
    """The path as typed, but escaped: a directory's name is untrusted text too."""
    return clean(str(path))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def did_you_mean(name: str, known: list[str], otherwise: str, cutoff: float = 0.6) -> str:
    """A hint with the nearest known names, or `otherwise` if none is near.

    `cutoff`: how similar two names must be (difflib's ratio), for sets of names that share long parts.
    """
    from difflib import get_close_matches

    typed = name.lower()[:80]
    near = get_close_matches(typed, known, n=3, cutoff=cutoff)
    near.sort(key=lambda n: sorted(n) != sorted(typed))  # two letters exchanged: the most frequent mistake first
    return "did you mean " + " or ".join(f"'{n}'" for n in near) + "?" if near else otherwise
