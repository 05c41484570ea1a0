"""Packed weights become the numbers that their format defines, as compressed-tensors and transformers make them too; a
traced FFN is that of the unpacked weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.models.files.packing import LogicalTensor
from ffncli.models.files.rows import FLOAT8 as OF_TORCH
from tests.oracles.checkpoints import LLAMA, MIXTRAL, expect_refusal, folder, tensors
from tests.oracles.packed import BNB, FP8, UP, by_library, config_groups, counted, unpacked

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
W = f"{UP}.weight"
pytestmark = pytest.mark.usefixtures("block")


def float8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return (8 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


# --- FP8 --------------------------------------------------------------------------------------------------------------


def whole_blocks(size: int, count: int) -> int:
    """How many values share a scale where no config says it: equally many, or 128 where the last block is cut."""
    return 128 if size % count else size // count


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize(
    ("shape", "scales", "blocks"),
    [
        ((12, 20), (), None), ((12, 20), (1,), None), ((12, 20), (1, 1), None),  # one for the tensor
        ((12, 20), (12,), None), ((12, 20), (12, 1), None),  # one for each row
        ((12, 20), (3, 5), None), ((12, 20), (3, 5), [4, 4]),  # blocks, which the scales' shape says
        ((10, 21), (3, 3), [4, 8]), ((201, 131), (2, 2), None), ((200, 100), (2, 1), [128, 128]),  # the last ones cut
        ((3, 12, 20), (3, 3, 5), [4, 4]), ((3, 12, 20), (3,), None), ((3, 12, 20), (3, 12, 1), None),
        ((3, 12, 20), (1, 1, 1), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("named", ["_scale_inv", "_scale"])
def test_fp8_is_value_times_scale(
    shape: tuple[int, ...], scales: tuple[int, ...], blocks: list[int] | None, named: str, dtype: torch.dtype,
    tmp_path: Path,
):  # fmt: skip
    weight, scale = float8(*shape, dtype=dtype), torch.rand(scales) + 0.5
    config = {"quant_method": "fp8", **({"weight_block_size": blocks} if blocks else {})}
    found = unpacked(tmp_path, {W: weight, W + named: scale}, quantization=config)
    grid = scale.view(*scales, *[1] * (len(shape) - len(scales)))
    for axis in (-2, -1):
        size = blocks[axis] if blocks else whole_blocks(shape[axis], grid.shape[axis])
        grid = grid.repeat_interleave(size, axis).narrow(axis, 0, min(shape[axis], size * grid.shape[axis]))
    assert torch.equal(found, weight.float() * grid)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_fp8_is_what_transformers_makes_of_it(dtype: torch.dtype, tmp_path: Path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale = float8(256, 384), (torch.rand(2, 3) + 0.5).to(dtype)
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(unpacked(tmp_path, {W: weight, f"{W}_scale_inv": scale}, quantization=FP8), theirs)


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (None, "up_proj.weight_scale_inv' is missing"), (torch.ones(3, 3), "weight_scale_inv' of shape [3, 3]"),
        (torch.ones(3, 1, 1), "does not fit"), (torch.ones(0, 5), "does not fit"),
        (torch.ones(3, 4, dtype=torch.int32), "has scales of type I32"),
    ],
)  # fmt: skip
def test_fp8_scales_that_cannot_be(scale: Tensor | None, says: str, call, tmp_path: Path):
    stored = tensors("llama")
    stored[W] = float8(6, 4)
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 1]}}
    stored |= {} if scale is None else {f"{W}_scale_inv": scale}
    expect_refusal(call("trace", folder(tmp_path, config, stored)), "model.safetensors", W, says)


@pytest.mark.parametrize("stated", [[0, 0], ["a", None], [2.5, 1], [True, 1], 7, "128", [128]])
def test_a_block_size_that_says_nothing_does_no_harm(stated: Any, tmp_path: Path):
    """It is looked at by `logical` where it matters; for one scale a row it does not."""
    weight, scale = float8(6, 4), torch.rand(6)
    found = unpacked(tmp_path, {W: weight, f"{W}_scale": scale}, quantization={"weight_block_size": stated})
    assert torch.equal(found, weight.float() * scale[:, None])


def test_blocks_of_no_known_size(tmp_path: Path):
    with pytest.raises(FFNError, match=r"do not divide \[300, 10\] into equal blocks"):
        unpacked(tmp_path, {W: float8(300, 10), f"{W}_scale": torch.ones(7, 10)})


def test_a_dtype_that_this_torch_does_not_have(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(OF_TORCH, "F8_E4M3", "float8_of_tomorrow")
    stored = {**tensors("llama"), W: float8(6, 4), f"{W}_scale": torch.ones(())}
    says = "model.safetensors holds F8_E4M3 values, which torch"
    expect_refusal(call("trace", folder(tmp_path, LLAMA, stored)), says, "pip install -U torch", code=3)


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def test_every_byte_of_mxfp4_is_two_values_and_every_scale_a_power_of_two(tmp_path: Path):
    """OCP Microscaling Formats 1.0: E2M1 by sign, exponent and mantissa; E8M0 without a sign, 255 for NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    found = unpacked(tmp_path, {"w_blocks": blocks, "w_scales": scales}, "w")

    def e2m1(code: int) -> float:
        sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * ((1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2)

    row = torch.tensor([e2m1(code) for byte in range(256) for code in (byte & 15, byte >> 4)], dtype=torch.float64)
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan], dtype=torch.float64)
    wanted = powers.unsqueeze(1) * row  # [out, in]
    assert found.shape == (1, 256, 512)
    assert torch.equal(found[0, :255].double(), wanted[:255].float().double())
    assert found[0, 255].isnan().all()


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(100, 140, (3, 6, 2), dtype=torch.uint8, generator=g)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(unpacked(tmp_path, {"w_blocks": blocks, "w_scales": scales}, "w").mT, theirs)


def test_mxfp4_of_other_writers(tmp_path: Path):
    """compressed-tensors keeps bytes [out, in / 2]."""
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, 2, 16), dtype=torch.uint8, generator=g)
    scales = torch.randint(100, 140, (6, 2), dtype=torch.uint8, generator=g)
    blocked = unpacked(tmp_path, {"w_blocks": blocks, "w_scales": scales}, "w")
    plain = unpacked(tmp_path, {f"{W}_packed": blocks.flatten(1), f"{W}_scale": scales})
    assert torch.equal(plain, blocked)


def test_mxfp4_without_scales(call, tmp_path: Path):
    stored = gpt_oss(packed=True)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    del stored[name]
    for config in (GPT_OSS, {**GPT_OSS, "quantization_config": None}):
        expect_refusal(call("trace", folder(tmp_path, config, stored), "--layer", "1"), name, "missing", "_blocks")
    stored[name] = torch.zeros(4, 64, 2, dtype=torch.uint8)
    expect_refusal(call("trace", folder(tmp_path, GPT_OSS, stored), "--layer", "1"), "down_proj_blocks", "16 bytes")


# --- the whole FFN ----------------------------------------------------------------------------------------------------

GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 6,
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]},
}  # fmt: skip


def gpt_oss(packed: bool) -> dict[str, Tensor]:
    """gpt-oss's tensors, its experts in MXFP4, or as transformers unpacks them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(0)
    out: dict[str, Tensor] = {}
    for i in range(2):
        stem = f"model.layers.{i}."
        out[f"{stem}post_attention_layernorm.weight"] = torch.randn(64, generator=g)
        out |= {
            f"{stem}mlp.router.weight": torch.randn(4, 64, generator=g),
            f"{stem}mlp.router.bias": torch.randn(4, generator=g),
        }
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            base = f"{stem}mlp.experts.{name}"
            blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), dtype=torch.uint8, generator=g)
            scales = torch.randint(120, 125, (4, rows, columns // 32), dtype=torch.uint8, generator=g)
            plain = {base: convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()}
            out |= {f"{base}_blocks": blocks, f"{base}_scales": scales} if packed else plain
            out[f"{base}_bias"] = torch.randn(4, rows, generator=g)
    return out


def deepseek(packed: bool) -> dict[str, Tensor]:
    """DeepSeek-V3's tensors of both layers, matrices in FP8 under blocks of 4×4, or multiplied out."""
    g = torch.Generator().manual_seed(0)
    out: dict[str, Tensor] = {}

    def add(stem: str, d_ff: int) -> None:
        for name, shape in (("gate", (d_ff, 8)), ("up", (d_ff, 8)), ("down", (8, d_ff))):
            weight = (4 * torch.randn(shape, generator=g)).to(torch.float8_e4m3fn)
            scale = torch.rand([-(-size // 4) for size in shape], generator=g)
            full = weight.float() * scale.repeat_interleave(4, 0).repeat_interleave(4, 1)[: shape[0], : shape[1]]
            key = f"{stem}{name}_proj.weight"
            out.update({key: weight, f"{key}_scale_inv": scale} if packed else {key: full})

    for i in range(2):
        out[f"model.layers.{i}.post_attention_layernorm.weight"] = torch.randn(8, generator=g)
    add("model.layers.0.mlp.", 12)
    stem = "model.layers.1.mlp."
    out[f"{stem}gate.weight"] = torch.randn(4, 8, generator=g)
    out[f"{stem}gate.e_score_correction_bias"] = torch.randn(4, generator=g)
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(4))):
        add(f"{stem}{expert}.", 6)
    return out


@pytest.mark.parametrize("layer", ["0", "1"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("made", "config"), [(gpt_oss, GPT_OSS), (deepseek, DEEPSEEK)])
def test_a_trace_is_that_of_the_unpacked_weights(made: Any, config: Any, dtype: str, layer: str, call, tmp_path: Path):
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    sources = folder(tmp_path / "q", config, made(True)), folder(tmp_path / "p", plain, made(False))
    found, wanted = (
        call("trace", source, "--layer", layer, "--dtype", dtype, "--show", "all", "--expert", "all", "--json")
        if layer == "1" or made is gpt_oss
        else call("trace", source, "--layer", layer, "--dtype", dtype, "--show", "all", "--json")
        for source in sources
    )
    assert (found[0], wanted[0]) == (0, 0), found[2] + wanted[2]
    answer, other = json.loads(found[1]), json.loads(wanted[1])
    assert answer["steps"] == other["steps"]
    form = "mxfp4" if made is gpt_oss else "fp8-block4"
    assert answer["block"]["weights"] == f"{other['block']['weights']}, unpacked from {form}"


@pytest.mark.parametrize(("made", "config", "form"), [(gpt_oss, GPT_OSS, "mxfp4"), (deepseek, DEEPSEEK, "fp8-block4")])
def test_the_evidence_of_a_packed_weight_names_its_format(made: Any, config: Any, form: str, json_of, tmp_path: Path):
    """Of those alone: what lies in the file as floats was not unpacked."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    said = f"; stored as {form}, unpacked with its scales"
    packed, floats = (
        {row["subject"]: row["note"] for row in json_of("verify", source, "--check", "layout")["rows"]}
        for source in (folder(tmp_path / "q", config, made(True)), folder(tmp_path / "p", plain, made(False)))
    )
    names = [name for name in packed if name.endswith(("gate.weight", "up.weight", "down.weight"))]
    assert len(names) == 3
    assert [name for name, note in packed.items() if said in note] == names
    assert not any("stored as" in note for note in floats.values())


# --- what is refused --------------------------------------------------------------------------------------------------


def nf4() -> dict[str, Tensor]:
    return {W: torch.zeros(96 * 32, 1, dtype=torch.uint8), f"{W}.absmax": torch.zeros(96),
            f"{W}.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}  # fmt: skip


def int8() -> dict[str, Tensor]:
    return {W: torch.zeros(96, 64, dtype=torch.int8), f"{UP}.SCB": torch.zeros(96)}


def torchao() -> dict[str, Tensor]:
    return {f"{UP}._weight_qdata": torch.zeros(96, 64, dtype=torch.int8), f"{UP}._weight_scale": torch.zeros(96, 1)}


@pytest.mark.parametrize(
    ("packed", "config", "form"),
    [
        (nf4, BNB, "bnb-nf4"), (int8, BNB, "bnb-int8"), (torchao, {}, "torchao-int8")
    ],
)  # fmt: skip
def test_other_packings_are_named_and_refused(packed: Any, config: Any, form: str, call, tmp_path: Path):
    stored = {"model.layers.0.post_attention_layernorm.weight": torch.ones(64)}
    stored |= {
        f"model.layers.0.mlp.{n}_proj.weight": torch.ones(s) for n, s in (("gate", (96, 64)), ("down", (64, 96)))
    }
    model = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    source = folder(tmp_path, {**model, **({"quantization_config": config} if config else {})}, {**stored, **packed()})
    anchor = next(iter(packed()))
    err = expect_refusal(call("trace", source), "model.safetensors", f"'{anchor}' is packed as {form}", "ffn params")
    assert "dequantized" in err


def test_one_packed_expert_of_many_is_named(call, tmp_path: Path):
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    stored = {**tensors("mixtral"), name: torch.zeros(6, 4, dtype=torch.int8), name[:-6] + "SCB": torch.zeros(6)}
    expect_refusal(call("trace", folder(tmp_path, MIXTRAL, stored)), f"'{name}' is packed as bnb-int8")


FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4 = {**FP4, "strategy": "tensor_group", "group_size": 16}
OCP = {"strategy": "group", "group_size": 32, "symmetric": True, "type": "float", "scale_dtype": torch.uint8}
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


def amounts(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16) + 0.05


def nvfp4(weight: Tensor, whole: float = 37.0) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' file of a weight, and the bfloat16 that it makes of it."""
    scale = (weight.float().unflatten(1, (-1, 16)).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn).bfloat16()
    more = {"weight_global_scale": torch.tensor([whole])}
    return by_library("nvfp4-pack-quantized", weight, scale, NVFP4, **more)


def as_modelopt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same file under ModelOpt's names, whose scale of the tensor multiplies."""
    return {
        W: tensors[f"{W}_packed"], f"{W}_scale": tensors[f"{W}_scale"],
        f"{W}_scale_2": tensors[f"{W}_global_scale"].reciprocal().squeeze(), f"{UP}.input_scale": torch.ones(()),
    }  # fmt: skip


def test_nvfp4_is_what_the_library_decompresses(tmp_path: Path):
    """Bit for bit in bfloat16, to which it rounds the float32 product."""
    tensors, theirs = nvfp4(some(48, 64))
    found = unpacked(tmp_path, tensors, quantization=config_groups(NVFP4))
    assert (found.dtype, theirs.dtype) == (torch.float32, torch.bfloat16)
    assert theirs.unique().numel() > 100
    assert torch.equal(found.bfloat16(), theirs)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    counted_ = counted(tmp_path, as_modelopt(tensors), config)
    assert counted_ == {W: LogicalTensor((48, 64), 48 * 64, 48 * 36 + 8, "nvfp4")}


def test_modelopts_nvfp4_is_its_converted_file(tmp_path: Path):
    """compressed-tensors converts ModelOpt's files: its scale of the tensor is one over theirs."""
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    tensors, theirs = nvfp4(some(48, 64), 64.0)  # a power of two: one over it is exact
    renamed = as_modelopt(tensors)
    assert torch.equal(unpacked(tmp_path, renamed, quantization={"quant_method": "modelopt"}).bfloat16(), theirs)
    converted = ModelOptNvfp4Converter(targets=["re:.*up_proj"]).process(dict(renamed))
    assert torch.equal(unpacked(tmp_path, converted).bfloat16(), theirs)


def test_stacked_nvfp4_experts(tmp_path: Path):
    """Experts in one parameter, each with its scale or all with one; ModelOpt's Llama-4 has them transposed."""
    made = [nvfp4(some(48, 64).roll(turn, 0), whole) for turn, whole in ((0, 64.0), (5, 32.0))]
    wanted = torch.stack([theirs for _, theirs in made])
    packed, scale = (torch.stack([one[f"{W}_{n}"] for one, _ in made]) for n in ("packed", "scale"))
    whole = torch.tensor([1 / 64, 1 / 32])
    rows = {EXPERTS: packed, f"{EXPERTS}_scale": scale, f"{EXPERTS}_scale_2": whole}
    assert torch.equal(unpacked(tmp_path, rows, EXPERTS).bfloat16(), wanted)
    upright = {EXPERTS: packed.mT, f"{EXPERTS}_weight_scale": scale.view(torch.uint8).mT.contiguous()}
    upright[f"{EXPERTS}_weight_scale"] = upright[f"{EXPERTS}_weight_scale"].view(torch.float8_e4m3fn)
    upright[f"{EXPERTS}_weight_scale_2"] = whole
    assert torch.equal(unpacked(tmp_path, upright, EXPERTS).bfloat16(), wanted.mT)
    assert counted(tmp_path, upright, None)[EXPERTS].shape == (2, 64, 48)
    upright[f"{EXPERTS}_weight_scale_2"] = whole[:1].squeeze()
    one = unpacked(tmp_path, upright, EXPERTS).bfloat16()
    assert torch.equal(one[0], wanted[0].mT)
    assert torch.equal(one[1], (wanted[1].float() / 2).bfloat16().mT)


@pytest.mark.parametrize("form", ["mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"])
def test_ocp_formats_are_what_the_library_decompresses(form: str, tmp_path: Path):
    weights = {**OCP, "num_bits": int(form[4])}
    weight = some(48, 128)
    scale = torch.exp2(torch.randint(-9, 3, (48, 4), generator=torch.Generator().manual_seed(0))).bfloat16()
    tensors, theirs = by_library(form, weight, scale, weights)
    found = unpacked(tmp_path, tensors, quantization=config_groups({**weights, "scale_dtype": "torch.uint8"}))
    assert theirs.unique().numel() > 20
    assert torch.equal(found.to(theirs.dtype), theirs)
    assert counted(tmp_path, tensors, None)[W].format == form[:5]


@pytest.mark.parametrize("shape", [(48, 128), (3, 48, 128)])
@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_is_what_transformers_makes_of_it(scale: torch.dtype, shape: tuple[int, ...], tmp_path: Path):
    """`quant_method` mxfp8: scales are bytes (Inkling-2), or have the dtype for them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = (8 * some(*shape)).to(torch.float8_e4m3fn)
    powers = torch.randint(100, 140, (*shape[:-1], 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, powers, torch.float32)
    tensors = {W: weight, f"{W}_scale_inv": powers.view(scale)}
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    assert torch.equal(unpacked(tmp_path, tensors, quantization=config), theirs)
    assert counted(tmp_path, tensors, config)[W].format == "mxfp8"


@pytest.mark.parametrize("name", [f"{UP}.qscale_weight", f"{UP}.scale"])
def test_fp8_scales_of_other_names(name: str, tmp_path: Path):
    """Mistral-Large-4's, DeepSeek-V4's: transformers renames them."""
    weight, scale = some(128, 256).to(torch.float8_e4m3fn), torch.tensor([[0.5, 3.0]])
    found = unpacked(tmp_path, {W: weight, name: scale, f"{UP}.qscale_act": torch.ones(())}, quantization=FP8)
    assert torch.equal(found, weight.float() * scale.repeat_interleave(128, 1))


@pytest.mark.parametrize(("strategy", "shape"), [("tensor", (1,)), ("channel", (48, 1)), ("group", (48, 4))])
@pytest.mark.parametrize("zeros", [True, False])
def test_int8_in_place_is_what_the_library_decompresses(strategy: str, shape: Any, zeros: bool, tmp_path: Path):
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": not zeros}
    weights |= {"group_size": 32} if strategy == "group" else {}
    more = {"weight_zero_point": torch.randint(-20, 20, shape, dtype=torch.int8)} if zeros else {}
    tensors, theirs = by_library("int-quantized", some(48, 128), amounts(*shape), weights, **more)
    found = unpacked(tmp_path, tensors, quantization=config_groups(weights))
    assert torch.equal(found.bfloat16(), theirs)


# --- what cannot be ---------------------------------------------------------------------------------------------------

E4M3 = torch.ones(48, 4).to(torch.float8_e4m3fn)
BYTES = torch.zeros(48, 32, dtype=torch.uint8)
WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scale of the tensor": ({W: BYTES, f"{W}_scale": E4M3}, "weight_scale_2' is missing"),
    "a scale for each row": (
        {W: BYTES, f"{W}_scale": E4M3, f"{W}_scale_2": torch.ones(48)}, r"is F32 \[48\]; NVFP4 requires one float",
    ),
    "whole scales": ({W: BYTES, f"{W}_scale": E4M3, f"{W}_scale_2": torch.ones(1).int()}, "is I32"),
    "NVFP4 scales that are bytes": (
        {W: BYTES, f"{W}_scale": E4M3.view(torch.uint8), f"{W}_scale_2": torch.ones(1)}, "type U8; NVFP4 stores them",
    ),
    "MXFP4 scales that are floats": ({W: BYTES, f"{W}_scale": torch.ones(48, 2)}, "type F32; MXFP4 stores them"),
    "scales of 12 values": ({W: torch.zeros(48, 30, dtype=torch.uint8), f"{W}_scale": E4M3}, "does not fit"),
    "scales along columns": ({W: BYTES, f"{W}_scale": torch.ones(6, 32)}, "weight_scale_2' is missing"),
    "zeros of another shape": (
        {W: BYTES.to(torch.int8), f"{W}_scale": torch.ones(48, 1), f"{W}_zero_point": torch.zeros(48).to(torch.int8)},
        "in the shape of the scales",
    ),
    "zeros that are floats": (
        {W: BYTES.to(torch.int8), f"{W}_scale": torch.ones(48, 1), f"{W}_zero_point": torch.zeros(48, 1)}, "is F32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "says"), WRONG.values(), ids=WRONG)
def test_pieces_that_cannot_be_are_refused(tensors: dict[str, Tensor], says: str, tmp_path: Path):
    with pytest.raises(FFNError, match=says) as error:
        unpacked(tmp_path, tensors)
    assert "model.safetensors" in str(error.value)
