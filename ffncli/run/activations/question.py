"""The options of `ffn activations`: compare functions and gated units with each other, or on a model's own inputs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, TypeAlias

from ffncli.block.activations import TABLE, gated_name, resolve
from ffncli.block.analysis.facts import FARTHEST, claim
from ffncli.block.analysis.gated import UNITS, split
from ffncli.block.analysis.rounding import NumberFormat, formats
from ffncli.errors import FFNError, option, shown
from ffncli.options import shared
from ffncli.options.accept import ABOVE_ZERO, COUNT, FROM_ZERO, TEXT, TEXTS, Accepts, number_or_text, several
from ffncli.options.conflicts import Conflict
from ffncli.options.opt import SOURCE, Opt, Options
from ffncli.run.user.options import Input
from ffncli.run.user.time_limit import LoadOptions

_curves = partial(Opt, group="Values and curves")
_gated = partial(Opt, group="Gated units")
_differences = partial(Opt, group="Differences and rounding")
IN_USE = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "xielu")
DEFAULT_AT = "-3:3:1"
BEYOND_LIMITS = "-12:12:4"  # wide enough to exceed the limits of most gated units
DEFAULT_UP, COMPARED_UP = (1.0,), (1.0, 12.0)
DEFAULT_FORMATS = "bf16,fp16"
D_MODEL, D_FF = 512, 2048  # the Transformer of 2017
MOST = 10_000  # points
Names: TypeAlias = str | Sequence[str]
Points: TypeAlias = str | float | Sequence[float]


def points(value: Any) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers and ranges A:B:STEP (both ends included) into numbers, in order.

    A range is computed in exact decimals, so that steps of 0.1 reach 0.3. A number that is not finite, an empty range,
    a step of 0 and more than MOST points raise FFNError.
    """
    out: list[float] = []
    members = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for part in (part for member in members for part in str(member).split(",")):
        out += _range(part, MOST - len(out)) if ":" in part else [float(_number(part))]
        if len(out) > MOST:
            raise FFNError(f"more than {MOST:,} points", "choose a larger step")
    return tuple(out)


def _range(text: str, most: int) -> list[float]:
    ends = text.split(":")
    if len(ends) not in (2, 3):
        raise FFNError(f"a range is A:B:STEP, got {shown(text)}", "for example -3:3:0.5")
    first, last = _number(ends[0]), _number(ends[1])
    step = _number(ends[2]) if len(ends) == 3 else Fraction(1)
    if step <= 0:
        raise FFNError(f"the step of a range must be above 0, got {shown(ends[2])}")
    if last < first:
        raise FFNError(f"the range {shown(text)} is empty", "give the smaller end first")
    count = (last - first) // step + 1
    if count > most:
        raise FFNError(f"{shown(text)} has more than {MOST:,} points", "choose a larger step")
    return [float(first + i * step) for i in range(int(count))]


def _number(text: str) -> Fraction:
    """Read a number exactly as written; refuse magnitudes above FARTHEST."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FFNError(f"{shown(text)} is not a finite number", "for example 0.5 or -3:3:0.5")
    if abs(value) > FARTHEST:
        raise FFNError(f"{shown(text)} is out of range", f"between -{FARTHEST:g} and {FARTHEST:g}")
    return Fraction(text.strip()) if abs(value) > 1e-300 else Fraction(value)


_POINTS = Accepts("numbers, or a range A:B:STEP", points, metavar="X,...", repeat=True)


def _checked(pair: str) -> str:
    claim(pair)  # raises FFNError
    return pair


_CLAIMS = Accepts(
    "pairs X=Y", lambda value: tuple(_checked(pair) for text in TEXTS.convert(value) for pair in text.split(",")),
    metavar="X=Y,...", repeat=True,
)  # fmt: skip
_FORMATS = Accepts("names of formats", lambda value: ",".join(TEXTS.convert(value)), metavar="NAME,...", repeat=True)


@dataclass(frozen=True, kw_only=True)
class FunctionsQuestion(Options):
    """Show functions of one input, and gated units: their values, shapes, differences and rounding."""

    names: Annotated[
        Names,
        Opt(
            metavar="NAME", accepts=several(TEXT, "names of activations", least=0), repeat=True,
            completes="functions gates limited",
            help="Activations or gated units, as in gelu or swiglu. [default: the common ones]",
        ),
    ] = field(default=(), kw_only=False)  # fmt: skip
    at: Annotated[
        Points | None,
        _curves(
            "--at", metavar="X,...|A:B:STEP", accepts=_POINTS, daily=True,
            help=f"Inputs to show. [default: {DEFAULT_AT}; for differences of gated units {BEYOND_LIMITS}]",
        ),
    ] = None  # fmt: skip
    std: Annotated[
        float, _curves("--std", accepts=ABOVE_ZERO, daily=True, help="Standard deviation of the normal input.")
    ] = 1.0
    everything: Annotated[bool, _curves("--all", daily=True, help="Show every activation.")] = False
    expect: Annotated[
        str | Sequence[str],
        _curves("--expect", accepts=_CLAIMS, help="Check that f(X) = Y to the digits given; exit 1 if not."),
    ] = ()
    up: Annotated[
        Points | None,
        _gated(
            "--up", accepts=_POINTS,
            help="Values of the up input; --at sets the gate's values. [default: 1; for differences 1,12]",
        ),
    ] = None  # fmt: skip
    iso_params: Annotated[
        bool,
        _gated("--iso-params", help="Show the width at which a gated block has as many parameters as a plain one."),
    ] = False
    d_model: Annotated[
        int | str | None,
        _gated(
            "--d-model", accepts=number_or_text("a whole number"),
            help=f"With --iso-params: width of both blocks. [default: {D_MODEL}]",
        ),
    ] = None  # fmt: skip
    d_ff: Annotated[
        int | str | None,
        _gated(
            "--d-ff", metavar="N|4x", accepts=number_or_text("a whole number or a string such as '4x'"),
            help=f"With --iso-params: d_ff of the plain block. [default: {D_FF}]",
        ),
    ] = None  # fmt: skip
    multiple_of: Annotated[
        int | None,
        _gated("--multiple-of", accepts=COUNT, help="With --iso-params: round the gated d_ff up to a multiple of N."),
    ] = None
    against: Annotated[
        str | None,
        _differences(
            "--against", metavar="NAME", daily=True, completes="functions gates limited",
            help="Show the largest difference from NAME, and where it is.",
        ),
    ] = None  # fmt: skip
    tolerance: Annotated[
        float | None,
        _differences("--tolerance", accepts=FROM_ZERO, help="Exit 1 if a difference from --against exceeds X."),
    ] = None
    dtype: Annotated[
        str | Sequence[str] | None,
        _differences(
            "--dtype", accepts=_FORMATS, daily=True,
            completes="rounding", help="Formats to round to: bf16, fp16 or fp32; with --source, to compute in."
            f" [default: {DEFAULT_FORMATS}]",
        ),
    ] = None  # fmt: skip
    rounding: Annotated[
        bool, _differences("--rounding", help="Show each function's rounding error, computed by torch in --dtype.")
    ] = False

    def chosen_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (functions, gated units), by canonical name: the given names, all functions, or the common names."""
        return (tuple(TABLE), ()) if self.everything else split(self.names or IN_USE)

    @property
    def unit(self) -> str | None:
        """The name of the reference if it is a gated unit, else None."""
        return gated_name(self.against or "")

    def reference(self) -> str | None:
        """Return the canonical name of the reference if the reference is a function."""
        function = None if self.against is None else resolve(self.against, option("against"))[0]
        return None if self.unit else function

    def formats(self) -> tuple[NumberFormat, ...]:
        """Return the formats to round to."""
        return formats(DEFAULT_FORMATS if self.dtype is None else str(self.dtype))


@dataclass(frozen=True, kw_only=True)
class DataQuestion(LoadOptions):
    """A model whose activations are examined on its own inputs; `FunctionsQuestion` names the functions to compare."""

    source: Annotated[
        str | None,
        Opt(
            "--source", metavar="SOURCE", group=SOURCE, daily=True, completes="models",
            help="Run on the real inputs of this model's activation: a directory, gpt2, ...",
        ),
    ] = None  # fmt: skip
    layer: Annotated[
        int | str | None,
        Opt(
            "-l", "--layer", metavar="N|all", accepts=shared.LAYER, group=SOURCE,
            help="With --source: layer, counted from 0, or decoder.3; all gives one row per layer. [default: 0]",
        ),
    ] = None  # fmt: skip
    input: Input = None
    device: shared.Device = "cpu"
    seed: shared.Seed = None
    threads: shared.Threads = None
    tokens: shared.Tokens = None
    batch: shared.Batch = None
    seq_len: shared.SeqLen = None
    prompt: shared.Prompt = None
    input_ids: shared.InputIds = None
    position: shared.Position = None


CONFLICTS = (
    Conflict("everything", contradicts="names", why="give one or the other"),
    Conflict(
        "at std expect up iso_params against rounding plot plot_file",
        contradicts="source",
        why=f"with {option('source')} the model provides the values",
    ),
    Conflict(
        "layer prompt input_ids position input tokens batch seq_len seed threads",
        needs="source",
        why=f"give the model that contains the activation: {option('source', 'DIR')}",
    ),
    Conflict("device", needs="source rounding"),
    Conflict("prompt", contradicts="input_ids", why="give one"),
    Conflict("input tokens batch seq_len", contradicts="prompt input_ids", why="the model computes the FFN's input"),
    Conflict("position", needs="prompt input_ids"),
    Conflict("tolerance", needs="against", why="it limits the largest difference"),
    Conflict("dtype", needs="against rounding source", why="it is the format to round to, or to compute in"),
    Conflict("d_model d_ff multiple_of", needs="iso_params", why="it compares blocks of equal size"),
)


def require_same_kind(question: FunctionsQuestion, with_source: bool) -> None:
    """Refuse options for functions if gated units are named, and options for gated units if functions are named.

    With a source, the dtype option sets the dtype in which the model runs.
    """
    functions, units = question.chosen_names()
    without = f"leave out {', '.join(units)}"
    reference, unit = question.reference(), question.unit
    if question.dtype is not None and not with_source:
        question.formats()
    if with_source and units:
        gate = UNITS[units[0]].gate.function
        raise FFNError(f"{option('source')}: {units[0]} is a gated unit", f"name the function of its gate, {gate}")
    if unit and functions:
        gate = option("against", UNITS[unit].gate.function)
        raise FFNError(
            f"{option('against', question.against)} is a gated unit, a function of two inputs",
            f"name only gated units, or compare with the function of its gate: {gate}",
        )
    if unit and question.dtype is not None:
        raise FFNError(f"{option('dtype')} is for functions of one input, not gated units", "leave it out")
    if reference and units:
        raise FFNError(
            f"{option('against', question.against)} is a function of one input, unlike gated units",
            f"{without}, or compare them with a gated unit: {option('against', 'swiglu')}",
        )
    if units and (question.rounding or question.expect):
        name = "rounding" if question.rounding else "expect"
        raise FFNError(f"{option(name)} is for functions of one input, not gated units", without)
    if question.up is not None and not units:
        raise FFNError(f"{option('up')} needs a gated unit", f"plain functions have one input: {option('at')}")
    if question.iso_params and not units:
        raise FFNError(f"{option('iso_params')} needs a gated unit to compare", "name one: " + ", ".join(UNITS))
