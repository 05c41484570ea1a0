"""FFNError, the only exception for errors that users can cause, and the exit codes. Only `cli/main.py` prints it.

Also the helpers that every message needs: they escape strings from files and arguments, so that these cannot control a
terminal.
"""

import re
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

# C0, DEL and C1 controls, and characters that hide or reorder text in a terminal: Unicode's format characters
# (direction marks, zero-width characters, soft hyphens, tags and the whole plane of the tags), surrogates, line and
# paragraph separators.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)


class ExitCode(IntEnum):
    """The exit code that a shell or a CI job sees in `$?`."""

    OK = 0
    FAILED = 1  # a requested check failed
    USAGE = 2  # wrong options, or input of the wrong kind
    ENVIRONMENT = 3  # impossible on this machine: not enough memory, a full disk, a missing extra
    INCONCLUSIVE = 4
    BUG = 70
    INTERRUPTED = 130
    TERMINATED = 143


class Terminated(SystemExit):
    """SIGTERM as an exception, so that every `finally` runs; unlike a user's SystemExit, it is never handled."""

    def __init__(self) -> None:
        super().__init__(int(ExitCode.TERMINATED))


def option(name: str, value: object = None) -> str:
    """Return a field's name, with its value if given, marked for a message: Python prints `layer` or `norm='none'`.

    The command line prints the field as its option is typed in a shell: `--layer` or `--norm none`.
    """
    return f"\ue000{name}\ue002" if value is None else f"\ue000{name}\ue001{value!r}\ue002"


_OPTION = re.compile("\ue000(\\w+)(?:\ue001([^\ue002]*))?\ue002")


def spelled(text: str, spell: Callable[[str, str | None], str] | None = None) -> str:
    """Return `text` with its marked options written as in Python, or as `spell(name, repr of the value)` returns."""
    python: Callable[[str, str | None], str] = lambda name, value: name if value is None else f"{name}={value}"  # noqa: E731
    return _OPTION.sub(lambda match: (spell or python)(match[1], match[2]), text)


class FFNError(Exception):
    """An error that the user can fix. `message` says what is wrong and where, `hint` says what to do; both use the
    options' names in Python.

    Options in a message are marked by `option`, so that the command line can write them as in a shell (`in_words`).
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
        """What to do; "" if the message already says so."""
        return spelled(self._hint)

    def in_words(self, spell: Callable[[str, str | None], str] | None = None) -> str:
        """Return message and hint on one line, with options written by `spell`."""
        return spelled(f"{self._message}; {self._hint}" if self._hint else self._message, spell)

    def __str__(self) -> str:
        return self.in_words()

    def within(self, place: str, hint: str | None = None) -> "FFNError":
        """Return the same error with `place` before its message, and with `hint` as its hint if one is given."""
        return FFNError(f"{place}: {self._message}", self._hint if hint is None else hint, self.code)


def shown(value: object, limit: int = 60) -> str:
    """Return the repr of `value` as quoted in an error, shortened to fit one line."""
    try:
        text = repr(value)
    except Exception:  # a caller's class may raise anything; Python refuses to print integers of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean(text: str) -> str:
    """Return `text` with every control, reordering or hidden character escaped (`\\x1b`)."""
    return UNSAFE.sub(_written_out, text)


def shown_path(path: Path) -> str:
    """Return the path as typed, but escaped: a directory's name is an untrusted string, too."""
    return clean(str(path))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def did_you_mean(name: str, known: list[str], otherwise: str, cutoff: float = 0.6) -> str:
    """Return a hint with the closest known names, or `otherwise` if no name is close.

    `cutoff` is the required similarity (difflib's ratio); raise it for names that share long parts.
    """
    from difflib import get_close_matches

    typed = name.lower()[:80]
    near = get_close_matches(typed, known, n=3, cutoff=cutoff)
    near.sort(key=lambda n: sorted(n) != sorted(typed))  # swapped letters, the most frequent mistake, come first
    return "did you mean " + " or ".join(f"'{n}'" for n in near) + "?" if near else otherwise
