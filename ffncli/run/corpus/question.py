"""The questions of `ffn trace --prompts` and `ffn experts`: options, model and layers. Does not import torch."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ffncli.errors import FFNError, option, shown_path
from ffncli.models.dimensions import Dimensions
from ffncli.models.files.headers import read_header
from ffncli.models.model import Layer, Resolved, folder_of
from ffncli.options import conflicts, shared
from ffncli.options.accept import (
    ABOVE_ZERO,
    COUNT,
    COUNTS,
    NATURAL,
    PATH,
    RANKS,
    SHARE,
    TEXT,
    Accepts,
    choice,
    comma_list,
    several,
    text,
    whole,
)
from ffncli.options.opt import INPUT, SOURCE, Opt, Options, chosen
from ffncli.run.pretrained.prompt import layers_of
from ffncli.run.user.load import load
from ffncli.run.user.options import MODEL, ModelSource, Source
from ffncli.system.files import check_writable, open_to_read
from ffncli.system.packages import require_extra

BATCH_SIZE = 32
LIMIT = 6.0  # an input dimension whose |x| reaches this limit is an outlier
TABLES = (".csv", ".parquet")
_many = partial(Opt, group="Many prompts")


def _prompts(value: Any) -> str | tuple[str, ...]:
    """Convert the argument to a file name, or to a tuple of prompts."""
    return text(value) if isinstance(value, str | os.PathLike) else several(TEXT, "").convert(value)


PROMPTS = Accepts("a file's name, or a list of texts", _prompts)


@dataclass(frozen=True, kw_only=True)
class ReadingQuestion(Options):
    """The options shared by questions about a corpus and about experts: the model, the texts, and how to run them."""

    source: ModelSource = field(default=None, kw_only=False)
    prompts: Annotated[
        shared.Path | Sequence[str] | None,
        Opt(
            "--prompts", metavar="FILE|-", accepts=PROMPTS, group=INPUT,
            after="position",
            help="Run the model on every line of FILE (.jsonl: the text field) and show statistics for every layer.",
        ),
    ] = field(default=None, kw_only=False)  # fmt: skip
    layer: shared.LayerOrAll = None
    dtype: shared.Dtype = None
    device: shared.Device = "cpu"
    threads: shared.Threads = None
    batch_size: Annotated[
        int | None,
        _many(
            "--batch-size", accepts=whole(1, 4096), after="promotes",
            help=f"Texts per batch. [default: {BATCH_SIZE}, or as many as fit in memory]",
        ),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int | None,
        _many(
            "--max-tokens", accepts=COUNT, after="batch_size",
            help="Truncate every text to N tokens. [default: the model's limit]",
        ),
    ] = None  # fmt: skip
    limit: Annotated[
        int | None, _many("--limit", accepts=COUNT, after="max_tokens", help="Read the first N texts.")
    ] = None
    skip_special: Annotated[
        bool,
        _many("--skip-special", after="limit", help="Leave special tokens, such as [CLS], out of all figures."),
    ] = False
    force: shared.Force = False


Similar = Annotated[
    float | None,
    _many(
        "--similar", accepts=SHARE, after="outliers",
        help="List units (in ffn experts: experts) whose weights have at least this cosine.",
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CorpusQuestion(ReadingQuestion):
    """Run a model on many texts and return figures of every layer and hidden unit, as `ffn trace --prompts` does.

    `source` is a model's directory or GGUF file; `prompts` is a list of texts or a file's name. Each line of the file
    is a text; in a .jsonl file, a JSON string or an object with the key `text`, `prompt` or `content`. The model is
    loaded once, and no activation is kept: memory does not grow with the corpus. `rows` has a record for each layer,
    `frame()` a row for each unit: the share of tokens for which the unit is active, its mean, its minimum and maximum
    with their places, and its `top_contexts` largest values. `limit` reads the first texts only, `skip_special` leaves
    special tokens out of all figures. `outliers` is the magnitude (default 6) from which an input dimension is an
    outlier. `similar` lists the pairs of units whose weights have at least this cosine. `save` writes the table of
    units (.csv, .parquet); `resume` names a file that stores progress, so that an interrupted run can resume. The other
    arguments are the command line's options. Raises FFNError for whatever the command line refuses, and for an argument
    of the wrong type.
    """

    top_units: shared.TopUnits = None
    top_contexts: Annotated[
        int | None,
        _many(
            "--top-contexts", accepts=whole(1, 100), after="max_tokens",
            help="Keep each unit's N largest values with the text around them.",
        ),
    ] = None  # fmt: skip
    outliers: Annotated[
        float | None,
        _many(
            "--outliers", metavar="SIZE", accepts=ABOVE_ZERO, after="top_contexts",
            help=f"Magnitude at which an input dimension counts as an outlier. [default: {LIMIT:g}]",
        ),
    ] = None  # fmt: skip
    similar: Similar = None
    save: shared.Save = None
    resume: Annotated[
        shared.Path | None,
        _many("--resume", accepts=PATH, after="outliers", help="Checkpoint to FILE, and resume from it."),
    ] = None

    @property
    def outlier_limit(self) -> float:
        """Return the magnitude from which an input dimension is an outlier."""
        return LIMIT if self.outliers is None else self.outliers

    @property
    def save_path(self) -> Path | None:
        """The path for the table of all units."""
        return None if self.save is None else Path(os.path.expanduser(self.save))

    @property
    def resume_path(self) -> Path | None:
        """The path of the file that stores the progress of a run."""
        return None if self.resume is None else Path(os.path.expanduser(self.resume))


@dataclass(frozen=True, kw_only=True)
class UnitQuestion(ReadingQuestion):
    """Run a model on many texts and describe one hidden unit, as `ffn trace --prompts --neuron` does.

    `source`, `prompts` and most arguments are those of `ffncli.corpus`; `layer` and `neuron` name the unit, with
    `expert` in a mixture. The answer has the unit's values over the corpus as a histogram and as quantiles, its
    `top_contexts` (default 10) largest values with the text around them, the tokens that it fires on and that it
    promotes, and the `top_units` (default 5) most like it: by their weights, and by their values over the corpus.
    Raises FFNError for whatever the command line refuses, and for an argument of the wrong type.
    """

    neuron: Annotated[int | None, NATURAL] = None
    expert: Annotated[int | None, NATURAL] = None
    top_contexts: Annotated[int, whole(1, 100)] = 10
    top_units: Annotated[int, COUNT] = 5


@dataclass(frozen=True)
class ReadingModel:
    """The model that reads a corpus, and the layers to examine."""

    model: Resolved
    layers: tuple[Layer, ...]


def reading_model(question: ReadingQuestion, experts: bool = False) -> ReadingModel:
    """Load the model of a question about texts, and choose its layers; with `experts`, of a stack that has some."""
    if question.prompts is None:
        raise FFNError(f"{option('prompts')} is missing", "give a file's name, or texts")
    model = load(question.source, Dimensions())
    folder_of(model, option("prompts"))
    every = layers_of(model)
    stacks = list(dict.fromkeys(layer.stack for layer in every))
    if question.layer in (None, "all"):
        mixed = [layer.stack for layer in every if layer.spec.moe and experts]
        reads = "encoder" if "encoder" in stacks else [*mixed, *stacks][0]
        return ReadingModel(model, tuple(layer for layer in every if layer.stack == reads))
    layer = model.model.layer(question.layer)
    if layer.stack == "decoder" and "encoder" in stacks:
        what = f"{option('prompts')}: the texts go to the encoder of {model.model.name}"
        raise FFNError(what, "its decoder gets only a start token")
    return ReadingModel(model, (layer,))


def check_files(question: CorpusQuestion) -> None:
    """Refuse output files that cannot be written."""
    path = question.save_path
    if path is not None:
        if path.suffix.lower() not in TABLES:
            what = f"{option('save', question.save)}: a table of units needs a name that ends in {' or '.join(TABLES)}"
            raise FFNError(what)
        if path.suffix.lower() == ".parquet":
            require_extra("pyarrow", "parquet")
        check_writable(str(path), question.force, option("save"))
    if question.resume is not None:
        check_writable(str(question.resume_path), True, option("resume"))


ABLATE_TEXTS = 4
SUFFIX = ".safetensors"
POLICIES = ("lru", "lfu", "pin", "best")  # which expert a cache evicts; see run/corpus/placement.py
_where = partial(Opt, group="Where experts live")
_recorded = partial(Opt, group="Recorded routes")


@dataclass(frozen=True, kw_only=True)
class ExpertsQuestion(ReadingQuestion):
    """Run a mixture on many texts and return how its experts are used and what each expert is worth, as `ffn experts`
    does.

    `source` is a model's directory or GGUF file; `prompts` is a file's name or a list of texts, as in `ffncli.corpus`.
    `layers` has a record for each layer with experts: the load of each expert, pairs chosen together, the number of
    experts chosen within the first n tokens, and the hit rate of a cache of n experts; `frame()` has a row for each
    expert. `ablate_texts` texts (default 4) are read again for each expert, with that expert removed, to measure how
    the predictions change; 0 skips this. With `ep` ranks, `placement` says which experts each rank should hold, with
    `redundant` copies more than experts, and `worth` what this saves; `groups` of experts (default: the router's) stay
    on one of the `nodes`. `similar` lists the pairs of experts whose weights, or whose outputs for the tokens of both,
    have at least this cosine. `cache` policies (`lru`, `lfu`, `pin`, `best`) of `slots` experts a layer give `caches`.
    `save_routes` writes the routes, of one `layer` for `ffn bench --routing` or of all. `source` may also be a file of
    routes: ours, or one that vLLM, SGLang or llama.cpp recorded; then `recorded_experts` and `recorded_top_k` say what
    the file does not. Raises FFNError for whatever the command line refuses, and for an argument of the wrong type.
    """

    source: Annotated[
        Source | None,
        Opt(accepts=MODEL, help="Directory or GGUF file of a mixture of experts; or a file of routes, see the manual."),
    ] = field(default=None, kw_only=False)
    layer: Annotated[
        int | str | None,
        Opt(
            "-l", "--layer", accepts=shared.LAYER, group=SOURCE, daily=True,
            help="One layer, counted from 0. [default: all]",
        ),
    ] = None  # fmt: skip
    recorded_experts: Annotated[
        int | None,
        _recorded("--experts", accepts=COUNT, help="Experts of each layer. [default: the most that is named, plus 1]"),
    ] = None
    recorded_top_k: Annotated[
        int | None,
        _recorded("--top-k", accepts=COUNT, help="Choices per token, where a CSV does not separate tokens."),
    ] = None
    ablate_texts: Annotated[
        int,
        Opt(
            "--ablate-texts", accepts=whole(0, 1_000_000), group="What to measure",
            help="Texts to run again for each expert, with it removed; 0 skips this.",
        ),
    ] = ABLATE_TEXTS  # fmt: skip
    save_routes: Annotated[
        shared.Path | None,
        Opt(
            "--save-routes", accepts=PATH,
            help="Write the routes to FILE.safetensors: one --layer for ffn bench --routing, or all for ffn compare.",
        ),
    ] = None  # fmt: skip

    similar: Similar = None
    ep: Annotated[
        int | None,
        _where("--ep", "--expert-parallel", accepts=RANKS, help="Place the experts on N ranks by their load."),
    ] = None
    redundant: Annotated[
        int, _where("--redundant", accepts=NATURAL, help="Copies of busy experts, in addition to the experts.")
    ] = 0
    groups: Annotated[
        int | None,
        _where("--groups", accepts=COUNT, help="Groups of experts that stay on one node. [default: the router's]"),
    ] = None
    nodes: Annotated[int, _where("--nodes", accepts=COUNT, help="Nodes that the ranks are on.")] = 1
    cache: Annotated[
        Sequence[str],
        _where(
            "--cache", accepts=comma_list(choice(*POLICIES), f"one or more of {', '.join(POLICIES)}"),
            help="Replay the choices through caches that evict by these rules; best is Belady's bound.",
        ),
    ] = ()  # fmt: skip
    slots: Annotated[
        Sequence[int], _where("--slots", accepts=COUNTS, help="Experts of a layer in a cache. [default: half of them]")
    ] = ()

    @property
    def routes_path(self) -> Path | None:
        """The path for the routes."""
        return None if self.save_routes is None else Path(os.path.expanduser(self.save_routes))


EXPERTS_RULES = (conflicts.Conflict("redundant groups nodes", needs="ep", why="they say where the ranks' experts go"),)


_OF_RECORDS = (b"logical_count", b"last_physical_to_logical_map")  # SGLang's keys
_THREE_AXES = rb"'descr': '[<|][iu]\d', .{1,40}'shape': \(\d+, \d+, \d+\)"  # of an array of integers, vLLM's
_MOST_PICKLE = 1 << 24


def recorded_routes(source: Any, traces: bool = True) -> Path | None:
    """Return the file if a source is a file of routes instead of a model, judged by its suffix and its first bytes;
    with `traces`, a saved trace of a mixture is one."""
    path = Path(os.path.expanduser(source)) if isinstance(source, str) else None
    suffix = "" if path is None else path.suffix.lower()
    if path is None or suffix not in (SUFFIX, ".pt", ".csv", ".npy", ".npz") or not path.is_file():
        return None
    if suffix == SUFFIX:
        names = read_header(path)
        return path if any(name.endswith("/ids") for name in names) or (traces and "route" in names) else None
    with open_to_read(path) as file:
        start = file.read(_MOST_PICKLE)
    if suffix in (".npy", ".npz"):
        return path if traces or re.search(_THREE_AXES, start) else None
    if suffix == ".pt":
        return path if any(key in start for key in _OF_RECORDS) else None
    first = next((line for line in start.splitlines() if line and not line.startswith(b"#")), b"")
    return path if re.match(rb"\d[\d, -]*$|(.*,)?layer", first, re.I) else None


def recorded(question: ExpertsQuestion) -> Path | None:
    """Return the file of routes that the question is about, None if it is about a model. Raises FFNError for options
    that belong to the other."""
    path = recorded_routes(question.source)
    given = chosen(question)
    wrong = [name for name in given if (name in _OF_MODELS if path else name.startswith("recorded_"))]
    if wrong and path:
        raise FFNError(f"{option(wrong[0])} is for a model, and {shown_path(path)} has recorded routes", "leave it out")
    if wrong:
        raise FFNError(f"{option(wrong[0])} is for recorded routes", "a model says it itself: leave it out")
    conflicts.check(EXPERTS_RULES, question)
    return path


_OF_MODELS = (
    "prompts", "dtype", "device", "batch_size", "max_tokens", "limit", "skip_special", "similar", "ablate_texts",
    "save_routes",
)  # fmt: skip


def mixture(question: ExpertsQuestion) -> ReadingModel:
    """Return the model of a question about experts, and its layers with experts; refuse a model without experts."""
    if (path := question.routes_path) is not None:
        if path.suffix != SUFFIX:
            raise FFNError(f"{option('save_routes', question.save_routes)}: the name must end in {SUFFIX}")
        check_writable(str(path), question.force, option("save_routes"))
    reading = reading_model(question, experts=True)
    layers = tuple(layer for layer in reading.layers if layer.spec.moe)
    if not layers:
        where = "this layer of " if question.layer not in (None, "all") else ""
        raise FFNError(f"{where}{reading.model.model.name} has no experts", "trace it with ffn trace --prompts")
    return replace(reading, layers=layers)
