"""Calls of the library, drawn: every public name, with arguments of the right types and of any other.

A call with right arguments is held to an answer computed here; one with an argument of a type that no option takes must
raise FFNError; every other one may do either, and nothing else.
"""

import inspect
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import chdir
from functools import cache
from pathlib import Path, PurePath
from random import Random
from typing import Any

import numpy as np
import torch

import ffncli
from tests.fuzz import changes, results
from tests.fuzz.answers import FuzzAnswer, TooLate, limited, overdue, wrong_with
from tests.oracles.prompted import made


class Raises:
    """An object of which every method raises."""

    def fail(self, *_: Any) -> Any:
        raise RuntimeError("not this one")

    __repr__ = __str__ = __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __fspath__ = fail
    __getattr__ = __eq__ = __hash__ = __array__ = __getitem__ = __call__ = __contains__ = __lt__ = __add__ = fail


class NoRepr:
    """An object that cannot be printed."""

    def __repr__(self) -> str:
        raise KeyError("repr")


FOREIGN: Mapping[str, Callable[[], Any]] = {  # of a type that no argument takes
    "object": object, "no repr": NoRepr, "raises": Raises, "type": lambda: int, "function": lambda: math.sqrt,
    "complex": lambda: 1j, "...": lambda: ..., "bytes": lambda: b"gelu", "dict": lambda: {"a": 1},
    "error": lambda: ValueError("x"), "module": lambda: math, "objects": lambda: [object(), NoRepr()],
    "slice": lambda: slice(1), "bytearray": lambda: bytearray(b"\1\2"), "class": lambda: torch.nn.Linear,
    "NaT": lambda: np.datetime64("NaT"), "a dtype": lambda: torch.float32,
    "bool tensor": lambda: torch.tensor(True), "meta": lambda: torch.ones((), device="meta"),
}  # fmt: skip
OTHERS: Mapping[str, Callable[[], Any]] = {  # which some arguments take
    "None": lambda: None, "True": lambda: True, "False": lambda: False, "0": lambda: 0, "-3": lambda: -3,
    "7": lambda: 7, "2**31": lambda: 2**31, "10**400": lambda: 10**400, "1.5": lambda: 1.5, "nan": lambda: math.nan,
    "inf": lambda: math.inf, "[]": list, "()": tuple, "[1]": lambda: [1], "['x', 0]": lambda: ["x", 0],
    "[[1]]": lambda: [[1]], "endless": itertools.count, "texts without end": lambda: itertools.repeat("x"),
    "generator": lambda: (n for n in range(3)), "set": lambda: {1}, "spec": lambda: ffncli.FFNSpec(4, 8),
    "tensor": lambda: torch.ones(3), "empty tensor": lambda: torch.zeros(0, 3),
    "number tensor": lambda: torch.tensor(3), "array": lambda: np.ones((2, 2)),
    "number array": lambda: np.array(2), "np.int64": lambda: np.int64(2), "np.float32": lambda: np.float32(0.5),
    "model": lambda: torch.nn.Linear(2, 3), "path": lambda: PurePath("nowhere"), "file": lambda: Path("a.csv"),
    "long": lambda: "a" * 100_000, "long path": lambda: "/".join(["a" * 300] * 20), "blanks": lambda: " " * 100_000,
    "digits": lambda: "1" * 100_000,
    **{repr(text): lambda text=text: text for text in (*changes.TEXTS, "fp32", "gelu", "0", "1,2", "all", "a.csv")},
}  # fmt: skip
_ERF = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in (-1.0, 0.5)]


def _spec(draw: Random) -> tuple[ffncli.FFNSpec, int, int]:
    """(a block, its parameters, its matmul FLOPs per token), by hand."""
    d_model, d_ff, gated, bias = draw.randrange(1, 9), draw.randrange(1, 17), draw.random() < 0.5, draw.random() < 0.5
    weights = (3 if gated else 2) * d_model * d_ff
    biases = bias * (d_ff * (1 + gated) + d_model)
    return ffncli.FFNSpec(d_model, d_ff, "silu", gated=gated, bias=bias), weights + biases, 2 * weights


Right = tuple[dict[str, Any], Callable[[Any], bool]]  # arguments, and whether an answer to them is right


def _right(name: str, draw: Random) -> Right:
    spec, params, flops = _spec(draw)
    tokens = draw.randrange(1, 5)
    block = f"{spec.d_model}x{spec.d_ff}:silu"
    source = {"source": block, "gated": spec.gated, "bias": spec.bias}
    text = str(made("mixtral").path)
    prompts = {"source": text, "prompts": ["Hello the cat", "sat on"]}
    weights = {"up.weight": torch.randn(6, 4), "down.weight": torch.randn(4, 6)}
    plain = ffncli.FFNSpec(4, 6, "relu", bias=False)
    x = torch.randn(tokens, 4)
    rows = len(results.COMPARED)
    table: dict[str, Callable[[], Right]] = {
        "FFNError": lambda: ({"message": "a", "hint": "b"}, lambda a: str(a) == "a; b"),
        "FFNSpec": lambda: ({"d_model": 4, "d_ff": 8, "activation": "SwiGLU"}, lambda a: a.gated),
        "MoE": lambda: ({"experts": 4, "top_k": 2}, lambda a: (a.experts, a.top_k) == (4, 2)),
        "activation": lambda: (
            {"name": "gelu", "at": draw.choice(([-1.0, 0.5], np.array([-1.0, 0.5]), torch.tensor([-1.0, 0.5])))},
            lambda a: all(math.isclose(v.value, w, rel_tol=1e-12) for v, w in zip(a.values, _ERF, strict=True)),
        ),
        "admit": lambda: ({"path": "a.csv"}, lambda a: not a.admitted),
        "approximate": lambda: (
            {"targets": "sin", "activations": "relu", "widths": 1, "seeds": 1, "steps": 1, "samples": 16},
            lambda a: len(a) == 1 and 0 < a[0].row.rmse < 10,
        ),
        "benchmark": lambda: (
            {**source, "tokens": tokens, "kernel": ["eager", "inplace"], "processes": 1},
            lambda a: [row.status for row in a] == ["ok", "ok"] and a[0].tokens == tokens,
        ),
        "compare": lambda: ({"base": "a.csv", "new": Path("b.csv")}, lambda a: len(a.rows) == rows),
        "corpus": lambda: (prompts | {"layer": 0}, lambda a: a is not None),
        "cost": lambda: (
            {"steps": ffncli.steps(spec), "tokens": tokens},
            lambda a: (a.params, a.matmul_flops) == (params, tokens * flops),
        ),
        "count": lambda: (
            {**source, "tokens": np.int64(tokens)},
            lambda a: (a.ffn_params_total, a.matmul_flops_total) == (params, tokens * flops),
        ),
        "experts": lambda: (prompts | {"ablate_texts": 1}, lambda a: a is not None),
        "explain": lambda: ({"topic": draw.choice(("gelu", "GELU", "gelu "))}, lambda a: a.topic == "gelu"),
        "export": lambda: ({**source, "form": "torch"}, lambda a: bool(compile(a.text, "", "exec"))),
        "kernel": lambda: (
            {"name": draw.choice(("eager", "inplace")), "block": plain, "weights": weights, "tokens": tokens},
            lambda f: torch.allclose(f(x), (x @ weights["up.weight"].T).relu() @ weights["down.weight"].T, atol=1e-5),
        ),
        "kernel_names": lambda: ({}, lambda a: "eager" in a),
        "load": lambda: ({"source": block}, lambda a: a.model.main.spec.d_ff == spec.d_ff),
        "merge": lambda: ({"paths": ["a.csv"], "out": "all.csv"}, lambda a: len(a.rows) == rows),
        "plan": lambda: ({**source, "device": "h100", "tp": 1}, lambda a: {r.tp for r in a.rows} == {1}),
        "precision": lambda: (
            {**source, "tokens": tokens, "dtype": draw.choice(("fp8", ["fp8"]))},
            lambda a: math.isclose(sum(a.rows[0].shares), 1, abs_tol=1e-12),
        ),
        "quantize": lambda: ({"tensor": x, "to": "fp8"}, lambda a: (a.shape, a.scales.shape) == (x.shape, (tokens, 1))),
        "read_results": lambda: ({"path": draw.choice(("a.csv", ["a.csv"], Path("a.csv")))}, lambda a: len(a) == rows),
        "replace": lambda: ({"model": made("llama").model, "kernel": "eager", "tokens": [1]}, _restored),
        "report": lambda: (
            {"files": ["a.csv"], "output": "r.html", "force": True}, lambda a: a.bytes == Path("r.html").stat().st_size
        ),
        "steps": lambda: ({"spec": spec}, lambda a: [s.output for s in a if s.output != "up"][-1] == "down"),
        "survey": lambda: ({"source": text, "tokens": tokens}, lambda a: len(a.rows) == 2),
        "trace": lambda: ({**source, "tokens": tokens}, lambda a: a["down"].shape == (tokens, spec.d_model)),
        "unit": lambda: (
            prompts | {"layer": 0, "expert": 0, "neuron": draw.randrange(4)},
            lambda a: sum(one.count for one in a.histogram) == a.tokens == len(a.values),
        ),
        "verify": lambda: ({**source, "check": "nonlinearity"}, lambda a: all(row.passed for row in a.rows)),
    }  # fmt: skip
    return table[name]()


def _restored(replaced: Any) -> bool:
    """Whether both layers were replaced; they are restored for the next call."""
    replaced.restore()
    return len(replaced.ffns) == 2


@cache
def _parameters(name: str) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(getattr(ffncli, name)).parameters.values())


def drawn_call(draw: Random) -> tuple[list[str], FuzzAnswer]:
    """(the call in words, its answer): up to two arguments are of any type. The current folder has two results."""
    name = draw.choice(ffncli.__all__)
    arguments, is_right = _right(name, draw)
    refused, words = False, [name]
    for parameter in draw.sample(_parameters(name), min(len(_parameters(name)), draw.choice((0, 1, 1, 1, 2)))):
        if name == "FFNError":
            continue  # an exception class takes anything, as every one does
        foreign = draw.random() < 0.4
        what = draw.choice(list(FOREIGN if foreign else OTHERS))
        arguments[parameter.name] = (FOREIGN if foreign else OTHERS)[what]()
        takes = str(parameter.annotation)
        whole = "int" in takes and "bool" not in takes and "Any" not in takes
        refused |= foreign or (whole and what in ("True", "False"))
        words.append(f"{parameter.name}={what}")
    start, code, wrong, text = time.monotonic(), 0, "", ""
    try:
        with tempfile.TemporaryDirectory(prefix="ffn-fuzz-") as folder, chdir(folder), results.no_workers(), limited():
            results.write_compared()
            answer = getattr(ffncli, name)(**arguments)
            if refused:
                wrong = "not refused"
            elif len(words) == 1 and not is_right(answer):
                wrong = f"not the right answer: {answer!r:.200}"
            elif len(words) > 1 and name == "replace":
                answer.restore()  # another call replaces the same layers
    except ffncli.FFNError as error:
        code, text = int(error.code), str(error)
        wrong = wrong_with(code, text) or ("right arguments refused" if len(words) == 1 else "")
    except TooLate:
        wrong = overdue()
    except BaseException as error:
        wrong = f"{type(error).__name__} came out of ffncli.{name}: {error}"
    return words, FuzzAnswer(code, time.monotonic() - start, wrong, text)
