"""`ffn trace`."""

from __future__ import annotations

from ffncli.cli.example_options import ExampleOptions
from ffncli.cli.explain_options import ExplainOptions
from ffncli.cli.insight import InsightOptions
from ffncli.cli.options import DimensionOptions, OutputOptions, RunOptions, Source, TokenOptions, spread
from ffncli.cli.prompt_options import PromptOptions
from ffncli.cli.prompt_page import kept, with_prompt
from ffncli.cli.save_options import SaveOptions
from ffncli.cli.survey_page import show_survey
from ffncli.cli.trace_page import answer
from ffncli.cli.traced import Traced
from ffncli.cli.unembed_page import with_unembedded
from ffncli.cli.view_options import ViewOptions
from ffncli.run.threads import set_threads, sleep_while_waiting


@spread
def command(
    *,
    source: Source = None,
    run: RunOptions,
    tokens: TokenOptions,
    view: ViewOptions,
    explain: ExplainOptions,
    insight: InsightOptions,
    texts: ExampleOptions,
    prompt: PromptOptions,
    dimensions: DimensionOptions,
    save: SaveOptions,
    show: OutputOptions,
) -> None:
    """Run a block step by step and print every intermediate.

    Try: ffn trace ./my-model --layer 1, ffn trace 512x2048:gelu --explain 'up[0,3]'
    """
    output = show.output()
    prompt.check(run, tokens, dimensions)
    said = dimensions.dimensions()
    sleep_while_waiting()  # a module of the user's own imports torch
    example, model = texts.chosen(source, said, run, tokens, prompt.unembed)
    if run.layer == "all":
        one = {"--explain": explain.explain, "--save": save.save, "--vocab": texts.vocab, "--expert": view.expert}
        show_survey(model, run, tokens, prompt, insight, one, output)
        return
    values, inside, leading = view.values(), view.inside(model, run.layer), tokens.leading()
    explain = explain.renamed(example.aliases if example else {})
    explain.spots()
    save.check(show.out, show.force)
    prompt.check_model(model, run, inside, texts.vocab)

    # From here on torch is needed; what can be wrong without it has been said.
    set_threads(run.threads)
    from ffncli.run.not_finite import find_not_finite
    from ffncli.run.prepare import Request
    from ffncli.run.trace import trace

    vocab = texts.final_width(example)
    request = Request(run.layer, run.input, leading, run.dtype, run.device, run.seed, run.train, vocab)
    ready, given = prompt.prepare(model, request, example)
    output.notes(*model.notes, *map(str, model.differences), *ready.notes)
    keep = frozenset({"probs"}) | explain.keep(ready.steps) | save.keep(ready, inside) | kept(ready, prompt)
    keep |= view.all_of(ready, inside)
    top = insight.top_units or 0
    result = trace(ready.steps, ready.weights, ready.inputs, ready.mode, values, inside, keep, top)
    output.notes(*view.remarks(inside, result))
    bad = find_not_finite(result, ready.weights)
    traced = Traced(model, request, example, ready, given, result, inside, values, view.digits)
    page = answer(traced, bad)
    save.write(page.body["block"], traced, output)
    page = with_unembedded(with_prompt(page, prompt, traced), prompt, texts, traced)
    output.show(explain.with_answers(texts.extended(page, traced), traced))
    insight.judge(bad, output)
