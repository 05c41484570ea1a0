"""The files that `benchmarks/unchanged.txt` reads: tiny checkpoints of every layout, user code, stored results.

All values are drawn from fixed seeds and written without ffncli, so that two versions of ffncli read the same bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import save_file
from torch import Tensor

from tests.oracles.checkpoints import GPT2, INDEX, LLAMA, MIXTRAL, T5, folder, raw_safetensors, tensors
from tests.oracles.huggingface import make
from tests.oracles.own_modules import MODULES
from tests.oracles.prompted import give_tokenizer

# Models that transformers builds and saves, each with a tokenizer: from the name under m/ to the oracle's case.
BUILT = {
    "gpt2": "gpt2", "llama": "llama", "phi3": "phi3", "bert": "bert", "t5": "t5-gated-gelu", "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe", "gpt_oss": "gpt_oss", "deepseek": "deepseek_v3", "falcon": "falcon-7b", "olmo2": "olmo2",
    "gemma2": "gemma2", "opt": "opt", "bloom": "bloom", "whisper": "whisper", "vit": "vit",
    "llama-bare": "llama-no-prefix", "qwen3_moe-mixed": "qwen3_moe-layer-1-dense",
}  # fmt: skip
UNKNOWN = {**LLAMA, "model_type": "brand_new"}
KERNELS = """
import torch.nn.functional as F

def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

def swapped(x, gate, up, down):
    return F.linear(F.linear(x, gate) * F.silu(F.linear(x, up)), down)

def plain(x, up, up_bias, down, down_bias):
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)

def narrow(x, gate, up, down):
    return mlp(x, gate, up, down)[..., :1]

def failing(x, gate, up, down):
    raise RuntimeError("not today")
"""


def write_inputs(path: Path) -> None:
    """Write all files in the existing folder `path`."""
    for name, case in BUILT.items():
        make(case, path / "m" / name)
        give_tokenizer(path / "m" / name)
    _by_hand(path)
    _damaged(path)
    _quantized(path)
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16):
        _gguf(path / f"{kind.name.lower()}.gguf", kind)
    (path / "mine.py").write_text(KERNELS, "utf-8")
    (path / "my.py").write_text(MODULES, "utf-8")
    (path / "broken.py").write_text("def mlp(x:\n", "utf-8")
    (path / "values.txt").write_text("0.1, -0.2, 0.3, 0.4\n", "utf-8")
    (path / "texts.txt").write_text("Hello the cat sat\nthe cat sat on the mat\n\nHello world\n", "utf-8")
    (path / "texts.jsonl").write_text('{"text": "Hello the cat"}\n{"text": "the mat", "id": 7}\n', "utf-8")
    (path / "facts.txt").write_text("# of GPT-2\nd_model == 768\nffn_params_total > 5e7\n", "utf-8")
    save_file({"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}, path / "x.safetensors")
    _results(path)


def _by_hand(path: Path) -> None:
    """Write checkpoints that transformers would not write: sharded, without a config, of an unknown family, pickled."""
    llama = tensors("llama")
    folder(path / "no-config", None, llama)
    folder(path / "no-config-experts", None, tensors("mixtral"))
    folder(path / "no-config-gpt2", None, tensors("gpt2"))
    folder(path / "unknown", UNKNOWN, llama)
    folder(path / "bf16", LLAMA, tensors("llama", torch.bfloat16))
    folder(path / "tiny-gpt2", GPT2, tensors("gpt2"))
    folder(path / "tiny-mixtral", MIXTRAL, tensors("mixtral"))
    folder(path / "tiny-llama", LLAMA, llama)
    folder(path / "config-only", LLAMA)
    folder(path / "t5-config-only", T5)
    pickled = Path(folder(path / "bin", LLAMA))
    torch.save(llama, pickled / "pytorch_model.bin")
    sharded = Path(folder(path / "sharded", LLAMA))
    names = sorted(llama)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: llama[name] for name in part}, sharded / file)
    places = {name: file for file, part in parts.items() for name in part}
    (sharded / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")
    missing = Path(folder(path / "missing-shard", LLAMA))
    (missing / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")
    save_file({name: llama[name] for name in names[::2]}, missing / "model-00001-of-00002.safetensors")


def _damaged(path: Path) -> None:
    """Write faulty checkpoints and files."""
    llama = tensors("llama")
    folder(path / "disagreeing", {**LLAMA, "intermediate_size": 8}, llama)
    other = {name: tensor.flip(0) if "gate_proj" in name else tensor for name, tensor in llama.items()}
    folder(path / "altered", LLAMA, other)
    swaps = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = {n.replace(k, v): t for n, t in llama.items() for k, v in swaps.items() if k in n}
    folder(path / "swapped", LLAMA, {**llama, **swapped})
    bad = {name: tensor.clone() for name, tensor in llama.items()}
    bad["model.layers.1.mlp.up_proj.weight"][2, 1] = float("nan")
    bad["model.layers.1.mlp.down_proj.weight"][0, 0] = float("inf")
    folder(path / "not-finite", LLAMA, bad)
    folder(path / "incomplete", LLAMA, {name: tensor for name, tensor in llama.items() if "1.mlp.down" not in name})
    folder(path / "bad-config", "{")
    folder(path / "negative-config", {**LLAMA, "hidden_size": -4})
    folder(path / "empty", None)
    (path / "cut.safetensors").write_bytes(raw_safetensors(b"{}", 0, 3))
    (path / "text.safetensors").write_bytes(b"not a safetensors file at all")
    (path / "text.gguf").write_bytes(b"GGUF")


def _quantized(path: Path) -> None:
    """Write DeepSeek's FP8 with a scale per block, gpt-oss's MXFP4, and GPTQ matrices."""
    g = torch.Generator().manual_seed(0)
    fp8: dict[str, Tensor] = {}
    for i in range(2):
        stem = f"model.layers.{i}."
        fp8[f"{stem}post_attention_layernorm.weight"] = torch.randn(8, generator=g)
        for name, shape in (("gate", (12, 8)), ("up", (12, 8)), ("down", (8, 12))):
            key = f"{stem}mlp.{name}_proj.weight"
            fp8[key] = (4 * torch.randn(shape, generator=g)).to(torch.float8_e4m3fn)
            fp8[f"{key}_scale_inv"] = torch.rand([-(-size // 4) for size in shape], generator=g)
    method: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    wide = {**LLAMA, "hidden_size": 8, "intermediate_size": 12}
    folder(path / "fp8", {**wide, "quantization_config": method}, fp8)
    mxfp4: dict[str, Tensor] = {}
    for i in range(2):
        stem = f"model.layers.{i}."
        mxfp4[f"{stem}post_attention_layernorm.weight"] = torch.randn(64, generator=g)
        mxfp4[f"{stem}mlp.router.weight"] = torch.randn(4, 64, generator=g)
        mxfp4[f"{stem}mlp.router.bias"] = torch.randn(4, generator=g)
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            base, size = f"{stem}mlp.experts.{name}", (4, rows, columns // 32)
            mxfp4[f"{base}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=g)
            mxfp4[f"{base}_scales"] = torch.randint(120, 125, size, dtype=torch.uint8, generator=g)
            mxfp4[f"{base}_bias"] = torch.randn(4, rows, generator=g)
    config = {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    folder(path / "mxfp4", config, mxfp4)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    packed: dict[str, Tensor] = {}
    for i in range(2):
        for name, (rows, columns) in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
            stem = f"model.layers.{i}.mlp.{name}_proj."
            packed[f"{stem}qweight"] = torch.randint(0, 2**31 - 1, (columns // 8, rows), dtype=torch.int32, generator=g)
            packed[f"{stem}qzeros"] = torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
            packed[f"{stem}scales"] = torch.ones(columns // 32, rows, dtype=torch.float16)
            packed[f"{stem}g_idx"] = torch.arange(columns, dtype=torch.int32) // 32
    folder(path / "gptq", {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "quantization_config": gptq}, packed)


def _gguf(path: Path, kind: GGMLQuantizationType) -> None:
    """Write a Llama of two layers as llama.cpp stores it."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for name, value in {"embedding_length": 64, "block_count": 2, "feed_forward_length": 96}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-3)
    for layer in range(2):
        for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            array = rng.standard_normal(shape).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_{name}.weight", quantize(array, kind), raw_dtype=kind)
        norm = rng.standard_normal(64).astype(np.float32)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", norm, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- results of ffn bench ---------------------------------------------------------------------------------------------

RESULT: Mapping[str, object] = {  # the columns of a row, in the file's order
    "schema_version": 1, "run_id": "base", "started_utc": "2026-01-01T00:00:00Z", "ffncli": "0.0.1", "torch": "2.13.0",
    "python": "3.12.1", "host": "ci-1", "cpu": "AMD EPYC 7B13", "device": "cpu", "device_name": "AMD EPYC 7B13",
    "driver": "", "blas": "torch: MKL 2024.2; numpy: openblas 0.3.31", "threads": 2, "math_mode": "highest",
    "source": "512x2048:swiglu", "d_model": 512, "d_ff": 2048, "activation": "silu", "gated": "true", "bias": "false",
    "experts": 0, "top_k": 0, "shared_experts": 0, "tokens": 32, "dtype": "fp32", "pass": "forward", "cache": "warm",
    "kernel": "packed", "baseline": "eager", "status": "ok", "processes": 5, "placements": 15, "rounds": 100,
    "inner": 4, "time_s": "", "time_low_s": "", "time_high_s": "", "ratio": 0.9, "ratio_low": 0.89, "ratio_high": 0.91,
    "verdict": "faster", "aa_ratio": 1.0, "aa_low": 0.995, "aa_high": 1.005, "gemm_ratio": 1.1, "flops": 201326592,
    "bytes": 12713984, "tflops": 0.2, "gbytes_per_s": 12.5, "roof_fraction": 0.6, "datasheet_fraction": "",
    "fusion_saving_max": 0.05, "peak_memory_bytes": "", "page_faults_per_call": 0.0, "compile_s": "",
    "error_max": 1e-7, "error_rel": 1e-7, "baseline_error_rel": 1e-7, "seed": 0, "warnings": "", "note": "",
    "process_times_s": "", "process_anchors_s": "", "process_ratios": "", "openmp": "OMP_PROC_BIND=true",
    "allocator": "glibc", "case": "", "precision": 0.01, "numpy": "2.4.0", "isa": "avx2 fma",
}  # fmt: skip
SPREAD = (0.998, 1.003, 1.0, 1.001, 0.997)  # of five processes around their mean


def _results(path: Path) -> None:
    """Write a result, and others in which a case is slower, all are faster, one is broken, or the machine differs."""
    factors = {"base": (1.0, 1.0, 1.0, 1.0), "slower": (1.0, 1.12, 0.9, 1.0), "faster": (0.8, 0.8, 0.8, 0.8)}
    for name, slowdowns in factors.items():
        _result(path / f"{name}.csv", slowdowns, run_id=name)
    _result(path / "other-machine.csv", (1.5, 1.5, 1.5, 1.5), run_id="other", cpu="Intel Xeon", torch="2.14.0")
    _result(path / "other-host.csv", (1.0, 1.0, 1.0), run_id="host", host="ci-2", ffncli="0.0.2")
    _result(path / "wrong.csv", (1.0, 1.0, 1.0, 1.0), run_id="wrong", status="wrong")
    _result(path / "troubled.csv", (1.2, 1.0, 1.0, 1.0), run_id="troubled", warnings="preempted: 15 % of the blocks")
    (path / "no-columns.csv").write_text("a,b\n1,2\n", "utf-8")


def _result(path: Path, slowdowns: tuple[float, ...], **changes: object) -> None:
    lines = [",".join(RESULT)]
    for at, factor in enumerate(slowdowns):
        tokens = 2**at
        times = [1e-3 * tokens * factor * x for x in SPREAD]
        case = f"512x2048:swiglu; {tokens} tokens; fp32; forward; warm; cpu; 2 threads"
        row = {
            **RESULT, "tokens": tokens, "case": case, "time_s": times[2], "time_low_s": times[4],
            "time_high_s": times[1], "process_times_s": _joined(times), "process_ratios": _joined([0.9] * 5),
            "process_anchors_s": _joined([0.01 * x for x in reversed(SPREAD)]), **changes,
        }  # fmt: skip
        lines.append(",".join(str(row[name]) for name in RESULT))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _joined(values: list[float]) -> str:
    return ";".join(map(repr, values))
