"""`--unembed`: the tokens that an FFN's output, or one of its hidden units, promotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ffncli.cli.example_options import ExampleOptions
from ffncli.cli.prompt_options import PromptOptions
from ffncli.cli.prompt_page import label, named
from ffncli.cli.sampling_page import NOTHING, columns, more, sets_text
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.cli.traced import Traced
    from ffncli.run.tokens import Token
    from ffncli.run.unembed import Added, Unembedded

TOP = 10
_OUTPUT = "the FFN's direct contribution alone, through the final norm and head, without the residual stream"
_UNIT = "the unit's column of the down projection alone, through the final norm and head; its sign is the activation's"


def with_unembedded(page: Answer, prompt: PromptOptions, texts: ExampleOptions, traced: Traced) -> Answer:
    """The trace's answer with the tokens that are promoted, where that was asked for.

    Raises FFNError for a --sample-top-k above the vocabulary.
    """
    if not prompt.unembed:
        return page
    from ffncli.run.tokens import positions
    from ffncli.run.unembed import Wanted, of_rows, of_unit, promoted

    ready = traced.ready
    if prompt.neuron is None:
        output = traced.result.tensors[traced.result.ffn_output].flatten(0, -2)
        chosen = bool(traced.given) and prompt.position is not None  # a prompt's rows are only those already
        added = of_rows(output, positions("all" if chosen else prompt.position or "-1", output.shape[0]))
    else:
        added = of_unit(ready, prompt.neuron, traced.inside)
    top_k, top_p = texts.sets
    wanted = Wanted(prompt.top_tokens or max(TOP, top_k), top_k, top_p)
    found = promoted(traced.model, ready, added, traced.request, wanted)
    texts.check_top_k(found[0].vocab)
    rows: list[dict[str, Any]] = []
    parts: list[Part] = [Heading("unembed", _OUTPUT if prompt.neuron is None else _UNIT)]
    for one, what in zip(added, found, strict=True):
        rows.append(_record(one, what))
        parts += _parts(_title(one, traced.given), what, traced.digits)
    return replace(page, body={**page.body, "unembed": rows}, parts=[*page.parts, *parts])


def _title(one: Added, given: Sequence[Token]) -> str:
    """`after token 3 "sat"`, `unit 7 of expert 3, negative`."""
    if one.row is not None:
        return f"after token {label(given[one.row]) if given else one.row}"
    where = "" if one.expert is None else f" of expert {one.expert}"
    return f"unit {one.neuron}{where}, {'positive' if one.sign == 1 else 'negative'}"


def _record(one: Added, what: Unembedded) -> dict[str, Any]:
    sets = what.sets
    return {
        "row": one.row, "neuron": one.neuron, "expert": one.expert, "sign": one.sign,
        "argmax": sets.argmax, "top_k": sets.top_k, "top_k_mass": sets.top_k_mass,
        "top_p": sets.top_p, "top_p_count": sets.top_p_count, "top_p_mass": sets.top_p_mass,
        "promoted": [asdict(token) for token in what.promoted],
    }  # fmt: skip


def _parts(title: str, what: Unembedded, digits: int) -> list[Part]:
    """The tokens with their sets marked; the first is the argmax."""
    if not what.promoted:
        return [Heading(f"{title}: {NOTHING}")]
    rows = [
        (named(t.id, t.text), t.id, t.logit, t.probability, t.cumulative, t.in_top_k, t.in_top_p) for t in what.promoted
    ]
    argmax = what.promoted[0]
    return [
        Table(
            ("token", "id", "logit", "probability", *columns(what.sets)),
            rows,
            title=f"{title}: argmax {named(argmax.id, argmax.text)}",
        ),
        Line(sets_text(what.sets, what.vocab, digits)),
        *more(what.sets, len(rows), "--top-tokens"),
    ]
