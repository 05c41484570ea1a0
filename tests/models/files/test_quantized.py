"""Quantized checkpoints as a whole: plain tensors stay plain, contradictions are refused, nothing depends on order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ffncli.errors import FFNError
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.quantized import Logical, logical
from tests.oracles.checkpoints import harmful
from tests.oracles.packed import (
    AWQ,
    BNB,
    FP8,
    GPTQ,
    SIZES,
    UP,
    config_groups,
    info,
)


def test_a_plain_checkpoint_is_as_it_is_stored():
    tensors = {
        "embed.weight": info("BF16", 10, 4), "embeddings.position_ids": info("I64", 1, 512),
        "a.bias": info("U8", 1, 1, 8, 8), "b.weight": info("F8_E4M3", 4, 4), "d": info("F32"),
        "c.experts.gate_up_proj": info("F32", 2, 3, 4), "table": info("I32", 3, 3), "block_scales": info("F32", 3),
    }  # fmt: skip
    expected = {n: Logical(i.shape, i.bytes // SIZES[i.dtype], i.bytes, i.dtype) for n, i in tensors.items()}
    assert logical(tensors, None, "x") == expected
    assert list(logical(tensors, None, "x")) == list(tensors)
    assert logical({}, None, "x") == {}


Q, S, G, W = (f"{UP}.{name}" for name in ("qweight", "scales", "g_idx", "weight"))
SC, INV, PACKED = (W + end for end in ("_scale", "_scale_inv", "_packed"))
FP8_4, FP8_384 = info("F8_E4M3", 4, 4), info("F8_E4M3", 384, 256)
FOURS = info("F32", 2, 2)
PACK4 = config_groups({"num_bits": 4, "group_size": 32})
WRONG: dict[str, tuple[dict[str, TensorInfo], Any, str]] = {
    "GPTQ words of no whole width": (
        {Q: info("I32", 7, 96), S: info("F16", 2, 96), G: info("I32", 64)}, GPTQ, "64 values in 7",
    ),
    "GPTQ words for no input": ({Q: info("I32", 0, 96)}, GPTQ, "not a matrix"),
    "GPTQ words in a row": ({Q: info("I32", 96)}, GPTQ, "not a matrix"),
    "GPTQ words of 8 bits": ({Q: info("U8", 8, 96), S: info("F16", 2, 96)}, GPTQ, "int32"),
    "GPTQ with more groups than inputs": ({Q: info("I32", 8, 96), S: info("F16", 65, 96)}, GPTQ, "65 groups"),
    "GPTQ with groups of no equal size": ({Q: info("I32", 8, 96), S: info("F16", 60, 96)}, GPTQ, "60 groups"),
    "GPTQ with empty scales": ({Q: info("I32", 8, 96), S: info("F16", 0, 96)}, GPTQ, S),
    "GPTQ with scales in a row": ({Q: info("I32", 8, 96), S: info("F16", 96)}, GPTQ, S),
    "GPTQ with bits against the config": ({Q: info("I32", 8, 96), G: info("I32", 32)}, GPTQ, "8-bit"),
    "bits that are no number": ({Q: info("I32", 8, 96)}, {"bits": "4"}, "bits must be a whole number"),
    "bits that are true": ({Q: info("I32", 8, 96)}, {"bits": True}, "bits must be a whole number"),
    "16 bits": ({Q: info("I32", 8, 96)}, {"bits": 16}, "how wide"),
    "3 bits in 8 words": ({Q: info("I32", 8, 96)}, {"bits": 3}, "whole 3-bit"),
    "AWQ of no whole width": ({Q: info("I32", 64, 12), S: info("F16", 2, 100)}, AWQ, "100 values in 12"),
    "a method that is a number": ({Q: info("I32", 64, 12)}, {"quant_method": 4}, "quant_method must be a string"),
    "FP8 scales of another matrix": ({W: FP8_384, INV: info("F32", 3, 3)}, FP8, INV),
    "FP8 scales of more axes": ({W: FP8_384, SC: info("F32", 1, 3, 2)}, None, SC),
    "FP8 scales of none": ({W: FP8_384, SC: info("F32", 0, 2)}, None, SC),
    "FP8 scales for more rows": ({W: FP8_384, SC: info("F32", 385)}, None, SC),
    "FP8 values of none": ({W: info("F8_E4M3", 0, 256), SC: info("F32", 3, 2)}, None, SC),
    "FP8 blocks of no size": ({W: FP8_4, SC: FOURS}, {"weight_block_size": [0, 2]}, "[0, 2]"),
    "FP8 blocks that are a number": ({W: FP8_4, SC: FOURS}, {"weight_block_size": 2}, "whole numbers, got 2"),
    "FP8 blocks of three": ({W: FP8_4, SC: FOURS}, {"weight_block_size": [1, 2, 2]}, "[1, 2, 2]"),
    "MXFP4 scales of another matrix": (
        {"e_blocks": info("U8", 2, 8, 4, 16), "e_scales": info("U8", 2, 8, 3)}, {}, "e_blocks",
    ),
    "MXFP4 blocks of 8 bytes": (
        {"e_blocks": info("U8", 2, 8, 4, 8), "e_scales": info("U8", 2, 8, 4)}, None, "16 bytes",
    ),
    "MXFP4 of one row": ({"e_blocks": info("U8", 4, 16), "e_scales": info("U8", 4)}, None, "16 bytes"),
    "MXFP4 without scales": ({"e_blocks": info("U8", 2, 8, 4, 16)}, {"quant_method": "mxfp4"}, "'e_scales' is missing"),
    "NVFP4 scales of another matrix": ({PACKED: info("U8", 48, 64), SC: info("F8_E4M3", 47, 8)}, None, SC),
    "bytes in groups of 12": ({PACKED: info("U8", 48, 96), SC: info("F8_E4M3", 48, 8)}, None, SC),
    "packed bytes without scales": ({PACKED: info("U8", 48, 64)}, None, "no scales"),
    "packed words without a config": ({PACKED: info("I32", 48, 8), SC: info("F16", 48, 2)}, None, "config_groups"),
    "packed words of another group size": (
        {PACKED: info("I32", 48, 8), SC: info("F16", 48, 4)}, PACK4, "config_groups",
    ),
    "groups that are a list": ({PACKED: info("I32", 48, 8)}, {"config_groups": [4]}, "config_groups must be"),
    "zero bits": ({PACKED: info("I32", 48, 8)}, config_groups({"num_bits": 0}), "num_bits must be"),
    "packed floats": ({PACKED: info("I8", 48, 8)}, PACK4, "int32 words or bytes"),
    "2:4 sparse": ({PACKED: info("I32", 8, 96), f"{UP}.meta": info("I32", 8, 8)}, PACK4, "marlin-24"),
    "absmax of another matrix": ({W: info("U8", 3072, 1), f"{W}.absmax": info("F32", 97)}, BNB, "97 blocks"),
    "SCB of another matrix": ({W: info("I8", 96, 64), f"{UP}.SCB": info("F32", 95)}, BNB, f"{UP}.SCB"),
    "packed and plain": ({Q: info("I32", 8, 96), W: info("F16", 96, 64)}, GPTQ, "is duplicated"),
    "a piece of two": (
        {W: info("F8_E4M3", 4, 16), SC: info("F32", 4, 1), PACKED: info("U8", 4, 8)}, None, "belongs to both",
    ),
    "an unknown packing": ({f"{UP}.W_q": info("U8", 8, 96)}, {"quant_method": "hqq"}, "'hqq'"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "says"), WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(tensors: dict[str, TensorInfo], config: Any, says: str):
    with pytest.raises(FFNError) as error:
        logical(tensors, config, "m.safetensors")
    assert "m.safetensors: " in str(error.value)
    assert says in str(error.value)


def test_hostile_names_and_shapes_are_shown_harmlessly():
    name = "\x1b[2J\n" + "x" * 10_000 + ".qweight"
    with pytest.raises(FFNError) as error:
        logical({name: TensorInfo("I32", (0,) * 10_000, 0)}, GPTQ, "x")
    assert not harmful(str(error.value))
    assert len(str(error.value)) < 600


ENDINGS = (
    ".qweight .qzeros .scales .g_idx .weight .weight_scale .weight_scale_inv .scale .weight_packed .weight_shape .meta "
    ".weight.absmax .SCB ._weight_qdata ._weight_scale _blocks _scales .bias .weight_zero_point .weight_scale_2"
).split()
CONFIGS: tuple[Any, ...] = (
    None, {}, GPTQ, AWQ, FP8, PACK4, {"bits": -1}, {"quant_method": []}, {"weight_block_size": [10**40, 1]},
    {"config_groups": {"a": None, "b": {"weights": {"num_bits": 4, "group_size": -1}}}}, {"dynamic": 1, "bits": 3},
)  # fmt: skip


def test_nothing_but_a_refusal_comes_of_tensors_at_random():
    """Whatever is counted has at most 8 values for each stored byte, and every stored byte once."""
    rng = random.Random(0)
    refused = 0
    for _ in range(5000):
        names = [rng.choice("ab") + ending for ending in rng.sample(ENDINGS, rng.randrange(1, 5))]
        tensors = {name: info(rng.choice(list(SIZES)), *_some_shape(rng)) for name in names}
        try:
            out = logical(tensors, rng.choice(CONFIGS), "x")
        except FFNError:
            refused += 1
            continue
        assert sum(entry.bytes for entry in out.values()) == sum(tensor.bytes for tensor in tensors.values())
        assert all(0 <= entry.params <= 8 * entry.bytes for entry in out.values())
    assert 500 < refused < 4500


def _some_shape(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, 1, 2, 8, 16, 32, 64, 2**40)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 4)))]
