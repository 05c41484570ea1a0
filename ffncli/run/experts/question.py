"""The question about a mixture's experts, with the command line's names, and its checks, which need no torch."""

from __future__ import annotations

import os
from pathlib import Path

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.models.model import Resolved
from ffncli.run.corpus.question import CheckedCorpusQuestion, CorpusQuestion, check_corpus
from ffncli.system.files import check_writable

ABLATE_TEXTS = 4
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ExpertsQuestion:
    """The options of `ffn experts` that decide what is computed. None: not chosen, so the default.

    `prompts` are texts, or the name of a file with them. `ablate_texts` of them the model reads once more without each
    expert (0: none). `save_routes` names a file for the routes of the one `layer`.
    """

    source: str | Resolved | None
    prompts: str | tuple[str, ...]
    layer: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    threads: int | None = None
    batch_size: int | None = None
    max_tokens: int | None = None
    ablate_texts: int | None = None
    save_routes: str | None = None
    force: bool = False

    @property
    def ablated(self) -> int:
        """How many texts the model reads without each expert."""
        return ABLATE_TEXTS if self.ablate_texts is None else self.ablate_texts

    @property
    def routes_path(self) -> Path | None:
        """The file for the routes."""
        return None if self.save_routes is None else Path(os.path.expanduser(self.save_routes))


@dataclass(frozen=True)
class CheckedExpertsQuestion:
    """A question that its model can answer: `corpus` has the layers, those with experts."""

    question: ExpertsQuestion
    corpus: CheckedCorpusQuestion


def check_experts(question: ExpertsQuestion) -> CheckedExpertsQuestion:
    """The question with its model, located and read. Raises FFNError for what cannot be answered."""
    path = question.routes_path
    if path is not None:
        if path.suffix != SUFFIX:
            raise FFNError(f"--save-routes {shown(question.save_routes)}: the name must end in {SUFFIX}")
        if question.layer in (None, "all"):
            raise FFNError("--save-routes needs one layer", "give --layer I: a benchmark is of one block")
        check_writable(str(path), question.force, "--save-routes")
    checked = check_corpus(
        CorpusQuestion(
            question.source, question.prompts, question.layer, question.dtype, question.device, question.threads,
            question.batch_size, question.max_tokens,
        )
    )  # fmt: skip
    layers = tuple(layer for layer in checked.layers if layer.spec.moe)
    if not layers:
        where = "this layer of " if question.layer not in (None, "all") else ""
        raise FFNError(f"{where}{checked.model.model.name} has no experts", "ffn trace --prompts shows a dense model")
    return CheckedExpertsQuestion(question, CheckedCorpusQuestion(checked.question, checked.model, layers))
