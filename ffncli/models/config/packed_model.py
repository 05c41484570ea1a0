"""The bytes of a quantised model's weights, from its config alone."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ffncli.block import dtypes
from ffncli.block.dtypes import DType
from ffncli.block.steps import Axis, Experts, Linear, Step, of_norm
from ffncli.models.config.quantized import Packing, Scheme, UnknownPacking, scheme_of
from ffncli.models.model import LayerParams, Model, NonFFN, Resolved


def unknown_packing(resolved: Resolved) -> str:
    """Return a note if a quantised model without tensors has a config that does not determine its bytes, else ""."""
    try:
        packed = packed_model(resolved)
    except UnknownPacking as unknown:
        return f"{unknown.message}, so weight bytes are not counted"
    if packed is None or not packed.unknown:
        return ""
    where = f"{resolved.source}: quantization_config"
    return f"{where}: the bytes of {packed.unknown} are not known, so those of the whole model are not counted"


_LEAVES = {
    "gate": ("gate_proj", "w1", "gate_up_proj", "w_in"), "down": ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h"),
    "up": ("up_proj", "w3", "gate_up_proj", "w_in", "fc1", "c_fc", "dense_h_to_4h"),
}  # fmt: skip
_MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "mixer")
_MOST_MATCHES = 100_000  # patterns times layers; published models have a few thousand
_USUAL = ("self_attn.", "self_attention.", "attention.", "attn.")  # modules that every library packs
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True)
class PackedModel:
    """The bytes of a quantised model: of its FFNs, and of everything else (None if unknown, and then `unknown` names
    the modules, unless their parameters are unknown). `format` stands for the FFNs' formats, with their mean bytes per
    parameter."""

    ffn_bytes: int
    other_bytes: int | None
    format: DType
    unknown: str = ""


def packed_model(resolved: Resolved) -> PackedModel | None:
    """Return the bytes that a quantised model's tensors would have; None if no config describes its quantization, or if
    there are tensors. Raises UnknownPacking, which names what the config does not determine."""
    quantization, model = resolved.quantization, resolved.model
    if not quantization or resolved.stored is not None:
        return None
    scheme, plain = scheme_of(quantization, resolved.source), dtypes.find(model.dtype) or dtypes.dtype("bf16")
    try:
        matches = len(scheme.patterns) * sum(len(group.layers) for group in model.groups)
    except re.error as error:
        raise UnknownPacking(f"{resolved.source}: quantization_config: a pattern is not read ({error})") from None
    if matches > _MOST_MATCHES:
        raise UnknownPacking(
            f"{resolved.source}: quantization_config: the bytes of {len(scheme.patterns):,} patterns are not known"
        )
    bytes_by_format: dict[str, int] = {}
    for group in model.groups:
        for matrix in _matrices(group.steps):
            names = _names(matrix) if matrix.role else []
            for layer in group.layers:
                packing = scheme.in_layer(layer, names) if names else None
                if matrix.part == "router":
                    packing = scheme.default if scheme.default and scheme.default.everywhere else None
                size = matrix.bytes(packing, plain)
                name = packing.name if packing else plain.name
                bytes_by_format[name] = bytes_by_format.get(name, 0) + size
    total = sum(bytes_by_format.values())
    name = max(bytes_by_format, key=lambda one: bytes_by_format[one])
    packings = [scheme.default, *(packing for _, packing in scheme.rules)]
    block = max([1, *(packing.group for packing in packings if packing)])
    blocks = [(group.steps, len(group.layers)) for group in model.groups]
    mean = dtypes.mean_format(name, blocks, total, block, plain.block_bytes)
    other = _outside(model, scheme, plain)
    return PackedModel(total, None, mean, other) if isinstance(other, str) else PackedModel(total, other, mean)


@dataclass(frozen=True)
class _Matrix:
    """A parameter of a block: the part of the block (`mlp`, `experts`, `shared`, `router`), its role there (`gate`,
    `up`, `down`; empty if no format packs it), and its shape."""

    part: str
    role: str
    shape: tuple[int, ...]

    @property
    def params(self) -> int:
        return prod(self.shape)

    def bytes(self, packing: Packing | None, plain: DType) -> int:
        if packing is None or len(self.shape) < 2:
            return self.params * plain.block_bytes
        rows, columns = self.shape[-2:]
        return prod(self.shape[:-2]) * packing.matrix_bytes(rows, columns)


def _matrices(steps: Sequence[Step], part: str = "mlp", stack: tuple[Axis, ...] = ()) -> Iterator[_Matrix]:
    """Yield a block's parameters, without its norms."""
    for step in steps:
        if isinstance(step.op, Experts):
            inner = "shared" if step.op.always else "experts"
            yield from _matrices(step.op.program, inner, (*stack, step.op.experts))
        elif not of_norm(step):
            for name, axes in step.parameters().items():
                first, _, last = step.output.rpartition(".")
                at = "shared" if first == "shared" else "router" if step.output.startswith("router") else part
                shape = tuple(axis.size for axis in (*stack, *axes))
                packs = isinstance(step.op, Linear) and name.endswith("weight") and last in _LEAVES
                yield _Matrix(at, last if packs else "", shape)


def _names(matrix: _Matrix) -> list[str]:
    """Return the names that checkpoints give to this matrix's module in a layer."""
    if matrix.part == "experts":
        bases = [f"{mlp}.experts{e}" for mlp in _MLPS for e in (".0", "")]
    elif matrix.part == "shared":
        bases = [f"{mlp}.{shared}" for mlp in _MLPS for shared in _SHARED]
    else:
        bases = [*_MLPS]
    return [f"{base}.{leaf}" for base in bases for leaf in _LEAVES[matrix.role]]


_HEADS = ("lm_head", "model.lm_head", "language_model.lm_head", "embed_out")


def _outside(model: Model, scheme: Scheme, plain: DType) -> int | str | None:
    """Return the bytes of a model outside its FFNs: None if its parameters are unknown, or the modules whose packing is
    unknown. The projections of attention and other mixers are packed unless they are left out; embeddings and norms are
    not, except in formats that pack everything."""
    rest, stacks = model.non_ffn, {group.stack for group in model.groups}
    total = rest.params(stacks) if rest else None
    if rest is None or rest.parts is None or total is None:
        return None
    if not scheme.beyond_experts:
        return total * plain.block_bytes
    if not rest.listed:
        return f"the projections of {model.model_type} that belong to neither attention nor FFN"
    out, packed = 0, 0
    for layer, one in _layers_outside(rest, stacks):
        for matrix in one.projections:
            packing = scheme.in_layer(layer, [matrix.name])
            if packing and not rest.named:
                return f"the attention of {model.model_type}"
            if packing and scheme.usual_only and not matrix.name.startswith(_USUAL):
                return matrix.name
            if packing:
                out += packing.matrix_bytes(matrix.rows, matrix.columns)
                packed += matrix.params
    everywhere = scheme.default if scheme.default and scheme.default.everywhere else None
    head = scheme.of(_HEADS) if scheme.head else everywhere
    for part, packing in (("head", head), ("input embedding", everywhere)):
        columns = rest.parts["", part] // rest.vocabulary if rest.vocabulary else 0  # without the head's bias
        if packing and columns:
            out += packing.matrix_bytes(rest.vocabulary, columns)
            packed += rest.vocabulary * columns
    return out + (total - packed) * plain.block_bytes


def _layers_outside(rest: NonFFN, stacks: Collection[str]) -> Iterator[tuple[int, LayerParams]]:
    """Yield the number of each layer and its parameters outside the FFN, in the stacks and in layers without FFN."""
    for stack in stacks:
        yield from rest.layers.get(stack, {}).items()
    yield from rest.between.items()
