"""`ffn trace`."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from ffncli.cli.example_options import ExampleOptions
from ffncli.cli.explain_options import ExplainOptions
from ffncli.cli.insight import InsightOptions
from ffncli.cli.options import DimensionOptions, OutputOptions, RunOptions, TokenOptions, natural, positive, spread
from ffncli.cli.prompt_options import PromptOptions
from ffncli.cli.prompt_page import completed, kept, labels
from ffncli.cli.save_options import SaveOptions
from ffncli.cli.survey_page import show_survey
from ffncli.cli.trace_page import answer, block_of
from ffncli.cli.unembed_page import unembedded
from ffncli.errors import FFNError, shown
from ffncli.models.model import Model

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="Model directory or name, 512x2048:gelu, my.py:Class (runs that file); default: a notebook's.",
    ),
]
Expert = Annotated[str | None, typer.Option("--expert", metavar="I,J|all", help="Show the steps inside experts.")]
Values = Annotated[str, typer.Option("--show", metavar="N|all", help="Values shown per axis.")]
Digits = Annotated[int, typer.Option("--digits", metavar="N", parser=natural("--digits", 17), help="Digits shown.")]


@spread
def command(
    *,
    source: Source = None,
    run: RunOptions,
    tokens: TokenOptions,
    prompt: PromptOptions,
    expert: Expert = None,
    values: Values = "8",
    digits: Digits = 4,
    insight: InsightOptions,
    dimensions: DimensionOptions,
    texts: ExampleOptions,
    explain: ExplainOptions,
    save: SaveOptions,
    show: OutputOptions,
) -> None:
    """Run a block step by step and print every intermediate.

    Try: ffn trace ./my-model --layer 1, ffn trace 512x2048:gelu
    """
    output = show.output()
    prompt.check(run, tokens, dimensions)
    said = dimensions.dimensions()
    example, model = texts.chosen(source, said, run, tokens)
    if run.layer == "all":
        one = {"--explain": explain.explain, "--save": save.save, "--vocab": texts.vocab, "--expert": expert}
        show_survey(model, run, tokens, prompt, insight, one, output)
        return
    shown_values, inside, leading = _count("--show", values), _expert(expert, model, run.layer), tokens.leading()
    explain = explain.renamed(example.aliases if example else {})
    explain.spots()
    save.check(show.out, show.force)
    prompt.check_model(model, run, inside, texts.vocab)

    # From here on torch is needed; what can be wrong without it has been said.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take four times as long on a busy machine
    import torch

    from ffncli.run.not_finite import find_not_finite
    from ffncli.run.prepare import Request
    from ffncli.run.trace import trace

    if run.threads:
        torch.set_num_threads(run.threads)
    vocab = texts.final_width(example)
    request = Request(run.layer, run.input, leading, run.dtype, run.device, run.seed, run.train, vocab)
    ready, given = prompt.prepare(model, request, example)
    if run.train and not any(step.output == "dropout" for step in ready.steps):
        output.note("--train changes nothing: the block has no dropout")
    for note in (*model.notes, *map(str, model.differences), *ready.notes):
        output.note(note)
    keep = frozenset({"probs"}) | explain.keep(ready.steps) | save.keep(ready, inside) | kept(ready, prompt)
    top = insight.top_units or 0
    result = trace(ready.steps, ready.weights, ready.inputs, ready.mode, shown_values, inside, keep, top)
    bad = find_not_finite(result, ready.weights)
    idle = [e for e in sorted(inside or ()) if not any(s.name.startswith(f"experts.{e}.") for s in result.steps)]
    if idle:
        output.note(f"no token is routed to expert {', '.join(map(str, idle))}")
    page = answer(block_of(model, ready, run.device), result, digits, bad, labels(given))
    save.write(page.body["block"], ready, result, output)
    page = completed(page, prompt, ready, given, result, shown_values)
    page = unembedded(page, prompt, model, request, ready, given, result, inside)
    page = texts.extended(page, result, ready, example, shown_values, digits)
    output.show(explain.with_answers(page, ready, result, digits))
    insight.judge(bad, output)


def _count(option: str, text: str) -> int | None:
    """A number of values, None for all."""
    return None if text == "all" else positive(option)(text)


def _expert(text: str | None, model: Model, layer: str | None) -> frozenset[int] | None:
    """The experts to look into: none, some (`0,3`), or all (None). FFNError where the model has no such expert."""
    if text is None:
        return frozenset()
    moe = model.layer(layer).spec.moe
    if moe is None:
        first = next((g.layers[0] for g in model.groups if g.spec.moe), None)
        advice = "it is dense" if first is None else f"the first MoE layer is {first}"
        raise FFNError(f"--expert {shown(text)}: this layer of {model.name} has no experts", advice)
    if text == "all":
        return None
    if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
        raise FFNError(f"--expert must be a number, a comma list or all, got {shown(text)}")
    chosen = frozenset(int(word) for word in text.split(","))
    if max(chosen) >= moe.experts:
        raise FFNError(f"--expert {max(chosen)} is out of range", f"{model.name} has experts 0 to {moe.experts - 1}")
    return chosen
