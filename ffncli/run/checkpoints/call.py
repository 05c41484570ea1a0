"""The comparison of two checkpoints as a question: what is expected, what is read, and what else is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ffncli.block.dtypes import find_storage
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.run.checkpoints.results import FINDINGS, CheckpointFinding

if TYPE_CHECKING:
    from ffncli.run.checkpoints.results import CheckpointComparison

Note = Callable[[str], None]
Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def check_expected(text: str) -> None:
    """Raise FFNError for an expectation that names no finding."""
    name, colon, form = text.partition(":")
    word = re.fullmatch(r"lora(?:<=([1-9][0-9]{0,4}))?", text)
    if (name in FINDINGS and not colon) or word or (name == "rounding" and form):
        return
    hint = did_you_mean(name, [*FINDINGS], f"use one of {', '.join(FINDINGS)}; also rounding:FORMAT and lora<=R")
    raise FFNError(f"{option('expect')} {shown(text)} names no finding", hint)


def is_expected(finding: CheckpointFinding, text: str) -> bool:
    """Return whether a finding is the expected one: `lora<=16` allows ranks up to 16, `rounding:int4` any int4."""
    name, _, form = text.partition(":")
    if text.startswith("lora<="):
        return finding.finding == "lora" and finding.evidence["rank"] <= int(text[6:])
    if finding.finding != name or not form:
        return finding.finding == name
    wanted, got = (_words(one) for one in (form, str(finding.evidence["format"])))
    return wanted[0] == got[0] and set(wanted) <= set(got)


def _words(form: str) -> list[str]:
    """Return a format's name in one spelling, and its words."""
    name, *words = re.split(r"[:-]", form.strip().lower())
    known = find_storage(name)
    return [known.name if known else name, *words]


def compare_sources(
    base: str, new: str, third: str | None = None, tolerance: float | None = None, expect: str | None = None,
    exact: bool = False, prompt: str | Sequence[str] | None = None, prompts: Any = None,
    note: Note = lambda text: None, bar: Bar = lambda total: nullcontext(lambda count: None),
) -> CheckpointComparison:  # fmt: skip
    """Compare two checkpoints, and run both on texts if there are any. Calls `note` with what is worth knowing before;
    `bar` shows the progress over a number of values. Raises FFNError for checkpoints of different blocks."""
    if expect is not None:
        check_expected(expect)
    from ffncli.run.checkpoints.compare import compare_checkpoints, open_pair

    pair = open_pair(base, new, third)
    texts: list[str] = []
    if prompt is not None or prompts is not None:
        from ffncli.run.checkpoints.activations import compare_activations, texts_of

        texts = texts_of(prompt, prompts)
    with bar(pair.values) as advance:
        out = compare_checkpoints(pair, tolerance or 0.0, exact, note, advance)
    if texts:
        out = replace(out, activations=compare_activations(pair.base, pair.new, pair.layers, texts))
    return out if expect is None else replace(out, expected=is_expected(out.first, expect))
