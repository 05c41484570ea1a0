"""The question about a corpus, with the command line's names, and its checks, which need no torch."""

from __future__ import annotations

import os
from pathlib import Path

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Layer, Resolved
from ffncli.models.runnable import folder_of
from ffncli.run.corpus.texts import OPTION
from ffncli.run.pretrained.prompt import layers_of
from ffncli.run.user.load import load
from ffncli.system.files import check_writable
from ffncli.system.packages import require_extra

BATCH_SIZE = 32
LIMIT = 6.0  # of an outlier dimension
TABLES = (".csv", ".parquet")


@dataclass(frozen=True)
class CorpusQuestion:
    """The options of `ffn trace --prompts` that decide what is computed. None: not chosen, so the default.

    `prompts` are texts, or the name of a file with them. `layer` is None or "all" for all layers. `top_contexts` of a
    unit are kept, none by default. `save` names a table of all units, `resume` a file that an interrupted run goes on
    from.
    """

    source: str | Resolved | None
    prompts: str | tuple[str, ...]
    layer: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    threads: int | None = None
    batch_size: int | None = None
    max_tokens: int | None = None
    top_units: int | None = None
    top_contexts: int | None = None
    outliers: float | None = None
    save: str | None = None
    resume: str | None = None
    force: bool = False

    @property
    def limit(self) -> float:
        """From which size on a dimension is an outlier."""
        return LIMIT if self.outliers is None else self.outliers

    @property
    def save_path(self) -> Path | None:
        """The table of all units."""
        return None if self.save is None else Path(os.path.expanduser(self.save))

    @property
    def resume_path(self) -> Path | None:
        """The file of an unfinished run."""
        return None if self.resume is None else Path(os.path.expanduser(self.resume))


@dataclass(frozen=True)
class CheckedCorpusQuestion:
    """A question that its model can answer, and the layers that it is about."""

    question: CorpusQuestion
    model: Resolved
    layers: tuple[Layer, ...]


def check_corpus(question: CorpusQuestion) -> CheckedCorpusQuestion:
    """The question with its model, located and read. Raises FFNError for what cannot be answered."""
    _check_files(question)
    resolved = load(question.source, Dimensions())
    folder_of(resolved, OPTION)
    every = layers_of(resolved)
    stacks = list(dict.fromkeys(layer.stack for layer in every))
    if question.layer in (None, "all"):
        reads = "encoder" if "encoder" in stacks else stacks[0]
        return CheckedCorpusQuestion(question, resolved, tuple(layer for layer in every if layer.stack == reads))
    layer = resolved.model.layer(question.layer)
    if layer.stack == "decoder" and "encoder" in stacks:
        raise FFNError(
            f"{OPTION}: the texts go to the encoder of {resolved.model.name}", "its decoder gets only a start token"
        )
    return CheckedCorpusQuestion(question, resolved, (layer,))


def _check_files(question: CorpusQuestion) -> None:
    path = question.save_path
    if path is not None:
        if path.suffix.lower() not in TABLES:
            raise FFNError(f"--save {shown(question.save)}: a table of units ends in {' or '.join(TABLES)}")
        if path.suffix.lower() == ".parquet":
            require_extra("pyarrow", "parquet")
        check_writable(str(path), question.force, "--save")
    if question.resume is not None:
        check_writable(str(question.resume_path), True, "--resume")
