"""Options that run a real model: what it is given, and what `ffn trace` looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffncli.cli.options import DimensionOptions, InputOptions, RunOptions, TokenOptions, natural, positive
from ffncli.errors import FFNError, shown

if TYPE_CHECKING:
    from ffncli.models.examples import Example
    from ffncli.models.model import Resolved
    from ffncli.run.prepare import Prepared, Request
    from ffncli.run.tokens import Asked, Token

_model = partial(typer.Option, rich_help_panel="A real model, run by transformers")
_MOST_IDS = 1_000_000


def _ids(text: str) -> tuple[int, ...]:
    """Token numbers, `1,2,3`."""
    words = [word for word in str(text).replace(" ", ",").split(",") if word]
    if not words or len(words) > _MOST_IDS:
        raise FFNError(f"--input-ids must be token numbers like 1,2,3, got {shown(text)}")
    return tuple(map(natural("--input-ids", 2**31 - 1), words))


def input_options(place: InputOptions, tokens: TokenOptions) -> dict[str, object]:
    """The options that make an FFN's input without any model, each with what was given."""
    return {"--input": place.input, "--tokens": tokens.tokens, "--batch": tokens.batch, "--seq-len": tokens.seq_len}


@dataclass(frozen=True)
class GivenOptions:
    """--prompt, --input-ids and --position: what the model reads, and which of that is looked at."""

    prompt: Annotated[
        str | None, _model("--prompt", metavar="TEXT", help="Run the model on it: what then enters its FFN.")
    ] = None
    input_ids: Annotated[
        Any, _model("--input-ids", metavar="N,...", parser=_ids, help="Token numbers instead of a prompt.")
    ] = None
    position: Annotated[
        str | None, _model("--position", metavar="I,...", help="Which tokens: -1 (the last), 0,3 or 2:5; default all.")
    ] = None

    @property
    def runs_model(self) -> bool:
        """Whether transformers is to run the model."""
        return self.prompt is not None or self.input_ids is not None

    @property
    def option(self) -> str:
        """The option that asks for a run of the model, for errors."""
        return "--input-ids" if self.prompt is None else "--prompt"

    def asked(self) -> Asked:
        """The same for `run/capture.py`."""
        from ffncli.run.tokens import Asked

        return Asked(self.prompt, self.input_ids, self.position)

    def check_given(self, made: Mapping[str, object]) -> None:
        """Raises FFNError for a prompt beside token numbers, or beside an option of `made`, which make the input."""
        if self.prompt is not None and self.input_ids is not None:
            raise FFNError("--prompt contradicts --input-ids", "give one")
        if self.runs_model and (said := next((name for name, value in made.items() if value is not None), None)):
            raise FFNError(f"{said} contradicts {self.option}", "the model makes the FFN's input")


@dataclass(frozen=True)
class PromptOptions(GivenOptions):
    """The same, and --unembed and its kin."""

    unembed: Annotated[bool, _model("--unembed", help="The tokens that the FFN's output promotes.")] = False
    neuron: Annotated[
        int | None,
        _model("--neuron", metavar="I", parser=natural("--neuron"), help="With --unembed: of one hidden unit."),
    ] = None
    top_tokens: Annotated[
        int | None,
        _model("--top-tokens", metavar="N", parser=positive("--top-tokens"), help="With --unembed: how many, 10."),
    ] = None

    def prepare(self, model: Resolved, request: Request, example: Example | None) -> tuple[Prepared, tuple[Token, ...]]:
        """A layer ready to run: on what enters it in the model, with the tokens; else on the request's input."""
        if self.runs_model:
            from ffncli.run.capture import capture

            return capture(model, self.asked(), request)
        from ffncli.run.prepare import prepare

        return prepare(model, request, example), ()

    def check_model(
        self, model: Resolved, run: RunOptions, experts: frozenset[int] | None, vocab: int | None = None
    ) -> None:
        """Raises FFNError for what the model or its layer cannot answer, before anything large is loaded."""
        from ffncli.models.runnable import folder_of

        if self.runs_model:
            folder_of(model, self.option)
            if vocab:
                raise FFNError(f"--vocab contradicts {self.option}", "--unembed goes through the model's own head")
        if not self.unembed:
            return
        folder_of(model, "--unembed")
        layer = model.layer(run.layer)
        if layer.stack == "encoder" and any(group.stack == "decoder" for group in model.groups):
            raise FFNError(
                f"--unembed: no head reads {model.name}'s encoder", "a decoder layer's output can be unembedded"
            )
        if self.neuron is None:
            return
        if self.neuron >= layer.spec.d_ff:
            last = layer.spec.d_ff - 1
            raise FFNError(f"--neuron {self.neuron} is out of range", f"d_ff is {layer.spec.d_ff}: 0 to {last}")
        if layer.spec.moe and not experts:
            what = f"--neuron {self.neuron}: each of {layer.spec.moe.experts} experts has one"
            raise FFNError(what, "say which: --expert 0")

    def check(self, run: RunOptions, tokens: TokenOptions, dimensions: DimensionOptions) -> None:
        """Raises FFNError for options that contradict each other, or that say something to nobody."""
        self.check_given(input_options(run, tokens))
        if not self.unembed:
            for option, value in (("--neuron", self.neuron), ("--top-tokens", self.top_tokens)):
                if value is not None:
                    raise FFNError(f"{option} needs --unembed")
        if not self.runs_model:
            if self.position is not None and not self.unembed:
                raise FFNError("--position needs --prompt, --input-ids or --unembed")
            return
        if changed := [f.name for f in fields(dimensions) if getattr(dimensions, f.name) is not None]:
            name = changed[0].replace("_", "-")
            raise FFNError(f"--{name} contradicts {self.option}", "the model is run as it is")
        if run.train:
            raise FFNError(f"--train contradicts {self.option}", "the model is run in eval mode")
