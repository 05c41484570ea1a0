"""`ffn trace`: one layer, one row per layer, or every layer over many texts."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ffncli.cli.common.options import CORPUS, ONE_OR_MANY, OutputOptions, corpus_size, lines_note, prompt_text
from ffncli.cli.common.spread import spread
from ffncli.cli.trace.layers_page import corpus_answer, not_finite_layers, not_finite_texts, survey_answer
from ffncli.cli.trace.page import trace_answer
from ffncli.cli.trace.unit_page import unit_answer
from ffncli.errors import ExitCode, FFNError, option
from ffncli.models.examples import find
from ffncli.options import conflicts
from ffncli.options.accept import COUNT, PATH, listed, whole
from ffncli.options.conflicts import Conflict
from ffncli.options.opt import Opt, Options
from ffncli.options.shared import VIEW
from ffncli.run.corpus.call import corpus_for
from ffncli.run.corpus.question import CorpusQuestion, UnitQuestion
from ffncli.run.trace.call import session_for, survey_for, unit_for
from ffncli.run.trace.question import ONE_LAYER, RULES, Question, SurveyQuestion
from ffncli.run.user.time_limit import LoadOptions
from ffncli.show.color import progress
from ffncli.show.output import Output
from ffncli.show.text import bytes_text
from ffncli.system.files import check_writable, written_together


@dataclass(frozen=True, kw_only=True)
class TraceView(Options):
    """Options for what the page shows of a run, and for when the command fails."""

    verbose: Annotated[
        bool,
        Opt(
            "-v", "--verbose", group=VIEW, after="show",
            help="With --unembed, --promotes, --set, --ablate, --tp, --ep, also show the steps.",
        ),
    ] = False  # fmt: skip
    digits: Annotated[
        int, Opt("--digits", accepts=whole(0, 17), group=VIEW, after="verbose", help="Digits to show.")
    ] = 4
    heatmap: Annotated[
        bool,
        Opt("--heatmap", group=VIEW, after="digits", help="Show each step as a heat map instead of its values."),
    ] = False
    fail_on_nonfinite: Annotated[
        bool, Opt("--fail-on-nonfinite", group=VIEW, help="Exit 1 if the input, a weight or a step has NaN or Inf.")
    ] = False

    def steps(self, question: Question) -> bool:
        """Return True if the page shows the steps. --unembed, --promotes, --tp, --ep, --set and --ablate show something
        else instead, unless an option about steps is given."""
        lens = question.unembed or question.promotes is not None
        steps = self.verbose or question.expert is not None
        steps = steps or (question.top_units is not None and question.promotes is None)
        if question.ranks:
            return steps
        return (
            steps
            or "show" in conflicts.given(question)
            or not (lens or question.set or question.ablate or question.patch_from)
        )

    def judge(self, not_finite: Sequence[str], output: Output) -> None:
        """Report non-finite values after the answer: as notes, or, if requested, as FFNError (exit 1)."""
        if not_finite and self.fail_on_nonfinite:
            raise FFNError(f"not finite: {'; '.join(not_finite)}", code=ExitCode.FAILED)
        output.notes(*not_finite)


@dataclass(frozen=True, kw_only=True)
class TraceOutput(OutputOptions):
    """The same options; a page of HTML is written, too."""

    suffix_hint: ClassVar = "use .html, .svg, .png, .json, .csv, .md, .txt or no suffix"
    out: Annotated[
        str | None,
        Opt(
            "-o",
            "--output",
            accepts=PATH,
            daily=True,
            help="Write to FILE, in the format of its suffix (.json, .csv, .md; .html: a page on which a small block's"
            " numbers can be changed; .svg, .png: a drawing of it); - is stdout.",
        ),
    ] = None
    exercise: Annotated[
        int | None,
        Opt(
            "--exercise", accepts=COUNT, after="out",
            help="With -o FILE.html: leave N results of steps blank, drawn by --seed; answers are in"
            " FILE.answers.html.",
        ),
    ] = None  # fmt: skip


MANY_RULES = (
    Conflict(
        "prompts",
        allows=f"source layer dtype device threads top_units save force {' '.join(CORPUS)} digits fail_on_nonfinite",
        why="it reads many texts; all other options apply to one text",
    ),
    Conflict(
        "prompts",
        allows="source layer neuron expert dtype device threads top_units batch_size max_tokens limit skip_special"
        " top_contexts force digits",
        why="a unit's options are these",
    ),
)
PAGE_RULES = (
    Conflict(
        "explain terms depth show verbose digits heatmap keep top_units fail_on_nonfinite set ablate tp ep save"
        " backward save_weights format json csv",
        contradicts="out=.html out=.svg out=.png",
        why="a page or picture shows the whole, unchanged block",
    ),
    Conflict("exercise", needs="out=.html", why="it is a page"),
)


@spread
def command(
    *,
    corpus: CorpusQuestion,
    survey: SurveyQuestion,
    question: Question,
    view: TraceView,
    load_limit: LoadOptions,
    show: TraceOutput,
) -> None:
    """Run a block step by step and print every intermediate.

    Examples:
      ffn trace 4x8:relu --input 1,2,3,4          # small enough to check by hand
      ffn trace 512x2048:gelu --explain 'up[0,3]' # how one number was computed
      ffn trace ./my-model -l 1 -p "Hello world"  # a checkpoint, on real text
      ffn trace ./my-model --prompts texts.txt    # every layer over many texts
    """
    many = isinstance(question.prompt, tuple) or any(name in CORPUS for name in conflicts.given(corpus))
    of_block = not many and question.layer != "all" and question.patch_from is None
    page = of_block and (show.out or "").lower().endswith((".html", ".htm", ".svg", ".png"))
    output = (replace(show, out=None) if page else show).output()  # the page or picture replaces the answer
    load_limit.apply()
    _check_files(question, view, show, page)
    if many:
        _show_many(question, corpus, view, show, output)
        return
    if question.prompt is not None:
        typed, question = question.prompt, replace(question, prompt=prompt_text(question.prompt))
        output.notes(*lines_note(typed, str(question.prompt)))
    if page:
        _write_page(question, show, output)
    elif question.layer == "all":
        conflicts.check((*RULES, *ONE_LAYER), question)
        source = survey.source if question.example is None else find(question.example)
        layers = survey_for(replace(survey, source=source, prompt=question.prompt), output.note)
        output.show(survey_answer(layers, question.top_units or 1))
        view.judge(not_finite_texts(layers), output)
    else:
        _show_one(question, view, output)


def _show_one(question: Question, view: TraceView, output: Output) -> None:
    """Show one layer; a heat map needs every tensor, `--keep` says how much they take."""
    session = session_for(replace(question, keep=True) if view.heatmap else question, output.note)
    if question.keep is True:
        size = sum(tensor.numel() * tensor.element_size() for tensor in session.tensors.values())
        output.note(f"kept {len(session.tensors)} tensors, {bytes_text(size)}")
    output.show(trace_answer(session, view.digits, view.steps(question), view.heatmap))
    view.judge([*map(str, session.not_finite)], output)


def _check_files(question: Question, view: TraceView, show: OutputOptions, page: bool) -> None:
    """Raise FFNError if two options name the same file, and for options that an HTML page does not support."""
    paths = [os.path.realpath(os.path.expanduser(name)) for name in (question.save, show.out) if name is not None]
    if len(paths) == 2 and paths[0] == paths[1]:
        raise FFNError(f"{option('save')} and {option('out')} name the same file", "give two names")
    suffix = os.path.splitext(show.out or "")[1].lower()
    rules = PAGE_RULES if page else PAGE_RULES[-1:]
    conflicts.check(rules, question, view, show, {"out": ".html" if suffix == ".htm" else suffix})


def _show_many(
    question: Question, corpus: CorpusQuestion, view: TraceView, show: OutputOptions, output: Output
) -> None:
    """Show every layer over many texts, read from a file or typed."""
    conflicts.check(ONE_OR_MANY, corpus, question)
    corpus = replace(corpus, prompts=corpus.prompts if question.prompt is None else listed(question.prompt))
    one_unit = question.neuron is not None
    conflicts.check(MANY_RULES[one_unit : 1 + one_unit], corpus, replace(question, prompt=None), view)
    with progress(corpus_size(corpus.prompts), "texts", output.quiet, show.color_choice()) as advance:
        if one_unit:
            output.show(unit_answer(unit_for(_of_unit(question, corpus), output.note, advance), view.digits))
            return
        survey = corpus_for(corpus, output.note, advance)
    output.show(corpus_answer(survey, view.digits))
    view.judge(not_finite_layers(survey), output)


def _of_unit(question: Question, corpus: CorpusQuestion) -> UnitQuestion:
    """Return the question about one unit that both records ask together."""
    expert: Any = question.expert  # converted there
    names = {field.name for field in fields(UnitQuestion)} & {field.name for field in fields(CorpusQuestion)}
    same = {name: getattr(corpus, name) for name in names}
    return UnitQuestion(**same, neuron=question.neuron, expert=expert)


def _write_page(question: Question, show: TraceOutput, output: Output) -> None:
    """Write an HTML page of a small block, in which every number can be changed or some are to be filled in, or a
    drawing of any block.

    Raises FFNError for a block that is too large for a page, or that a page cannot compute.
    """
    page = Path(os.path.expanduser(show.out or ""))
    paths = [page] if show.exercise is None else [page, page.with_suffix(f".answers{page.suffix}")]
    for path in paths:
        check_writable(str(path), show.force, option("out"))
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "trace.safetensors")
        session = session_for(replace(question, save=name, save_weights=True), lambda text: None, inside=True)
        from ffncli.pages.drawing import SUFFIXES, block_drawing, write_drawing
        from ffncli.pages.exercise import exercise_pages, learner_page
        from ffncli.run.saved.saved import open_saved

        saved, block = open_saved(Path(name)), session.block
        title = f"{block.name}, {block.experts} experts" if block.experts else block.name
        if page.suffix.lower() in SUFFIXES:
            write_drawing(block_drawing(saved), page)
            output.wrote(str(page))
            return
        if show.exercise is None:
            texts: tuple[str, ...] = (learner_page(saved, title),)
        else:
            texts = exercise_pages(saved, title, show.exercise, question.seed or 0)
    with written_together(*paths) as files:
        for file, text in zip(files, texts, strict=True):
            file.write(text.encode())
    size = f"{len(texts[0].encode()) / 1000:,.0f} kB"
    what = "change a number there and see what follows" if show.exercise is None else f"the answers are in {paths[-1]}"
    output.wrote(str(page), f"{size}; {what}")
