"""How much memory `ffn trace` takes for one layer of a checkpoint that is many times larger than the layer.

What: the peak resident memory of `ffn trace DIR --layer 1 --tokens 4 --dtype ...`, minus the peak of a process that
only imports torch and safetensors. The limit is 50 MB + 2.5 × the bytes of the layer's FFN in the compute dtype. The
script writes the checkpoints, one for each way of storing an FFN (`CASES` below), with non-zero values: several GB in
llama's layout, a few hundred MB to 1.3 GB in the others. Each is sharded and has one attention matrix per layer, which
no trace needs.

How: every run is a fresh process that runs the command line as the console script does and, at its end, reads VmHWM
from /proc/self/status. Each command runs twice: first after the checkpoint was dropped from the file cache, so that
/proc/self/io shows how much of it was read, then with a warm cache; the larger peak counts. The baseline is the
smallest of three runs.

Limits: Linux only. Pages of a mapped file count as resident while they are mapped, though the system can reclaim them.
The bytes read include the kernel's read-ahead; they are `-` if the file system does not count them (tmpfs) or does not
drop its cache. MB and GB are powers of ten.

    python -m benchmarks.memory [--layers N] [--case NAME,...] [--dir DIR] [--keep] [--save FILE]

The exit code is 1 if a peak is above its limit.
"""

import argparse
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import script

Shapes = Mapping[str, tuple[int, ...]]

DTYPES = {"bf16": 2, "fp32": 4, "fp64": 8}  # compute dtype → bytes
STORED = {"BF16": 2, "F32": 4}
ALLOWANCE, FACTOR = 50e6, 2.5
LAYER, TOKENS = 1, 4
LLAMA_LAYERS = 14  # 4.3 GB

IMPORTS = "import torch; from safetensors import safe_open; finish()"
TRACE = "import atexit; atexit.register(finish); from ffncli.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Case:
    """A checkpoint to write: `ffn` and `other` map names, which follow `stem`, to the shapes of a layer's tensors."""

    name: str
    config: Mapping[str, object]
    stem: str
    ffn: Shapes
    other: Shapes
    layers: int
    stored: str = "BF16"

    @property
    def ffn_params(self) -> int:
        """Parameters of one layer's FFN, without norms."""
        return sum(map(prod, self.ffn.values()))

    @property
    def bytes(self) -> int:
        """The size of all tensors."""
        return self.layers * STORED[self.stored] * (self.ffn_params + sum(map(prod, self.other.values())))


# --- the checkpoints --------------------------------------------------------------------------------------------------


def llama(layers: int) -> Case:
    """Store gate, up and down as separate matrices in nn.Linear's layout, with Llama-2-7B's widths."""
    d, f = 4096, 11008
    config = {"model_type": "llama", "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers}
    ffn = {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f)}
    return Case("llama", config, "model.layers.{i}.", ffn, _attention(d), layers)


def mixtral() -> Case:
    """Store one tensor for each expert and matrix."""
    d, f, experts, layers = 2048, 4096, 8, 3
    config = {
        "model_type": "mixtral", "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers,
        "num_local_experts": experts, "num_experts_per_tok": 2,
    }  # fmt: skip
    ffn = {"block_sparse_moe.gate.weight": (experts, d)}
    for e in range(experts):
        ffn |= {f"block_sparse_moe.experts.{e}.{w}.weight": (d, f) if w == "w2" else (f, d) for w in ("w1", "w2", "w3")}
    return Case("mixtral", config, "model.layers.{i}.", ffn, _attention(d), layers)


def gpt2() -> Case:
    """Store matrices transposed, in float32."""
    d, f, layers = 2048, 8192, 4
    config = {"model_type": "gpt2", "n_embd": d, "n_inner": f, "n_layer": layers}
    ffn = {
        "mlp.c_fc.weight": (d, f), "mlp.c_fc.bias": (f,), "mlp.c_proj.weight": (f, d), "mlp.c_proj.bias": (d,),
    }  # fmt: skip
    other = {"attn.c_attn.weight": (d, 3 * d), "ln_2.weight": (d,), "ln_2.bias": (d,)}
    return Case("gpt2", config, "transformer.h.{i}.", ffn, other, layers, "F32")


def phi3() -> Case:
    """Store gate and up in one matrix, one after the other."""
    d, f, layers = 3072, 8192, 4
    config = {"model_type": "phi3", "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers}
    ffn = {"mlp.gate_up_proj.weight": (2 * f, d), "mlp.down_proj.weight": (d, f)}
    return Case("phi3", config, "model.layers.{i}.", ffn, _attention(d), layers)


def gpt_oss() -> Case:
    """Store all experts in one tensor, transposed, with gate and up in alternate columns."""
    d, f, experts, layers = 1024, 2048, 8, 3
    config = {
        "model_type": "gpt_oss", "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers,
        "num_local_experts": experts, "num_experts_per_tok": 2,
    }  # fmt: skip
    ffn = {
        "mlp.router.weight": (experts, d), "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, d, 2 * f), "mlp.experts.gate_up_proj_bias": (experts, 2 * f),
        "mlp.experts.down_proj": (experts, f, d), "mlp.experts.down_proj_bias": (experts, d),
    }  # fmt: skip
    return Case("gpt_oss", config, "model.layers.{i}.", ffn, _attention(d), layers)


def _attention(d: int) -> Shapes:
    """Return a layer's other tensors: an attention matrix that must not be read, and the norm before the FFN."""
    return {"self_attn.q_proj.weight": (d, d), "post_attention_layernorm.weight": (d,)}


CASES: Mapping[str, Callable[[int], Case]] = {
    "llama": llama,
    "mixtral": lambda _: mixtral(),
    "gpt2": lambda _: gpt2(),
    "phi3": lambda _: phi3(),
    "gpt_oss": lambda _: gpt_oss(),
}


def write(case: Case, folder: Path) -> None:
    """Write the checkpoint in three shards, its index and config.json, with only a few MB in memory at a time."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config), "utf-8")
    each = -(-case.layers // 3)
    starts = range(0, case.layers, each)
    weights: dict[str, str] = {}
    values = pattern(case.stored)
    for number, start in enumerate(starts, 1):
        file = f"model-{number:05}-of-{len(starts):05}.safetensors"
        shapes = {
            case.stem.format(i=layer) + name: shape
            for layer in range(start, min(start + each, case.layers))
            for name, shape in {**case.other, **case.ffn}.items()
        }
        write_shard(folder / file, shapes, case.stored, values)
        weights |= dict.fromkeys(shapes, file)
    index = {"metadata": {"total_size": case.bytes}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def write_shard(path: Path, shapes: Shapes, stored: str, values: bytes) -> None:
    """Write a safetensors file in which every tensor repeats `values`."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = prod(shape) * STORED[stored]
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": (at, at + size)}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            for size in _chunks(prod(shape) * STORED[stored], len(values)):
                file.write(memoryview(values)[:size])
        file.flush()
        os.fsync(file.fileno())  # only clean pages can be dropped from the cache


def _chunks(total: int, most: int) -> Iterator[int]:
    for start in range(0, total, most):
        yield min(most, total - start)


def pattern(stored: str, count: int = 4_000_000) -> bytes:
    """Return the bytes of `count` values with random signs and magnitudes from 2⁻⁷ to 2⁻⁵, in float32 or bfloat16."""
    draw, width = random.Random(0), STORED[stored]
    values = bytearray(draw.randbytes(width * count))
    sign_and_exponent = bytes(0x3C | (byte & 0x80) for byte in range(256))
    values[width - 1 :: width] = values[width - 1 :: width].translate(sign_and_exponent)
    return bytes(values)


# --- measuring --------------------------------------------------------------------------------------------------------


def forget(folder: Path) -> None:
    """Drop the checkpoint's files from the file cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(case: Case, folder: Path, dtype: str, base: int) -> dict[str, Any]:
    """Run a trace with a cold and with a warm file cache, and return its row; `read_bytes` is None if not known."""
    arguments = ["trace", str(folder), "--layer", str(LAYER), "--tokens", str(TOKENS), "--dtype", dtype]
    forget(folder)
    cold, warm = (script.child(TRACE, *arguments) for _ in range(2))
    ffn, peak, read = case.ffn_params * DTYPES[dtype], max(cold["peak"], warm["peak"]), cold["read"]
    limit, over = round(ALLOWANCE + FACTOR * ffn), peak - base
    known = read if read >= case.ffn_params * STORED[case.stored] else None
    return {
        "case": case.name, "stored": case.stored, "dtype": dtype, "checkpoint_bytes": case.bytes, "ffn_bytes": ffn,
        "baseline_bytes": base, "peak_bytes": peak, "over_bytes": over, "limit_bytes": limit, "passed": over <= limit,
        "read_bytes": known,
    }  # fmt: skip


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each checkpoint and dtype."""
    if options.layers < 2:
        raise SystemExit("--layers must be at least 2: the trace is of layer 1")
    base = min(script.child(IMPORTS)["peak"] for _ in range(3))  # which also fill the file cache
    with script.scratch("memory", options.dir, options.keep) as root:
        for name in options.case:
            case = CASES[name](options.layers)
            with checkpoint(case, root, options.keep) as folder:
                for dtype in DTYPES:
                    yield measure(case, folder, dtype, base)


@contextmanager
def checkpoint(case: Case, root: Path, keep: bool = False) -> Iterator[Path]:
    """Write the checkpoint to a folder in `root` and yield the folder; delete it afterwards unless `keep`."""
    folder, free = root / case.name, shutil.disk_usage(root).free
    if case.bytes * 1.05 > free:
        raise SystemExit(f"{case.name} needs {case.bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: use --dir")
    try:
        write(case, folder)
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    packages = ("torch", "safetensors")
    script.main_once(__doc__, packages, measured, layers=LLAMA_LAYERS, case=tuple(CASES), dir=None, keep=False)
