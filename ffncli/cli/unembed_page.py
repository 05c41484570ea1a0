"""`--unembed`: the tokens that an FFN's output, or one of its hidden units, promotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ffncli.cli.prompt_options import PromptOptions
from ffncli.cli.prompt_page import label, named
from ffncli.show.parts import Answer, Heading, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from torch import Tensor

    from ffncli.cli.traced import Traced
    from ffncli.run.prepare import Prepared
    from ffncli.run.tokens import Token
    from ffncli.run.trace import Trace
    from ffncli.run.unembed import Promoted

TOP = 10
_OUTPUT = "the FFN's direct contribution alone, through the final norm and head, without the residual stream"
_UNIT = "the unit's column of the down projection alone, through the final norm and head; its sign is the activation's"


@dataclass(frozen=True)
class _Vector:
    """One vector to unembed: how it is called, the row of the input or None, the sign and expert of a unit."""

    title: str
    value: Tensor
    row: int | None = None
    sign: int | None = None
    expert: int | None = None


def with_unembedded(page: Answer, prompt: PromptOptions, traced: Traced) -> Answer:
    """The trace's answer with the tokens that are promoted, where that was asked for."""
    if not prompt.unembed:
        return page
    import torch

    from ffncli.run.unembed import unembed, written

    ready = traced.ready
    if prompt.neuron is None:
        vectors = _outputs(prompt, traced.given, traced.result)
    else:
        vectors = _unit(prompt.neuron, ready, traced.inside)
    stacked = written(ready, torch.stack([vector.value for vector in vectors]))
    found = unembed(traced.model, ready.layer, stacked, traced.request, prompt.top_tokens or TOP)
    rows: list[dict[str, Any]] = []
    parts: list[Part] = [Heading("unembed", _OUTPUT if prompt.neuron is None else _UNIT)]
    for vector, tokens in zip(vectors, found, strict=True):
        promoted = [asdict(token) for token in tokens]
        rows.append({"row": vector.row, "neuron": prompt.neuron, "expert": vector.expert, "sign": vector.sign,
                     "promoted": promoted})  # fmt: skip
        parts.append(_table(vector.title, tokens))
    return replace(page, body={**page.body, "unembed": rows}, parts=[*page.parts, *parts])


def _outputs(prompt: PromptOptions, given: Sequence[Token], result: Trace) -> list[_Vector]:
    """The FFN's output at the asked positions; the last one where none was asked for."""
    from ffncli.run.tokens import positions

    rows = result.tensors[result.ffn_output].flatten(0, -2)
    asked = prompt.position if prompt.position is None or not given else "all"  # a prompt's rows are chosen already
    chosen = positions(asked or "-1", rows.shape[0])
    return [_Vector(f"after token {label(given[i]) if given else i}", rows[i], i) for i in chosen]


def _unit(neuron: int, ready: Prepared, inside: frozenset[int] | None) -> list[_Vector]:
    """A hidden unit's column of the down projection, and its negative; of every asked expert in a MoE."""
    spec, down = ready.layer.spec, ready.weights["down.weight"]
    out = []
    for expert in sorted(inside or ()) if spec.moe else (None,):
        column = (down if expert is None else down[expert])[:, neuron]
        name = f"unit {neuron}" + ("" if expert is None else f" of expert {expert}")
        out.append(_Vector(f"{name}, positive", column, None, 1, expert))
        out.append(_Vector(f"{name}, negative", -column, None, -1, expert))
    return out


def _table(title: str, tokens: Sequence[Promoted]) -> Table:
    rows = [(named(t.id, t.text), t.id, t.logit, t.probability) for t in tokens]
    return Table(("token", "id", "logit", "probability"), rows, title=title)
