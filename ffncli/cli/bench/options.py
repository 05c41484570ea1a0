"""The options of `ffn bench`: what is measured, how, and where it goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from ffncli.bench.judge.limits import LEAST_MEMORY
from ffncli.bench.records import FIRST_CALL, Calibrate, Launch, Method, Pass
from ffncli.bench.request.grid import DECODE, Grid
from ffncli.bench.request.parts import GridPart, grid_part
from ffncli.block.shard import Ranks
from ffncli.cli.common import values
from ffncli.cli.common.option import COMPUTE, option
from ffncli.cli.common.options import Count, Text, TokenListOptions
from ffncli.cli.common.parsers import byte_count, duration, flat, natural, numbers, percentage, positive
from ffncli.cli.common.rank_options import ExpertParallel, TensorParallel
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import Dimensions

_what = partial(option, "What to measure")
_how = partial(option, "How to measure")
_gate = partial(option, "Checks and results")
_compute = partial(option, COMPUTE)
_Texts = list[str] | None
FIRST_LOOK = Method(processes=3, precision=0.03, max_time=12.0)  # `ffn bench` alone: some 30 s, quiet


_NAMED = {
    "allocator": ("fixed", "system"),
    "math_mode": ("highest", "high", "medium"),
    "launch": get_args(Launch),
    "calibrate": get_args(Calibrate),
}


def _choice(*words: str) -> Callable[[], tuple[str, ...]]:
    """The shell completion for a choice among these."""
    return lambda: words


def _words(texts: _Texts) -> tuple[str, ...]:
    """The values of comma-separated lists, in order."""
    return tuple(word.strip() for text in texts or () for word in text.split(","))


@dataclass(frozen=True)
class GridOptions:
    """--dtype, --kernel and the other options for cases and kernels."""

    dtype: Annotated[
        _Texts, _compute("--dtype", metavar="NAME,...", daily=True, values=values.dtypes,
                         help="Compute in fp32, bf16, fp16 or fp64; several make a grid. [default: fp32]"),
    ] = None  # fmt: skip
    passes: Annotated[
        _Texts, _what("--pass", metavar="NAME,...", values=_choice(*get_args(Pass)),
                      help="forward or forward+backward. [default: forward]"),
    ] = None  # fmt: skip
    cache: Annotated[
        _Texts, _what("--cache", metavar="NAME,...", values=_choice("auto", "warm", "cold-weights", "flush"),
                      help="State of the caches: warm, cold-weights or flush. [default: auto, which is cold-weights"
                           f" up to {DECODE} tokens, else warm]"),
    ] = None  # fmt: skip
    device: Annotated[
        _Texts,
        _compute("--device", metavar="NAME,...", help="Device: cpu, cuda or cuda:1. [default: a GPU if there is one]"),
    ] = None
    threads: Annotated[
        list[Any] | None, _compute("--threads", metavar="N,...", parser=numbers("--threads"), daily=True,
                      help="CPU threads; several make a grid. [default: one for each core]"),
    ] = None  # fmt: skip
    routing: Annotated[
        _Texts, _what("--routing", metavar="NAME,...", values=_choice("uniform", "zipf:1.2", "text"),
                      help="Tokens per expert of a mixture: uniform, zipf:1.2 (by popularity), text (by the words of"
                           " one), or FILE from ffn trace --save; several make a grid. [default: as the router"
                           " sends random tokens]"),
    ] = None  # fmt: skip
    input: Annotated[
        Text, _what("--input", metavar="FILE",
                    help="Real input: rows of the tensor x in a .safetensors file. [default: normal random numbers]"),
    ] = None  # fmt: skip
    kernel: Annotated[
        _Texts, _what("-k", "--kernel", metavar="NAME,...", daily=True, values=values.kernels,
                      help="Kernels to time: eager, packed, ..., all, auto (the fastest here), or your"
                           " [label=]file.py:name (runs that file); main:file.py:name is the file at a git commit."
                           " [default: all that need not compile]"),
    ] = None  # fmt: skip
    baseline: Annotated[
        Text, _what("--baseline", metavar="NAME", daily=True, values=values.kernels,
                    help="Kernel that the others are compared with. [default: eager, else the first]"),
    ] = None  # fmt: skip
    shard: Annotated[
        GridPart | None, _what("--shard", metavar="I/N", parser=grid_part("--shard"),
                               help="Measure part I of N of the cases, as in 3/8; ffn merge joins the parts.")
    ] = None  # fmt: skip

    tp: TensorParallel = None
    ep: ExpertParallel = None

    @property
    def devices(self) -> tuple[str, ...]:
        """The values of --device."""
        return _words(self.device)

    def grid(
        self, source: str | None, dimensions: Dimensions, tokens: TokenListOptions, ranks: Ranks | None = None
    ) -> Grid:
        """The requested cases, each split over the `ranks`."""
        return Grid(
            source, dimensions, tokens.numbers(), _words(self.dtype), _words(self.passes),
            _words(self.cache), self.devices, flat(self.threads) or (), routings=_words(self.routing),
            input=self.input, ranks=ranks or Ranks(),
        )  # fmt: skip


@dataclass(frozen=True)
class MethodOptions:
    """--precision, --max-time and the other options for how and how long."""

    precision: Annotated[
        float | None, _how("--precision", metavar="X%", parser=percentage("--precision", 0.5), daily=True,
                           help="Stop a case once each ratio is known to within X%. [default: 1%]"),
    ] = None  # fmt: skip
    max_time: Annotated[
        float | None, _how("--max-time", metavar="TIME", parser=duration("--max-time"), daily=True,
                           help="Time limit per case, as in 20s or 2m, over all processes. [default: 20s]"),
    ] = None  # fmt: skip
    load_time: Annotated[
        float | None, _how("--load-time", metavar="TIME", parser=duration("--load-time"),
                           help="Time limit for loading a Python file of yours. [default: 3m]"),
    ] = None  # fmt: skip
    call_time: Annotated[
        float | None, _how("--call-time", metavar="TIME", parser=duration("--call-time"),
                           help=f"Time limit for one call of a kernel, {FIRST_CALL} times as long for the first,"
                           " which may compile. [default: 2m, more for large blocks]"),
    ] = None  # fmt: skip
    memory_limit: Annotated[
        int | None, _how("--memory-limit", metavar="SIZE", parser=byte_count("--memory-limit", LEAST_MEMORY),
                         help="Limit on the memory of a process that runs kernels, as in 8GB. [default: 90 % of what is"
                         " free]"),
    ] = None  # fmt: skip
    processes: Annotated[
        Count, _how("--processes", metavar="N", parser=positive("--processes", 1000),
                    help="Number of fresh processes; the interval is computed across them. [default: 5]"),
    ] = None  # fmt: skip
    quick: Annotated[
        bool, _how("--quick", daily=True, help="Same as --processes 3 --precision 3%; either can be overridden.")
    ] = False
    seed: Annotated[
        Count, _compute("--seed", metavar="N", parser=natural("--seed"),
                        help="Seed of weights, inputs and the order of timing. [default: 0]"),
    ] = None  # fmt: skip
    allocator: Annotated[
        Text, _compute("--allocator", metavar="NAME", values=_choice("fixed", "system"),
                       help="fixed sets malloc's thresholds, system leaves them unchanged. [default: fixed]"),
    ] = None  # fmt: skip
    math_mode: Annotated[
        Text, _compute("--math-mode", metavar="NAME", values=_choice("highest", "high", "medium"),
                       help="Precision of float32 products: highest, high or medium. [default: highest]"),
    ] = None  # fmt: skip
    launch: Annotated[
        Text, _how("--launch", metavar="NAME", values=_choice(*get_args(Launch)),
                   help="How calls reach a GPU: graphs replays them from CUDA graphs, plain launches each call by"
                        " itself. [default: auto, which is graphs for small cases whose kernels can all be captured]"),
    ] = None  # fmt: skip
    calibrate: Annotated[
        Text, _how("--calibrate", metavar="NAME", values=_choice(*get_args(Calibrate)),
                   help="How --kernel auto chooses: quick leaves out kernels that would have to compile first, full has"
                        " them all. [default: quick]"),
    ] = None  # fmt: skip
    sustained: Annotated[
        bool, _how("--sustained", help="On a GPU, time blocks of 300 ms too, at the clock of sustained work.")
    ] = False
    by_step: Annotated[bool, _how("--by-step", help="Time every step of the block by itself.")] = False
    in_model: Annotated[
        bool,
        _how("--in-model", help="Time a whole model's forward, SOURCE being its directory: alone, and with kernels in"
                                " place of its FFNs."),
    ] = False  # fmt: skip
    selftest: Annotated[
        bool, _how("--selftest", help="Test the benchmark: it must detect a 5 % slowdown, and only that.")
    ] = False

    def method(self, default: Method | None = None) -> Method:
        """The requested method; explicit options override --quick, which overrides the default. Raises FFNError for an
        unknown word."""
        settings: dict[str, Any] = {"processes": 3, "precision": 0.03} if self.quick else {}
        for name in ("precision", "max_time", "load_time", "call_time", "memory_limit", "processes", "seed"):
            if getattr(self, name) is not None:
                settings[name] = getattr(self, name)
        for name, known in _NAMED.items():
            if (text := getattr(self, name)) is not None:
                if text not in known:
                    option = f"--{name.replace('_', '-')}"
                    raise FFNError(f"{option}: unknown value {shown(text)}", f"use one of {', '.join(known)}")
                settings[name] = text
        settings |= {"sustained": self.sustained, "by_step": self.by_step, "in_model": self.in_model}
        return replace(default or Method(), **settings)


@dataclass(frozen=True)
class ResultOptions:
    """--save, --resume, --fail-if-slower, --strict, --certificate."""

    fail_if_slower: Annotated[
        float | None, _gate("--fail-if-slower", metavar="X%", parser=percentage("--fail-if-slower", 10.0), daily=True,
                            help="Exit 1 if a kernel is slower than the baseline by more than X%."),
    ] = None  # fmt: skip
    strict: Annotated[bool, _gate("--strict", help="Exit 4 if a verdict is inconclusive.")] = False
    certificate: Annotated[
        _Texts, _gate("--certificate", metavar="FILE",
                      help="Certificates of your kernels, from ffn verify --referee; results name them."),
    ] = None  # fmt: skip
    save: Annotated[
        Text, _gate("--save", metavar="FILE.csv", daily=True,
                    help="Result file. [default: in benchmarks/results/ if it exists, else your state folder]"),
    ] = None  # fmt: skip
    resume: Annotated[
        Text, _gate("--resume", metavar="FILE.csv", help="Continue an interrupted run.")
    ] = None  # fmt: skip

    def certificates(self) -> tuple[str, ...]:
        """The certificates' files."""
        return _words(self.certificate)

    def resumed(self) -> Path | None:
        """The file to resume."""
        if self.resume is not None and self.save is not None:
            raise FFNError("--resume contradicts --save", "it continues in the file that it names")
        if self.resume is not None and self.certificate:
            raise FFNError("--resume contradicts --certificate", "the run keeps those that it began with")
        return None if self.resume is None else Path(os.path.expanduser(self.resume))


def asked(bundles: list[Any], more: dict[str, Any]) -> dict[str, str]:
    """Option → value as text, of the given options."""
    options = {f.name: getattr(b, f.name) for b in bundles for f in fields(b) if getattr(b, f.name) != f.default}
    options |= {name: value for name, value in more.items() if value is not None}
    names = {"passes": "pass"}
    return {f"--{names.get(name, name).replace('_', '-')}": _text_of(value) for name, value in options.items()}


def _text_of(value: Any) -> str:
    if isinstance(value, (list, tuple)):  # of a repeated option, each a value or a list of them
        return ",".join(word.strip() for part in value for word in _text_of(part).split(","))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)
