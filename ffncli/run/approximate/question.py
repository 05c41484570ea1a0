"""The question of `ffn approximate`, checked and expanded into cases of one block each, without importing torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from ffncli.block import activations
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Axis, Linear, Step
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.models.dimensions import width
from ffncli.options.accept import NAMES, Accepts, comma_list, listed, number_or_text, real, whole
from ffncli.options.opt import COMPUTE, Opt, Options

Domain = tuple[float, float]
_CIRCLE: Domain = (-math.pi, math.pi)


@dataclass(frozen=True)
class Target:
    """A function of `inputs` values, each from `domain` by default.

    `f(m, *x)` takes one x per input and a namespace `m` with torch's function names, as in `block/activations.py`.
    """

    name: str
    formula: str
    f: Callable[..., Any]
    inputs: int = 1
    domain: Domain = _CIRCLE


def _bump(m: Any, x: Any) -> Any:
    inside = m.abs(x) < 1
    return m.where(inside, m.exp(1 - 1 / (1 - m.where(inside, x, 0 * x) ** 2)), 0 * x)


def _and(m: Any, a: Any, b: Any) -> Any:
    return m.where((a > 0.5) & (b > 0.5), 0 * a + 1, 0 * a)


_TARGETS = (
    Target("sin", "sin(x)", lambda m, x: m.sin(x)),
    Target("abs", "|x|", lambda m, x: m.abs(x)),
    Target("step", "1 if x ≥ 0 else 0", lambda m, x: m.where(x >= 0, 0 * x + 1, 0 * x)),
    Target("bump", "exp(1 − 1/(1 − x²)) if |x| < 1 else 0", _bump),  # smooth, and 0 outside
    Target("and", "1 if a > 1/2 and b > 1/2 else 0", _and, 2, (0.0, 1.0)),  # if A and B then C
)
TARGETS: dict[str, Target] = {target.name: target for target in _TARGETS}


def find(name: str) -> Target:
    """Return the target of that name; raise FFNError with the nearest names if it is unknown."""
    key = name.strip().lower()
    if key not in TARGETS:
        raise FFNError(
            f"{option('targets')}: unknown target {shown(name)}",
            did_you_mean(key, list(TARGETS), "use one of " + ", ".join(TARGETS)),
        )
    return TARGETS[key]


ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "identity", "swiglu", "geglu")
WIDTHS = ("1", "2", "4", "8", "16", "32", "64")
SAMPLES = {1: 256, 2: 1024}  # maps the number of inputs to the default number of samples without noise
NOISY_SAMPLES = 32
STEPS = 300
MAX_WIDTH, MAX_SEEDS, MAX_SAMPLES, MAX_STEPS, MAX_ROWS = 4096, 100, 100_000, 100_000, 1000
MAX_VALUES = 1 << 24  # in a hidden tensor of all seeds: 64 MB in float32; training keeps a dozen such tensors
# limit of samples × d_ff × min(samples, d_ff): Ctrl-C cannot stop least squares, which should take 1-2 seconds at most
MAX_REFIT = 1 << 32
MAX_END, MIN_EXTENT = 1e6, 1e-6
CONVENTIONS: Mapping[str, str] = {
    "block": "up (and gate), activation, down, with biases in plain and gated blocks alike; the down projection"
    " outputs the target's one value, so with one input the block has d_model = 1",
    "params": "weights, biases and learned activation parameters of that block",
    "d_ff": "width of one projection; a gated block gets the width at which its number of parameters, with biases, is"
    " nearest to the plain block's with d_ff_plain; 4x is 4 times the number of inputs",
    "training": "every seed draws its own weights, with kinks all over the domain; inputs are scaled to unit variance"
    " over the domain; Adam runs in float32 on all samples at once, with a learning rate of 0.2/√d_ff, at most 0.1,"
    " that rises over a twentieth of the steps, then falls as a cosine; without noise the output layer is then"
    " refitted in float64 by least squares (with noise, least squares would fit the noise)",
    "samples": "by default 256 (1,024 for two inputs), or 32 with noise; without noise they are spread evenly over the"
    " domain with its ends (two inputs: Roberts' R2 sequence); with noise each seed draws them uniformly, and normal"
    " noise with that standard deviation is added to the target",
    "errors": "computed in float64 against the target without noise, at points spread evenly over the domain that are"
    " not the samples (2,048; 64 × 64 for two inputs); best and median are over seeds; the largest error is the best"
    " seed's",
    "floor": "root-mean-square error of the best-fitting straight line (or plane, for two inputs) at those points",
    "seeds": "a seed whose training ends in NaN or Inf counts as diverged and is left out of every other figure",
}


def parse_domain(value: Any) -> Domain:
    """Return the ends of a domain, given as `-3:3`, as `-pi:2pi` or as two numbers."""
    ends = value.split(":") if isinstance(value, str) else tuple(value)
    if len(ends) != 2:
        raise FFNError(f"{shown(value)} is not a range A:B", "for example -3:3 or -pi:pi")
    low, high = _end(ends[0]), _end(ends[1])
    where = f"{low:g}:{high:g}"
    if not (math.isfinite(low) and math.isfinite(high)) or max(-low, high) > MAX_END or min(low, -high) < -MAX_END:
        raise FFNError(f"{where}: its ends must lie between {-MAX_END:,.0f} and {MAX_END:,.0f}")
    if not high - low >= MIN_EXTENT:
        why = "has no width" if high >= low else "ends before it begins"
        raise FFNError(f"{where} {why}", f"B must exceed A by at least {MIN_EXTENT:g}")
    return low, high


def _end(value: Any) -> float:
    """Read one end of a domain: a number, or a multiple of pi such as `2pi`."""
    number, pi = str(value).strip().lower(), 1.0
    if number.endswith("pi"):
        number, pi = number.removesuffix("pi"), math.pi
        number += "1" if number in ("", "-", "+") else ""
    try:
        return pi * float(number)
    except ValueError:
        raise FFNError(f"{shown(value)} is not a number", "for example -3:3 or -pi:pi") from None


_fit, _training = partial(Opt, group="What to fit", daily=True), partial(Opt, group="Training")
_WIDTHS = comma_list(
    number_or_text("a whole number or a string such as '4x'"), "one or more whole numbers or strings such as '4x'"
)
_NOISE = real(f"a number from 0 to {MAX_END:g}", lambda x: 0 <= x <= MAX_END)


@dataclass(frozen=True, kw_only=True)
class FitQuestion(Options):
    """Train blocks of growing width on functions: every target with every activation in every width.

    >>> import ffncli
    >>> (fit,) = ffncli.approximate(targets="sin", activations="gelu", widths=4, seeds=1, steps=50)
    >>> fit.row.d_ff, fit.row.params
    (4, 13)

    `widths` are the widths of plain blocks, as integers or as multiples of the number of inputs (`4x`). `samples`
    defaults to 256, to 1,024 for two inputs, and to 32 with noise. `domain` defaults to each target's own domain. The
    seeds are `seed`, `seed` + 1, ...
    """

    targets: Annotated[
        str | Sequence[str],
        _fit(
            "--target", accepts=NAMES, completes="targets",
            help=f"Functions to fit: {', '.join(TARGETS)}. [default: sin]",
        ),
    ] = ("sin",)  # fmt: skip
    activations: Annotated[
        str | Sequence[str],
        _fit(
            "--activation", accepts=NAMES,
            completes="functions gates limited",
            help=f"Activations to fit with. [default: {', '.join(ACTIVATIONS)}]",
        ),
    ] = ACTIVATIONS  # fmt: skip
    widths: Annotated[
        int | str | Sequence[int | str],
        _fit(
            "--d-ff", metavar="N|4x,...", accepts=_WIDTHS,
            help="Widths of plain blocks; gated ones get as many parameters. [default: 1, 2, 4, ..., 64]",
        ),
    ] = WIDTHS  # fmt: skip
    seeds: Annotated[
        int,
        _training(
            "--seeds", accepts=whole(1, MAX_SEEDS), daily=True, help="Training runs per row, each with its own seed."
        ),
    ] = 5
    seed: Annotated[int, Opt("--seed", accepts=whole(0, 2**31 - 1), group=COMPUTE, help="First seed.")] = 0
    noise: Annotated[
        float,
        _training(
            "--noise", accepts=_NOISE, daily=True, help="Standard deviation of the noise added to the training targets."
        ),
    ] = 0.0
    samples: Annotated[
        int | None,
        _training(
            "--samples", accepts=whole(1, MAX_SAMPLES), daily=True,
            help="Training samples. [default: 256; 1024 for two inputs; 32 with --noise]",
        ),
    ] = None  # fmt: skip
    steps: Annotated[int, _training("--steps", accepts=whole(1, MAX_STEPS), daily=True, help="Training steps.")] = STEPS
    domain: Annotated[
        str | Domain | None,
        _training(
            "--domain", metavar="A:B", accepts=Accepts("a range such as -3:3", parse_domain),
            help="Range of the inputs. [default: -pi:pi; 0:1 for two inputs]",
        ),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples == 1:
            raise FFNError(f"{option('samples')} must be at least 2", "one point does not show the shape of a function")

    def samples_of(self, target: Target) -> int:
        """Return the number of samples on which a block is trained."""
        return self.samples or (NOISY_SAMPLES if self.noise else SAMPLES[target.inputs])

    def domain_of(self, target: Target) -> Domain:
        """Return the domain of the target's inputs."""
        assert not isinstance(self.domain, str)  # FitQuestion has converted it to numbers
        return self.domain or target.domain


@dataclass(frozen=True)
class FitCase:
    """One block to train: its steps, and the corresponding width of a plain block.

    `name` is the activation, such as `gelu`, or the gated unit, such as `swiglu`.
    """

    target: Target
    name: str
    spec: FFNSpec
    d_ff_plain: int
    params: int

    @property
    def steps(self) -> tuple[Step, ...]:
        """The block's steps; the last step outputs one value."""
        return one_value(self.spec)


def one_value(spec: FFNSpec) -> tuple[Step, ...]:
    """Return the steps of a block whose down projection outputs one value instead of d_model."""
    *body, last = steps(spec)
    assert isinstance(last.op, Linear)
    return (*body, replace(last, op=replace(last.op, out=Axis("one", 1))))


def cases(question: FitQuestion) -> tuple[FitCase, ...]:
    """Return all blocks to train, by target, activation and width; raise FFNError if there are too many."""
    targets = [find(name) for name in dict.fromkeys(listed(question.targets))]
    names = [activations.gated_name(name) or activations.resolve(name)[0] for name in listed(question.activations)]
    names, widths = list(dict.fromkeys(names)), question.widths
    assert isinstance(widths, tuple)  # FitQuestion has converted it to a tuple
    rows = len(targets) * len(names) * len(widths)
    if rows > MAX_ROWS:
        raise FFNError(f"{rows:,} blocks to train, the limit is {MAX_ROWS:,}", "use fewer targets or widths")
    out = []
    for target in targets:
        sizes = list(dict.fromkeys(_width(text, target) for text in widths))
        _bounded(question.seeds, question.samples_of(target), max(sizes), refit=not question.noise)
        out += [_case(target, name, d_ff) for name in names for d_ff in sizes]
    return tuple(out)


def _width(text: int | str, target: Target) -> int:
    d_ff = width(option("widths"), text, target.inputs)
    if d_ff > MAX_WIDTH:
        raise FFNError(
            f"{option('widths', text)} is above the limit of {MAX_WIDTH:,}",
            "wider blocks train for minutes without adding anything",
        )
    return d_ff


def _bounded(seeds: int, samples: int, widest: int, refit: bool) -> None:
    values = seeds * samples * widest
    if values > MAX_VALUES:
        raise FFNError(
            f"{seeds} seeds × {samples:,} samples × d_ff {widest:,} are {values:,} values"
            f" per step, the limit is {MAX_VALUES:,}",
            f"use fewer {option('seeds')} or {option('samples')}, or a smaller {option('widths')}",
        )
    if refit and samples * widest * min(samples, widest) > MAX_REFIT:
        raise FFNError(
            f"least squares for {samples:,} samples and d_ff {widest:,} would take minutes",
            f"use fewer {option('samples')} or a smaller {option('widths')}",
        )


def _case(target: Target, name: str, d_ff: int) -> FitCase:
    plain = FFNSpec(target.inputs, d_ff, activations.resolve(name)[0], bias=True)
    limits = activations.limits_of(name)
    spec = plain if limits is None else _gated(replace(plain, limits=limits))
    return FitCase(target, name, spec, d_ff, _params(spec))


def _params(spec: FFNSpec) -> int:
    return cost(one_value(spec)).params


def _gated(plain: FFNSpec) -> FFNSpec:
    """Return the gated block whose parameter count is nearest to the plain block's; of two, the narrower.

    Shazeer's 2/3 (`models/counting/iso_params.py`) leaves out biases, which are a third of the parameters of a block
    with one input.
    """
    sought = _params(plain)

    def apart(d_ff: int) -> int:
        return abs(_params(replace(plain, gated=True, d_ff=d_ff)) - sought)

    one, two = (_params(replace(plain, gated=True, d_ff=d_ff)) for d_ff in (1, 2))
    near = 1 + (sought - one) // (two - one)  # the parameter count is linear in d_ff
    return replace(plain, gated=True, d_ff=min((max(1, near), max(1, near + 1)), key=apart))
