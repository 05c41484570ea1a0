"""Conditions on the keys of a row, for CI: `ffn_params_total == 4328521728`. `ffn params --assert` asks them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ffncli.errors import ExitCode, FFNError, did_you_mean, shown

_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_FORM = re.compile(r"\s*([\w.]+)\s*(==|!=|<=|>=|<|>|=)\s*(.*?)\s*")
_WORDS = {"true": True, "yes": True, "false": False, "no": False, "null": None, "none": None}


@dataclass(frozen=True)
class Assertion:
    """One condition: `text` as it was given."""

    text: str
    key: str
    operator: str
    value: Any

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether it holds for a row. Raises FFNError for a comparison of two kinds, which says nothing."""
        found = self.found(row)
        wrong = f"--assert {shown(self.text)}: {self.key} is {_words(found)}"
        if found is None or self.value is None:
            if self.operator in ("==", "!="):
                return _OPERATORS[self.operator](found, self.value)
            raise FFNError(f"{wrong}, which is neither more nor less than {_words(self.value)}")
        if _kind(found) != _kind(self.value):
            raise FFNError(f"{wrong}, {shown(self.value)} is {_kind(self.value)}", f"compare it with {_kind(found)}")
        if self.operator not in ("==", "!=") and _kind(found) != "a number":
            raise FFNError(f"{wrong}, which is neither more nor less than anything", "use == or !=")
        return _OPERATORS[self.operator](found, self.value)

    def found(self, row: Mapping[str, Any]) -> Any:
        """What the row has: of a list, how many. Raises FFNError where nothing was asked for that would have it."""
        if self.key not in row:
            option = "--ridge" if self.key.startswith("ridge") else "--tp"
            raise FFNError(f"--assert {shown(self.text)}: {self.key} is there with {option} only")
        value = row[self.key]
        return len(value) if isinstance(value, (list, tuple)) else value


def parse(texts: Sequence[str], keys: Sequence[str]) -> list[Assertion]:
    """The conditions. Raises FFNError for one that is none, or about a key that no row has."""
    return [_parse(text, keys) for text in texts]


def check(assertions: Sequence[Assertion], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises FFNError, exit 1, naming every condition that does not hold and what the row has instead."""
    failed = [
        f"{a.text.strip()} (it is {_words(a.found(row))}" + (f" in {shown(row['name'])})" if len(rows) > 1 else ")")
        for row in rows
        for a in assertions
        if not a.holds(row)
    ]
    if failed:
        raise FFNError(f"not so: {'; '.join(failed)}", code=ExitCode.FAILED)


def _parse(text: str, keys: Sequence[str]) -> Assertion:
    match = _FORM.fullmatch(text)
    if not match or match[2] == "=" or not match[3]:
        raise FFNError(f"--assert {shown(text)} is no condition", "write it as 'ffn_params_total == 4328521728'")
    if match[1] not in keys:
        hint = did_you_mean(match[1], list(keys), "any key of the row with one value will do; --json shows them")
        raise FFNError(f"--assert {shown(text)}: no key {shown(match[1])}", hint)
    value = _value(match[3])
    if match[2] not in ("==", "!=") and _kind(value) != "a number":
        raise FFNError(f"--assert {shown(text)}: {shown(value)} is no number to compare by {match[2]}")
    return Assertion(text, match[1], match[2], value)


def _value(text: str) -> Any:
    """A number (1_000, 1,000, 6.7e9), true or false, null, else text, with or without quotation marks."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    plain = re.sub(r"(?<=\d)[_,](?=\d{3}(?!\d))", "", text)
    if re.fullmatch(r"[-+]?\d{1,40}", plain):
        return int(plain)
    if re.fullmatch(r"[-+]?(\d{1,40}(\.\d*)?|\.\d+)([eE][-+]?\d{1,3})?", plain):
        return float(plain)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, (int, float)) else "a text"


def _words(value: object) -> str:
    """A value as JSON has it."""
    return "not known (null)" if value is None else str(value).lower() if isinstance(value, bool) else shown(value)
