"""The question of a trace, with the command line's names: as given, and checked against its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.block.shard import Ranks
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.models.dimensions import Dimensions, leading_axes
from ffncli.models.examples import Example
from ffncli.models.model import Resolved
from ffncli.run.pretrained.prompt import Prompt, prompt_of
from ffncli.run.what_if.changes import Change

if TYPE_CHECKING:
    from torch import nn

    from ffncli.run.engine.inputs import InputSource

TOP_K, TOP_P = 5, 0.9
TERMS = 8
StepIndex = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Question:
    """The options of `ffn trace` that decide what is computed. None, "" and empty: not chosen, so the default.

    `source` is any SOURCE, a model that is loaded already or a module; `input` may be its values. `show` values per
    axis are recorded (None: all), `keep` are the steps whose whole tensors stay (None: all that are recorded).
    """

    source: str | Resolved | nn.Module | None = None
    dimensions: Dimensions = field(default_factory=Dimensions)
    layer: str | None = None
    input: InputSource | None = None
    tokens: int | None = None
    batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    device: str = "cpu"
    seed: int | None = None
    threads: int | None = None
    train: bool | None = None
    prompt: str | None = None
    input_ids: tuple[int, ...] | None = None
    position: str | None = None
    expert: str | None = None
    show: int | None = 8
    top_units: int | None = None
    keep: frozenset[str] | None = frozenset()
    explain: Sequence[str] | None = None
    terms: int | None = None
    depth: int | None = None
    unembed: bool = False
    neuron: int | None = None
    top_tokens: int | None = None
    promotes: str | None = None
    set: Sequence[str] | None = None
    ablate: Sequence[str] | None = None
    example: str | None = None
    vocab: int | None = None
    sample_top_k: int | None = None
    sample_top_p: float | None = None
    save: str | None = None
    save_weights: bool | None = None
    force: bool = False
    tp: int | None = None
    ep: int | None = None

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that the block is split over too; None if that was not requested."""
        return Ranks(self.tp or 1, self.ep or 1) if self.tp or self.ep else None

    @property
    def model_prompt(self) -> Prompt | None:
        """The model's text input; None if transformers does not have to run it."""
        return prompt_of(self.prompt, self.input_ids, self.position)

    @property
    def leading(self) -> tuple[int, ...] | None:
        """The input's axes before d_model, None by default. Raises FFNError if they are given twice."""
        return leading_axes(self.tokens, self.batch, self.seq_len)

    @property
    def sets(self) -> tuple[int, float]:
        """The K and P of the sets of a vocabulary that are marked."""
        return self.sample_top_k or TOP_K, self.sample_top_p or TOP_P

    @property
    def save_path(self) -> Path:
        """The file to save to."""
        return Path(os.path.expanduser(self.save or ""))

    def check_top_k(self, vocab: int) -> None:
        """Raises FFNError for a --sample-top-k above the vocabulary."""
        if self.sample_top_k is not None and self.sample_top_k > vocab:
            raise FFNError(f"--sample-top-k {self.sample_top_k} exceeds the vocabulary of {vocab}")


@dataclass(frozen=True)
class CheckedQuestion:
    """A question that its model can answer, judging without torch.

    `example` is the small block to run, if any; `experts` are those to look into (None: all), `places` the
    numbers to explain, by our names of the steps, `changes` those of the block that the question tries.
    """

    question: Question
    model: Resolved
    example: Example | None = None
    experts: frozenset[int] | None = frozenset()
    places: tuple[StepIndex, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def final_width(self) -> int | None:
        """The vocabulary of the final layer to add after the block; None for none, or if it is already there."""
        block = self.example.block if self.example else None
        return None if block and block[-1].output == "probs" else self.question.vocab
