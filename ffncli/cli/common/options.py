"""Options that several commands share, each with one meaning. A command takes them as one dataclass.

`spread` lets a command's signature name an options dataclass; Typer sees its fields as the command's own options.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial, wraps
from math import inf, nan
from typing import Annotated, Any, get_type_hints

import typer

from ffncli.block.recipe import MAX_SIZE
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import Dimensions, leading_axes, whole
from ffncli.show.output import Output


def positive(option: str, high: int = MAX_SIZE) -> Callable[[str], int]:
    """A parser for a whole number from 1 to `high`; its FFNError names the option."""

    def parse(text: str) -> int:
        return whole(option, text, high)

    return parse


def natural(option: str, high: int = 2**63 - 1) -> Callable[[str], int]:
    """A parser for a whole number from 0."""

    def parse(text: str) -> int:
        text = str(text).strip()
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= high):
            limit = f" to {high}" if high < 2**63 - 1 else ""
            raise FFNError(f"{option} must be a whole number from 0{limit}, got {shown(text)}")
        return int(text)

    return parse


def _number(option: str, allowed: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """A parser for a number that is `allowed`, which `words` say; NaN never is."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not allowed(value):
            raise FFNError(f"{option} must be {words}, got {shown(text)}")
        return value

    return parse


def probability(option: str) -> Callable[[str], float]:
    """A parser for a number of at least 0 and below 1."""
    return _number(option, lambda value: 0 <= value < 1, "at least 0 and below 1")


def share(option: str) -> Callable[[str], float]:
    """A parser for a number above 0 and at most 1."""
    return _number(option, lambda value: 0 < value <= 1, "above 0 and at most 1")


def above_zero(option: str) -> Callable[[str], float]:
    """A parser for a finite number above 0."""
    return _number(option, lambda value: 0 < value < inf, "a number above 0")


def from_zero(option: str) -> Callable[[str], float]:
    """A parser for a finite number of at least 0."""
    return _number(option, lambda value: 0 <= value < inf, "a number from 0")


def percentage(option: str, most: float = inf, zero: bool = False) -> Callable[[str], float]:
    """A parser for a difference, `3%` or `0.03`, up to `most`, above 0 or from it where `zero`.

    A bare number of 1 or more is refused: it is likely a percentage.
    """
    limit = "" if most == inf else f" and at most {most:.0%},"
    words = f"a percentage {'from' if zero else 'above'} 0{limit} such as 3%"

    def parse(text: str) -> float:
        said = str(text).strip()
        bare = not said.endswith("%")
        try:
            value = float(said.removesuffix("%").rstrip()) / (1 if bare else 100)
        except ValueError:
            value = nan
        if not (0 <= value <= most and value < inf and (zero or value)) or (bare and value >= 1):
            hint = f"that would be {value:.0%}: say {said}%" if bare and 1 <= value <= 100 * min(most, 1) else ""
            raise FFNError(f"{option} must be {words}, got {shown(text)}", hint)
        return value

    return parse


def joined(values: list[str] | None) -> str | None:
    """One comma list of an option that may be repeated; None where it was not given."""
    return ",".join(values) if values else None


_MOST_VALUES = 1000  # of a comma list
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


def numbers(option: str) -> Callable[[str], tuple[int, ...]]:
    """A parser for a comma list of positive whole numbers, `1,32,512`; its FFNError names the option."""
    one = positive(option)

    def parse(text: str) -> tuple[int, ...]:
        parts = str(text).split(",")
        if len(parts) > _MOST_VALUES:
            raise FFNError(f"{option} takes at most {_MOST_VALUES} values, got {len(parts)}")
        return tuple(one(part) for part in parts)

    return parse


@dataclass(frozen=True)
class TokenListOptions:
    """--tokens as a list, or --batch and --seq-len."""

    tokens: Annotated[
        Any, _run("--tokens", metavar="N,...", parser=numbers("--tokens"), help="How many tokens; several: a table.")
    ] = None
    batch: _Batch = None
    seq_len: _SeqLen = None

    def numbers(self) -> tuple[int, ...]:
        """How many tokens, each in turn; () where nothing was said."""
        if self.batch is None and self.seq_len is None:
            return self.tokens or ()
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


@dataclass(frozen=True)
class OutputOptions:
    """--format and its kin."""

    format: Annotated[Text, _show("--format", metavar="STYLE", help="table (default), json, csv or md.")] = None
    json: Annotated[bool, _show("--json", help="Short for --format json.")] = False
    csv: Annotated[bool, _show("--csv", help="Short for --format csv.")] = False
    out: Annotated[Text, _show("-o", "--output", metavar="FILE", help="Write there instead (- is stdout).")] = None
    force: Annotated[bool, _show("--force", help="Let -o (and --save) replace an existing file.")] = False
    no_color: Annotated[bool, _show("--no-color", help="No colour.")] = False
    quiet: Annotated[bool, _show("-q", "--quiet", help="No notes on stderr.")] = False
    debug: Annotated[bool, _show("--debug", help="Show tracebacks of errors.")] = False  # main.py reads it, from argv

    def output(self) -> Output:
        """The sink these options ask for. Raises FFNError for a contradiction or a file that exists."""
        said = [name for name, on in (("json", self.json), ("csv", self.csv)) if on]
        said += [self.format] if self.format is not None else []
        if len(set(said)) > 1:
            raise FFNError(f"--format: {' and '.join(dict.fromkeys(said))} contradict each other", "give one")
        suffix = os.path.splitext(self.out or "")[1].lstrip(".")
        implied = suffix if suffix in ("json", "csv", "md") else "table"
        chosen: Any = said[0] if said else implied
        path = None if self.out is None else os.path.expanduser(self.out)
        return Output(chosen, path, self.force, not self.no_color, self.quiet)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with every parameter whose type is an options dataclass replaced by that class's fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    bundles: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if hasattr(hints[name], "__dataclass_fields__"):
            bundles[name] = hints[name]
            types = get_type_hints(hints[name], include_extras=True)
            parameters += [_parameter(f.name, types[f.name], f.default) for f in fields(hints[name])]
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, bundle in bundles.items():
            values[name] = bundle(**{f.name: values.pop(f.name) for f in fields(bundle)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # or Typer would look through to the original
    return run


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=empty if default is MISSING else default, annotation=annotation
    )
