"""Options that several commands share, each with one meaning. A command takes them as one dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer

from ffncli.block.recipe import MAX_SIZE
from ffncli.cli.common.parsers import flat, natural, numbers, positive, probability
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import Dimensions, leading_axes
from ffncli.show.output import Output

_dims = partial(typer.Option, rich_help_panel="Dimensions: make a block, or override the SOURCE's")
_run = partial(typer.Option, rich_help_panel="The run")
_show = partial(typer.Option, rich_help_panel="Output")

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="Model directory or name, 512x2048:gelu, my.py:Class (runs that file); default: a notebook's.",
    ),
]

BenchSource = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="Model directory or name, 512x2048:gelu, my.py:Class (runs that file); default: 512x2048:swiglu.",
    ),
]

Text = str | None
Count = int | None
Flag = bool | None


@dataclass(frozen=True)
class DimensionOptions:
    """--d-model and its kin: the choices that make a block, or override a source's."""

    d_model: Annotated[Text, _dims("--d-model", metavar="N", help="Width of the model.")] = None
    d_ff: Annotated[Text, _dims("--d-ff", metavar="N|4x", help="Width of one projection; 4x of d_model.")] = None
    activation: Annotated[Text, _dims("--activation", metavar="NAME", help="gelu, silu, swiglu, ...")] = None
    gated: Annotated[Flag, _dims("--gated/--plain", help="With a gate projection or without.")] = None
    bias: Annotated[Flag, _dims("--bias/--no-bias", help="Default: iff not gated.")] = None
    norm: Annotated[Text, _dims("--norm", metavar="KIND", help="none, layernorm or rmsnorm.")] = None
    norm_position: Annotated[
        Text, _dims("--norm-position", metavar="WHERE", help="pre, post, branch or pre+branch.")
    ] = None
    residual: Annotated[Flag, _dims("--residual/--no-residual", help="Add the input at the end.")] = None
    dropout: Annotated[
        float | None,
        _dims("--dropout", metavar="P", parser=probability("--dropout"), help="Dropout before the down projection."),
    ] = None
    experts: Annotated[
        Count, _dims("--experts", metavar="N", parser=positive("--experts"), help="Routed experts (MoE).")
    ] = None
    top_k: Annotated[
        Count, _dims("--top-k", metavar="K", parser=positive("--top-k"), help="Experts per token, default 2.")
    ] = None
    shared_experts: Annotated[
        Count,
        _dims(
            "--shared-experts", metavar="N", parser=natural("--shared-experts", MAX_SIZE),
            help="Experts that every token uses.",
        ),
    ] = None  # fmt: skip

    def dimensions(self) -> Dimensions:
        """The same choices for `models/source.py`."""
        return Dimensions(**{f.name: getattr(self, f.name) for f in fields(self)})


_Batch = Annotated[
    Count, _run("--batch", metavar="B", parser=positive("--batch"), help="Batch, with --seq-len instead of --tokens.")
]
_SeqLen = Annotated[
    Count, _run("--seq-len", metavar="L", parser=positive("--seq-len"), help="Tokens per sequence of the batch.")
]


@dataclass(frozen=True)
class TokenOptions:
    """--tokens, or --batch and --seq-len."""

    tokens: Annotated[Count, _run("--tokens", metavar="N", parser=positive("--tokens"), help="How many tokens.")] = None
    batch: _Batch = None
    seq_len: _SeqLen = None

    def leading(self) -> tuple[int, ...] | None:
        """An input's axes before d_model, or None where nothing was said."""
        return leading_axes(self.tokens, self.batch, self.seq_len)


@dataclass(frozen=True)
class TokenListOptions:
    """--tokens as a list, or --batch and --seq-len."""

    tokens: Annotated[
        list[Any] | None,
        _run("--tokens", metavar="N,...", parser=numbers("--tokens"), help="How many tokens; several: a table."),
    ] = None
    batch: _Batch = None
    seq_len: _SeqLen = None

    def numbers(self) -> tuple[int, ...]:
        """How many tokens, each in turn; () where nothing was said."""
        if self.batch is None and self.seq_len is None:
            return flat(self.tokens) or ()
        if self.tokens is not None:
            raise FFNError("--tokens contradicts --batch and --seq-len", "give one or the other")
        return ((self.batch or 1) * (self.seq_len or 1),)


@dataclass(frozen=True)
class InputOptions:
    """--layer, --input and their kin: what is run, on what, where."""

    layer: Annotated[Text, _run("--layer", metavar="I", help="Layer from 0; decoder.3 where there are two stacks.")] = (
        None
    )
    input: Annotated[Text, _run("--input", metavar="X", help="arange, randn, zeros, ones, 0.1,0.2,..., FILE or -.")] = (
        None
    )
    device: Annotated[str, _run("--device", metavar="WHERE", help="cpu, cuda or cuda:1.")] = "cpu"
    seed: Annotated[
        Count, _run("--seed", metavar="N", parser=natural("--seed"), help="For random weights and input, default 0.")
    ] = None
    threads: Annotated[
        Count, _run("--threads", metavar="N", parser=positive("--threads", 4096), help="CPU threads.")
    ] = None


@dataclass(frozen=True)
class PlaceOptions(InputOptions):
    """The same, and in which dtype."""

    dtype: Annotated[Text, _run("--dtype", metavar="NAME", help="Compute in fp32 (default), fp64, bf16, fp16.")] = None


@dataclass(frozen=True)
class RunOptions(PlaceOptions):
    """The same, of all layers too, and in which mode."""

    layer: Annotated[
        Text,
        _run("--layer", metavar="I|all", help="Layer from 0; decoder.3 where there are two stacks; a row for all."),
    ] = None
    train: Annotated[Flag, _run("--train/--eval", help="Whether dropout is active.")] = None


def format_of(path: str | None) -> str | None:
    """The format that the suffix of `-o` means; None where it leaves it open: no suffix, or .txt.

    Raises FFNError for any other suffix: text in a file of that name would not be what the name says.
    """
    suffix = os.path.splitext(path or "")[1].lower()
    if suffix in ("", ".txt"):
        return None
    if suffix not in (".json", ".csv", ".md"):
        raise FFNError(f"-o {shown(path)}: cannot write {suffix} files", "use .json, .csv, .md, .txt or no suffix")
    return suffix[1:]


@dataclass(frozen=True)
class OutputOptions:
    """--format and its kin."""

    format: Annotated[Text, _show("--format", metavar="STYLE", help="table (default), json, csv or md.")] = None
    json: Annotated[bool, _show("--json", help="Short for --format json.")] = False
    csv: Annotated[bool, _show("--csv", help="Short for --format csv.")] = False
    out: Annotated[Text, _show("-o", "--output", metavar="FILE", help="Write there instead (- is stdout).")] = None
    force: Annotated[bool, _show("--force", help="Replace an existing file.")] = False
    no_color: Annotated[bool, _show("--no-color", help="No colour.")] = False
    quiet: Annotated[bool, _show("-q", "--quiet", help="No notes on stderr.")] = False
    debug: Annotated[bool, _show("--debug", help="Show tracebacks of errors.")] = False  # main.py reads it, from argv

    def output(self) -> Output:
        """The sink these options ask for. Raises FFNError for a contradiction or a file that exists."""
        said = [name for name, on in (("json", self.json), ("csv", self.csv)) if on]
        said += [self.format] if self.format is not None else []
        if len(set(said)) > 1:
            raise FFNError(f"--format: {' and '.join(dict.fromkeys(said))} contradict each other", "give one")
        implied = format_of(self.out)
        if said and implied and said[0] != implied:
            raise FFNError(f"-o {shown(self.out)} contradicts --format {said[0]}", f"-o of .{implied} is {implied}")
        chosen: Any = said[0] if said else implied or "table"
        path = None if self.out is None else os.path.expanduser(self.out)
        return Output(chosen, path, self.force, not self.no_color, self.quiet)
