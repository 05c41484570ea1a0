"""What a run of the real model adds to a trace: its tokens, the agreement with its own FFN, the chosen experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ffncli.block.steps import Experts, Step, ffn_span
from ffncli.show.parts import Answer, Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import edges

if TYPE_CHECKING:
    from torch import Tensor

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


def labels(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Labels for the rows of a trace; none without a prompt."""
    return tuple(map(label, tokens))


def kept(ready: Prepared, prompt: PromptOptions) -> frozenset[str]:
    """The steps whose whole tensors `with_prompt` needs: the routes, and what leaves the FFN."""
    wanted = prompt.unembed or ready.reference is not None
    return frozenset(_routes(ready.steps) | ({ffn_span(ready.steps)[1]} if wanted else set()))


def _routes(steps: Sequence[Step]) -> set[str]:
    """The steps whose output says which experts a token is given to."""
    return {step.inputs[1] for step in steps if isinstance(step.op, Experts)}


def with_prompt(page: Answer, prompt: PromptOptions, traced: Traced) -> Answer:
    """The trace's answer with what a run of the model adds, and with the chosen experts where there are any."""
    ready, tokens, result = traced.ready, traced.given, traced.result
    if ready.reference is not None:
        from ffncli.run.agreement import agreement

        found = agreement(result.tensors[result.ffn_output], ready.reference)
        page = _with_model_run(page, prompt.prompt, tokens, found)
    routed = {name: result.tensors[name] for name in _routes(ready.steps)}
    return _with_routes(page, ready.steps, routed, labels(tokens), traced.show) if routed else page


def _with_model_run(page: Answer, prompt: str | None, tokens: Sequence[Token], found: Agreement) -> Answer:
    """The answer with what the model was given, and how far our output is from its own."""
    body = {"model_run": {"prompt": prompt, "tokens": [*map(asdict, tokens)], "agreement": asdict(found)}}
    shown = ", ".join(map(label, (tokens[i] for i in edges(len(tokens), 8))))
    lines: list[Part] = [Line(f"{len(tokens)} token{'s' * (len(tokens) != 1)}: {shown}"), Line(agreement_text(found))]
    return replace(page, body={**page.body, **body}, parts=[*page.parts[:2], *lines, *page.parts[2:]])


def agreement_text(found: Agreement) -> str:
    """One line: how far our steps are from the model's own FFN."""
    if not found.max_error:
        return "the model's own FFN gives the same"  # NaN for NaN, and 0 for -0: equal, and not always bit for bit
    return (
        f"against the model's own FFN: max error {found.max_error:.2e}, relative {found.relative_error:.2e}, "
        f"{found.ulps:.3g} units in the last place of the largest value"
    )


def _with_routes(
    page: Answer, steps: Sequence[Step], tensors: dict[str, Tensor], labels: Sequence[str], show: int | None
) -> Answer:
    """The answer with a table of the experts that were chosen for each token, and their weights."""
    rows, table = [], []
    for name, tensor in tensors.items():
        experts = next(s.op for s in steps if isinstance(s.op, Experts) and name in s.inputs)
        assert isinstance(experts, Experts)
        flat = tensor.flatten(0, -2)
        for at in edges(flat.shape[0], flat.shape[0] if show is None else show):
            weights = flat[at].double().cpu()
            chosen = sorted(weights.nonzero().flatten().tolist(), key=lambda e: -float(weights[e].abs()))
            numbers = [float(weights[e]) for e in chosen]
            rows.append({"step": name, "token": at, "experts": chosen, "weights": numbers})
            texts = [f"{_expert(e, experts)}: {w:.4f}" for e, w in zip(chosen, numbers, strict=True)]
            table.append((labels[at] if labels else str(at), ", ".join(texts)))
    parts = [*page.parts, Table(("token", "expert: weight"), table, title="The chosen experts, heaviest first")]
    return replace(page, body={**page.body, "routes": rows}, parts=parts)


def _expert(number: int, op: Experts) -> str:
    return str(number) if number < op.experts.size else f"identity {number}"
