"""Bytes of quantised weights: what a config says, compared with what the format's library writes.

What: three matrices of an FFN (gate and up 384 × 128, down 128 × 384), quantised by each library on a CPU, in every
kind of quantization_config that it writes there. The table has the bytes that `ffn params` derives from the config and
the bytes of the library's tensors, without numbers that a matrix has once (a scale or a shape of the whole matrix).

How: the libraries are none of ours: install those to try in an environment of their own, with the torch of
constraints.txt: compressed-tensors torchao bitsandbytes auto-round nvidia-modelopt mlx (with mlx-cpu). A kind whose
library is absent, or does not run on this machine, is listed with the reason, and its bytes are by hand in
tests/models/config/test_quantized.py.

    python -m benchmarks.quantized_kinds [--save FILE]

The exit code is 1 if any number of bytes differs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks import script
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count

D, F = 128, 384
LLAMA = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1, "hidden_act": "silu",
    "num_attention_heads": 4, "vocab_size": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
MATRICES = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((F, D), (F, D), (D, F))]
COLUMNS = ("kind", "library", "from_config", "written", "agrees", "oracle")


def size(tensor: Any) -> int:
    """Return the bytes of a tensor, of the parts of a subclass, or 0 for a single number."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.nbytes) if tensor.numel() > 1 else 0


def by_compressed_tensors(form: str, **weights: Any) -> int:
    """Return the bytes that compressed-tensors writes for the matrices."""
    from tests.oracles.packed import by_library

    total, group = 0, weights.get("group_size")
    for matrix in MATRICES:
        columns = 1 if group is None else matrix.shape[1] // group
        scale = torch.full((matrix.shape[0], columns), 0.1, dtype=torch.bfloat16)
        total += sum(map(size, by_library(form, matrix.bfloat16(), scale, weights)[0].values()))
    return total - 3 * 2 * 8 * (form == "pack-quantized")  # without each matrix's shape, two int64


def by_torchao(kind: str, group: int | None = None) -> int:
    """Return the bytes of the tensor subclasses that torchao makes of the matrices."""
    from torchao import quantization

    layers = torch.nn.ModuleList([torch.nn.Linear(m.shape[1], m.shape[0], bias=False).bfloat16() for m in MATRICES])
    how = {"granularity": quantization.PerGroup(group)} if group else {}
    quantization.quantize_(layers, getattr(quantization, kind)(**how))
    return sum(size(layer.weight) for layer in layers)


def by_bitsandbytes(form: str, double: bool = False) -> int:
    """Return the bytes of bitsandbytes' packed values and scales."""
    from bitsandbytes import functional

    total = 0
    for matrix in MATRICES:
        if form == "int8":
            packed, scales, _ = functional.int8_vectorwise_quant(matrix.half())
            total += size(packed) + size(scales)
        else:
            packed, state = functional.quantize_4bit(matrix, blocksize=64, quant_type=form, compress_statistics=double)
            total += size(packed) + size(state.absmax) + (size(state.state2.absmax) if state.nested else 0)
    return total


def by_auto_round(bits: int, group: int, order: bool = False) -> int:
    """Return the bytes of the buffers of AutoRound's own layer; `order`: with the order of the columns."""
    from auto_round_extension.torch.qlinear_torch import QuantLinear

    layers = [QuantLinear(bits, group, m.shape[1], m.shape[0], False, g_idx=order) for m in MATRICES]
    return sum(size(buffer) for layer in layers for buffer in layer.buffers())


def by_modelopt(name: str, block: int | None) -> int:
    """Return the bytes of ModelOpt's quantised tensor and its scales."""
    from modelopt.torch.quantization import qtensor

    total = 0
    for matrix in MATRICES:
        made, *scales = getattr(qtensor, name).quantize(matrix.bfloat16(), *([block] if block else []))
        total += size(made._quantized_data) + sum(map(size, scales))
    return total


def by_mlx(**how: Any) -> int:
    """Return the bytes of MLX's packed values, scales and biases."""
    import mlx.core as mx

    arrays = [mx.array(matrix.numpy()).astype(mx.bfloat16) for matrix in MATRICES]
    return sum(part.nbytes for array in arrays for part in mx.quantize(array, **how))


def _compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def kinds() -> Iterator[tuple[str, str, Mapping[str, Any], Callable[[], int]]]:
    """Yield each kind: its name, its library, its quantization_config, and a function that writes it."""
    common = {"symmetric": True}
    for name, form, weights in (
        ("int4, groups of 32", "pack-quantized",
         {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, **common}),
        ("int4 by channel, in bytes", "int-quantized",
         {"num_bits": 4, "type": "int", "strategy": "channel", **common}),
        ("int8 by channel", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", **common}),
        ("fp8 by channel", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", **common}),
    ):  # fmt: skip
        yield (
            name,
            "compressed-tensors",
            _compressed(**weights) | {"format": form},
            lambda f=form, w=weights: by_compressed_tensors(f, **w),
        )
    for kind in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
                 "Float8DynamicActivationFloat8WeightConfig", "Int4WeightOnlyConfig"):  # fmt: skip
        config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}
        yield kind, "torchao", config, lambda k=kind: by_torchao(k)
    by_group = {"granularity": {"_type": "PerGroup", "_data": {"group_size": 64}}}
    config = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": by_group}},
    }
    yield "Int8WeightOnlyConfig, groups of 64", "torchao", config, lambda: by_torchao("Int8WeightOnlyConfig", 64)
    for form, double in (("nf4", False), ("nf4", True), ("fp4", False)):
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": form,
                  "bnb_4bit_use_double_quant": double}  # fmt: skip
        yield form + ", doubled" * double, "bitsandbytes", config, lambda f=form, d=double: by_bitsandbytes(f, d)
    yield (
        "LLM.int8",
        "bitsandbytes",
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        (lambda: by_bitsandbytes("int8")),
    )
    for bits, size_, form in ((4, 128, "auto_gptq"), (2, 64, "gptqmodel"), (8, 32, "auto_gptq")):
        config = {"quant_method": "auto-round", "bits": bits, "group_size": size_,
                  "packing_format": f"auto_round:{form}"}  # fmt: skip
        yield (
            f"{bits} bits, {form}",
            "auto-round",
            config,
            (lambda b=bits, s=size_, o=form == "gptqmodel": by_auto_round(b, s, o)),
        )
    for algorithm, made, block in (("NVFP4", "NVFP4QTensor", 16), ("MXFP4", "MXFP4QTensor", 32),
                                   ("FP8", "FP8QTensor", None), ("W4A16_AWQ", "INT4QTensor", 128)):  # fmt: skip
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        yield algorithm, "nvidia-modelopt", config, lambda m=made, b=block: by_modelopt(m, b)
    for mode, bits, group in (("affine", 2, 128), ("affine", 3, 64), ("affine", 4, 64), ("affine", 6, 64),
                              ("affine", 8, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)):  # fmt: skip
        how = {"bits": bits, "group_size": group, "mode": mode}
        yield f"{mode}, {bits} bits", "mlx", how, lambda h=how: by_mlx(**h)


def row(name: str, library: str, config: Mapping[str, Any], write: Callable[[], int]) -> dict[str, object]:
    """Compare one kind."""
    key = "quantization" if library == "mlx" else "quantization_config"
    ours = count(from_config({**LLAMA, key: dict(config)}, "m", "config.json")).weight_bytes
    try:
        written, oracle = write(), f"{library} {version(library)}"
    except (ImportError, PackageNotFoundError, AssertionError, RuntimeError, ValueError) as error:
        written, oracle = None, f"by hand: {str(error).splitlines()[0][:80]}"
    return dict(zip(COLUMNS, (name, library, ours, written, None if written is None else ours == written, oracle),
                    strict=True))  # fmt: skip


def main() -> int:
    """Print the table; return 1 if any kind differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE")
    options = parser.parse_args()
    rows = [row(*kind) for kind in kinds()]
    print(script.table(COLUMNS, [[one[name] for name in COLUMNS] for one in rows]))
    script.save(options.save, rows, "torch")
    return int(any(one["agrees"] is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
