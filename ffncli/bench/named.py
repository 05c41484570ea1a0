"""The texts of --kernel, looked at without torch: what each is called, and what can be wrong with its file."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ffncli.bench.records import OWN_ARMS
from ffncli.errors import FFNError, did_you_mean, shown, shown_path
from ffncli.kernels import BUILT_IN, BY_DEFAULT, COMPILING, full_name

_FILE = re.compile(r"(?:(?P<label>[^=:/]+)=)?(?P<path>.+\.py)(?::(?P<name>\w+))?")
_SLOWED = re.compile(r"(?:(?P<label>[^=:/]+)=)?slowed:(?P<factor>[0-9.]+):(?P<kernel>\w+)")


@dataclass(frozen=True)
class Named:
    """`texts` in the order asked, the baseline added where it was left out; `names` are what results call them."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    baseline: str
    files: Mapping[str, str]  # path → sha256, of the user's
    notes: tuple[str, ...] = ()


def named(texts: Sequence[str] | None, baseline: str | None) -> Named:
    """What --kernel and --baseline mean. None: all built-in kernels that need no compiling; `all`: those too.

    The baseline is eager where that is measured, else the first one named; a single kernel is compared with eager.
    Raises FFNError for an unknown name, a file that is not there, is no Python or lacks the name.
    """
    said = [word.strip() for text in texts or () for word in text.split(",")]
    words = [name for word in said for name in (BUILT_IN if word == "all" else (word,))]
    words = words or list(BY_DEFAULT)
    files: dict[str, str] = {}
    found = {}
    for word in dict.fromkeys(words):
        name = _name(word, files)
        if name in found:
            raise FFNError(f"--kernel: two kernels are called {shown(name)}", "give labels: --kernel a=file.py:name")
        found[name] = word
    notes: tuple[str, ...] = (
        () if said else (f"not timed: {', '.join(COMPILING)} (torch.compile); --kernel all adds it",)
    )
    if baseline is None and len(found) == 1 and "eager" not in found:
        baseline, notes = "eager", ("compared with eager; --baseline NAME names another",)
    if baseline is None:
        baseline = "eager" if "eager" in found else next(iter(found))
    baseline = _asked(baseline, found, files)
    return Named(tuple(found.values()), tuple(found), baseline, files, notes)


def _asked(baseline: str, found: dict[str, str], files: dict[str, str]) -> str:
    """The baseline's name; it is put in front where it was not among the kernels."""
    if baseline in found:
        return baseline
    text = next((name for name, word in found.items() if word == baseline), None)
    if text is not None:
        return text
    baseline = full_name(baseline)
    if baseline in found:
        return baseline
    if baseline not in BUILT_IN and not _FILE.fullmatch(baseline) and not _SLOWED.fullmatch(baseline):
        hint = did_you_mean(baseline, [*found, *BUILT_IN], f"measured: {', '.join(found)}")
        raise FFNError(f"--baseline: there is no kernel {shown(baseline)}", hint)
    name, rest = _name(baseline, files), dict(found)
    found.clear()
    found.update({name: baseline, **rest})
    return name


def _name(word: str, files: dict[str, str]) -> str:
    """What results call the kernel of this text."""
    if match := _SLOWED.fullmatch(word):
        _demand(match["kernel"])
        return match["label"] or word
    if ".py" not in word:
        _demand(word)
        return full_name(word)
    match = _FILE.fullmatch(word)
    if not match:
        raise FFNError(f"--kernel: {shown(word)} is no kernel", "write it as file.py:name or label=file.py:name")
    path = Path(os.path.abspath(os.path.expanduser(match["path"])))
    name = _in_file(path, match["name"], files)
    label = match["label"] or f"{path.name}:{name}"
    if label in BUILT_IN or label in OWN_ARMS:
        raise FFNError(f"--kernel: {shown(label)} is a kernel of ffn's own", "give another label")
    return label


def called(text: str) -> str:
    """What results call the kernel of this text, whatever becomes of it."""
    try:
        return _name(text, {})
    except FFNError:
        label, _, rest = text.rpartition("=")
        return label or rest


def _demand(name: str) -> None:
    """Raises FFNError where no built-in kernel has the name."""
    if full_name(name) not in BUILT_IN:
        hint = did_you_mean(name, list(BUILT_IN), f"known: {', '.join(BUILT_IN)}; your own: --kernel file.py:name")
        raise FFNError(f"--kernel: unknown kernel {shown(name)}", hint)


def _in_file(path: Path, name: str | None, files: dict[str, str]) -> str:
    """The name in the file, the only one that it defines where none was said; the file is read, not run."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FFNError(f"--kernel: cannot read {shown_path(path)}: {error.strerror}", "give file.py:name") from None
    except ValueError:
        raise FFNError(f"--kernel: {shown(str(path))} is no file's name") from None
    files[str(path)] = hashlib.sha256(raw).hexdigest()
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise FFNError(f"{shown_path(path)}{where}: {why}", "it is no Python") from None
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    if name is not None:
        plain = all(isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Import | ast.Expr) for n in tree.body)
        if plain and name not in defined:  # anything else may make names in ways that only running shows
            hint = did_you_mean(name, defined, f"it has {', '.join(defined) or 'no function and no class'}")
            raise FFNError(f"{shown_path(path)} has no {shown(name)}", hint)
        return name
    public = [n for n in defined if not n.startswith("_")]
    if len(public) != 1:
        there = ", ".join(public) or "no function and no class"
        hint = f"say which, as in {path.name}:name; it has {there}"
        raise FFNError(f"{shown_path(path)} has {len(public)} kernels", hint)
    return public[0]
