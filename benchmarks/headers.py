"""How fast `ffn params DIR` reads the headers of a checkpoint of 689 GB, compared with a minimal program.

What: a checkpoint of DeepSeek-V3's shape: 163 shards and about 92,000 tensors, whose data are holes in sparse files.
The yardstick is a program with one Typer command that runs json.loads over the same headers and prints a rich table.
Targets: at most 1.6 times its CPU time, and 100 MB. Two more checkpoints show what the time depends on: one has half
the experts and so half the tensors; the other has such small widths that it has a thousandth of the bytes.

How: every round runs every command once, in random order, one process at a time. A ratio is the median over rounds of
CPU seconds (user + system) divided by the yardstick's in the same round, because wall time would include other work on
the machine. Wall time and its ratio are reported too. stdout is a file, so that `ffn` prints plain text.

Limits: warm caches. The yardstick checks nothing, and does not read the index, whose 92,000 entries `ffn` compares with
the headers.

    python -m benchmarks.headers [--rounds N] [--dir DIR] [--save FILE]

The exit code is 1 if a target is missed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import script

# The bare program of script.py, extended to read the headers in a folder.
BARE = (
    script.BARE.replace("import typer", "import json\nfrom pathlib import Path\n\nimport typer")
    .replace(
        "def main() -> None:",
        """def main(folder: str) -> None:
    tensors = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            tensors += len(json.loads(file.read(int.from_bytes(file.read(8), "little"))))""",
    )
    .replace('"answer", "42"', '"tensors", str(tensors)')
)
MOST_RATIO, MOST_BYTES = 1.6, 100e6
SHARDS = 163
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
WARM_UPS = 2
Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


@dataclass(frozen=True)
class Shape:
    """DeepSeek-V3's dimensions; `scale` divides the widths, so that the same tensors have fewer bytes."""

    experts: int = 256
    scale: int = 1
    layers: int = 61
    dense: int = 3

    def of(self, width: int) -> int:
        return max(1, width // self.scale)

    @property
    def config(self) -> dict[str, object]:
        """The fields of config.json that describe the shape."""
        return {
            "model_type": "deepseek_v3", "hidden_size": self.of(7168), "intermediate_size": self.of(18432),
            "moe_intermediate_size": self.of(2048), "num_hidden_layers": self.layers, "hidden_act": "silu",
            "n_routed_experts": self.experts, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8,
            "topk_group": 4, "first_k_dense_replace": self.dense, "num_nextn_predict_layers": 1, "vocab_size": 129280,
            "num_attention_heads": self.of(128), "num_key_value_heads": self.of(128), "q_lora_rank": self.of(1536),
            "kv_lora_rank": self.of(512), "qk_nope_head_dim": self.of(128), "qk_rope_head_dim": self.of(64),
            "v_head_dim": self.of(128), "torch_dtype": "bfloat16",
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        }  # fmt: skip


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Yield all tensors, layer by layer; an extra layer after the last one predicts a second token."""
    d, vocabulary = shape.of(7168), (129280, shape.of(7168))
    yield "model.embed_tokens.weight", "BF16", vocabulary
    for layer in range(shape.layers + 1):
        stem = f"model.layers.{layer}."
        yield from attention(stem, shape)
        yield from ffn_tensors(stem + "mlp.", shape, layer < shape.dense)
        if layer == shape.layers:
            yield stem + "eh_proj.weight", "BF16", (d, 2 * d)
            yield from ((f"{stem}{norm}.weight", "BF16", (d,)) for norm in ("enorm", "hnorm", "shared_head.norm"))
            yield from ((f"{stem}{name}.weight", "BF16", vocabulary) for name in ("embed_tokens", "shared_head.head"))
    yield "model.norm.weight", "BF16", (d,)
    yield "lm_head.weight", "BF16", vocabulary


def attention(stem: str, shape: Shape) -> Iterator[Tensor]:
    """Yield the tensors of the latent attention and the norms of one layer."""
    d, heads, query, latent = shape.of(7168), shape.of(128), shape.of(1536), shape.of(512)
    plain, rotary = shape.of(128), shape.of(64)
    sizes = {
        "q_a_proj": (query, d), "q_b_proj": (heads * (plain + rotary), query),
        "kv_a_proj_with_mqa": (latent + rotary, d), "kv_b_proj": (heads * 2 * plain, latent),
        "o_proj": (d, heads * plain),
    }  # fmt: skip
    for name, (rows, columns) in sizes.items():
        yield from matrix(f"{stem}self_attn.{name}.weight", rows, columns)
    for name, size in (("q_a_layernorm", query), ("kv_a_layernorm", latent)):
        yield f"{stem}self_attn.{name}.weight", "BF16", (size,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{stem}{name}.weight", "BF16", (d,)


def ffn_tensors(stem: str, shape: Shape, dense: bool) -> Iterator[Tensor]:
    """Yield the tensors of a dense FFN, or of the router, the shared expert and the routed experts."""
    if dense:
        yield from gated(stem, shape.of(7168), shape.of(18432))
        return
    yield stem + "gate.weight", "BF16", (shape.experts, shape.of(7168))
    yield stem + "gate.e_score_correction_bias", "F32", (shape.experts,)
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(shape.experts))):
        yield from gated(f"{stem}{expert}.", shape.of(7168), shape.of(2048))


def gated(stem: str, d_model: int, d_ff: int) -> Iterator[Tensor]:
    yield from matrix(stem + "gate_proj.weight", d_ff, d_model)
    yield from matrix(stem + "up_proj.weight", d_ff, d_model)
    yield from matrix(stem + "down_proj.weight", d_model, d_ff)


def matrix(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """Yield a matrix of FP8 values, and its scales, one for each block of 128 × 128."""
    yield name, "F8_E4M3", (rows, columns)
    yield name + "_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def write(shape: Shape, folder: Path) -> tuple[int, int]:
    """Write the checkpoint in shards of about equal size, with holes as data; return how many tensors and bytes."""
    folder.mkdir()
    everything = list(tensors(shape))
    total = sum(map(size_of, everything))
    shards: list[list[Tensor]] = [[] for _ in range(SHARDS)]
    at = 0
    for tensor in everything:
        shards[min(at * SHARDS // total, SHARDS - 1)].append(tensor)
        at += size_of(tensor)
    index: dict[str, str] = {}
    for number, held in enumerate((shard for shard in shards if shard), 1):
        name = f"model-{number:05}-of-{SHARDS:06}.safetensors"
        write_shard(folder / name, held)
        index |= dict.fromkeys((tensor[0] for tensor in held), name)
    weights = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights, indent=2), "utf-8")
    (folder / "config.json").write_text(json.dumps(shape.config), "utf-8")
    return len(everything), total


def write_shard(path: Path, held: Sequence[Tensor]) -> None:
    """Write a header as safetensors does, followed by a hole of the size of its data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in held:
        end = at + size_of((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)


def size_of(tensor: Tensor) -> int:
    _, dtype, shape = tensor
    return BYTES[dtype] * prod(shape)


CHECKPOINTS = {
    "deepseek-v3": Shape(),
    "a thousandth of the bytes": Shape(scale=32),
    "half the tensors": Shape(experts=128),
}


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every command on every checkpoint, all measured in the same rounds."""
    with script.scratch("headers", options.dir) as root:
        bare = root / "bare.py"
        bare.write_text(BARE, "utf-8")
        folders = [root / str(number) for number in range(len(CHECKPOINTS))]
        with ProcessPoolExecutor(1, get_context("spawn")) as writer:  # this process stays small: see script.run
            sizes = dict(zip(CHECKPOINTS, writer.map(write, CHECKPOINTS.values(), folders), strict=True))
        commands = {}
        for name, path in zip(CHECKPOINTS, folders, strict=True):
            commands[name, "bare"] = [sys.executable, str(bare), str(path)]
            commands[name, "params"] = script.ffn("params", str(path))
            commands[name, "params --json"] = script.ffn("params", str(path), "--json")
        runs = script.runs_of(commands, options.rounds, WARM_UPS)
    for (name, command), done in runs.items():
        limit = MOST_RATIO if name == "deepseek-v3" and command != "bare" else None
        peak, base = int(script.median(done, "peak_bytes")), runs[name, "bare"]
        wall_ratio, cpu_ratio = script.ratio(done, base, "wall_s"), script.ratio(done, base, "cpu_s")
        yield {
            "checkpoint": name, "tensors": sizes[name][0], "checkpoint_bytes": sizes[name][1], "command": command,
            "wall_s": script.median(done, "wall_s"), "cpu_s": script.median(done, "cpu_s"), "peak_bytes": peak,
            "wall_ratio": wall_ratio, "cpu_ratio": cpu_ratio, "limit": limit,
            "passed": None if limit is None else cpu_ratio <= limit and peak <= MOST_BYTES, "rounds": options.rounds,
        }  # fmt: skip


if __name__ == "__main__":
    script.main_once(__doc__, ("typer", "rich"), measure, rounds=15, dir=None)
