"""A library call's arguments as options: of the accepted types, or an error that names them."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Resolved
from ffncli.options.accept import MAX_SIZE
from ffncli.run.user.options import is_module

if TYPE_CHECKING:
    from torch import nn

    from ffncli.run.engine.inputs import InputSource

Source: TypeAlias = "str | os.PathLike[str] | Resolved | nn.Module | None"
Input: TypeAlias = "InputSource | os.PathLike[str] | None"
Number = int | str


class DimensionNames(TypedDict, total=False):
    """The dimension options: they make a block, or change the source's."""

    d_model: Number
    d_ff: Number
    activation: str
    gated: bool
    bias: bool
    norm: str
    norm_position: str
    residual: bool
    dropout: float
    experts: int
    top_k: int
    shared_experts: int


def converted(arguments: Mapping[str, Any], call: str) -> dict[str, Any]:
    """The arguments of `ffncli.<call>` as its options. Raises FFNError for a wrong type or an unknown name."""
    options = {name: value for name, value in arguments.items() if name != "dimensions"}
    if "dimensions" not in arguments:
        return {name: _converted(name, value, call) for name, value in options.items()}
    names, sizes = list(DimensionNames.__annotations__), arguments["dimensions"]
    if unknown := next((name for name in sizes if name not in names), None):
        candidates = [name for name in (*options, *names) if name != "source"]
        if unknown == "prompts":
            raise FFNError(f"no argument 'prompts' of ffncli.{call}", "several texts are ffncli.corpus's")
        raise FFNError(f"no argument {shown(unknown)}", did_you_mean(unknown, candidates, f"see help(ffncli.{call})"))
    chosen = Dimensions(**{name: _converted(name, value) for name, value in sizes.items()})
    return {name: _converted(name, value, call) for name, value in options.items()} | {"dimensions": chosen}


def _converted(name: str, value: object, call: str = "") -> Any:
    """One argument as its option's value. Raises FFNError that says what is accepted."""
    convert, accepted = _OF_CALL.get(call, {}).get(name) or _ARGUMENTS[name]
    if value is None and name != "show":
        return _DEFAULTS.get(name)
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        several = name == "prompt" and isinstance(value, (list, tuple))
        hint = "several texts are ffncli.corpus's prompts" if several else ""
        raise FFNError(f"{name} must be {accepted}, got {shown(value)}", hint) from None


def _source(value: Any) -> str | Resolved | nn.Module:
    return value if isinstance(value, Resolved) or is_module(value) else _text(value)


def _input(value: Any) -> Any:
    """Text as it is typed, or values, which are read when torch is there."""
    if isinstance(value, (str, os.PathLike)):
        return _text(value)
    if not (isinstance(value, (list, tuple)) or hasattr(value, "__array__") or hasattr(value, "__dlpack__")):
        raise TypeError
    return value


def _text(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError
    return text


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _whole(value: Any) -> int:
    """A whole number of any integer type (numpy's too), but not a bool."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _from(low: int, high: int = 2**63 - 1) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        number = _whole(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return convert


def _number(value: Any) -> str:
    """A whole number, or text as typed."""
    return value if isinstance(value, str) else str(_whole(value))


def _numbers(value: Any) -> str:
    """`0,3` from one whole number or several, or text as typed."""
    return _number(value) if isinstance(value, str) or not _several(value) else ",".join(_number(one) for one in value)


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(_COUNT[0](one) for one in (value if _several(value) else (value,)))


def _several(value: Any) -> bool:
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0  # an array without axes is one number


def _ids(value: Any) -> tuple[int, ...]:
    """Token numbers from text as typed, or from whole numbers."""
    ids = tuple(int(word) for word in value.replace(",", " ").split()) if isinstance(value, str) else tuple(
        _whole(one) for one in value)  # fmt: skip
    if not ids or not all(0 <= number < 2**31 for number in ids):
        raise ValueError
    return ids


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return texts


def _corpus(value: Any) -> str | tuple[str, ...]:
    """A file's name, or several texts."""
    if isinstance(value, (str, os.PathLike)):
        return _text(value)
    texts = _texts(value)
    if not texts:
        raise ValueError
    return texts


def _positive(value: Any) -> float:
    """A number above 0."""
    if isinstance(value, (bool, str)) or not 0 < float(value) < inf:
        raise ValueError
    return float(value)


def _paths(value: Any) -> tuple[str, ...]:
    return tuple(_text(one) for one in ([value] if isinstance(value, (str, os.PathLike)) else value))


def _precision(value: Any) -> float:
    """A number above 0 and at most 0.5."""
    if _share(value) > 0.5:
        raise ValueError
    return float(value)


def _shown_values(value: Any) -> int | None:
    return None if value is None or value == "all" else _from(1)(value)


def _record(value: Any) -> Any:
    """A record of the library's, whose class the caller names."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError
    return value


def _kept(value: Any) -> frozenset[str] | None:
    """The steps to keep: all of them (None) for True."""
    if isinstance(value, bool):
        return None if value else frozenset()
    return frozenset(_texts(value))


def _share(value: Any) -> float:
    """A number above 0 and at most 1."""
    if isinstance(value, (bool, str)) or not 0 < float(value) <= 1:
        raise ValueError
    return float(value)


def _tolerance(value: Any) -> float:
    """A number of at least 0."""
    if isinstance(value, (bool, str)) or not 0 <= float(value) < inf:
        raise ValueError
    return float(value)


def _seconds(value: Any) -> float:
    """A number above 0, at most a day."""
    if isinstance(value, (bool, str)) or not 0 < float(value) <= 86_400:
        raise ValueError
    return float(value)


def _probability(value: Any) -> float:
    """A number of at least 0 and below 1."""
    if isinstance(value, (bool, str)) or not 0 <= float(value) < 1:
        raise ValueError
    return float(value)


_MODEL = (_source, "text such as '512x2048:gelu', a path, a model from ffncli.load, or an nn.Module")
_TEXT, _FLAG = (_text, "text"), (_flag, "True or False")
_COUNT, _NATURAL = (_from(1, MAX_SIZE), "a whole number from 1"), (_from(0), "a whole number from 0")
_SIZE = (_number, "a whole number or text such as '4x'")
_PART = (_share, "a number above 0 and at most 1")
_COUNTS = (_counts, "a whole number from 1, or several of them")
_SEVERAL = (_numbers, "a whole number, several of them, or text as it is typed in a shell")
_DEFAULTS: Mapping[str, Any] = {
    "device": "cpu",
    "keep": frozenset(),
    "unembed": False,
    "force": False,
    "referee": False,
    "batch_invariant": False,
    "check": (),
    "kernel": (),
}
_ARGUMENTS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "source": _MODEL, "layer": (_number, "a whole number or text such as 'decoder.3'"),
    "prompt": _TEXT, "prompts": (_corpus, "a file's name, or a list of texts"), "position": _SEVERAL,
    "input_ids": (_ids, "token numbers such as [1, 2, 3]"),
    "tokens": _COUNT, "batch": _COUNT, "seq_len": _COUNT,
    "input": (_input, "values [tokens, d_model] (a list, a NumPy array, a tensor), or text: arange, randn, zeros, "
              "ones, '0.1,0.2', or a file's path"),
    "dtype": (_text, "text: fp32, fp64, bf16 or fp16"), "device": (_text, "text: cpu, cuda or cuda:1"),
    "seed": _NATURAL, "threads": (_from(1, 4096), "a whole number from 1 to 4096"), "train": _FLAG, "vocab": _COUNT,
    "show": (_shown_values, "a whole number from 1, or None for all values"), "expert": _SEVERAL,
    "batch_size": _COUNT, "max_tokens": _COUNT, "top_contexts": (_from(1, 100), "a whole number from 1 to 100"),
    "ablate_texts": _NATURAL, "save_routes": (_text, "a path"),
    "outliers": (_positive, "a number above 0"), "resume": (_text, "a path"),
    "top_units": (_from(0, 1000), "a whole number from 0 to 1000"),
    "explain": (_texts, "places such as ['up[0,3]']"), "terms": _COUNT, "depth": (_from(1, 99), "1 to 99 steps"),
    "set": (_texts, "weights and their values, such as ['W1[0,3]=5']"),
    "ablate": (_texts, "parts such as ['unit:3', 'expert:5', 'gate']"),
    "unembed": _FLAG, "neuron": _NATURAL, "top_tokens": _COUNT, "promotes": _TEXT, "sample_top_k": _COUNT,
    "sample_top_p": (_share, "a number above 0 and at most 1"), "example": _TEXT,
    "keep": (_kept, "names of steps, or True for all"),
    "save": (_text, "a path"), "save_weights": _FLAG, "force": _FLAG,
    "check": (_texts, "names of checks, such as 'module'"),
    "kernel": (_texts, "names such as 'eager' or 'mine.py:mlp'"), "against": _MODEL,
    "tolerance": (_tolerance, "a number from 0"),
    "referee": _FLAG, "batch_invariant": _FLAG,
    "tp": (_from(1, 65536), "a whole number from 1"), "ep": (_from(1, 65536), "a whole number from 1"),
    "rank_timeout": (_seconds, "seconds, at most a day"),
    "load_time": (_seconds, "seconds, at most a day"), "call_time": (_seconds, "seconds, at most a day"),
    "d_model": _SIZE, "d_ff": _SIZE, "activation": _TEXT, "gated": _FLAG, "bias": _FLAG, "norm": _TEXT,
    "norm_position": _TEXT, "residual": _FLAG, "dropout": (_probability, "a number from 0 and below 1"),
    "experts": _COUNT, "top_k": _COUNT, "shared_experts": _NATURAL,
    "form": _TEXT, "part": _TEXT, "large": _FLAG,
    "skew": _TEXT, "baseline": _TEXT, "quick": _FLAG, "suite": _TEXT, "shard": _TEXT, "method": (_record, "a Method"),
    "gemm_efficiency": _PART, "memory_efficiency": _PART, "link_efficiency": _PART, "usable_memory": _PART,
    "link": _TEXT, "network": _TEXT, "per_node": _COUNT,
}  # fmt: skip
_OF_CALL: Mapping[str, Mapping[str, tuple[Callable[[Any], Any], str]]] = {  # lists where other calls take one
    "plan": {
        "device": (_texts, "names such as 'h100', or several of them"), "tokens": _COUNTS,
        "dtype": (_texts, "formats such as 'fp8', or several of them"), "tp": _COUNTS, "ep": _COUNTS,
    },
    "export": {"tokens": _COUNTS},
    "benchmark": {
        "source": (_text, "text such as '512x2048:gelu', or a path"), "tokens": _COUNTS,
        "threads": _COUNTS, "input": (_text, "a path"),
        **dict.fromkeys(("dtype", "passes", "cache", "device", "routing"), (_texts, "a name, or several of them")),
        "certificate": (_paths, "a path, or several of them"),
        "precision": (_precision, "a share above 0 and at most 0.5, such as 0.01"),
        "max_time": (_seconds, "seconds, at most a day"), "processes": (_from(1, 1000), "a whole number from 1"),
    },
}  # fmt: skip
