"""--example and --vocab: the founding texts' blocks with their facts, and the final layer behind a block."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.block import dtypes
from ffncli.cli.options import Count, RunOptions, Text, TokenOptions, positive, share
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import Dimensions, whole, with_dimensions
from ffncli.models.examples import EXAMPLES, Example, final_layer_alone, find, notebook
from ffncli.models.model import Resolved
from ffncli.run.sources import load

if TYPE_CHECKING:
    from ffncli.cli.traced import Traced
    from ffncli.show.parts import Answer

_example = partial(typer.Option, rich_help_panel="Texts and final layer")
TOP_K, TOP_P = 5, 0.9


@dataclass(frozen=True)
class ExampleOptions:
    """A text's block, and what follows a block over a vocabulary."""

    example: Annotated[
        Text, _example("--example", metavar="NAME", help=f"A text's block and facts: {', '.join(EXAMPLES)}.")
    ] = None
    vocab: Annotated[
        Count, _example("--vocab", metavar="V", parser=positive("--vocab"), help="Final layer: logits and probs.")
    ] = None
    sample_top_k: Annotated[
        Count,
        _example(
            "--sample-top-k", metavar="K", parser=positive("--sample-top-k"),
            help=f"Mark the K most probable, default {TOP_K}.",
        ),
    ] = None  # fmt: skip
    sample_top_p: Annotated[
        float | None,
        _example(
            "--sample-top-p",
            metavar="P",
            parser=share("--sample-top-p"),
            help=f"Mark the likeliest that make up P, default {TOP_P}.",
        ),
    ] = None

    def chosen(
        self, source: str | None, said: Dimensions, run: RunOptions, tokens: TokenOptions, unembed: bool = False
    ) -> tuple[Example | None, Resolved]:
        """The example, if it is one, and the model to run. Raises FFNError for options that contradict each other.

        With `unembed` there are the probabilities of a model's own head, whose vocabulary is not known yet.
        """
        if self.example is not None:
            example = find(self.example)
            _check(self.example, example, source, said, run, tokens)
            if self.vocab and not example.vocab:
                raise FFNError(f"--example {self.example} contradicts --vocab", "only conv's text has a final layer")
            self._check_vocab(example.vocab, unembed)
            return example, example.model
        self._check_vocab(0, unembed)
        if self.vocab and source is None and said.d_model is not None and not _block_said(said):
            d_model = whole("--d-model", said.d_model)
            example = final_layer_alone(d_model, self.vocab, said.bias is not False)
            return example, example.model
        if source is None and said.d_model is None:
            example = notebook()
            return example, with_dimensions(example.model, said)
        return None, load(source, said, run.seed or 0)

    @property
    def sets(self) -> tuple[int, float]:
        """The K and P of the sets that are marked."""
        return self.sample_top_k or TOP_K, self.sample_top_p or TOP_P

    def check_top_k(self, vocab: int) -> None:
        """Raises FFNError for a --sample-top-k above the vocabulary."""
        if self.sample_top_k is not None and self.sample_top_k > vocab:
            raise FFNError(f"--sample-top-k {self.sample_top_k} exceeds the vocabulary of {vocab}")

    def _check_vocab(self, given: int, unembed: bool) -> None:
        vocab = self.vocab or given
        for option, value in (("--sample-top-k", self.sample_top_k), ("--sample-top-p", self.sample_top_p)):
            if value is not None and not vocab and not unembed:
                raise FFNError(f"{option} needs --vocab or --unembed", "without logits there are no probabilities")
        if vocab:
            self.check_top_k(vocab)

    def final_width(self, example: Example | None) -> int | None:
        """The vocabulary of the final layer that is to be put behind the block; None for none, or where it is there."""
        if self.vocab and example and example.block and example.block[-1].output == "probs":
            return None
        return self.vocab

    def extended(self, page: Answer, traced: Traced) -> Answer:
        """The trace's answer with the sets of a final layer (`probs` must be kept), an example's picture and facts."""
        if "probs" in traced.result.tensors:
            from ffncli.cli.sampling_page import with_sampling

            page = with_sampling(page, traced, *self.sets)
        if self.example is not None and traced.example is not None:
            from ffncli.cli.facts_page import with_facts
            from ffncli.run.texts import facts

            found = facts(self.example.strip().lower(), traced.ready)
            page = with_facts(page, traced.ready.steps, traced.example, found)
        return page


def _check(
    asked: str, example: Example, source: str | None, said: Dimensions, run: RunOptions, tokens: TokenOptions
) -> None:
    """Raises FFNError for what an example cannot be asked beside its own block."""
    contradicted = f"--example {asked} contradicts"
    if source is not None:
        raise FFNError(f"{contradicted} SOURCE {shown(source)}", "give one or the other")
    if changed := _given(said):
        raise FFNError(f"{contradicted} {changed}", "it runs the text's own block, whose facts hold for it alone")
    if run.dtype is not None and dtypes.dtype(run.dtype).name not in ("fp32", "fp64"):
        raise FFNError(f"{contradicted} --dtype {run.dtype}", "its facts are about exact numbers: use fp32 or fp64")
    if run.input is not None:
        raise FFNError(f"{contradicted} --input", "its facts hold for the text's own input, or a drawn one")
    again = _given(tokens) or _given(RunOptions(seed=run.seed, train=run.train))
    if example.fixed and again:
        raise FFNError(f"{contradicted} {again}", "the text gives input and mask; `ffn trace` alone takes it")


def _given(options: Dimensions | TokenOptions | RunOptions) -> str:
    """The first of these options that was said, as it was typed; "" for none."""
    said = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "device"}
    name = next((name for name, value in said.items() if value is not None), "")
    off = {"gated": "plain", "bias": "no-bias", "residual": "no-residual", "train": "eval"}
    return f"--{(off[name] if said[name] is False else name).replace('_', '-')}" if name else ""


def _block_said(said: Dimensions) -> bool:
    """Whether any option speaks of a block before the final layer."""
    return replace(said, d_model=None, bias=None).said()
