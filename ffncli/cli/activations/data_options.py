"""--source and related options: `ffn activations` on the actual input of a model's activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.common import values
from ffncli.cli.common.option import SOURCE, option
from ffncli.cli.common.options import InputOptions, Text, TokenOptions
from ffncli.cli.common.prompt_options import GivenOptions
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError

if TYPE_CHECKING:
    from ffncli.show.output import Output

_source = partial(option, SOURCE)


@dataclass(frozen=True)
class SourceOption:
    """--source, before the options of its input."""

    source: Annotated[
        Text,
        _source("--source", metavar="SOURCE", daily=True, values=values.models,
                help="Measure them on the real inputs of this model's activation: a directory, gpt2, ..."),
    ] = None  # fmt: skip


@dataclass(frozen=True)
class DataOptions(GivenOptions, TokenOptions, InputOptions, SourceOption):
    """The same, with the options of its input and of its layers."""

    layer: Annotated[
        Text,
        _source("-l", "--layer", metavar="N|all",
                help="With --source: layer, counted from 0; decoder.3; all gives a row for each. [default: 0]"),
    ] = None  # fmt: skip

    def check(self, others: Mapping[str, object], rounding: bool) -> None:
        """Raises FFNError for options that need --source without it, and for contradictions.

        `others` are the command's options that do not concern data, each with its value; `rounding` computes on a
        --device too.
        """
        made = {"--input": self.input, "--tokens": self.tokens, "--batch": self.batch, "--seq-len": self.seq_len}
        if self.source is None:
            if self.device != "cpu" and not rounding:
                raise FFNError("--device is the device for --source and --rounding", "add one of them")
            where = {"--seed": self.seed, "--threads": self.threads}
            prompts = {"--prompt": self.prompt, "--input-ids": self.input_ids, "--position": self.position}
            needing = {"--layer": self.layer, **prompts, **made, **where}
            if option := next((name for name, value in needing.items() if value is not None), None):
                raise FFNError(f"{option} needs --source", "name the model with the activation: --source DIR")
            return
        if option := next((name for name, value in others.items() if value), None):
            raise FFNError(f"{option} contradicts --source", "with --source the values are those of the model")
        if self.model_prompt:
            self.model_prompt.check(made)
        elif self.position is not None:
            raise FFNError("--position needs --prompt or --input-ids")

    def run(self, names: Sequence[str], output: Output, dtype: str | None = None) -> None:
        """Show the model's layers, with the activations of these (canonical) names in place of its own."""
        from ffncli.cli.activations.data_page import answer, remarks
        from ffncli.run.activations.call import activations_of

        data = activations_of(
            self.source or "", names, layer=self.layer, **self.model_input, input=self.input,
            leading=self.leading(), dtype=dtype, device=self.device,
            seed=self.seed, threads=self.threads,
        )  # fmt: skip
        output.notes(*self.notes, *remarks(data, self.layer, self.input))
        output.show(answer(data, self.model_input["prompt"], self.input))
