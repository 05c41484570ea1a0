"""Seeded changes of bytes, JSON values and words, as damaged or hostile files have shown them; cases of words alone."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.cli.test_any_input import OPTIONS, SOURCES
from tests.oracles.checkpoints import LLAMA, raw_safetensors

BLOCK = [*"4x8:. -/\\", "512", "2048", "4x", "swiglu", "gelu", "relu", "gleu", "1e3", "X"]
KEYS = [*"d_ff ffn_params_total gated activation name experts layers".split(), "FFN parameters", "d_f", "bytes"]
OPERATORS = [" == ", " < ", " >= ", " != ", "<=", "=", "==", "!"]
OPERANDS = "8|1_000|6.7e9|60 %|1.5 GB|true|null|'gelu'|\"|1e999|0|96|silu|-0| and ".split("|")
SIZES, WORDS = ["1x", "4x", "8", "16", "8:64:8"], ["yes", "no"]
AXES = {
    "d_ff": SIZES, "d_model": ["8", "16", "4:16:4"], "tokens": ["1", "32"], "activation": ["gelu", "swiglu", "relu"],
    "gated": WORDS, "experts": ["2", "4"], "bias": WORDS, "D-FF": SIZES, "dtype": ["fp16"], "zz": SIZES,
}  # fmt: skip
VALUES = ["1:99999", "64:8:-8", "1:2:0", "gelu", "yes", "0", "-1", "0.5", "", "fp16", "2147483648"]


def one(choices: Sequence[str], draw: Random) -> str:
    """One of them, or now and then a text of nobody's."""
    return draw.choice(TEXTS) if draw.random() < 0.1 else draw.choice(choices)


def options(draw: Random, folder: Path) -> list[str]:
    """Up to three options, most with values of their own."""
    words = [draw.choice(("params", "params", "trace", "trace", "activations", "explain", "models"))]
    words.append(one(("4x8", "4x8:swiglu", "2x4:relu", draw.choice(SOURCES)), draw))
    for option in draw.sample([name for name in OPTIONS if name != "-o"], draw.randrange(4)):
        words += [option, one(OPTIONS[option], draw)] if OPTIONS[option] else [option]
    return words


def block(draw: Random, folder: Path) -> list[str]:
    """A block string."""
    text = of_words(BLOCK, draw) if draw.random() < 0.4 else _mostly_right(draw)
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


LONG = [*" a1([,.-_=:/x\n'W]<@", "x[", "a,", "1.", "(x", " (", " and ", "and x", "n_gram", "ForA", "experts.0.", ",\n"]
PARSED = (
    ("trace", "4x8:swiglu", "--explain --set --ablate --input --position"),
    ("params", "4x8:swiglu", "--assert --sweep"),
    ("activations", "gelu", "--at --expect"),
    ("verify", "4x8:swiglu", "--kernel --check"),
)


def long(draw: Random, folder: Path) -> list[str]:
    """100,000 characters of one piece, in a place that is parsed: a pattern that goes back over them has no end."""
    piece = draw.choice(LONG)
    start, end = draw.choice(("", "up[", "a=")), draw.choice(("", "!", "b", "]", ")", "=", "=1"))
    text = start + piece * (100_000 // len(piece)) + end
    where = draw.randrange(10)
    if where == 0:
        path = folder / "conditions.txt"
        path.write_text(text)
        return ["params", "4x8:swiglu", "--assert-file", str(path)]
    if where == 1:
        field = draw.choice(("model_type", "hidden_act", "architectures"))
        (folder / "config.json").write_text(json.dumps(LLAMA | {field: [text] if field == "architectures" else text}))
        return ["params", str(folder)]
    if where == 2:
        (folder / "config.json").write_text(json.dumps(LLAMA))
        names = ("model.norm.weight", "model.layers.0.mlp.gate_proj.weight", "model.n_gram.weight" + text)
        header = {
            name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * at, 16 * at + 16]}
            for at, name in enumerate(names)
        }
        (folder / "model.safetensors").write_bytes(raw_safetensors(header, bytes(48)))
        return ["params", str(folder)]
    if where == 3:
        return [draw.choice(("params", "trace", "explain", "models", "activations")), text]
    command, block, options = draw.choice(PARSED)
    return [command, block, f"{draw.choice(options.split())}={text}"]


_CONTROLS = ["", "x", "\x1b[31mred\x1b[0m", "a\nb", "a\r\nb", "\0", "\u202eabc", "\u200b"]
_SIGNS = ["=1+1", "'", '"', ";", ",", "%s%n", "../..", "/dev/zero", "é" * 50, "A" * 5000]
TEXTS = [*_CONTROLS, *_SIGNS, "null", "nan", "1e999", "²", "-", "[bold]", "\udcff"]
_SMALL = [0, -1, 1, 2, 3, 7, -0.0, 0.5, -1e-300, 1e300, 1e-300]
_LARGE = [2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400]
NUMBERS = [*_SMALL, *_LARGE, float("nan"), float("inf"), float("-inf")]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"": None}, {"x": 1}, [1, "a"], [0] * 3000]


def value(draw: Random) -> Any:
    """A value that its field did not expect."""
    return copy.deepcopy(draw.choice(draw.choice((TEXTS, NUMBERS, OTHERS))))


def of_json(whole: Any, draw: Random, times: int | None = None) -> str:
    """A JSON value with some of its parts replaced, left out, doubled, renamed or nested; now and then its text."""
    whole = copy.deepcopy(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 4)) if times is None else times):
        places = list(_places(whole))
        if not places:
            break
        _change(*draw.choice(places), draw)
    text = json.dumps(whole)
    if draw.random() < 0.15:
        text = of_text(text, draw)
    return text


def _places(whole: Any) -> Any:
    """(container, key or index) of every part, the outermost first."""
    keys = list(whole) if isinstance(whole, dict) else range(len(whole)) if isinstance(whole, list) else ()
    for key in keys:
        yield whole, key
        yield from _places(whole[key])


def _change(parent: Any, key: Any, draw: Random) -> None:
    part = parent[key]
    match draw.randrange(9):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[draw.choice([*TEXTS, *map(str, parent)])] = part
        case 2 if isinstance(parent, list):
            parent.append(copy.deepcopy(part))
        case 3:
            parent[key] = [part]
        case 4 if isinstance(part, (int, float)) and not isinstance(part, bool):
            parent[key] = draw.choice((-part, part + 1, part - 1, part * 1000, str(part), part / 3, bool(part)))
        case 5 if isinstance(part, str):
            parent[key] = draw.choice((part + draw.choice(TEXTS), part.upper(), part[:-1], [part], {part: part}))
        case 6 if isinstance(part, (list, dict)):
            parent[key] = type(part)()
        case _:
            parent[key] = value(draw)


def of_text(text: str, draw: Random) -> str:
    """JSON as text: keys that are there twice, tokens that JSON does not have, nesting, a text that ends early."""
    at = draw.randrange(len(text) + 1)
    match draw.randrange(6):
        case 0:
            return text[:at]
        case 1:
            return text.replace("{", '{"x": 1, "x": 2, ', 1)
        case 2:
            return text.replace(":", ": NaN, ", 1)
        case 3:
            return text[:at] + "[" * draw.choice((3, 5000)) + text[at:]
        case 4:
            return text + draw.choice((text, "}", "\0", "\n{}"))
        case _:
            return text[:at] + draw.choice(('"', ",", "\\", "\\ud800", "\x1b", "1e999", "-0")) + text[at:]


def of_bytes(raw: bytes, draw: Random, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes with bits flipped, pieces cut out, doubled or filled, numbers made huge, or an early end."""
    out, stop = bytearray(raw), len(raw) if stop is None else stop
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(start, max(stop, start + 1))
        match draw.randrange(7):
            case 0:
                del out[at:]
            case 1:
                del out[at : at + draw.choice((1, 4, 40))]
            case 2:
                out[at:at] = out[at : at + draw.choice((1, 8, 200))]
            case 3:
                out[at : at + 8] = draw.choice(
                    (b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7, (2**40).to_bytes(8, "little"))
                )
            case 4:
                out[at:at] = draw.choice(TEXTS).encode("utf-8", "surrogatepass")
            case _:
                if at < len(out):
                    out[at] = draw.choice((0, 1, 127, 128, 255, out[at] ^ 1 << draw.randrange(8)))
    return bytes(out)


def of_words(parts: Sequence[str], draw: Random) -> str:
    """A text made of parts of its grammar, in an order that may be wrong, or with something else among them."""
    words = [draw.choice(parts) for _ in range(draw.randrange(1, 7))]
    if draw.random() < 0.4:
        words[draw.randrange(len(words))] = draw.choice((str(draw.choice(NUMBERS)), draw.choice(TEXTS)))
    return "".join(words)
