"""Options that several commands share, each with one meaning. A command takes them as one dataclass.

`spread` lets a command's signature name an options dataclass; Typer sees its fields as the command's own options.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from ffncli.errors import FFNError, shown
from ffncli.models.source import Dimensions, whole
from ffncli.show.output import Output


def positive(option: str) -> Callable[[str], int]:
    """A parser for a whole number of at least 1; its FFNError names the option."""
    return lambda text: whole(option, text)


def natural(option: str, high: int = 2**63 - 1) -> Callable[[str], int]:
    """A parser for a whole number from 0."""

    def parse(text: str) -> int:
        text = str(text).strip()
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= high):
            raise FFNError(f"{option} must be a whole number from 0 to {high}, got {shown(text)}")
        return int(text)

    return parse


def probability(option: str) -> Callable[[str], float]:
    """A parser for a number of at least 0 and below 1."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1:
            raise FFNError(f"{option} must be at least 0 and below 1, got {shown(text)}")
        return value

    return parse


_SHOW, _DIMS = "Output", "Dimensions (without SOURCE they make a block; with it they override)"


@dataclass(frozen=True)
class OutputOptions:
    """--format and its kin."""

    format: Annotated[
        str, typer.Option("--format", metavar="STYLE", help="table, json, csv or md.", rich_help_panel=_SHOW)
    ] = "table"
    json: Annotated[bool, typer.Option("--json", help="Short for --format json.", rich_help_panel=_SHOW)] = False
    csv: Annotated[bool, typer.Option("--csv", help="Short for --format csv.", rich_help_panel=_SHOW)] = False
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write there instead (- is stdout).", rich_help_panel=_SHOW
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Let -o replace an existing file.", rich_help_panel=_SHOW)] = (
        False
    )
    no_color: Annotated[bool, typer.Option("--no-color", help="No colour.", rich_help_panel=_SHOW)] = False
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No notes on stderr.", rich_help_panel=_SHOW)] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel=_SHOW)] = (
        False  # read by main.py from the arguments, so that it works for errors in them too
    )

    def output(self) -> Output:
        """The sink these options ask for. Raises FFNError for a contradiction or a file that exists."""
        said = [name for name, on in (("json", self.json), ("csv", self.csv)) if on]
        if self.format != "table":
            said.append(self.format)
        if len(set(said)) > 1:
            raise FFNError(f"--format: {' and '.join(dict.fromkeys(said))} contradict each other", "give one")
        suffix = os.path.splitext(self.out or "")[1].lstrip(".")
        implied = suffix if suffix in ("json", "csv", "md") else "table"
        chosen: Any = said[0] if said else implied
        return Output(chosen, self.out, self.force, not self.no_color, self.quiet)


@dataclass(frozen=True)
class DimensionOptions:
    """--d-model and its kin."""

    d_model: Annotated[
        str | None, typer.Option("--d-model", metavar="N", help="Width of the model.", rich_help_panel=_DIMS)
    ] = None
    d_ff: Annotated[
        str | None,
        typer.Option("--d-ff", metavar="N|4x", help="Width of one projection; 4x of d_model.", rich_help_panel=_DIMS),
    ] = None
    activation: Annotated[
        str | None,
        typer.Option("--activation", metavar="NAME", help="gelu, silu, swiglu, ...", rich_help_panel=_DIMS),
    ] = None
    gated: Annotated[
        bool | None, typer.Option("--gated/--plain", help="With a gate projection or without.", rich_help_panel=_DIMS)
    ] = None
    bias: Annotated[
        bool | None, typer.Option("--bias/--no-bias", help="Default: iff not gated.", rich_help_panel=_DIMS)
    ] = None
    norm: Annotated[
        str | None, typer.Option("--norm", metavar="KIND", help="none, layernorm or rmsnorm.", rich_help_panel=_DIMS)
    ] = None
    norm_position: Annotated[
        str | None,
        typer.Option(
            "--norm-position", metavar="WHERE", help="pre, post, branch or pre+branch.", rich_help_panel=_DIMS
        ),
    ] = None
    residual: Annotated[
        bool | None, typer.Option("--residual/--no-residual", help="Add the input at the end.", rich_help_panel=_DIMS)
    ] = None
    dropout: Annotated[
        float | None,
        typer.Option(
            "--dropout",
            metavar="P",
            parser=probability("--dropout"),
            help="Dropout before the down projection.",
            rich_help_panel=_DIMS,
        ),
    ] = None
    experts: Annotated[
        int | None,
        typer.Option(
            "--experts", metavar="N", parser=positive("--experts"), help="Routed experts (MoE).", rich_help_panel=_DIMS
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            metavar="K",
            parser=positive("--top-k"),
            help="Experts per token, default 2.",
            rich_help_panel=_DIMS,
        ),
    ] = None
    shared_experts: Annotated[
        int | None,
        typer.Option(
            "--shared-experts", metavar="N", parser=natural("--shared-experts", 2**31 - 1),
            help="Experts that every token uses.", rich_help_panel=_DIMS,
        ),
    ] = None  # fmt: skip

    def dimensions(self) -> Dimensions:
        """The same choices for `models/source.py`."""
        return Dimensions(**{f.name: getattr(self, f.name) for f in fields(self)})


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
