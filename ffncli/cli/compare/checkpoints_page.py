"""Two checkpoints compared, as JSON, CSV and tables: what was done, by how much, where, and what it does to a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.cli.common.summaries import csv_table, named
from ffncli.run.checkpoints.results import CONVENTIONS
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import counted, in_percent, rounded

if TYPE_CHECKING:
    from ffncli.run.checkpoints.activations import ActivationComparison
    from ffncli.run.checkpoints.results import ChangedPart, CheckpointComparison, ParameterRow

_MOST_ROWS, _MOST_LAYERS, _MOST_UNITS, _MOST_PERMUTED = 24, 48, 10, 64
_SPECTRUM = 3  # the index of the first 8 singular values among the energies


def checkpoints_answer(result: CheckpointComparison, verdict: bool = True) -> Answer:
    """Build the answer: findings and rows in JSON, rows in CSV. Without `verdict` the page omits the first finding,
    because the error message contains it."""
    body: dict[str, Any] = {
        "base": result.base, "new": result.new, "model": result.model,
        "findings": [asdict(one) for one in result.findings], "tolerance": result.tolerance, "within": result.within,
        "expected": result.expected, "rows": [asdict(row) for row in result.rows],
        "units": [asdict(one) for one in result.units], "experts": [asdict(one) for one in result.experts],
        "outside": [asdict(one) for one in result.outside], "notes": list(result.notes),
        "activations": None if result.activations is None else asdict(result.activations),
    }  # fmt: skip
    parts: list[Part] = [Heading(f"{result.base} against {result.new}", f"{result.model}; BASE is the reference")]
    first, *others = result.findings
    parts += [Heading(_sentence(first.detail))] if verdict else []
    parts += [Line(f"also {one.detail}") for one in others]
    changed = [row for row in result.rows if row.changed_share]
    if changed:
        parts += [_table(changed)] if len(changed) <= _MOST_ROWS else [_map(result.rows)]
        parts += _units(result.units, result.experts)
    parts += [Line(f"outside the FFNs, {_outside(one)}", quiet=True) for one in result.outside]
    if result.activations is not None:
        parts += _activations(result.activations)
    return Answer("compare", body, csv_table([asdict(row) for row in result.rows]), parts, CONVENTIONS)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _outside(one: Any) -> str:
    if one.group == "adapter":
        return str(one.detail)
    tensors = counted(one.base, "tensor") if one.base == one.new else f"{one.base} tensors, {one.new} in NEW"
    return f"{one.group}: {tensors}" + (f", {one.detail}" if one.detail else "")


def _names(rows: Sequence[ParameterRow]) -> bool:
    return len({row.stack for row in rows}) > 1


def _table(rows: Sequence[ParameterRow]) -> Table:
    """Show one line for each parameter that changed."""
    many = _names(rows)
    columns = ("layer", "matrix", "change %", "values %", "largest", "at", "rank 90 %", "first 8 %", "cosine")
    cells = [
        (
            f"{row.stack}.{row.layer}" if many else row.layer, row.matrix, _share(row.relative_change),
            _share(row.changed_share), rounded(row.max_change, 3), _place(row.max_at), row.rank_90,
            _share(row.energy[_SPECTRUM]) if len(row.energy) > _SPECTRUM else None,
            None if row.cosine is None else f"{row.cosine:.5f}",
        )
        for row in rows
    ]  # fmt: skip
    caption = "change: ‖new - base‖ / ‖base‖; first 8: the energy of the change in 8 singular values"
    return Table(columns, cells, "What changed", labels=2, caption=caption)


def _map(rows: Sequence[ParameterRow]) -> Table:
    """Show the relative change of each matrix, one line for each layer."""
    many, names = _names(rows), list(dict.fromkeys(row.matrix for row in rows))
    layers: dict[tuple[str, int], dict[str, ParameterRow]] = {}
    for row in rows:
        layers.setdefault((row.stack, row.layer), {})[row.matrix] = row
    cells = [
        (f"{stack}.{layer}" if many else layer, *(_share(of[n].relative_change) if n in of else None for n in names))
        for (stack, layer), of in [*layers.items()][:_MOST_LAYERS]
    ]
    left = len(layers) - _MOST_LAYERS
    caption = f"{_MOST_LAYERS} of {len(layers)} layers; --json and --csv have all, with spectra" if left > 0 else (
        "--json and --csv have all figures, with spectra")  # fmt: skip
    return Table(("layer", *names), cells, "‖new - base‖ / ‖base‖ in %", labels=1, caption=caption)


def _place(at: tuple[int, ...] | None) -> str | None:
    return None if at is None else str([*at])


def _share(share: float | None) -> float | None:
    return rounded(in_percent_exactly(share), 3)


def in_percent_exactly(share: float | None) -> float | None:
    """Return a share of 1 as a percentage, with all digits: changes are often far below 0.01 %."""
    return None if share is None else 100 * share


def _units(units: Sequence[ChangedPart], experts: Sequence[ChangedPart]) -> Iterator[Part]:
    """Show the experts and the hidden units that changed most."""
    for title, parts in (("Experts", experts), ("Hidden units", units)):
        ranked = sorted(parts, key=lambda part: -part.relative_change)[:_MOST_UNITS]
        if ranked:
            texts = [f"{_part(one)} ({in_percent(one.relative_change)} %)" for one in ranked[:5]]
            yield Line(f"{title} that changed most: {', '.join(texts)}")


def _part(one: ChangedPart) -> str:
    kind = "shared" if one.shared else ""
    which = [f"layer {one.layer}", kind, f"expert {one.expert}" if one.expert is not None else ""]
    which.append(f"unit {one.unit}" if one.unit is not None else "")
    return " ".join(filter(None, which))


def _activations(result: ActivationComparison) -> Iterator[Part]:
    """Show where both models part on the texts, and what each layer adds."""
    texts = f"{counted(result.prompts, 'text')}, {counted(result.tokens, 'token')}"
    if result.first_layer is None:
        yield Heading("The activations are equal", texts)
    else:
        yield Heading(f"The activations part in {result.first_layer}, at {result.first_step}", texts)
    yield from (Line(note) for note in result.notes)
    if result.kl is not None:
        other = f"the most likely token differs at {result.top_tokens_differ} of {counted(result.tokens, 'position')}"
        yield Line(f"KL divergence of the next token {result.kl:.3g} nats; {other}")
    rows = [(row.layer, *(_share(value) for value in (row.total, row.inherited, row.added)))
            for row in result.rows[:_MOST_LAYERS]]  # fmt: skip
    yield Table(("layer", "total %", "inherited %", "added %"), rows, "Change of each FFN's output", labels=1)
    top = [(one.prompt, named(one.id, one.text), _share(one.base_probability), _share(one.new_probability))
           for one in result.top[:12]]  # fmt: skip
    if top:
        yield Table(("text", "next token", "BASE %", "NEW %"), top, "Likely next tokens", labels=2)
