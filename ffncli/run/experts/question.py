"""What is asked of a mixture that reads a corpus, and its layers with experts: a corpus with two options more."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ffncli.errors import FFNError, option
from ffncli.options import shared
from ffncli.options.accept import PATH, whole
from ffncli.options.opt import SOURCE, Opt
from ffncli.run.corpus.question import ReadingModel, ReadingQuestion, reading_model
from ffncli.run.user.options import MODEL, Source
from ffncli.system.files import check_writable

ABLATE_TEXTS = 4
SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class ExpertsQuestion(ReadingQuestion):
    """Run a mixture on many texts and return how its experts are used and what each is worth, as `ffn experts` does.

    `source` is a model's directory or GGUF file; `prompts` is a file's name or a list of texts, as in `ffncli.corpus`.
    `layers` has a record for each layer with experts: the load of each, pairs that are chosen together, how many had
    been chosen after so many tokens, and the hit rate of a cache of n experts; `frame()` has a row for each expert.
    `ablate_texts` texts (4) are read once more without each expert, for what it is worth to the predictions; 0 leaves
    that out. `save_routes` writes the routes of the one `layer` for `ffn bench --routing`. Raises FFNError for whatever
    the command line refuses, and for an argument of another type, naming the accepted.
    """

    source: Annotated[
        Source | None, Opt(metavar="SOURCE", accepts=MODEL, help="Directory or GGUF file of a mixture of experts.")
    ] = field(default=None, kw_only=False)
    layer: Annotated[
        int | str | None,
        Opt(
            "-l", "--layer", metavar="N", accepts=shared.LAYER, group=SOURCE, daily=True,
            help="One layer, counted from 0. [default: all]",
        ),
    ] = None  # fmt: skip
    ablate_texts: Annotated[
        int,
        Opt(
            "--ablate-texts", metavar="N", accepts=whole(0, 1_000_000), group="What to measure",
            help="Texts to run again without each expert; 0 skips this.",
        ),
    ] = ABLATE_TEXTS  # fmt: skip
    save_routes: Annotated[
        shared.Path | None,
        Opt(
            "--save-routes", metavar="FILE", accepts=PATH,
            help="Write the routes of the --layer to FILE.safetensors, for ffn bench --routing.",
        ),
    ] = None  # fmt: skip

    @property
    def routes_path(self) -> Path | None:
        """The file for the routes."""
        return None if self.save_routes is None else Path(os.path.expanduser(self.save_routes))


def mixture(question: ExpertsQuestion) -> ReadingModel:
    """The model of a question about experts, with its layers that have some. Raises FFNError if none has."""
    if (path := question.routes_path) is not None:
        if path.suffix != SUFFIX:
            raise FFNError(f"{option('save_routes', question.save_routes)}: the name must end in {SUFFIX}")
        if question.layer in (None, "all"):
            hint = f"give one {option('layer')}: a benchmark is of one block"
            raise FFNError(f"{option('save_routes')} needs one layer", hint)
        check_writable(str(path), question.force, option("save_routes"))
    reading = reading_model(question)
    layers = tuple(layer for layer in reading.layers if layer.spec.moe)
    if not layers:
        where = "this layer of " if question.layer not in (None, "all") else ""
        raise FFNError(f"{where}{reading.model.model.name} has no experts", "ffn trace --prompts shows a dense model")
    return replace(reading, layers=layers)
