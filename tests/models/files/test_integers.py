"""Integers in words: GPTQ and AWQ as their packers write them, compressed-tensors as its library reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from torch import Tensor

from ffncli.errors import FFNError
from tests.oracles.checkpoints import MIXTRAL, folder
from tests.oracles.packed import AWQ, GPTQ, UP, by_library, config_groups, integers, unpacked, words

pytestmark = pytest.mark.usefixtures("block")
OUT, IN, GROUP = 96, 64, 32
Q, Z, S, G = (f"{UP}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx"))


def some_scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01).to(dtype)


def product(q: np.ndarray, zeros: np.ndarray, scales: Tensor, index: np.ndarray) -> Tensor:
    """(q - zero) × scale in float64: [out, in], from zeros and scales [groups, out]."""
    offset = torch.from_numpy(q - zeros.T[:, index]).double()
    return offset * scales.double().T[:, torch.from_numpy(index)]


# --- GPTQ -------------------------------------------------------------------------------------------------------------


def gptq_zeros(zeros: np.ndarray, bits: int, less_one: bool) -> Tensor:
    """Zeros [groups, out] in words; as GPTQModel writes the first format, 1 is subtracted from whole words."""
    stored = words(zeros, bits)
    if not less_one:
        return stored
    ones = words(np.ones(zeros.shape, dtype=np.int64), bits)
    return torch.from_numpy((stored.numpy().view(np.uint32) - ones.numpy().view(np.uint32)).view(np.int32))


def gptq(
    bits: int = 4, zeros: np.ndarray | None = None, index: np.ndarray | None = None, less_one: bool = True,
    dtype: torch.dtype = torch.float16, group: int = GROUP,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """(a GPTQ matrix, the weights in float64)."""
    groups = -(-IN // group)
    q, scales = integers(OUT, IN, bits=bits), some_scales(groups, OUT, dtype=dtype)
    zeros = integers(groups, OUT, bits=bits) if zeros is None else zeros
    index = np.arange(IN) // group if index is None else index
    tensors = {Q: words(q, bits).T, Z: gptq_zeros(zeros, bits, less_one), S: scales, G: torch.from_numpy(index).int()}
    return tensors, product(q, zeros, scales, index)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("form", [None, "gptq", "gptq_v2"])
def test_gptq_is_what_was_packed(bits: int, form: str | None, tmp_path: Path):
    tensors, wanted = gptq(bits, less_one=form != "gptq_v2")
    config = {**GPTQ, "bits": bits, "sym": False, **({"checkpoint_format": form} if form else {})}
    found = unpacked(tmp_path, tensors, quantization=config)
    assert torch.equal(found.double(), wanted)  # exact in float32, so rounded once in any other dtype


def test_gptq_by_the_shifts_that_are_published(tmp_path: Path):
    """Eight inputs of an output share a word, the first in its lowest bits; zeros of eight outputs share one."""
    tensors, wanted = gptq()
    for row, column in ((0, 0), (63, 95), (17, 40)):
        q = int(tensors[Q][row // 8, column]) >> 4 * (row % 8) & 15
        z = (int(tensors[Z][row // 32, column // 8]) & 0xFFFFFFFF) + 0x11111111 >> 4 * (column % 8) & 15
        assert (q - z) * float(tensors[S][row // 32, column]) == wanted[column, row]


def test_gptq_with_inputs_sorted_by_activation(tmp_path: Path):
    index = np.random.default_rng(3).permutation(np.arange(IN) // GROUP)
    tensors, wanted = gptq(index=index)
    assert torch.equal(unpacked(tmp_path, tensors, quantization={**GPTQ, "desc_act": True}).double(), wanted)
    del tensors[G]
    with pytest.raises(FFNError, match=r"qweight' needs the tensor g_idx: quantization_config says desc_act"):
        unpacked(tmp_path, tensors, quantization={**GPTQ, "desc_act": True})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [16, 48, 64])
def test_gptq_groups_without_g_idx(group: int, dtype: torch.dtype, tmp_path: Path):
    """The config's size where it fits (48: the last group is shorter), as a library in the scales' dtype rounds it."""
    tensors, wanted = gptq(group=group, dtype=dtype)
    del tensors[G]
    found = unpacked(tmp_path, tensors, quantization={**GPTQ, "group_size": group})
    assert torch.equal(found.to(dtype), wanted.to(dtype))


def test_symmetric_gptq_has_the_zero_in_the_middle(tmp_path: Path):
    """GPTQModel has written gptq_v2's zeros under the name of the first format; kernels for `sym` never read them."""
    middle = np.full((IN // GROUP, OUT), 8)
    config = {**GPTQ, "sym": True, "checkpoint_format": "gptq"}
    for less_one in (True, False):
        tensors, wanted = gptq(zeros=middle, less_one=less_one)
        assert torch.equal(unpacked(tmp_path, tensors, quantization=config).double(), wanted)
        rounds = {"quant_method": "auto-round", "bits": 4, "sym": True, "packing_format": "auto_round"}
        assert torch.equal(unpacked(tmp_path, tensors, quantization=rounds).double(), wanted)
    del tensors[Z]
    assert torch.equal(unpacked(tmp_path, tensors, quantization=config).double(), wanted)
    tensors, _ = gptq()
    with pytest.raises(FFNError, match="qzeros' has zeros other than 8, but quantization_config says sym"):
        unpacked(tmp_path, tensors, quantization=config)


def test_stacked_gptq_experts(tmp_path: Path):
    (first, one), (second, other) = gptq(), gptq(index=np.arange(IN)[::-1] // GROUP, zeros=integers(2, OUT)[::-1])
    both = {name: torch.stack([first[name], second[name].flip(0) if name == Z else second[name]]) for name in first}
    both[Z] = torch.stack([first[Z], second[Z]])
    assert torch.equal(unpacked(tmp_path, both, quantization=GPTQ).double(), torch.stack([one, other]))


# --- AWQ --------------------------------------------------------------------------------------------------------------


def in_awq_order(values: np.ndarray, bits: int) -> Tensor:
    """Rows in words; which column is where in a word: 0, 2, 4, 6, 1, 3, 5, 7, of 8 bits 0, 2, 1, 3."""
    order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    return words(values.reshape(len(values), -1, len(order))[:, :, order].reshape(values.shape), bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_awq_is_what_was_packed(bits: int, tmp_path: Path):
    q, zeros, scales = integers(OUT, IN, bits=bits), integers(2, OUT, bits=bits)[::-1], some_scales(2, OUT)
    tensors = {Q: in_awq_order(q.T, bits), Z: in_awq_order(zeros, bits), S: scales}
    wanted = product(q, zeros, scales, np.arange(IN) // GROUP)
    assert torch.equal(unpacked(tmp_path, tensors, quantization={**AWQ, "bits": bits}).double(), wanted)
    del tensors[Z]
    with pytest.raises(FFNError, match=r"up_proj\.qzeros' is missing"):
        unpacked(tmp_path, tensors, quantization={**AWQ, "bits": bits})
    found = unpacked(tmp_path, tensors, quantization={**AWQ, "bits": bits, "zero_point": False})
    assert torch.equal(found.double(), product(q, np.full((2, OUT), 1 << bits - 1), scales, np.arange(IN) // GROUP))


def test_awq_is_what_compressed_tensors_makes_of_it(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        Q: torch.randint(-(2**31), 2**31 - 1, (IN, OUT // 8), dtype=torch.int32, generator=generator),
        Z: torch.randint(-(2**31), 2**31 - 1, (2, OUT // 8), dtype=torch.int32, generator=generator),
        S: some_scales(2, OUT),
    }
    converted = AutoAWQConverter(group_size=GROUP, ignore=()).process(dict(tensors))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    theirs = unpacked(tmp_path, converted, quantization=config_groups(weights))
    assert torch.equal(unpacked(tmp_path, tensors, quantization=AWQ), theirs)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**AWQ, "version": "gemv"}, "awq, version 'gemv', which is not supported here"),
        ({**AWQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"), ({**AWQ, "bits": 2}, "awq-2bit, whose"),
    ],
)  # fmt: skip
def test_other_arrangements_of_awq_are_refused(config: Any, says: str, tmp_path: Path):
    bits = config["bits"]
    tensors = {Q: words(integers(IN, OUT, bits=bits), bits), S: some_scales(2, OUT)}
    with pytest.raises(FFNError, match=says):
        unpacked(tmp_path, tensors, quantization=config)


# --- the whole FFN ----------------------------------------------------------------------------------------------------


def packed_matrix(form: str, seed: int, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """(a matrix's pieces by the endings of their names, the weights in float32)."""
    rng = np.random.default_rng(seed)
    q, zeros = rng.integers(0, 16, (rows, columns)), rng.integers(1, 16, (columns // GROUP, rows))
    scales = torch.from_numpy(rng.random((columns // GROUP, rows)).astype(np.float16)) / 64
    pieces = {"qweight": words(q, 4).T, "qzeros": gptq_zeros(zeros, 4, True), "scales": scales}
    if form == "awq":
        pieces |= {"qweight": in_awq_order(q.T, 4), "qzeros": in_awq_order(zeros, 4)}
    return pieces, product(q, zeros, scales, np.arange(columns) // GROUP).float()


@pytest.mark.parametrize(("form", "config"), [("gptq", GPTQ), ("awq", AWQ)])
def test_a_trace_is_that_of_the_unpacked_weights(form: str, config: Any, json_of, tmp_path: Path):
    """Separate experts, each of whose matrices is packed by itself."""
    model = {**MIXTRAL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    stem = "model.layers.0."
    plain = {f"{stem}post_attention_layernorm.weight": torch.randn(64)}
    plain[f"{stem}block_sparse_moe.gate.weight"] = torch.randn(4, 64)
    packed = dict(plain)
    for at, name in enumerate(f"{stem}block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3")):
        pieces, weight = packed_matrix(form, at, *((64, 96) if name.endswith("w2") else (96, 64)))
        packed |= {f"{name}.{piece}": tensor.contiguous() for piece, tensor in pieces.items()}
        plain[f"{name}.weight"] = weight
    quantized = {**model, "quantization_config": config}
    sources = folder(tmp_path / "q", quantized, packed), folder(tmp_path / "p", model, plain)
    answer, other = (json_of("trace", source, "--show", "all", "--expert", "all") for source in sources)
    assert answer["steps"] == other["steps"]
    assert answer["block"]["weights"].endswith(f", unpacked from {form}-4bit")


# --- compressed-tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("strategy", "dtype"), [("group", torch.bfloat16), ("channel", torch.float32)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_integers_are_what_the_library_decompresses(
    bits: int, strategy: str, symmetric: bool, dtype: torch.dtype, tmp_path: Path
):
    """Bit for bit in the scales' dtype, in which the library computes."""
    rows, groups = 80, IN // GROUP if strategy == "group" else 1  # 80 zeros of 3 bits end inside a word
    weight = torch.randn(rows, IN, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric}
    weights |= {"group_size": GROUP} if strategy == "group" else {}
    zeros = torch.from_numpy(integers(rows, groups, bits=bits) - (1 << bits - 1)).to(torch.int8)
    more = {} if symmetric else {"weight_zero_point": zeros}
    tensors, theirs = by_library("pack-quantized", weight, some_scales(rows, groups, dtype=dtype), weights, **more)
    found = unpacked(tmp_path, tensors, quantization=config_groups(weights))
    assert theirs.dtype == dtype
    assert theirs.unique().numel() > 3
    assert torch.equal(found.to(dtype), theirs)


def test_compressed_words_with_spare_bits(tmp_path: Path):
    """Before dense packing, ten integers of 3 bits were in a word, and two bits of it were left over."""
    q = integers(16, 32, bits=3)
    padded = np.pad(q, ((0, 0), (0, 8))).reshape(16, 4, 10)
    sparse = (padded << 3 * np.arange(10)).sum(-1).astype(np.int32)
    weights = {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32}
    tensors = {f"{UP}.weight_packed": torch.from_numpy(sparse), f"{UP}.weight_scale": torch.ones(16, 1)}
    found = unpacked(tmp_path, tensors, quantization=config_groups(weights))
    assert torch.equal(found.double(), torch.from_numpy(q - 4).double())


def test_compressed_integers_in_the_order_of_activations(tmp_path: Path):
    """`actorder` of older files: weight_g_idx states the group of each input; -1 for all: there is none."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    scales, weight = some_scales(OUT, 2, dtype=torch.float32), torch.randn(OUT, IN)
    tensors, plain = by_library("pack-quantized", weight, scales, weights)
    index = torch.randperm(IN, generator=torch.Generator().manual_seed(0)) // GROUP
    for order, wanted in (
        (index, plain / scales.repeat_interleave(32, 1) * scales[:, index]),
        (-torch.ones(IN), plain),
    ):
        found = unpacked(tmp_path, tensors | {f"{UP}.weight_g_idx": order.int()}, quantization=config_groups(weights))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_stacked_compressed_experts(tmp_path: Path):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    zeros = torch.from_numpy(integers(48, 2) - 8).to(torch.int8)
    made = [
        by_library("pack-quantized", torch.randn(48, IN), some_scales(48, 2), weights, weight_zero_point=zeros[order])
        for order in (slice(None), torch.arange(48).flip(0), torch.arange(48).roll(5))
    ]
    stem = UP.removesuffix("up_proj") + "experts.gate_up_proj"
    names = [name for name in made[0][0] if not name.endswith("shape")]
    both = {name.replace(f"{UP}.weight", stem): torch.stack([one[name] for one, _ in made]) for name in names}
    found = unpacked(tmp_path, both, stem, config_groups(weights))
    assert torch.equal(found.half(), torch.stack([theirs for _, theirs in made]).half())


# --- what cannot be ---------------------------------------------------------------------------------------------------

C4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
WRONG: dict[str, tuple[str, Any, str]] = {
    "no zeros": ("gptq", {Z: None}, "qzeros' is missing"),
    "zeros of other groups": ("gptq", {Z: torch.zeros(3, 12, dtype=torch.int32)}, r"should be I32 \[2, 12\]"),
    "zeros of bytes": ("gptq", {Z: torch.zeros(2, 12, dtype=torch.uint8)}, r"is U8 \[2, 12\]"),
    "groups that are not there": ("gptq", {G: torch.full((IN,), 7).int()}, "refers to groups 7 to 7, but there are 2"),
    "negative groups": ("gptq", {G: torch.arange(IN).int() % 2 - 1}, "refers to groups -1 to 0"),
    "a group too few": ("gptq", {G: torch.zeros(IN, dtype=torch.int16)}, "should be the group of each of 64 inputs"),
    "integer scales": ("gptq", {S: torch.ones(2, OUT, dtype=torch.int8)}, "has scales of type I8"),
    "scales of other outputs": ("gptq", {S: torch.ones(2, OUT - 32), G: None}, "values in"),
    "groups of no size": ("gptq", {G: None, S: torch.ones(10, OUT), Z: torch.zeros(10, 12).int()}, "group_size is not"),
    "an unknown format": ("gptq", {"checkpoint_format": "marlin"}, "in the format 'marlin', which is not supported"),
    "zeros of auto-round": ("gptq", {"packing_format": "auto_round"}, "in the format 'auto_round'"),
    "rotated": ("gptq", {"transform_config": {"config_groups": {}}}, "rotated by quantization_config's transform_con"),
    "scaled inputs": ("awq", {f"{UP.rpartition('.')[0]}.act.scales": torch.ones(4)}, "act.scales' scales inputs of"),
    "a scale before": ("awq", {f"{UP}.pre_quant_scale": torch.ones(IN)}, "pre_quant_scale' scales inputs of"),
    "scales of two groups more": ("awq", {S: torch.ones(4, OUT)}, "should be I32"),
    "another shape": (
        "packed",
        {f"{UP}.weight_shape": torch.tensor([OUT, 63])},
        r"specifies \[96, 63\], but the tensors",
    ),
    "a shape of floats": ("packed", {f"{UP}.weight_shape": torch.ones(2)}, "should be a shape"),
    "packed zeros missing": ("packed", {f"{UP}.weight_zero_point": None}, "weight_zero_point' is missing"),
    "zeros not packed": ("packed", {f"{UP}.weight_zero_point": torch.zeros(OUT, 2).int()}, r"should be I32 \[12, 2\]"),
    "scales missing": ("packed", {f"{UP}.weight_scale": None}, "weight_scale' is missing"),
}


@pytest.mark.parametrize(("form", "changes", "says"), WRONG.values(), ids=WRONG)
def test_pieces_that_cannot_be_are_refused(form: str, changes: Any, says: str, tmp_path: Path):
    config: dict[str, Any] = {"packed": config_groups({**C4, "symmetric": False}), "awq": AWQ, "gptq": GPTQ}[form]
    if form == "packed":
        zeros = torch.zeros(OUT, 2, dtype=torch.int8)
        weights = {**C4, "symmetric": False}
        tensors, _ = by_library(
            "pack-quantized", torch.randn(OUT, IN), some_scales(OUT, 2), weights, weight_zero_point=zeros
        )
    elif form == "awq":
        tensors = {Q: torch.zeros(IN, 12).int(), Z: torch.zeros(2, 12).int(), S: torch.ones(2, OUT)}
    else:
        tensors, _ = gptq()
    for name, value in changes.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is None:
            del tensors[name]
        else:
            config = {**config, name: value}
    with pytest.raises(FFNError, match=says) as error:
        unpacked(tmp_path, tensors, quantization=config)
    assert "model.safetensors" in str(error.value)
