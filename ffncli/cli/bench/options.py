"""The options of `ffn bench`: what is measured, how, and where it goes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ffncli.bench.records import Method
from ffncli.bench.request.grid import Grid
from ffncli.cli.common.options import Count, DimensionOptions, Text, TokenListOptions
from ffncli.cli.common.parsers import natural, numbers, percentage, positive
from ffncli.errors import FFNError, shown

_grid = partial(typer.Option, rich_help_panel="What is measured (lists make a grid)")
_how = partial(typer.Option, rich_help_panel="How it is measured")
_gate = partial(typer.Option, rich_help_panel="Results")
_Texts = list[str] | None
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration(option: str) -> Callable[[str], float]:
    """A parser for `20s`, `2m`, `500ms`: seconds, at most a day."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|min|h|)", str(text).strip())
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if not 0 < value <= 86_400:
            raise FFNError(f"{option} must be a time, as in 20s or 2m, got {shown(text)}")
        return value

    return parse


def _words(texts: _Texts) -> tuple[str, ...]:
    """The values of comma lists, in order."""
    return tuple(word.strip() for text in texts or () for word in text.split(","))


@dataclass(frozen=True)
class GridOptions:
    """--dtype, --kernel and the other options for cases and kernels."""

    dtype: Annotated[_Texts, _grid("--dtype", metavar="NAME,...", help="fp32 (default), bf16, fp16, fp64.")] = None
    passes: Annotated[
        _Texts, _grid("--pass", metavar="WHICH,...", help="forward (default), forward+backward.")
    ] = None  # fmt: skip
    cache: Annotated[
        _Texts, _grid("--cache", metavar="MODE,...",
                      help="warm, cold-weights, flush; auto (default): cold-weights up to 16 tokens, else warm."),
    ] = None  # fmt: skip
    device: Annotated[
        _Texts, _grid("--device", metavar="WHERE,...", help="cpu, cuda, cuda:1; default: a GPU if there is one.")
    ] = None  # fmt: skip
    threads: Annotated[
        Any, _grid("--threads", metavar="N,...", parser=numbers("--threads"), help="CPU threads; default: the cores.")
    ] = None  # fmt: skip
    kernel: Annotated[
        _Texts, _grid("--kernel", metavar="NAME,...",
                      help="eager, packed, ..., or yours: [label=]file.py:name (runs it); default: all but compiled."),
    ] = None  # fmt: skip
    baseline: Annotated[
        Text, _grid("--baseline", metavar="NAME", help="What the others are compared with; default eager.")
    ] = None  # fmt: skip

    def grid(self, source: str | None, dimensions: DimensionOptions, tokens: TokenListOptions) -> Grid:
        """The cases asked for."""
        return Grid(
            source, dimensions.dimensions(), tokens.numbers(), _words(self.dtype), _words(self.passes),
            _words(self.cache), _words(self.device), self.threads or (),
        )  # fmt: skip


@dataclass(frozen=True)
class MethodOptions:
    """--precision, --max-time and the other options for how and how long."""

    precision: Annotated[
        float | None, _how("--precision", metavar="1%", parser=percentage("--precision", 0.5),
                           help="Stop a case when each ratio is known to within this; default 1%."),
    ] = None  # fmt: skip
    max_time: Annotated[
        float | None, _how("--max-time", metavar="20s", parser=duration("--max-time"),
                           help="Time limit per case, over all processes; default 20s."),
    ] = None  # fmt: skip
    load_time: Annotated[
        float | None, _how("--load-time", metavar="3m", parser=duration("--load-time"),
                           help="Time limit for loading one of your kernel files; default 3m."),
    ] = None  # fmt: skip
    processes: Annotated[
        Count, _how("--processes", metavar="K", parser=positive("--processes", 1000),
                    help="Fresh processes, default 5; the interval is computed across them."),
    ] = None  # fmt: skip
    quick: Annotated[bool, _how("--quick", help="--processes 3 --precision 3%; either may be given beside it.")] = False
    seed: Annotated[
        Count, _how("--seed", metavar="N", parser=natural("--seed"), help="For weights, inputs, orders; default 0.")
    ] = None  # fmt: skip
    allocator: Annotated[
        Text, _how("--allocator", metavar="fixed|system", help="system: leave malloc's thresholds alone.")
    ] = None  # fmt: skip
    math_mode: Annotated[
        Text, _how("--math-mode", metavar="MODE", help="float32 products: highest (default), high or medium.")
    ] = None  # fmt: skip
    sustained: Annotated[bool, _how("--sustained", help="On a GPU also at the clock of long work (300 ms each).")] = (
        False
    )
    by_step: Annotated[bool, _how("--by-step", help="Time every step of the block alone: where does the time go?")] = (
        False
    )
    selftest: Annotated[
        bool, _how("--selftest", help="Check the gate: it must flag an injected slowdown of 5 %, and no equal code.")
    ] = False  # fmt: skip

    def method(self) -> Method:
        """The method asked for; --quick gives way to what is given beside it. Raises FFNError for an unknown word."""
        said: dict[str, Any] = {"processes": 3, "precision": 0.03} if self.quick else {}
        for name in ("precision", "max_time", "load_time", "processes", "seed"):
            if getattr(self, name) is not None:
                said[name] = getattr(self, name)
        choices = (("allocator", ("fixed", "system")), ("math_mode", ("highest", "high", "medium")))
        for name, known in choices:
            if (text := getattr(self, name)) is not None:
                if text not in known:
                    option = f"--{name.replace('_', '-')}"
                    raise FFNError(f"{option}: unknown value {shown(text)}", f"use one of {', '.join(known)}")
                said[name] = text
        return Method(**said, sustained=self.sustained, by_step=self.by_step)


@dataclass(frozen=True)
class ResultOptions:
    """--save, --resume, --fail-if-slower, --strict."""

    fail_if_slower: Annotated[
        float | None, _gate("--fail-if-slower", metavar="3%", parser=percentage("--fail-if-slower", 10.0),
                            help="Exit 1 where a kernel is slower than the baseline by more than that."),
    ] = None  # fmt: skip
    strict: Annotated[bool, _gate("--strict", help="Exit 4 where no verdict could be reached.")] = False
    save: Annotated[
        Text, _gate("--save", metavar="FILE.csv",
                    help="Results; default: in benchmarks/results/ where that exists, else in your state folder."),
    ] = None  # fmt: skip
    resume: Annotated[
        Text, _gate("--resume", metavar="FILE.csv", help="Go on with a run that was interrupted.")
    ] = None  # fmt: skip

    def resumed(self) -> Path | None:
        """The file to go on with."""
        if self.resume is not None and self.save is not None:
            raise FFNError("--resume contradicts --save", "it goes on in the file that it names")
        return None if self.resume is None else Path(os.path.expanduser(self.resume))


def asked(bundles: list[Any], more: dict[str, Any]) -> dict[str, str]:
    """Option → value as text, of those that were given."""
    found = {f.name: getattr(b, f.name) for b in bundles for f in fields(b) if getattr(b, f.name) != f.default}
    found |= {name: value for name, value in more.items() if value is not None}
    names = {"passes": "pass"}
    return {f"--{names.get(name, name).replace('_', '-')}": _said(value) for name, value in found.items()}


def _said(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(part.replace(" ", "") if isinstance(part, str) else str(part) for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
