"""Cases of words alone: options, block strings, assertions, sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.cli.test_any_input import OPTIONS, SOURCES
from tests.fuzz import changes

BLOCK = [*"4x8:. -/\\", "512", "2048", "4x", "swiglu", "gelu", "relu", "gleu", "1e3", "X"]
KEYS = [
    "d_ff",
    "ffn_params_total",
    "gated",
    "activation",
    "name",
    "experts",
    "layers",
    "FFN parameters",
    "d_f",
    "bytes",
]
OPERATORS = [" == ", " < ", " >= ", " != ", "<=", "=", "==", "!"]
OPERANDS = [
    "8",
    "1_000",
    "6.7e9",
    "60 %",
    "1.5 GB",
    "true",
    "null",
    "'gelu'",
    '"',
    "1e999",
    "0",
    "96",
    "silu",
    "-0",
    " and ",
]
SIZES, WORDS = ["1x", "4x", "8", "16", "8:64:8"], ["yes", "no"]
AXES = {
    "d_ff": SIZES, "d_model": ["8", "16", "4:16:4"], "tokens": ["1", "32"], "activation": ["gelu", "swiglu", "relu"],
    "gated": WORDS, "experts": ["2", "4"], "bias": WORDS, "D-FF": SIZES, "dtype": ["fp16"], "zz": SIZES,
}  # fmt: skip
VALUES = ["1:99999", "64:8:-8", "1:2:0", "gelu", "yes", "0", "-1", "0.5", "", "fp16", "2147483648"]


def one(choices: Sequence[str], draw: Random) -> str:
    """One of them, or now and then a text of nobody's."""
    return draw.choice(changes.TEXTS) if draw.random() < 0.1 else draw.choice(choices)


def options(draw: Random, folder: Path) -> list[str]:
    """Up to three options, most with values of their own."""
    words = [draw.choice(("params", "params", "trace", "trace", "activations", "explain", "models"))]
    words.append(one(("4x8", "4x8:swiglu", "2x4:relu", draw.choice(SOURCES)), draw))
    for option in draw.sample([name for name in OPTIONS if name != "-o"], draw.randrange(4)):
        words += [option, one(OPTIONS[option], draw)] if OPTIONS[option] else [option]
    return words


def block(draw: Random, folder: Path) -> list[str]:
    """A block string."""
    text = changes.of_words(BLOCK, draw) if draw.random() < 0.4 else _mostly_right(draw)
    return [draw.choice(("params", "trace")), text]


def _mostly_right(draw: Random) -> str:
    sizes = [
        one(("4", "8", "1", "4", "8", "0", "-4", "2147483648", "4x", "1.5x", "9" * 30, "²"), draw) for _ in range(2)
    ]
    return f"{sizes[0]}x{sizes[1]}:{one(('swiglu', 'gelu', 'silu+gated', '', 'x', 'SwiGLU'), draw)}"


def assertion(draw: Random, folder: Path) -> list[str]:
    """--assert, and --assert-file with several conditions."""
    texts = [one(KEYS, draw) + one(OPERATORS, draw) + one(OPERANDS, draw) for _ in range(draw.choice((1, 1, 2)))]
    if draw.random() < 0.3:
        path = folder / "conditions.txt"
        path.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass"))
        return ["params", "4x8:swiglu", "--assert-file", str(path)]
    return ["params", "4x8:swiglu", *(word for text in texts for word in ("--assert", text))]


def sweep(draw: Random, folder: Path) -> list[str]:
    """--sweep, mostly of a dimension that there is."""
    texts = []
    for axis in draw.sample(list(AXES), draw.choice((1, 1, 2))):
        values = [one(AXES[axis] if draw.random() < 0.8 else VALUES, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
        texts.append(axis + draw.choice("=========:") + ",".join(values))
    return ["params", draw.choice(("4x8:swiglu", "gpt2")), *(word for text in texts for word in ("--sweep", text))]
