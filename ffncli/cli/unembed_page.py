"""`--unembed`: the tokens that an FFN's output, or one of its hidden units, promotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ffncli.cli.prompt_options import PromptOptions
from ffncli.cli.prompt_page import label, named
from ffncli.show.parts import Answer, Heading, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.cli.traced import Traced
    from ffncli.run.tokens import Token
    from ffncli.run.unembed import Added, Promoted

TOP = 10
_OUTPUT = "the FFN's direct contribution alone, through the final norm and head, without the residual stream"
_UNIT = "the unit's column of the down projection alone, through the final norm and head; its sign is the activation's"


def with_unembedded(page: Answer, prompt: PromptOptions, traced: Traced) -> Answer:
    """The trace's answer with the tokens that are promoted, where that was asked for."""
    if not prompt.unembed:
        return page
    from ffncli.run.tokens import positions
    from ffncli.run.unembed import of_rows, of_unit, promoted

    ready = traced.ready
    if prompt.neuron is None:
        output = traced.result.tensors[traced.result.ffn_output].flatten(0, -2)
        chosen = bool(traced.given) and prompt.position is not None  # a prompt's rows are only those already
        added = of_rows(output, positions("all" if chosen else prompt.position or "-1", output.shape[0]))
    else:
        added = of_unit(ready, prompt.neuron, traced.inside)
    found = promoted(traced.model, ready, added, traced.request, prompt.top_tokens or TOP)
    rows: list[dict[str, Any]] = []
    parts: list[Part] = [Heading("unembed", _OUTPUT if prompt.neuron is None else _UNIT)]
    for one, tokens in zip(added, found, strict=True):
        rows.append({"row": one.row, "neuron": one.neuron, "expert": one.expert, "sign": one.sign,
                     "promoted": [asdict(token) for token in tokens]})  # fmt: skip
        parts.append(_table(_title(one, traced.given), tokens))
    return replace(page, body={**page.body, "unembed": rows}, parts=[*page.parts, *parts])


def _title(one: Added, given: Sequence[Token]) -> str:
    """`after token 3 "sat"`, `unit 7 of expert 3, negative`."""
    if one.row is not None:
        return f"after token {label(given[one.row]) if given else one.row}"
    where = "" if one.expert is None else f" of expert {one.expert}"
    return f"unit {one.neuron}{where}, {'positive' if one.sign == 1 else 'negative'}"


def _table(title: str, tokens: Sequence[Promoted]) -> Table:
    rows = [(named(t.id, t.text), t.id, t.logit, t.probability) for t in tokens]
    return Table(("token", "id", "logit", "probability"), rows, title=title)
