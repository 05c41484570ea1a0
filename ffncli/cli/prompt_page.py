"""What a run of the real model adds to a trace: its tokens, the agreement with its own FFN, the chosen experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ffncli.block.steps import Experts, ffn_span
from ffncli.show.parts import Answer, Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import edges

if TYPE_CHECKING:
    from ffncli.cli.prompt_options import PromptOptions
    from ffncli.cli.traced import Traced
    from ffncli.run.agreement import Agreement
    from ffncli.run.prepare import Prepared
    from ffncli.run.tokens import Token

_LONGEST = 12  # characters of a token's text in a label: a row of eight values still fits 100 columns


def label(token: Token) -> str:
    """A token as a row's label: `3 " world"`, or its number where nothing says its text."""
    return f"{token.position} {named(token.id, token.text)}"


def named(number: int, text: str | None) -> str:
    """A token's text in quotation marks; `#1917` without one."""
    if text is None:
        return f"#{number}"
    return f'"{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"}"'


def listed(tokens: Sequence[Token]) -> str:
    """`3 tokens: 0 "Hello", 1 " my", 2 " dear"`, the first and the last of many."""
    some = ", ".join(label(tokens[i]) for i in edges(len(tokens), 8))
    return f"{len(tokens)} token{'s' * (len(tokens) != 1)}: {some}"


def labels(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Labels for the rows of a trace; none without a prompt."""
    return tuple(map(label, tokens))


def kept(ready: Prepared, prompt: PromptOptions) -> frozenset[str]:
    """The steps whose whole tensors `with_prompt` needs: the routes, and what leaves the FFN."""
    from ffncli.run.chosen import routes

    wanted = prompt.unembed or ready.reference is not None
    return frozenset(routes(ready.steps).keys() | ({ffn_span(ready.steps)[1]} if wanted else set()))


def with_prompt(page: Answer, prompt: PromptOptions, traced: Traced) -> Answer:
    """The trace's answer with what a run of the model adds, and with the chosen experts where there are any."""
    ready, tokens, result = traced.ready, traced.given, traced.result
    if ready.reference is not None:
        from ffncli.run.agreement import agreement

        found = agreement(result.tensors[result.ffn_output], ready.reference)
        page = _with_model_run(page, prompt.prompt, tokens, found)
    return _with_routes(page, traced)


def _with_model_run(page: Answer, prompt: str | None, tokens: Sequence[Token], found: Agreement) -> Answer:
    """The answer with what the model was given, and how far our output is from its own."""
    body = {"model_run": {"prompt": prompt, "tokens": [*map(asdict, tokens)], "agreement": asdict(found)}}
    lines: list[Part] = [Line(listed(tokens)), Line(agreement_text(found))]
    return replace(page, body={**page.body, **body}, parts=[*page.parts[:2], *lines, *page.parts[2:]])


def agreement_text(found: Agreement) -> str:
    """One line: how far our steps are from the model's own FFN."""
    if not found.max_error:
        return "the model's own FFN gives the same"  # NaN for NaN, and 0 for -0: equal, and not always bit for bit
    ulps = "" if found.ulps is None else f", {found.ulps:.3g} units in the last place there"
    error, relative = f"max error {found.max_error:.2e}", f"relative {found.relative_error:.2e}"
    return f"against the model's own FFN: {error}, {relative}{ulps}"


def _with_routes(page: Answer, traced: Traced) -> Answer:
    """The answer with a table of the experts that were chosen for each token, and their weights."""
    from ffncli.run.chosen import chosen_experts, routes

    steps, rows = traced.ready.steps, labels(traced.given)
    found, experts = chosen_experts(steps, traced.result.tensors, traced.show), routes(steps)
    if not found:
        return page
    table = []
    for one in found:
        pairs = zip(one.experts, one.weights, strict=True)
        texts = [f"{_expert(e, experts[one.step])}: {weight:.4f}" for e, weight in pairs]
        table.append((rows[one.token] if rows else str(one.token), ", ".join(texts)))
    parts = [*page.parts, Table(("token", "expert: weight"), table, title="The chosen experts, heaviest first")]
    return replace(page, body={**page.body, "routes": [*map(asdict, found)]}, parts=parts)


def _expert(number: int, op: Experts) -> str:
    return str(number) if number < op.experts.size else f"identity {number}"
