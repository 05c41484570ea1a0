"""The one error for what users can cause, and the exit codes. `cli/main.py` is the only place that catches it.

Also what every message needs: text from files and arguments, escaped so that it cannot control a terminal.
"""

from __future__ import annotations

import re
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


class FFNError(Exception):
    """Something the user can fix. `message` says what is wrong and where, `hint` what to do."""

    def __init__(self, message: str, hint: str = "", code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


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
