"""The load of a mixture's experts: of one layer, and a row for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.text import in_percent, percent, plural

if TYPE_CHECKING:
    from ffncli.run.trace.routing import Routing

_MOST_EXPERTS = 8  # that the page lists; JSON has all
IN_CSV = ("tokens_per_expert", "idle_experts", "busiest_expert", "busiest_share", "entropy_bits")


def routing_json(routing: Routing | None) -> dict[str, Any] | None:
    """The record under the keys of docs/json.md; None in a dense block."""
    return asdict(routing) if routing else None


def routing_parts(routing: Routing | None) -> list[Part]:
    """How many experts are used, which are idle, the busiest ones, and how even the load is."""
    if routing is None:
        return []
    load, tokens = routing.tokens_per_expert, f"{routing.tokens:,} {plural('token', routing.tokens)}"
    parts: list[Part] = [
        Heading(
            f"experts: {used(routing)} used", f"{routing.choices:,} {plural('choice', routing.choices)} for {tokens}"
        )
    ]
    if routing.idle_experts:
        parts.append(Line(f"idle: {_some(routing.idle_experts)}"))
    if routing.entropy_bits is not None:
        entropy = f"{routing.entropy_bits:.3g} bits, {routing.max_entropy_bits:.3g} where all are equal"
        parts.append(Line(f"entropy of the load: {entropy}"))
    if routing.identity_choices:
        parts.append(Line(f"{routing.identity_choices:,} more choices are identity experts"))
    busiest = sorted((e for e, count in enumerate(load) if count), key=lambda e: -load[e])[:_MOST_EXPERTS]
    rows = [
        (str(e), load[e], in_percent(load[e] / routing.choices), load[e] / routing.even_load) for e in busiest
    ]  # fmt: skip
    title = f"The busiest experts; evenly spread, each has {routing.even_load:.3g} ({percent(1 / len(load))})"
    return [*parts, Table(("expert", "tokens", "share %", "× even"), rows, title)] if rows else parts


def used(routing: Routing) -> str:
    """`5 of 8`: the experts that receive a token."""
    experts = len(routing.tokens_per_expert)
    return f"{experts - len(routing.idle_experts)} of {experts}"


def layers_table(loads: Sequence[tuple[str, Routing]]) -> Table:
    """A row for each (layer, load) of a mixture."""
    rows = [
        (
            layer, used(load), None if load.busiest_expert is None else str(load.busiest_expert),
            in_percent(load.busiest_share), in_percent(1 / len(load.tokens_per_expert)), load.entropy_bits,
            load.max_entropy_bits,
        )
        for layer, load in loads
    ]  # fmt: skip
    columns = ("layer", "experts used", "busiest", "share %", "even %", "entropy bits", "at most")
    return Table(columns, rows, "The load of the experts")


def _some(experts: Sequence[int]) -> str:
    """The first of these numbers, and how many more there are."""
    few, more = experts[:_MOST_EXPERTS], len(experts) - _MOST_EXPERTS
    return ", ".join(map(str, few)) + (f" and {more:,} more" if more > 0 else "")
