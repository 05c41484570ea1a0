"""The questions of `ffn trace --prompts` and `ffn experts`: options, model and layers. Does not import torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ffncli.errors import FFNError, option
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Layer, Resolved, folder_of
from ffncli.options import conflicts, shared
from ffncli.options.accept import (
    ABOVE_ZERO,
    COUNT,
    COUNTS,
    NATURAL,
    PATH,
    RANKS,
    TEXT,
    Accepts,
    choice,
    comma_list,
    several,
    text,
    whole,
)
from ffncli.options.opt import INPUT, SOURCE, Opt, Options
from ffncli.run.pretrained.prompt import layers_of
from ffncli.run.user.load import load
from ffncli.run.user.options import MODEL, ModelSource, Source
from ffncli.system.files import check_writable
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
    force: shared.Force = False


@dataclass(frozen=True, kw_only=True)
class CorpusQuestion(ReadingQuestion):
    """Run a model on many texts and return figures of every layer and hidden unit, as `ffn trace --prompts` does.

    `source` is a model's directory or GGUF file; `prompts` is a list of texts or a file's name. Each line of the file
    is a text; in a .jsonl file, a JSON string or an object with the key `text`, `prompt` or `content`. The model is
    loaded once, and no activation is kept: memory does not grow with the corpus. `rows` has a record for each layer,
    `frame()` a row for each unit: the share of tokens for which the unit is active, its mean, its minimum and maximum
    with their places, and its `top_contexts` largest values. `outliers` is the magnitude (default 6) from which an
    input dimension is an outlier. `save` writes the table of units (.csv, .parquet); `resume` names a file that stores
    progress, so that an interrupted run can resume. The other arguments are the command line's options. Raises FFNError
    for whatever the command line refuses, and for an argument of the wrong type.
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
    save: shared.Save = None
    resume: Annotated[
        shared.Path | None,
        _many("--resume", accepts=PATH, after="outliers", help="Checkpoint to FILE, and resume from it."),
    ] = None

    @property
    def limit(self) -> float:
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


@dataclass(frozen=True)
class ReadingModel:
    """The model that reads a corpus, and the layers to examine."""

    model: Resolved
    layers: tuple[Layer, ...]


def reading_model(question: ReadingQuestion) -> ReadingModel:
    """Load the model of a question about texts, and choose its layers."""
    if question.prompts is None:
        raise FFNError(f"{option('prompts')} is missing", "give a file's name, or texts")
    model = load(question.source, Dimensions())
    folder_of(model, option("prompts"))
    every = layers_of(model)
    stacks = list(dict.fromkeys(layer.stack for layer in every))
    if question.layer in (None, "all"):
        reads = "encoder" if "encoder" in stacks else stacks[0]
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
    on one of the `nodes`. `cache` policies (`lru`, `lfu`, `pin`, `best`) of `slots` experts per layer give `caches`.
    `save_routes` writes the routes of the given `layer` for `ffn bench --routing`. Raises FFNError for
    whatever the command line refuses, and for an argument of the wrong type.
    """

    source: Annotated[Source | None, Opt(accepts=MODEL, help="Directory or GGUF file of a mixture of experts.")] = (
        field(default=None, kw_only=False)
    )
    layer: Annotated[
        int | str | None,
        Opt(
            "-l", "--layer", accepts=shared.LAYER, group=SOURCE, daily=True,
            help="One layer, counted from 0. [default: all]",
        ),
    ] = None  # fmt: skip
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
            help="Write the routes of the --layer to FILE.safetensors, for ffn bench --routing.",
        ),
    ] = None  # fmt: skip

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


def mixture(question: ExpertsQuestion) -> ReadingModel:
    """Return the model of a question about experts, and its layers with experts; refuse a model without experts."""
    conflicts.check(EXPERTS_RULES, question)
    if (path := question.routes_path) is not None:
        if path.suffix != SUFFIX:
            raise FFNError(f"{option('save_routes', question.save_routes)}: the name must end in {SUFFIX}")
        if question.layer in (None, "all"):
            hint = f"give one {option('layer')}: a benchmark runs one block"
            raise FFNError(f"{option('save_routes')} needs one layer", hint)
        check_writable(str(path), question.force, option("save_routes"))
    reading = reading_model(question)
    layers = tuple(layer for layer in reading.layers if layer.spec.moe)
    if not layers:
        where = "this layer of " if question.layer not in (None, "all") else ""
        raise FFNError(f"{where}{reading.model.model.name} has no experts", "trace it with ffn trace --prompts")
    return replace(reading, layers=layers)
