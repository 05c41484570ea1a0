"""--source and its kin: `ffn activations` on what truly enters a model's activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.cli.common.options import InputOptions, Text, TokenOptions
from ffncli.cli.common.prompt_options import GivenOptions
from ffncli.errors import FFNError, shown

if TYPE_CHECKING:
    from ffncli.models.model import Resolved
    from ffncli.show.output import Output

_SAID = {"activation": "its activation", "top_k": "how many experts a token goes to"}  # for want of which none is run
_data = partial(typer.Option, rich_help_panel="On real data")


@dataclass(frozen=True)
class SourceOption:
    """--source, before what it is run on."""

    source: Annotated[
        Text, _data("--source", metavar="SOURCE", help="Look at what enters this model's activation: DIR, gpt2, ...")
    ] = None


@dataclass(frozen=True)
class DataOptions(GivenOptions, TokenOptions, InputOptions, SourceOption):
    """The same, what it is run on, and which of its layers are looked at."""

    layer: Annotated[
        Text,
        _data("--layer", metavar="I|all", help="With --source: layer from 0, decoder.3, or a row for each; default 0."),
    ] = None

    def check(self, others: Mapping[str, object], rounding: bool) -> None:
        """Raises FFNError for options without the --source that they speak of, and for contradictions.

        `others` are those options of the command that are not about data, each with what was given, if anything was;
        `rounding` computes on a --device too.
        """
        made = {"--input": self.input, "--tokens": self.tokens, "--batch": self.batch, "--seq-len": self.seq_len}
        if self.source is None:
            if self.device != "cpu" and not rounding:
                raise FFNError("--device says where --source and --rounding compute", "add one of them")
            where = {"--seed": self.seed, "--threads": self.threads}
            given = {"--prompt": self.prompt, "--input-ids": self.input_ids, "--position": self.position}
            needing = {"--layer": self.layer, **given, **made, **where}
            if said := next((name for name, value in needing.items() if value is not None), None):
                raise FFNError(f"{said} needs --source", "name the model whose activation it is: --source DIR")
            return
        if said := next((name for name, value in others.items() if value), None):
            raise FFNError(f"{said} contradicts --source", "it is about the numbers that a model has")
        from ffncli.run.trace.question_checks import check_one_input

        check_one_input(self.prompt, self.input_ids, made)
        if self.position is not None and not self.runs_model:
            raise FFNError("--position needs --prompt or --input-ids")

    def run(self, names: Sequence[str], output: Output, dtype: str | None = None) -> None:
        """Look at the model's layers, with the activations of these (canonical) names in the place of its own."""
        from ffncli.cli.activations.data_page import answer, remarks
        from ffncli.run.engine.threads import set_threads, sleep_while_waiting

        sleep_while_waiting()  # a module of the user's own imports torch
        model, leading = self._model(), self.leading()
        if self.layer != "all":
            model.layer(self.layer)
        if self.runs_model:
            from ffncli.models.runnable import folder_of

            folder_of(model, self.option)

        # From here on torch is needed; what can be wrong without it has been said.
        set_threads(self.threads)
        from ffncli.run.activations.on_data import activations_on_data
        from ffncli.run.engine.prepare import LayerRequest

        request = LayerRequest(self.layer, self.input, leading, dtype, self.device, self.seed)
        found = activations_on_data(model, request, self.model_prompt() if self.runs_model else None, names)
        output.notes(
            *model.notes, *map(str, model.differences), *found.notes, *remarks(model, found, self.layer, self.input)
        )
        output.show(answer(model, found, self.prompt, self.input))

    def _model(self) -> Resolved:
        """The model of --source; all it is, it says itself. Raises FFNError where it needs to be told something."""
        from ffncli.models.source import is_user_module
        from ffncli.run.user.load import load

        try:
            model = load(self.source, None, self.seed or 0)
        except FFNError as error:
            if is_user_module(self.source or "") and error.hint.startswith("give --"):
                raise FFNError(error.message, "here it cannot be told: give it a default") from None
            raise
        if lacking := [
            words for name, words in _SAID.items() if name in model.model.unknown and not model.model.refused
        ]:
            what = f"{shown(model.source)} does not say {' and '.join(lacking)}, so it cannot be run"
            raise FFNError(what, "its config.json has to; `ffn trace` can be told")
        return model
