"""`ffn trace`."""

from __future__ import annotations

from ffncli.cli.common.corpus_options import corpus_size
from ffncli.cli.common.options import OutputOptions, RunOptions, Source, TokenOptions
from ffncli.cli.common.parsers import joined
from ffncli.cli.common.prompt_options import PromptOptions
from ffncli.cli.common.rank_options import SplitOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.trace.change_options import ChangeOptions
from ffncli.cli.trace.corpus_options import CorpusOptions, refuse
from ffncli.cli.trace.corpus_page import corpus_answer, not_finite_layers
from ffncli.cli.trace.example_options import ExampleOptions
from ffncli.cli.trace.explain_options import ExplainOptions
from ffncli.cli.trace.page import trace_answer
from ffncli.cli.trace.save_options import SaveOptions, is_page, notes_alone, write_page
from ffncli.cli.trace.survey_page import not_finite_texts, survey_answer
from ffncli.cli.trace.view_options import InsightOptions, ViewOptions
from ffncli.models.dimensions import Dimensions
from ffncli.run.corpus.call import corpus_for
from ffncli.run.corpus.question import CorpusQuestion
from ffncli.run.trace.call import session_for, survey_for
from ffncli.run.trace.question import Question
from ffncli.run.user.time_limit import LoadOptions
from ffncli.show.color import ColorChoice
from ffncli.show.output import Output
from ffncli.show.progress import progress


@spread
def command(
    *,
    source: Source = None,
    run: RunOptions,
    tokens: TokenOptions,
    view: ViewOptions,
    explain: ExplainOptions,
    change: ChangeOptions,
    insight: InsightOptions,
    split: SplitOptions,
    texts: ExampleOptions,
    prompt: PromptOptions,
    corpus: CorpusOptions,
    dimensions: Dimensions,
    load_limit: LoadOptions,
    save: SaveOptions,
    show: OutputOptions,
) -> None:
    """Run a block step by step and print every intermediate.

    Examples:
      ffn trace 4x8:relu --input 1,2,3,4          # small enough to check by hand
      ffn trace 512x2048:gelu --explain 'up[0,3]' # how one number was computed
      ffn trace ./my-model -l 1 -p "Hello world"  # a checkpoint, on real text
      ffn trace ./my-model --prompts texts.txt    # every layer over many texts
    """
    output = notes_alone(show).output()
    load_limit.apply()
    save.check(show, explain, view, insight, change, split)
    if (prompts := corpus.source_of(prompt.prompt)) is not None:
        refuse(tokens, view, explain, change, split, texts, prompt, dimensions, run, save)
        chosen = {**corpus.values(), "save": save.save, "top_units": insight.top_units, "force": show.force}
        asked = CorpusQuestion(source, prompts, run.layer, run.dtype, run.device, run.threads, **chosen)
        return _show_corpus(asked, view.digits, insight, show.color_choice(), output)
    question = Question(
        source, dimensions, **vars(run), **vars(tokens), **prompt.values(), **vars(texts), **vars(explain),
        **vars(change), **vars(save), expert=joined(view.expert), show=view.values(), keep=view.kept(),
        top_units=insight.top_units, force=show.force, **vars(split))  # fmt: skip
    output.notes(*prompt.notes)
    return write_page(question, show, output) if is_page(show.out) else _show_trace(question, view, insight, output)


def _show_trace(question: Question, view: ViewOptions, insight: InsightOptions, output: Output) -> None:
    """One layer, or a row for each."""
    if question.layer == "all":
        survey = survey_for(question, output.note)
        output.show(survey_answer(survey, insight.top_units or 1))
        insight.judge(not_finite_texts(survey), output)
    else:
        session = session_for(question, output.note)
        output.show(trace_answer(session, view.digits, view.steps(question), view.heatmap))
        insight.judge([*map(str, session.not_finite)], output)


def _show_corpus(
    question: CorpusQuestion, digits: int, insight: InsightOptions, color: ColorChoice, output: Output
) -> None:
    """Every layer over many texts."""
    with progress(corpus_size(question.prompts), "texts", output.quiet, color) as advance:
        survey = corpus_for(question, output.note, advance)
    output.show(corpus_answer(survey, digits))
    insight.judge(not_finite_layers(survey), output)
