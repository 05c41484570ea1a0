"""Counts a model for `ffn params` and `ffn models`: parameters, FLOPs and bytes, per layer and in total.

Weights are counted in the requested format; by default in the stored format, or in fp32 if it is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ffncli.block import dtypes
from ffncli.block.cost import Cost, cost
from ffncli.block.dtypes import DType, weight_bytes
from ffncli.block.steps import Norm, Step, of_norm, untied_parameters, walk
from ffncli.errors import ExitCode, FFNError, option
from ffncli.models.config.non_ffn import RESTS
from ffncli.models.config.packed_model import PackedModel, packed_model, unknown_packing
from ffncli.models.config.quantized import UnknownPacking
from ffncli.models.model import MORE_TOKENS, Group, Model, NotCounted, Resolved, StoredSize, unknown_note
from ffncli.show.text import plural
from ffncli.system.notebook import Shown


@dataclass(frozen=True)
class TensorCount:
    """A parameter tensor. A `norm` is counted separately; a `shared` norm, whose output attention also reads, is not
    counted."""

    name: str
    shape: tuple[int, ...]
    params: int
    norm: bool
    shared: bool


@dataclass(frozen=True)
class GroupCount:
    """Layers with equal steps: parameters per layer, and forward FLOPs per token and layer.

    `latent` is the width that the routed experts read and write, 0 if it is d_model. `layer_norm_params_per_layer`
    includes every norm of the layer; it and the attention's count are None for an unknown family. `ffn_share_of_layer`
    is the FFN's share of FFN, attention and norms.
    """

    stack: str
    layers: tuple[int, ...]
    kind: str
    d_ff: int
    experts: int
    top_k: int | None
    shared_experts: int
    shared_d_ff: int
    latent: int
    ffn_params_per_layer: int
    ffn_params_active_per_layer: int | None
    norm_params_per_layer: int | None
    matmul_flops_per_token: int | None
    elementwise_flops_per_token: int | None
    attention_params_per_layer: int | None
    layer_norm_params_per_layer: int | None
    ffn_share_of_layer: float | None
    tensors: tuple[TensorCount, ...]


@dataclass(frozen=True)
class ModelCount(Shown):
    """One row of `ffn params`. Totals cover all layers, or the single block of bare dimensions.

    None means unknown: activation, norms and top_k if only tensor names were read, the whole model if its family's
    attention is unknown, stored sizes if no headers were read. `*_flops_total` are forward FLOPs on `tokens` tokens.
    `weight_bytes` is the size of the FFNs in `dtype`; for a packed format, it is the stored size, including scales; it
    is None if a quantised model's config does not determine it.
    `model_weight_bytes` is None if `model_params_total` or `weight_bytes` is. If a packed `dtype` was requested, it has
    the weights outside the FFNs in bf16; a quantization_config says how they are stored.
    `ffn_params_stored` is `ffn_params_total` counted from the tensors' shapes alone; `differences` lists disagreements
    between config and tensors.
    """

    name: str
    source: str
    citation: str
    d_model: int
    d_ff: int
    activation: str | None
    gated: bool
    bias: bool
    layers: int | None
    experts: int
    top_k: int | None
    shared_experts: int
    uniform: bool
    ffn_params_per_layer: int
    ffn_params_active_per_layer: int | None
    norm_params_per_layer: int | None
    matmul_flops_per_token: int | None
    elementwise_flops_per_token: int | None
    attention_params_per_layer: int | None
    layer_norm_params_per_layer: int | None
    ffn_share_of_layer: float | None
    ffn_params_total: int
    ffn_params_active: int | None
    ffn_share_of_model: float | None
    model_params_total: int | None
    model_params_active: int | None
    model_params_active_no_embedding: int | None
    tokens: int
    matmul_flops_total: int | None
    elementwise_flops_total: int | None
    dtype: str
    weight_bytes: int | None
    ffn_params_stored: int | None
    ffn_stored_bytes: int | None
    ffn_bits_per_weight: float | None
    stored_params: int | None
    stored_bytes: int | None
    bits_per_weight: float | None
    differences: tuple[str, ...]
    evidence: tuple[str, ...]
    published_as: str | None
    model_weight_bytes: int | None
    latent: int
    not_counted: tuple[NotCounted, ...]
    groups: tuple[GroupCount, ...]

    @property
    def has_experts(self) -> bool:
        """Return whether any layer is MoE; the main group may be dense (in Llama 4, every second layer is MoE)."""
        return any(group.experts for group in self.groups)

    def __repr__(self) -> str:
        layers = "" if self.layers is None else f"{self.layers:,} layers, "
        lines = [
            f"<ModelCount of {self.name}: {layers}d_model {self.d_model:,}, d_ff {self.d_ff:,}",
            f"  ffn_params_per_layer {self.ffn_params_per_layer:,}, ffn_params_total {self.ffn_params_total:,}",
            f"  weight_bytes {'unknown' if self.weight_bytes is None else f'{self.weight_bytes:,}'} in {self.dtype}>",
        ]
        if self.model_params_total is not None:
            lines.insert(2, f"  model_params_total {self.model_params_total:,}")
        return "\n".join(lines)


def count(resolved: Resolved, dtype: str | None = None, tokens: int = 1) -> ModelCount:
    """Count a model, with weight_bytes in `dtype` (default: the stored format, or fp32 if it is unknown).

    Raises FFNError if the block size of `dtype` does not divide the rows.
    """
    model = resolved.model
    groups = [(group, cost(group.steps)) for group in model.groups]
    counted = [_group(model, group, one) for group, one in groups]
    most = model.main
    main = next(c for group, c in zip(model.groups, counted, strict=True) if group is most)
    spec = most.spec
    total = sum((one.times(len(group.layers)) for group, one in groups), Cost())
    run = sum((one.times(len(group.layers) * group.runs * tokens) for group, one in groups), Cost())
    flops = _flops(model, run)
    active = None if "top_k" in model.unknown else total.params_active
    try:
        packed = packed_model(resolved) if dtype is None else None
        name, weight_bytes = _weights(resolved, dtype, packed)
        model_bytes = _model_bytes(resolved, dtype, total.params, weight_bytes, packed)
    except UnknownPacking:  # `load` has added a note
        name, weight_bytes, model_bytes = str((resolved.quantization or {}).get("quant_method")), None, None
    return ModelCount(
        name=model.name,
        source=resolved.source,
        citation=resolved.citation,
        d_model=spec.d_model,
        d_ff=spec.d_ff,
        activation=None if "activation" in model.unknown else spec.activation,
        gated=bool(spec.gated),
        bias=bool(spec.bias),
        layers=model.layer_count,
        uniform=len({group.spec for group in model.groups}) == 1,
        **{field: getattr(main, field) for field in _OF_MAIN},
        ffn_params_total=total.params,
        ffn_params_active=active,
        **_whole(model, total.params, active),
        tokens=tokens,
        matmul_flops_total=flops[0],
        elementwise_flops_total=flops[1],
        dtype=name,
        weight_bytes=weight_bytes,
        **_stored(resolved.stored),
        differences=tuple(map(str, resolved.differences)),
        evidence=resolved.evidence,
        published_as=resolved.published_as,
        model_weight_bytes=model_bytes,
        not_counted=not_counted(resolved),
        groups=tuple(counted),
    )


_OF_MAIN = (
    "experts", "top_k", "shared_experts", "ffn_params_per_layer", "ffn_params_active_per_layer",
    "norm_params_per_layer", "matmul_flops_per_token", "elementwise_flops_per_token", "attention_params_per_layer",
    "layer_norm_params_per_layer", "ffn_share_of_layer", "latent",
)  # fmt: skip


_OF_STORED = (
    "ffn_params_stored", "ffn_stored_bytes", "ffn_bits_per_weight", "stored_params", "stored_bytes", "bits_per_weight",
)  # fmt: skip


def _group(model: Model, group: Group, one: Cost) -> GroupCount:
    moe, flops = group.spec.moe, _flops(model, one)
    layer = model.non_ffn.layer(group.stack, group.layers) if model.non_ffn else None
    return GroupCount(
        stack=group.stack,
        layers=group.layers,
        kind="moe" if moe else "dense",
        d_ff=group.spec.d_ff,
        experts=moe.experts if moe else 0,
        top_k=(None if "top_k" in model.unknown else moe.top_k) if moe else 0,
        shared_experts=moe.shared_experts if moe else 0,
        shared_d_ff=group.spec.shared_width,
        latent=(moe.latent or 0) if moe else 0,
        ffn_params_per_layer=one.params,
        ffn_params_active_per_layer=None if moe and "top_k" in model.unknown else one.params_active,
        norm_params_per_layer=None if "norm" in model.unknown else one.norm_params,
        matmul_flops_per_token=flops[0],
        elementwise_flops_per_token=flops[1],
        attention_params_per_layer=layer.attention if layer else None,
        layer_norm_params_per_layer=layer.norms if layer else None,
        ffn_share_of_layer=layer.ffn_share(one.params) if layer else None,
        tensors=tensors(group.steps),
    )


def _flops(model: Model, one: Cost) -> tuple[int | None, int | None]:
    """Return (matmul, elementwise) FLOPs; None if they depend on an unknown field."""
    if "top_k" in model.unknown:
        return None, None
    return one.matmul_flops, None if "norm" in model.unknown else one.elementwise_flops


def _weights(resolved: Resolved, dtype: str | None, packed: PackedModel | None) -> tuple[str, int]:
    """Return the format's name and the FFN's bytes in it: for a packed format, the stored bytes, or those that a config
    determines."""
    if packed:
        return packed.format.name, packed.ffn_bytes
    row = storage_of(resolved, dtype)
    if dtype is None and resolved.stored and not row.computable:
        return row.name, resolved.stored.bytes
    return row.name, sum(weight_bytes(group.steps, row) * len(group.layers) for group in resolved.model.groups)


def _model_bytes(
    resolved: Resolved, dtype: str | None, ffn_total: int, ffn_bytes: int, packed: PackedModel | None
) -> int | None:
    """Return the whole model's bytes; None if a part is unknown. If a packed format was requested, the weights outside
    the FFNs count in the activations' format, bf16: no config says which of them are packed."""
    if dtype is None and resolved.stored:
        return resolved.stored.file_bytes
    if packed:
        return None if packed.other_bytes is None else ffn_bytes + packed.other_bytes
    total: int | None = _whole(resolved.model, ffn_total, None)["model_params_total"]
    if total is None:
        return None
    rest = dtypes.activation_dtype(storage_of(resolved, dtype)).block_bytes
    return ffn_bytes + (total - ffn_total) * rest


def _whole(model: Model, ffn_total: int, ffn_active: int | None) -> dict[str, Any]:
    """Return the keys for the whole model, with None for unknown values. Active parameters exclude experts that a token
    does not choose; `..._no_embedding` also excludes parameters that are looked up instead of multiplied."""
    rest = model.non_ffn.params({group.stack for group in model.groups}) if model.non_ffn else None
    lookup = model.non_ffn.lookup if model.non_ffn else None
    total = None if rest is None else rest + ffn_total
    active = None if rest is None or ffn_active is None else rest + ffn_active
    return {
        "ffn_share_of_model": None if total is None else ffn_total / total,
        "model_params_total": total,
        "model_params_active": active,
        "model_params_active_no_embedding": None if active is None or lookup is None else active - lookup,
    }


def _stored(stored: StoredSize | None) -> dict[str, Any]:
    """Return the row's keys that come from the checkpoint's headers; bits per weight are stored bits divided by logical
    parameters."""
    if stored is None:
        return dict.fromkeys(_OF_STORED)
    file_params, file_bytes = stored.file_params, stored.file_bytes
    bits = 8 * file_bytes / file_params if file_params and file_bytes is not None else None
    ffn_bits = 8 * stored.bytes / stored.params
    return dict(zip(_OF_STORED, (stored.params, stored.bytes, ffn_bits, file_params, file_bytes, bits), strict=True))


def tensors(steps: Sequence[Step]) -> tuple[TensorCount, ...]:
    """List every parameter tensor of a block, in step order."""
    norms = {step.output: step.op for _, step in walk(steps) if of_norm(step)}
    out = []
    for name, axes in untied_parameters(steps).items():
        norm = norms.get(name.rpartition(".")[0])
        shared = isinstance(norm, Norm) and norm.shared
        shape = tuple(axis.size for axis in axes)
        out.append(TensorCount(name, shape, prod(shape), norm is not None, shared))
    return tuple(out)


def not_counted(resolved: Resolved) -> tuple[NotCounted, ...]:
    """List the parts of a model that we do not count."""
    model, out = resolved.model, [*resolved.not_counted]
    if resolved.model.bare:
        return tuple(out)
    if model.extra_layers and all(part.why != MORE_TOKENS for part in out):
        layers = plural("layer", model.extra_layers)
        out.append(NotCounted(f"{model.extra_layers} {layers} after the model's last layer", MORE_TOKENS))
    if model.non_ffn is None or model.non_ffn.parts is None:
        out.append(NotCounted("everything outside the FFN: attention, norms, embeddings, head", _why(resolved)))
    elif "norm" in model.unknown:
        out.append(NotCounted("the FFN's norms", "tensor names alone do not identify them"))
    return tuple(out)


def require_determined(models: Sequence[Resolved], formats: Sequence[str | None]) -> None:
    """Raise FFNError (exit 4) if a source does not determine its bytes in one of the formats (None: as stored), or its
    totals."""
    texts = [_undetermined(resolved, name) for resolved in models for name in formats]
    if unknown := list(dict.fromkeys(filter(None, texts))):
        more = f"; and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise FFNError(f"{unknown[0]}{more}", code=ExitCode.INCONCLUSIVE)


def _undetermined(resolved: Resolved, dtype: str | None) -> str:
    """Return what is unknown about a model's bytes or totals; "" if they are known."""
    model = resolved.model
    if dtype is None and (unknown := unknown_packing(resolved)):
        return f"{unknown}; give the model's tensors, or {option('dtype')}"
    if "top_k" in model.unknown:
        return f"{model.name}: {unknown_note(['top_k'])}; pass {option('top_k', 2)}"
    if model.bare or (model.non_ffn and model.non_ffn.parts is not None):
        return ""
    return f"{model.name}: the totals of the whole model are unknown: {_why(resolved)}"


def _why(resolved: Resolved) -> str:
    """Return the reason why the whole model is unknown."""
    if resolved.from_tensors or resolved.checkpoint:
        return "the tensors do not show which of them belong to the text model, or which are stored twice"
    if resolved.model.non_ffn or resolved.model.model_type in RESTS:
        return "its source lacks a value that this requires"
    return f"the whole model is not described for model_type {resolved.model.model_type}"


def storage_of(resolved: Resolved, dtype: str | None = None) -> DType:
    """Return the weights' format: `dtype`, else as stored (if packed, with its file's mean size)."""
    if dtype is not None:
        return dtypes.storage(dtype, option("dtype"))
    if packed := packed_model(resolved):
        return packed.format
    if resolved.model.dtype is None:
        return dtypes.dtype("fp32")
    known = dtypes.find_storage(resolved.model.dtype)
    if resolved.stored is None or (known is not None and known.computable):
        # the plain format behind a file's packed format (fp8-block128, gptq-4bit)
        return known or dtypes.find_storage(resolved.model.dtype.partition("-")[0]) or dtypes.dtype("bf16")
    name, other = known.name if known else resolved.model.dtype, known.other_bytes if known else 2
    blocks = [(group.steps, len(group.layers)) for group in resolved.model.groups]
    return dtypes.mean_format(name, blocks, resolved.stored.bytes, _block(resolved), other or 2)


def _block(resolved: Resolved) -> int:
    """Return the number of weights in a row that share a scale; a slice of d_ff must be a multiple of this number."""
    known = dtypes.find_storage(resolved.model.dtype or "")
    if known is not None and known.block > 1:
        return known.block
    names = ("group_size", "weight_block_size")
    return max([1, *(size for name in names for size in _numbers(resolved.quantization, name))])


def _numbers(values: Any, name: str) -> list[int]:
    """Return every positive integer under the key `name`, at any depth of a quantization_config."""
    if not isinstance(values, Mapping):
        return []
    entry = values.get(name)
    numbers = [v for v in (entry if isinstance(entry, list) else [entry]) if type(v) is int and v > 0]
    return numbers + [number for inner in values.values() for number in _numbers(inner, name)]
