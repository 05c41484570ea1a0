"""The records of `ffn explain`, the tiny runs behind its examples, and the topics about activation functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from ffncli.block.activations import TABLE
from ffncli.block.analysis.curve import curve
from ffncli.block.analysis.facts import Facts, facts
from ffncli.block.analysis.gated import UNITS
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, steps
from ffncli.models.dimensions import Dimensions
from ffncli.models.examples import demo
from ffncli.show.text import percent
from ffncli.system.notebook import Shown

if TYPE_CHECKING:
    from ffncli.models.model import Resolved
    from ffncli.run.engine.prepare import Prepared
    from ffncli.run.engine.trace import StepRecord, Trace


Value = float | int | str | None


@dataclass(frozen=True)
class NumberTable:
    """A table of a few computed values; `command` runs the same block or functions."""

    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class TopicLine(Shown):
    """A topic in the list of topics: its name, a one-line definition, and its other names."""

    topic: str
    title: str
    aliases: tuple[str, ...]

    def explained(
        self, sentences: tuple[str, ...], example: NumberTable, go_on: str, sources: tuple[str, ...]
    ) -> Topic:
        """Build the complete topic."""
        return Topic(self.topic, self.title, self.aliases, sentences, example, go_on, sources)


@dataclass(frozen=True)
class Topic(TopicLine):
    """A complete topic: at most six sentences, a table, a command to try next (`next`), and citations."""

    sentences: tuple[str, ...]
    example: NumberTable
    next: str
    sources: tuple[str, ...]


def fixed(value: float) -> str:
    """Format a number for a sentence, with four decimals."""
    return f"{value:.4f}"


@dataclass(frozen=True)
class TinyRun:
    """A finished run of a small block: its inputs and weights, and its steps' records, keyed by the steps' names."""

    prepared: Prepared
    trace: Trace

    def __getitem__(self, name: str) -> StepRecord:
        return self.trace.step(name)


def tiny_run(
    source: str | None = None, tokens: int | None = None, input: str | None = None, train: bool = False,
    seed: int | None = None, **options: Any,
) -> TinyRun:  # fmt: skip
    """Run a small block like `ffn trace` with the same options, and keep all values."""
    from ffncli.run.engine.prepare import prepare
    from ffncli.run.engine.trace import trace
    from ffncli.run.user.load import load

    model = demo(Dimensions()) if source is None else load(source, Dimensions(**options))
    leading = None if tokens is None else (tokens,)
    ready = prepare(model, input=input, leading=leading, train=train, seed=seed)
    return TinyRun(ready, trace(ready.steps, ready.weights, ready.inputs, ready.mode))


def routes(tiny: TinyRun) -> list[tuple[int, str, str]]:
    """Return (token, its experts, the experts' weights) for every token, the experts by descending weight."""
    rows = []
    for token, weights in enumerate(tiny["route"].values):
        order = sorted((e for e, weight in enumerate(weights) if weight), key=lambda e: -weights[e])
        rows.append((token, ", ".join(map(str, order)), ", ".join(fixed(weights[e]) for e in order)))
    return rows


def catalog_model(name: str) -> Resolved:
    """Return a model of the catalog."""
    from ffncli.models import catalog

    model = catalog.find(name)
    assert model is not None, name
    return model


AT = (-3.0, -2.0, -1.0, -0.75, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)
_AT = ",".join(f"{x:g}" for x in AT)
_GATES, _UPS = (-2.0, -1.0, 0.0, 1.0, 2.0), (1.0, 3.0)
# maps a symbol in a formula to its meaning
_SYMBOLS = {
    "Φ(": "Φ(x), the normal distribution's cumulative function, rises from 0 to 1 and is 0.5 at 0.",
    "σ(": "σ(x) = 1 / (1 + e⁻ˣ), the sigmoid, rises from 0 to 1 and is 0.5 at 0.",
    "softplus(": "softplus(x) = log(1 + eˣ) is a smooth relu.",
    "erf(": "erf is the error function, the integral of the bell curve, scaled to run from -1 to 1.",
    "tanh(": "tanh rises from -1 to 1 and is 0 at 0.",
}
# formulas in words, for the most common functions
_IN_WORDS = {
    "relu": ": negative numbers become 0, positive ones pass unchanged",
    "gelu": ": each number is multiplied by the chance that a standard normal number is below it",
    "gelu_tanh": ", close to gelu and computed without the error function",
    "silu": ": each number is multiplied by its own sigmoid",
}
_DEAD = "Its slope is 0 below 0, so a unit that is negative for every token learns nothing: it is dead."
_JUMPS = ("it jumps", "its slope jumps", "its curvature jumps")  # indexed by the order of the derivative


def activation_topic(line: TopicLine) -> Topic:
    """Explain the purpose of activation functions."""
    f = {name: curve(name).f for name in ("relu", "gelu", "silu")}
    far, near = (", ".join(f"{name} {fixed(g(x))}" for name, g in f.items()) for x in (3.0, -1.0))
    return line.explained(
        (
            "An activation function is applied to each hidden value separately: act = f(up).",
            "It is the only step of a plain block that is not linear: without it, x · W1 · W2 is one matrix, W1 · W2.",
            f"The common functions nearly agree for large positive values (at 3: {far}).",
            f"They differ near and below zero (at -1: {near}).",
            "The first Transformer uses relu, BERT uses gelu, and Llama uses silu in a gate.",
        ),
        NumberTable(
            f"ffn activations relu gelu silu --at={_AT}", ("x", *f), tuple((x, *(g(x) for g in f.values())) for x in AT)
        ),
        "ffn activations gelu silu relu --plot",
        tuple(TABLE[name].source for name in f),
    )


def function_topic(line: TopicLine) -> Topic:
    """Explain one plain activation function; the topic is its canonical name."""
    name = line.topic
    known = facts(name, AT)
    other = "gelu" if name == "relu" else "relu"
    sentences = (
        f"{name}(x) = {known.formula}{_IN_WORDS.get(name, '')}.",
        *[text for symbol, text in _SYMBOLS.items() if symbol in known.formula][:1],
        *_keeps(name, known),
        _range(name, known),
        _zeros(known),
        *([_DEAD] if name == "relu" else []),
        *([f"It is used by {known.used_by}."] if known.used_by else []),
    )
    values = tuple((one.x, one.value, one.slope, curve(other).f(one.x)) for one in known.values)
    return line.explained(
        sentences,
        NumberTable(f"ffn activations {name} {other} --at={_AT}", ("x", name, "slope", other), values),
        f"ffn activations {name} {other} --plot",
        (known.source,) if known.source else (),
    )


def unit_topic(line: TopicLine) -> Topic:
    """Explain one gated unit; the topic is its name."""
    name = line.topic
    unit, width = UNITS[name], FFNSpec(512, 2048, "relu", bias=False)
    gated = width.d_ff * 2 // 3
    open_, shut = (fixed(unit.value(gate, 3.0)) for gate in (2.0, -2.0))
    sizes = [cost(steps(spec)).params for spec in (width, FFNSpec(512, gated, "swiglu"))]
    return line.explained(
        (
            f"{name} computes the hidden values from two projections of a token: hidden = {unit.formula}.",
            "gate = x · W1 and up = x · W3; then W2 maps back to d_model, as in a plain block.",
            f"The gate scales up: up = 3 becomes {open_} at gate = 2, and {shut} at gate = -2.",
            "Three matrices instead of two: for equal size, d_ff shrinks to two thirds, "
            f"as from 512x{width.d_ff} plain ({sizes[0]:,} weights) to 512x{gated} gated ({sizes[1]:,}).",
            *([f"It is used by {unit.used_by}."] if unit.used_by else []),
        ),
        NumberTable(
            f"ffn activations {name} --up 1,3 --at={','.join(f'{g:g}' for g in _GATES)}",
            ("gate", *(f"up = {up:g}" for up in _UPS)),
            tuple((gate, *(unit.value(gate, up) for up in _UPS)) for gate in _GATES),
        ),
        "ffn explain gate",
        (unit.source,),
    )


def _keeps(name: str, known: Facts) -> list[str]:
    """Return a sentence on the shares of 2 and -2 that the function passes; an empty list unless both shares are
    between 0 and 1 and the share of -2 is not larger."""
    f = curve(name).f
    high, low = f(2.0), f(-2.0)
    if not 0.0 <= low / -2.0 <= high / 2.0 <= 1.0:
        return []
    return [
        f"So it lets {percent(high / 2.0)} of 2 through ({fixed(high)}) and {percent(abs(low) / 2.0)} "
        f"of -2 ({fixed(low)})."
    ]


def _range(name: str, known: Facts) -> str:
    """Return a sentence on the function's minimum and its position."""
    low = known.shape.minimum
    if not isfinite(low):
        return "It has no minimum."
    at = known.shape.minimum_at
    return f"Its minimum is {low:.4g}" + (
        ", which it only approaches." if at is None else f", at x = {at:.4g}." if low else ", for all negative x."
    )


def _zeros(known: Facts) -> str:
    """Return a sentence on the share of normal inputs that become zero, and on the function's smoothness."""
    places: dict[int, list[str]] = {}
    for x, order in TABLE[known.name].kinks:
        places.setdefault(order, []).append(f"{x:g}")
    jumps = " and ".join(f"{_JUMPS[order]} at {' and '.join(xs)}" for order, xs in places.items())
    zeros = percent(known.exact_zero_share)
    return f"Of standard normal inputs {zeros} become exactly zero; {jumps or 'it is smooth everywhere'}."
