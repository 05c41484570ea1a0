"""Does `ffn compare` say what was done to a checkpoint?

What: tiny models of three families (gated, plain, a mixture) with random weights, edited in the ways of
`tests/oracles/edited.py` and written in several containers; equal pairs that are written differently; pairs that are
none of these; changes of rank 1 to 64 on matrices of 512 to 4,096, also rounded to bf16; merges; one pair of larger
matrices, for the bytes that are read and the peak memory; and one of a billion FFN parameters, all changed, for the
wall time of `ffn compare`.

Targets: every edit is the first finding; equal pairs are equal; pairs that are none of these are so called; ranks are
recovered where the change is at least 1 % of the matrix; coefficients within 1e-3; bytes at most 1.1 times those of
both FFNs; memory over that of the idle process at most 3 times the largest float32 matrix; at most 15 minutes on two
cores, which must be quiet.

    python -m benchmarks.checkpoints [--save FILE]
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import ffncli
from benchmarks import script
from benchmarks.script import Kept, Mark, Rows
from ffncli.run.checkpoints.spectra import RoundingNoise, singular_values, spectrum_of
from ffncli.run.quantize.quantized import quantize
from tests.oracles import edited as ed

COLUMNS = ("part", "family", "case", "container", "expected", "answer", "good", "detail")
FAMILIES = tuple(ed.CONFIGS)
FORMATS = ("q4_0", "q4_1", "q8_0", "nvfp4", "int8", "int4:g64", "mxfp4", "fp8")
WIDTHS, RANKS = ((512, 512), (512, 2048), (2048, 2048), (4096, 4096)), (1, 2, 4, 8, 16, 32, 64)
Tensors = ed.Tensors
_LIMITS = ("bytes", "memory", "seconds")  # parts with one figure
_MEMORY = """
import gc, re, sys, torch, ffncli
from ffncli.models.files.rows import OpenFiles
from ffncli.run.checkpoints import compare
count, fill = [0], OpenFiles._fill
def counted(self, path, start, into):
    count[0] += len(into)
    fill(self, path, start, into)
OpenFiles._fill = counted
ffncli.compare(sys.argv[3], sys.argv[3])
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
status = lambda name: int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
idle, count[0] = status("VmRSS"), 0
ffncli.compare(*sys.argv[1:3])
print(status("VmHWM") - idle, count[0])
"""


def half(w: torch.Tensor) -> torch.Tensor:
    return torch.where(w.abs() <= w.abs().flatten().kthvalue(w.numel() // 2).values, 0, w)


def edits(family: str, base: Tensors) -> Iterator[tuple[str, str, Tensors, dict[str, Any]]]:
    """Yield (the case, the expected finding, the edited tensors, changes of the config)."""
    layer = ed.matrix(family, 2, "down")
    yield "to bf16", "rounding", {name: t.bfloat16() for name, t in base.items()}, {}
    yield "to fp16", "rounding", {name: t.half() for name, t in base.items()}, {}
    for form in FORMATS:
        yield f"to {form}", "rounding", ed.every(family, base, lambda w, f=form: quantize(w, f).dequantize()), {}
    if family != "plain":
        names = [[n for i in range(ed.LAYERS) for n in ed.matrices(family, i, w)] for w in ("gate", "up")]
        yield "gate and up", "swapped", ed.exchanged(base, dict(zip(*names, strict=True))), {}
        yield "halves", "interleaved", ed.interleaved(family, base), {}
    plus = {name: t + 1 if "post_attention_layernorm.weight" in name else t for name, t in base.items()}
    yield "norm + 1", "norm_plus_one", plus, {}
    yield "units", "permuted", ed.units_permuted(family, base), {}
    if family == "mixture":
        yield "experts", "permuted", ed.experts_moved(base), {}
    yield "layer 2 of 0", "copied", ed.moved(family, base, lambda i: 0 if i == 2 else None), {}
    yield "layer 1 gone", "dropped", ed.moved(family, base, lambda i: i + (i > 0), 3), {"num_hidden_layers": 3}
    yield "all by one", "shifted", ed.moved(family, base, lambda i: min(i + 1, 3)), {}
    yield "all × 1.5", "scaled", ed.every(family, base, lambda w: w * 1.5), {}
    yield "one × 0.3", "scaled", {name: t * 0.3 if name == layer else t for name, t in base.items()}, {}
    for rank in (1, 4, 8):
        yield f"rank {rank}", "lora", ed.lora(family, base, rank), {}
    yield "half to 0", "pruned", ed.every(family, base, half), {}
    yield "noise 1 %", "finetuned", ed.noisy(base, 0.01), {}


def unlike(base: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Yield pairs without a known pattern, of the gated family."""
    g = torch.Generator().manual_seed(4)
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "rows in random orders": lambda w: w[torch.randperm(len(w), generator=g)],
        "columns in random orders": lambda w: w[:, torch.randperm(w.shape[1], generator=g)],
        "random signs": lambda w: w * (torch.randint(0, 2, w.shape, generator=g) * 2 - 1),
        "noise as large": lambda w: w + w.std() * torch.randn(w.shape, generator=g),
        "sorted": lambda w: w.flatten().sort().values.view_as(w),
        "rotated": lambda w: w @ torch.linalg.qr(torch.randn(w.shape[1], w.shape[1], generator=g))[0],
        "random factors": lambda w: w * torch.rand(w.shape, generator=g) * 4,
        "squared": lambda w: w.square(),
    }
    yield "another seed", ed.tensors("gated", 7)
    yield "another seed twice as large", {name: 2 * t for name, t in ed.tensors("gated", 8).items()}
    for name, change in changes.items():
        yield name, ed.every("gated", base, change)


def measure(kept: Kept, options: argparse.Namespace) -> None:
    """Add the rows of all parts that the file lacks."""

    def add(*values: object) -> None:
        kept.add(dict(zip(COLUMNS, values, strict=True)))

    def compared(
        base: Tensors, new: Tensors, family: str, container: str = "safetensors", third: Any = None, **config: Any
    ):
        with script.scratch("compared") as folder:
            paths = [
                ed.write(Path(folder, "a"), family, base),
                ed.write(Path(folder, "b"), family, new, container, **config),
            ]
            more = {} if third is None else {"with_": str(ed.write(Path(folder, "c"), family, third))}
            return ffncli.compare(*map(str, paths), **more).first

    for family in FAMILIES:
        base = ed.tensors(family)
        for at, (case, expected, new, config) in enumerate(edits(family, base)):
            container = ed.CONTAINERS[at % 2] if config else ed.CONTAINERS[at % 3]
            if not kept.has(part="edits", family=family, case=case):
                one = compared(base, new, family, container, **config)
                add("edits", family, case, container, expected, one.finding, one.finding == expected, one.detail)
        bf16 = {name: t.bfloat16() for name, t in base.items()}
        equal = [("same", base, base, c) for c in ed.CONTAINERS] + [("as fp32", bf16, _wide(bf16), "sharded")]
        equal += [("from fp32", _wide(bf16), bf16, "pt")]
        for case, a, b, container in equal:
            if not kept.has(part="equal", family=family, case=case, container=container):
                one = compared(a, b, family, container)
                add("equal", family, case, container, "same", one.finding, one.finding == "same", one.detail)
    base, other = ed.tensors("gated"), ed.tensors("gated", 7)
    for case, new in unlike(base):
        if not kept.has(part="none", case=case):
            one = compared(base, new, "gated")
            add("none", "gated", case, "safetensors", "none", one.finding, one.finding == "none", one.detail)
    for t in (0.1, 0.3, 0.5, 0.9, 1.25):
        for kind in ("linear", "slerp"):
            if not kept.has(part="merge", case=kind, expected=str(t)):
                merge = ed.slerp if kind == "slerp" else lambda a, c, t: (1 - t) * a + t * c
                new = {name: merge(tensor, other[name], t).bfloat16() for name, tensor in base.items()}
                one = compared(base, new, "gated", third=other)
                found = one.evidence.get("t", float("nan"))
                good = one.evidence.get("kind") == kind and abs(found - t) < 1e-3
                add("merge", "gated", kind, "bf16", t, found, good, one.detail)
    for shape in WIDTHS:
        for rank in RANKS:
            for dtype in ("fp32", "bf16"):
                case = f"{shape[0]}×{shape[1]}, rank {rank}"
                if not kept.has(part="rank", case=case, container=dtype):
                    spectrum = _ranked(shape, rank, dtype)
                    add("rank", "", case, dtype, rank, spectrum.rank, spectrum.rank == rank, f"{spectrum.smallest:.3g}")
    if not kept.has(part="bytes"):
        _resources(add)
    if not kept.has(part="seconds"):
        _billion(add)


def _wide(stored: Tensors) -> Tensors:
    return {name: tensor.float() for name, tensor in stored.items()}


def _ranked(shape: tuple[int, int], rank: int, dtype: str) -> Any:
    """Return the spectrum of a change of 1 % and this rank; in bf16, both sides are rounded."""
    g = torch.Generator().manual_seed(rank)
    w = torch.randn(shape, generator=g) * 0.02
    w = w.bfloat16().float() if dtype == "bf16" else w
    delta = torch.randn(shape[0], rank, generator=g) @ torch.randn(rank, shape[1], generator=g)
    new = w + delta * (0.01 * w.norm() / delta.norm())
    new = new.bfloat16().float() if dtype == "bf16" else new
    noise = RoundingNoise(0.0, torch.zeros(shape[1]))
    noise.add(new, dtype)
    return spectrum_of(singular_values([new - w]), noise)


def _resources(add: Callable[..., None]) -> None:
    """Compare two layers of 2,048 × 8,192 in a process of their own."""
    d, f = 2048, 8192
    base = ed.tensors("gated", layers=1, d=d, f=f)
    config = {"hidden_size": d, "intermediate_size": f, "num_hidden_layers": 1}
    with script.scratch("compared") as folder:
        paths = [ed.write(Path(folder, "a"), "gated", base, **config)]
        paths.append(ed.write(Path(folder, "b"), "gated", ed.noisy(base, 0.01), **config))
        paths.append(ed.write(Path(folder, "tiny"), "gated", ed.tensors("gated")))
        words = [sys.executable, "-c", _MEMORY, *map(str, paths)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."})
    memory, read = map(int, done.stdout.split())
    ffns = 2 * sum(4 * t.numel() for name, t in base.items() if ".mlp." in name or "norm" in name)
    add("bytes", "gated", "of both FFNs", "", 1.1, read / ffns, read <= 1.1 * ffns, f"{read:,} bytes")
    ratio = 1024 * memory / (4 * d * f)
    add("memory", "gated", "of the largest matrix", "", 3, ratio, ratio <= 3, f"{1024 * memory:,} bytes")


def _billion(add: Callable[..., None]) -> None:
    """Time the command on 20 layers of 2,048 × 8,192 in bf16, of which every value changed."""
    d, f, layers, most = 2048, 8192, 20, 900
    config = {"hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers}
    base = ed.tensors("gated", layers=layers, d=d, f=f)
    with script.scratch("compared") as folder:
        paths = [ed.write(folder / "a", "gated", {name: t.bfloat16() for name, t in base.items()}, **config)]
        base = ed.noisy(base, 0.01)
        paths.append(ed.write(folder / "b", "gated", {name: t.bfloat16() for name, t in base.items()}, **config))
        count = sum(t.numel() for name, t in base.items() if ".mlp." in name)
        del base
        start = time.perf_counter()
        answer = script.output_of(script.ffn("compare", *map(str, paths)), codes=(1,))  # 1: they differ
        seconds = time.perf_counter() - start
    first = next(line for line in answer.splitlines()[1:] if line)
    add("seconds", "gated", f"{count:,} parameters", "", most, seconds, seconds <= most, first)


def summary(rows: Rows) -> tuple[str, bool]:
    """Return how many answers of each part are right."""
    marks: list[Mark] = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        right = sum(row["good"] == "true" for row in mine)
        figure = mine[0]["answer"] if part in _LIMITS else f"{right} of {len(mine)}"
        target = f"≤ {mine[0]['expected']}" if part in _LIMITS else "all"
        marks.append((part, figure, target, right == len(mine)))
    return script.marks(marks), all(good for *_, good in marks)


if __name__ == "__main__":
    script.main(__doc__, ("ffncli", "torch"), COLUMNS, measure, summary)
