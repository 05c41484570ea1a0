"""Options that several commands share, each with one meaning. A command takes them as one dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from ffncli.cli.common import values
from ffncli.cli.common.option import COMPUTE, INPUT, OUTPUT, SOURCE, option
from ffncli.cli.common.parsers import (
    flat,
    natural,
    numbers,
    positive,
)
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import leading_axes
from ffncli.options import shared
from ffncli.options.opt import Opt, Options
from ffncli.run.ranks.environment import follows
from ffncli.show.color import ColorChoice, color_choice
from ffncli.show.output import Output

_source = partial(option, SOURCE)
_input = partial(option, INPUT)
_compute = partial(option, COMPUTE)
_show = partial(option, OUTPUT)
KINDS_OF_SOURCE = "Model name, directory, file or hf://org/name; 512x2048:gelu; my.py:Class (runs that file)."

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help=f"{KINDS_OF_SOURCE} [default: a small built-in demo]",
        autocompletion=values.models,
    ),
]

BenchSource = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help=f"{KINDS_OF_SOURCE} [default: 512x2048:swiglu]",
        autocompletion=values.models,
    ),
]

Text = str | None
Count = int | None
Flag = bool | None


_tokens = partial(_input, "-n", "--tokens", daily=True)
_Batch = Annotated[
    Count,
    _input("--batch", metavar="N", parser=positive("--batch"), help="Batch size; with --seq-len, instead of --tokens."),
]
_SeqLen = Annotated[Count, _input("--seq-len", metavar="N", parser=positive("--seq-len"), help="Tokens per sequence.")]


@dataclass(frozen=True)
class TokenOptions:
    """--tokens, or --batch and --seq-len."""

    tokens: Annotated[Count, _tokens(metavar="N", parser=positive("--tokens"), help="Number of tokens.")] = None
    batch: _Batch = None
    seq_len: _SeqLen = None

    def leading(self) -> tuple[int, ...] | None:
        """An input's axes before d_model, or None if not given."""
        return leading_axes(self.tokens, self.batch, self.seq_len)


@dataclass(frozen=True)
class TokenListOptions:
    """--tokens as a list, or --batch and --seq-len."""

    tokens: Annotated[
        list[Any] | None,
        _tokens(metavar="N,...", parser=numbers("--tokens"), help="Number of tokens; several give one row each."),
    ] = None
    batch: _Batch = None
    seq_len: _SeqLen = None

    def numbers(self) -> tuple[int, ...]:
        """The numbers of tokens, in order; () if not given."""
        if self.batch is None and self.seq_len is None:
            return flat(self.tokens) or ()
        if self.tokens is not None:
            raise FFNError("--tokens contradicts --batch and --seq-len", "give one or the other")
        return ((self.batch or 1) * (self.seq_len or 1),)


@dataclass(frozen=True)
class InputOptions:
    """--layer, --input and related options: what runs, on which input, on which device."""

    layer: Annotated[
        Text,
        _source("-l", "--layer", metavar="N", daily=True,
                help="Layer, counted from 0; decoder.3 in a model with two stacks."),
    ] = None  # fmt: skip
    input: Annotated[
        Text,
        _input("--input", metavar="VALUES", daily=True,
               help="arange, randn, zeros, ones, numbers (0.1,0.2,...), a FILE, or - for stdin."),
    ] = None  # fmt: skip
    device: Annotated[str, _compute("--device", metavar="NAME", help="Device: cpu, cuda or cuda:1.")] = "cpu"
    seed: Annotated[
        Count,
        _compute("--seed", metavar="N", parser=natural("--seed"),
                 help="Seed of random weights and random input. [default: 0]"),
    ] = None  # fmt: skip
    threads: Annotated[
        Count, _compute("--threads", metavar="N", parser=positive("--threads", 4096), help="CPU threads.")
    ] = None


@dataclass(frozen=True)
class PlaceOptions(InputOptions):
    """The same, with the dtype."""

    dtype: Annotated[
        Text,
        _compute("--dtype", metavar="NAME", daily=True, values=values.dtypes,
                 help="Compute in fp32, fp64, bf16 or fp16. [default: fp32]"),
    ] = None  # fmt: skip


@dataclass(frozen=True)
class RunOptions(PlaceOptions):
    """The same, also for all layers, with the mode."""

    layer: Annotated[
        Text,
        _source("-l", "--layer", metavar="N|all", daily=True,
                help="Layer, counted from 0; decoder.3 in a model with two stacks; all gives one row per layer."),
    ] = None  # fmt: skip
    train: Annotated[Flag, _compute("--train/--eval", help="Apply dropout, or turn it off.")] = None


def format_of(path: str | None) -> str | None:
    """The format that the suffix of `-o` means; None if it means none: no suffix, or .txt.

    Raises FFNError for any other suffix: a file of that name should not contain text.
    """
    suffix = os.path.splitext(path or "")[1].lower()
    if suffix in ("", ".txt"):
        return None
    if suffix not in (".json", ".csv", ".md"):
        raise FFNError(f"-o {shown(path)}: cannot write {suffix} files", "use .json, .csv, .md, .txt or no suffix")
    return suffix[1:]


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """--format and related options."""

    format: Annotated[
        str | None,
        Opt("--format", metavar="NAME", completes="formats", help="table, json, csv or md. [default: table]"),
    ] = None
    json: Annotated[bool, Opt("--json", daily=True, help="Same as --format json.")] = False
    csv: Annotated[bool, Opt("--csv", help="Same as --format csv.")] = False
    out: shared.Output = None
    force: shared.Force = False
    color: Annotated[
        str | None,
        Opt("--color", metavar="WHEN", eager=True, completes="colors",
            help="Colours: auto (in a terminal), always or never. [default: auto]"),
    ] = None  # fmt: skip
    no_color: Annotated[bool, Opt("--no-color", eager=True, help="Same as --color never.")] = False
    quiet: Annotated[bool, Opt("-q", "--quiet", help="Print no notes on stderr.")] = False
    debug: Annotated[bool, Opt("--debug", help="Print the traceback of an error.")] = False  # main.py reads argv

    def output(self) -> Output:
        """The sink for these options. Raises FFNError for a contradiction or an existing file."""
        formats = [name for name, on in (("json", self.json), ("csv", self.csv)) if on]
        formats += [self.format] if self.format is not None else []
        if len(set(formats)) > 1:
            raise FFNError(f"--format: {' and '.join(dict.fromkeys(formats))} contradict each other", "give one")
        implied = format_of(self.out)
        if formats and implied and formats[0] != implied:
            raise FFNError(f"-o {shown(self.out)} contradicts --format {formats[0]}", f"-o of .{implied} is {implied}")
        chosen: Any = formats[0] if formats else implied or "table"
        path = None if self.out is None else os.path.expanduser(self.out)
        if follows():
            return Output(chosen, quiet=True)  # rank 0 writes
        return Output(chosen, path, self.force, self.color_choice(), self.quiet)

    def color_choice(self) -> ColorChoice:
        """When to use colours. Raises FFNError for an unknown value, and for a contradiction."""
        choice = color_choice(self.color or "auto")
        if self.no_color and choice == "always":
            raise FFNError("--no-color contradicts --color always", "give one")
        return "never" if self.no_color else choice
