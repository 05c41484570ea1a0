"""The number formats for weights and activations, with every common name of each.

`TABLE` holds the formats that an FFN can be computed in; `STORED` holds storage-only formats, for counting bytes. A
storage-only format packs only the projection matrices; each value of a bias, a norm, a router or a learned activation
parameter takes `other_bytes` bytes.

The projection matrices map between d_model (or the latent width of experts) and d_ff, and are packed along their rows,
which are d_model long for up and gate, d_ff long for down. The gate of a shared expert and the projections to and from
a latent width are not packed. `other_bytes` is 4 in ggml's formats (llama.cpp writes vectors and routers as F32) and 2
in the others (checkpoints keep these parameters in bf16).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod

from ffncli.block.steps import Axis, Experts, Step, of_norm
from ffncli.errors import FFNError, did_you_mean, shown


@dataclass(frozen=True)
class DType:
    """One number format: `block` adjacent weights of a row take `block_bytes` bytes, including their scales.

    `torch` is the name of torch's dtype, `safetensors` the code in a safetensors header; either is empty if it does not
    exist. `other_bytes` is the size of a value that the format leaves unpacked. In a `flat` format, blocks continue
    across the ends of rows, and an incomplete last block is counted in full; in any other format each row must be a
    whole number of blocks. `mean`, used for the format of a file, replaces `block_bytes` by the file's mean bytes per
    weight, including all scales and indices.
    """

    name: str
    block_bytes: int
    torch: str = ""
    safetensors: str = ""
    aliases: tuple[str, ...] = ()
    block: int = 1
    other_bytes: int = 0
    flat: bool = False
    mean: Fraction | None = None

    @property
    def computable(self) -> bool:
        """Whether a block can run in this format."""
        return self in TABLE

    @property
    def bytes(self) -> float:
        """Bytes per weight, including scales: 2 for bf16, 0.5625 for q4_0."""
        return self.block_bytes / self.block if self.mean is None else float(self.mean)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, including scales: 16 for bf16, 4.5 for q4_0."""
        return 8 * self.bytes

    def matrix_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix, or of a stack of matrices, whose rows lie along the last axis.

        Raises FFNError if a row is not a whole number of blocks.
        """
        row, numbers = shape[-1], prod(shape)
        if self.mean is not None:
            return ceil(numbers * self.mean)
        if row % self.block and not self.flat:
            raise FFNError(
                f"{self.name} stores {self.block} weights in a block; a row of {row} is not a whole number of blocks",
                "choose another --dtype",
            )
        return -(-numbers // self.block) * self.block_bytes  # rounded up: a flat format's last block may be partly full


TABLE = (
    DType("fp64", 8, "float64", "F64", ("double", "f64")),
    DType("fp32", 4, "float32", "F32", ("float", "single", "f32")),
    DType("bf16", 2, "bfloat16", "BF16"),
    DType("fp16", 2, "float16", "F16", ("half", "f16")),
)
# The block layouts of ggml, as its headers declare them (ggml-common.h, `block_q4_0` ...): name, weights, bytes. Its
# files keep every vector and the router in F32.
_GGML = (
    ("q4_0", 32, 18), ("q4_1", 32, 20), ("q5_0", 32, 22), ("q5_1", 32, 24), ("q8_0", 32, 34),
    ("q2_k", 256, 84), ("q3_k", 256, 110), ("q4_k", 256, 144), ("q5_k", 256, 176), ("q6_k", 256, 210),
    ("iq1_s", 256, 50), ("iq1_m", 256, 56), ("iq2_xxs", 256, 66), ("iq2_xs", 256, 74), ("iq2_s", 256, 82),
    ("iq3_xxs", 256, 98), ("iq3_s", 256, 110), ("iq4_nl", 32, 18), ("iq4_xs", 256, 136),
    ("tq1_0", 256, 54), ("tq2_0", 256, 66), ("q1_0", 128, 18),
)  # fmt: skip
STORED = (
    # A scale per tensor, row or large tile is not counted: with tiles of 128 × 128 it is 0.002 bits per weight.
    DType("fp8", 1, "float8_e4m3fn", "F8_E4M3", ("fp8_e4m3", "e4m3", "float8"), other_bytes=2),
    DType("fp8_e5m2", 1, "float8_e5m2", "F8_E5M2", ("e5m2",), other_bytes=2),
    DType("int8", 1, "int8", "I8", other_bytes=2),
    DType("int4", 1, block=2, other_bytes=2, flat=True),
    # OCP Microscaling Formats 1.0, table 1: 32 weights share a scale of one byte.
    DType("mxfp8", 33, block=32, other_bytes=2),
    DType("mxfp6", 25, block=32, other_bytes=2),
    DType("mxfp4", 17, block=32, other_bytes=2),
    # 16 weights share an fp8 scale; the tensor's single fp32 scale is not counted.
    DType("nvfp4", 9, block=16, other_bytes=2),
    # bitsandbytes: 64 weights of the flattened tensor share an fp32 maximum, before any double quantization.
    DType("nf4", 36, block=64, other_bytes=2, flat=True),
    *(DType(name, size, aliases=(name.replace("_", ""),), block=block, other_bytes=4) for name, block, size in _GGML),
)


def _names(rows: Sequence[DType]) -> dict[str, DType]:
    every = ((row, (row.name, row.torch, row.safetensors.lower(), *row.aliases)) for row in rows)
    return {name: row for row, names in every for name in names if name}


_BY_NAME = _names(TABLE)
_STORABLE = _names((*TABLE, *STORED))


def dtype(text: str, field: str = "--dtype") -> DType:
    """Return the compute format with this name, in any usual spelling (`bf16`, `bfloat16`, `torch.bfloat16`).

    Raises FFNError for an unknown format, and for a storage-only format.
    """
    row = find(text)
    if row is None:
        names = ", ".join(row.name for row in TABLE)
        if stored := find_storage(text):
            raise FFNError(f"{field} {stored.name} is for counting bytes", f"compute in one of {names}")
        raise FFNError(
            f"{field}: unknown dtype {shown(text)}", did_you_mean(text, list(_BY_NAME), f"use one of {names}")
        )
    return row


def storage(text: str, field: str = "--dtype") -> DType:
    """Return the format with this name for counting bytes: a row of `TABLE` or `STORED`. Raises FFNError if unknown."""
    row = find_storage(text)
    if row is None:
        names = ", ".join(row.name for row in (*TABLE, *STORED))
        raise FFNError(
            f"{field}: unknown dtype {shown(text)}", did_you_mean(text, list(_STORABLE), f"use one of {names}")
        )
    return row


def find(text: object) -> DType | None:
    """Return the compute format with this name, or None."""
    return _BY_NAME.get(_key(text)) if isinstance(text, str) else None


def find_storage(text: object) -> DType | None:
    """Return the format with this name, compute or storage-only, or None."""
    return _STORABLE.get(_key(text)) if isinstance(text, str) else None


def activation_dtype(weights: DType) -> DType:
    """Return the format of the activations for weights in this format: the same, or bf16 for a storage-only format."""
    return weights if weights.computable else _BY_NAME["bf16"]


def _key(text: str) -> str:
    return text.strip().lower().removeprefix("torch.")


CONVENTIONS: Mapping[str, str] = {
    "weight_bytes": "compute formats: parameters × width; a storage-only format packs the projection matrices, scales"
    " included, and keeps every other parameter at 4 bytes (ggml's formats) or 2 (other formats); not counted: scales"
    " of whole tensors, rows or tiles in fp8, int8 and nvfp4, and all scales in int4",
}


def weight_bytes(steps: Sequence[Step], dtype: DType, stack: tuple[Axis, ...] = ()) -> int:
    """Return the bytes of the FFN's parameters, norms excluded; `stack` holds the leading axes of each tensor (the
    experts).

    Raises FFNError if a row is not a whole number of blocks.
    """
    total = 0
    for step in steps:
        if isinstance(step.op, Experts):
            total += weight_bytes(step.op.program, dtype, (*stack, step.op.experts))
        elif not of_norm(step):
            total += sum(parameter_bytes(n, (*stack, *axes), dtype) for n, axes in step.untied_parameters().items())
    return total


def mean_format(
    name: str, blocks: Sequence[tuple[Sequence[Step], int]], total: int, block: int, other_bytes: int
) -> DType:
    """Return the format in which `blocks`, (steps, number of layers), take `total` bytes: their projections have the
    same mean size, and all other parameters take `other_bytes` bytes each."""
    plain, only = DType("", 1, other_bytes=1, flat=True), DType("", 1, flat=True)  # a byte for each, or each projection
    params, projections = (sum(weight_bytes(steps, one) * n for steps, n in blocks) for one in (plain, only))
    mean = Fraction(max(0, total - other_bytes * (params - projections)), max(1, projections))
    return DType(name, 0, block=block, other_bytes=other_bytes, flat=True, mean=mean)


def parameter_bytes(name: str, axes: Sequence[Axis], dtype: DType) -> int:
    """Return the bytes of one parameter tensor. Raises FFNError, with the tensor's name, if its rows are not a whole
    number of blocks."""
    sizes = [axis.size for axis in axes]
    if dtype.computable:
        return prod(sizes) * dtype.block_bytes
    names = {axis.name for axis in axes}
    if "d_ff" not in names or not names & {"d_model", "latent"}:  # not a projection, so the format does not pack it
        return prod(sizes) * dtype.other_bytes
    try:
        return dtype.matrix_bytes(sizes)
    except FFNError as error:
        raise FFNError(f"{name}: {error.message}", error.hint) from None
