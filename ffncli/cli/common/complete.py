"""Completion on Tab: the candidates at the cursor, in the format that each shell reads.

The shells call `ffn` through the scripts of `ffn --show-completion`, which come from Typer. The candidates are computed
here, because Typer's own code would load every command and, for zsh and fish, rich.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Candidate = tuple[str, str]  # a word and its description; "" if it needs no description


def completion(commands: Mapping[str, str], load: Callable[[str | None], Any]) -> tuple[str, int] | None:
    """Return (text for the shell, exit code), or None if the request is not from a supported shell or is for the
    completion script itself.

    `commands` maps names to their help lines; `load` returns the Typer command of a name, or `ffn` itself for None.
    """
    shell = os.environ.get("_FFN_COMPLETE", "").removeprefix("complete_")
    if shell not in ("bash", "zsh", "fish", "powershell", "pwsh"):
        return None
    words = _bash_words() if shell == "bash" else _typed_words()
    matches = list(candidates(words[:-1], words[-1], commands, load))
    if shell == "bash":
        return "".join(f"{word}\n" for word, _ in matches), 0
    if shell == "zsh":
        return _for_zsh(matches), 0
    if shell != "fish":
        return "".join(f"{word}:::{text or ' '}\n" for word, text in matches), 0
    if os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":  # exit code 1 lets fish complete file names
        return "", int(not matches)
    return "".join(f"{word}\t{text}\n" if text else f"{word}\n" for word, text in matches), 0


def candidates(
    words: list[str], incomplete: str, commands: Mapping[str, str], load: Callable[[str | None], Any]
) -> Iterator[Candidate]:
    """Yield the candidates that start with `incomplete`, after the words `words` (without `ffn` itself)."""
    before = [word for word in words if not word.startswith("-")]
    name = before[0] if before and before[0] in commands else None
    if name is None and not incomplete.startswith("-"):
        if before in ([], ["help"]):
            yield from ((c, text) for c, text in commands.items() if c.startswith(incomplete))
        return
    command = load(name)
    options = {spelling: param for param in command.params if param.param_type_name == "option"
               for spelling in (*param.opts, *param.secondary_opts)}  # fmt: skip
    option, equals, value = incomplete.partition("=")
    if equals and option in options:
        yield from ((f"{option}={word}", "") for word in _values(command, options[option], value))
    elif words and words[-1] in options and not options[words[-1]].is_flag:
        yield from ((word, "") for word in _values(command, options[words[-1]], incomplete))
    elif incomplete.startswith("-"):
        yield from ((o, param.help or "") for o, param in options.items() if o.startswith(incomplete))
    else:
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        yield from ((word, "") for argument in arguments[:1] for word in _values(command, argument, incomplete))


def _values(command: Any, param: Any, incomplete: str) -> Iterator[str]:
    """Yield values of an option or argument; in a comma-separated list, those that are not yet in it."""
    import typer

    listed, comma, last = incomplete.rpartition(",") if ",..." in (param.metavar or "") else ("", "", incomplete)
    for item in param.shell_complete(typer.Context(command), last):
        if item.value not in listed.split(","):
            yield f"{listed}{comma}{item.value}"


def _bash_words() -> list[str]:
    """Return the words up to the cursor; bash passes all words, and splits `--color=al` into three."""
    words = _split(os.environ.get("COMP_WORDS", ""))
    at = int(os.environ.get("COMP_CWORD", "0"))
    typed = [*words[1 : at + 1], *([""] if at >= len(words) else [])]
    if typed[-1:] == ["="]:
        typed.append("")
    return [word for word in typed if word != "="] or [""]


def _typed_words() -> list[str]:
    """Return the words up to the cursor; zsh and fish pass the line up to there, and a space at its end begins a new
    word.

    PowerShell drops that space, but also passes the word at the cursor.
    """
    line = os.environ.get("_TYPER_COMPLETE_ARGS", "")
    begins = line.endswith(" ") or os.environ.get("_TYPER_COMPLETE_WORD_TO_COMPLETE") == ""
    return [*_split(line)[1:], *([""] if begins else [])] or [""]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # the line has an unclosed quote
        return line.split()


def _for_zsh(matches: list[Candidate]) -> str:
    """Return the text that the zsh script evaluates: words with their descriptions, or a request for file names."""
    if not matches:
        return "_files\n"
    items = (f'"{_escaped(word)}"' + (f':"{_escaped(text)}"' if text else "") for word, text in matches)
    return "_arguments '*: :((" + "\n".join(items) + "))'\n"


def _escaped(text: str) -> str:
    """Escape text for double quotes inside single quotes, in a list where a colon ends a word."""
    return re.sub(r"([$`])", r"\\\1", text.replace('"', '""').replace("'", "''")).replace(":", r"\\:")
