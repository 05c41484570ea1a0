"""Which options contradict or need each other: a table of rules, used for the checks and printed in the manual.

    Conflict("by_step", contradicts="kernel baseline launch=graphs", why="it times steps, not kernels")
    Conflict("position", needs="prompt input_ids unembed", why="it is a token's place")

Options are named by their fields; a rule with several options applies to each of them. `launch=graphs` matches if
`launch` has that value (or has it among several), and `passes!=forward` matches if `passes` has any other value.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ffncli.errors import FFNError, option, spelled
from ffncli.options.opt import Options, as_typed, chosen


@dataclass(frozen=True)
class Conflict:
    """A rule: `option` contradicts some other options (or all others except those in `allows`), or needs at least one
    of those in `needs`; `why` is the reason.

    The rule does not apply if one of the options in `unless` is given.
    """

    option: str
    contradicts: str = ""
    needs: str = ""
    allows: str = ""
    why: str = ""
    unless: str = ""

    def broken_by(self, given: Mapping[str, Any]) -> FFNError | None:
        """Return the error for these options if they break the rule, else None."""
        asked = next((text for one in self.option.split() if (text := _matched(one, given))), None)
        if asked is None or any(_matched(other, given) for other in self.unless.split()):
            return None
        if self.needs:
            if any(_matched(other, given) for other in self.needs.split()):
                return None
            return FFNError(f"{asked} needs {_joined(map(_named, self.needs.split()), 'or')}", self.why)
        allowed = (*(_parts(one)[0] for one in self.option.split()), *self.allows.split())
        others = self.contradicts.split() or [name for name in given if name not in allowed]
        clash = next((text for other in others if (text := _matched(other, given))), None)
        return FFNError(f"{asked} contradicts {clash}", self.why) if clash else None


def given(*records: Options) -> dict[str, Any]:
    """Return the options of these records that are not at their defaults, keyed by field."""
    return {name: getattr(record, name) for record in records for name in chosen(record)}


def check(rules: Iterable[Conflict], *records: Options | Mapping[str, Any]) -> None:
    """Raise FFNError for the first broken rule; in a mapping, None, False and () count as not given."""
    options: dict[str, Any] = {}
    for record in records:
        if isinstance(record, Options):
            options |= given(record)
        else:
            options |= {n: v for n, v in record.items() if v is not None and v is not False and v != ()}
    if error := next(filter(None, (rule.broken_by(options) for rule in rules)), None):
        raise error


def table(rules: Sequence[Conflict], groups: Mapping[str, str] | None = None) -> str:
    """Return the rules as a Markdown table, with options as typed in a shell. `groups` maps a name, such as `the
    dimension options`, to the options that it replaces."""

    def listed(patterns: str, last: str) -> str:
        called = [name for name, fields in (groups or {}).items() if fields in patterns]
        for name in called:
            patterns = patterns.replace((groups or {})[name], "")
        return _joined([*map(_shown, patterns.split()), *called], last)

    lines = ["| option | rule | because |", "| --- | --- | --- |"]
    for rule in rules:
        s = "" if rule.option in (groups or {}).values() else "s"  # singular verb for an option, plural for a group
        if rule.needs:
            text = f"need{s} {listed(rule.needs, 'or')}"
        elif rule.contradicts:
            text = f"contradict{s} {listed(rule.contradicts, 'and')}"
        else:
            text = f"contradicts all options but {listed(rule.allows, 'and')}" if rule.allows else "stands alone"
        text += f", unless {listed(rule.unless, 'or')} is given" if rule.unless else ""
        lines.append(f"| {listed(rule.option, 'or')} | {text} | {spelled(rule.why, as_typed)} |")
    return "\n".join(lines)


def _parts(pattern: str) -> tuple[str, str, str]:
    """Split a pattern into three parts, such as `passes`, `!=`, `forward`; the last two are empty if the pattern has no
    value."""
    name, sign, value = re.split(r"(!?=|$)", pattern, maxsplit=1)
    return name, sign, value


def _matched(pattern: str, given: Mapping[str, Any]) -> str | None:
    """Return the matching option for a message, with its value if the pattern has one; None if nothing matches."""
    name, sign, value = _parts(pattern)
    if name not in given:
        return None
    if not sign:
        return option(name, False) if given[name] is False else option(name)
    values = given[name] if isinstance(given[name], tuple) else (given[name],)
    match = next((one for one in values if (str(one) == value) == (sign == "=")), None)
    return None if match is None else option(name, match)


def _named(pattern: str) -> str:
    """Return a pattern as it is written in a message."""
    name, _, value = _parts(pattern)
    return option(name, value or None)


def _shown(pattern: str) -> str:
    """Return a pattern for the manual: "`--launch graphs`", "`--pass` other than `forward`"."""
    name, sign, value = _parts(pattern)
    if sign == "!=":
        return f"`{as_typed(name, None)}` other than `{value}`"
    return f"`{as_typed(name, value if value in ('True', 'False') else repr(value) if value else None)}`"


def _joined(words: Iterable[str], last: str) -> str:
    *some, one = [*words] or [""]
    return f"{', '.join(some)} {last} {one}" if some else one
