"""The question of `ffn precision`: options, model, layers and formats. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

from ffncli.block.formats import Format, format_of
from ffncli.errors import FFNError, option
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Layer, Resolved, folder_of
from ffncli.options import conflicts, shared
from ffncli.options.accept import ABOVE_ZERO, TEXT, Accepts, choice, comma_list, listed, outside_brackets, several, text
from ffncli.options.opt import INPUT, Opt
from ffncli.run.corpus.question import PROMPTS, ReadingQuestion, reading_model
from ffncli.run.explain.place import StepIndex, place_of
from ffncli.run.pretrained.prompt import DIMENSIONS, PROMPT_RULES, Prompt, layers_of, prompt_of, reached
from ffncli.run.user.load import load
from ffncli.run.user.options import Input, Source
from ffncli.run.user.options import source as source_option

What = Literal["weights", "inputs", "both"]
DEFAULT = "64x128:swiglu"
FORMATS = ("fp8", "nvfp4")
_round = partial(Opt, group="What is rounded")


TARGETS = ("llm-compressor", "modelopt", "llama.cpp")


def _recipe(value: Any) -> str:
    target, _, file = text(value).partition(":")
    if target not in TARGETS or not file:
        raise ValueError
    return f"{target}:{file}"


def _format(value: Any) -> str:
    name = text(value).strip().lower()
    format_of(name)
    return name


@dataclass(frozen=True, kw_only=True)
class PrecisionQuestion(Dimensions):
    """Run a layer's FFN with its matrices, their inputs or both in other formats, as `ffn precision` does, and return
    how large the output's error is, which tensor causes it, and how well the values fit the format.

    >>> import ffncli
    >>> precision = ffncli.precision("64x128:swiglu", dtype="nvfp4", tokens=8)
    >>> [row.format for row in precision.rows], round(sum(precision.rows[0].shares), 12)
    (['nvfp4'], 1.0)

    `source`, `layer`, `prompt`, `input` and `tokens` mean the same as in `ffncli.trace`; with `layer="all"` there is a
    row for each layer and format, the largest error first. `dtype` lists formats, named as in `ffncli.quantize`.
    `what` says what is rounded: `weights`, `inputs` or `both`; by default what deployments round, which is both for
    floats and weights for integers. With `budget`, a number of bits per weight, each matrix of each layer gets the
    format of `dtype` with which the predicted error is least within these bits, and `budget` of the answer has the
    choice and its measured error; `recipe` writes it for another program. `frame()` is a table of the rows. Raises
    FFNError for whatever the command line refuses, for formats whose blocks do not fit a width, and for values that are
    NaN or infinite.
    """

    source: Annotated[Source | None, source_option(DEFAULT)] = field(default=None, kw_only=False)
    dtype: Annotated[
        str | Sequence[str],
        _round(
            "--dtype", accepts=comma_list(Accepts("a format such as nvfp4", _format, metavar="FORMAT"),
                                          "a format or several, such as ['fp8', 'nvfp4']"),
            daily=True, help=f"Formats to try: nvfp4, fp8:block128, int4:g64, ... [default: {','.join(FORMATS)}]",
        ),
    ] = FORMATS  # fmt: skip
    what: Annotated[
        What | None,
        _round(
            "--what", accepts=choice("weights", "inputs", "both"), daily=True,
            help="Round weights, inputs or both. [default: both for floats, weights for integers]",
        ),
    ] = None  # fmt: skip
    sums: Annotated[
        bool,
        _round(
            "--sums", help="Also measure sums in fp32 and in bf16: products added one by one, from channel 0 upwards."
        ),
    ] = False
    explain: Annotated[
        str | Sequence[str],
        Opt(
            "--explain", metavar="NAME[i,j]", accepts=several(TEXT, "elements such as ['W1[0,3]']", least=0),
            group="How a number is rounded", daily=True,
            help="Show how this value of a weight, x or hidden is rounded, and what follows from it; repeatable.",
        ),
    ] = ()  # fmt: skip
    layer: shared.LayerOrAll = None
    tokens: shared.Tokens = None
    prompt: shared.Prompt = None
    input_ids: shared.InputIds = None
    position: shared.Position = None
    prompts: Annotated[
        shared.Path | Sequence[str] | None,
        Opt(
            "--prompts", metavar="FILE|-", accepts=PROMPTS, group=INPUT,
            help="Run the model on every line of FILE (.jsonl: the text field), and use the inputs of its FFN.",
        ),
    ] = None  # fmt: skip
    input: Input = None
    in_model: Annotated[
        bool,
        _round(
            "--in-model",
            help="With --layer all and a prompt or texts: also round inside the model, for the error that a layer "
            "inherits and the KL divergence of the next token.",
        ),
    ] = False  # fmt: skip
    budget: Annotated[
        float | None,
        Opt(
            "--budget", metavar="BITS", accepts=ABOVE_ZERO, group="A format for each matrix", daily=True,
            help="Choose a format of --dtype for each matrix of each layer: the least error within BITS per weight.",
        ),
    ] = None  # fmt: skip
    recipe: Annotated[
        str | None,
        Opt(
            "--recipe", metavar="TARGET:FILE", after="budget",
            accepts=Accepts(f"a target and a file, as in {TARGETS[0]}:recipe.yaml ({', '.join(TARGETS)})", _recipe),
            help="Write the choice to FILE for llm-compressor, modelopt (both in YAML) or llama.cpp.",
        ),
    ] = None  # fmt: skip
    force: shared.Force = False
    device: shared.Device = "cpu"
    seed: shared.Seed = None
    threads: shared.Threads = None

    @property
    def leading(self) -> tuple[int, ...] | None:
        """The input's axes before d_model, None by default."""
        return None if self.tokens is None else (self.tokens,)

    @property
    def formats(self) -> tuple[tuple[str, Format], ...]:
        """The formats to try, each with the name that was given."""
        return tuple((name, format_of(name)) for name in dict.fromkeys(listed(self.dtype)))

    def rounds(self, form: Format) -> What:
        """Return what is rounded to a format."""
        return self.what or ("weights" if form.element == "int" or self.budget is not None else "both")

    @property
    def in_whole_model(self) -> bool:
        """Whether a budget is for all layers of a model that reads text, so that the KL divergence is measured."""
        return self.layer == "all" and any(one is not None for one in (self.prompt, self.input_ids, self.prompts))


@dataclass(frozen=True)
class PrecisionSubject:
    """The model of a question about precision, the layers to run, and what the model reads, if anything: the `prompt`,
    or the texts of `reading`.

    `places` are the values to explain: as typed, and as (name, index).
    """

    model: Resolved
    layers: tuple[Layer, ...]
    prompt: Prompt | None
    reading: ReadingQuestion | None = None
    places: tuple[tuple[str, StepIndex], ...] = ()
    notes: tuple[str, ...] = ()


RULES = (
    *PROMPT_RULES,
    conflicts.Conflict("position", needs="prompt input_ids"),
    conflicts.Conflict("explain", contradicts="layer=all", why="give the layer's number"),
    conflicts.Conflict(
        f"input tokens prompt input_ids position {DIMENSIONS}", contradicts="prompts", why="it reads many texts"
    ),
    conflicts.Conflict("in_model", needs="prompt input_ids prompts"),
    conflicts.Conflict("in_model", needs="layer=all", why="a layer inherits the errors of all layers below"),
    conflicts.Conflict("budget", contradicts="explain sums", why="it chooses formats"),
    conflicts.Conflict("budget", contradicts="in_model", why="for all layers and a text, it runs the model anyway"),
    conflicts.Conflict("recipe", needs="budget", why="it has the formats of a choice"),
    conflicts.Conflict("budget", contradicts="what=inputs", why="it is of the weights' bits"),
    conflicts.Conflict("budget", contradicts="prompts=-", why="it reads the texts several times"),
)


def subject_of(question: PrecisionQuestion) -> PrecisionSubject:
    """Determine the model and its layers; raise FFNError for a question that cannot be answered."""
    conflicts.check(RULES, question)
    prompt = prompt_of(question.prompt, question.input_ids, question.position)
    if prompt and prompt.text is not None and not prompt.text.strip():
        raise FFNError(f"{option('prompt')} is empty", "give a text")
    bare = question.source is None and question.d_model is None
    model = load(DEFAULT if bare else question.source, question.dimensions, question.seed or 0)
    model = replace(model, example=None)
    reading = None
    if question.prompts is not None:
        which, threads = question.layer, question.threads
        reading = ReadingQuestion(model, prompts=question.prompts, layer=which, device=question.device, threads=threads)
        every = reading_model(reading).layers  # refuses a layer that no text reaches
    if prompt:
        folder_of(model, prompt.option)
    typed = [text for one in listed(question.explain) for text in outside_brackets(one)]
    places = tuple((text.strip(), place_of(text)) for text in typed)
    if question.layer != "all":
        return PrecisionSubject(model, (model.model.layer(question.layer),), prompt, reading, places)
    layers, silent = layers_of(model), tuple[str, ...]()
    if prompt:
        layers, silent = reached(model, layers)
    if reading:
        layers = [*every]
    return PrecisionSubject(model, tuple(layers), prompt, reading, (), silent)
