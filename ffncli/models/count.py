"""Model → the record that `ffn params` and `ffn models` show: parameters, FLOPs and bytes, per layer and in total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ffncli.block import dtypes
from ffncli.block.cost import Cost, cost
from ffncli.block.steps import Axis, Norm, Step, parameters, walk
from ffncli.models.model import Group, Model


@dataclass(frozen=True)
class TensorCount:
    """One parameter tensor: its canonical name, torch's shape, how many numbers.

    `norm` tensors are counted apart, `shared` ones (a norm that the attention reads too) not at all.
    """

    name: str
    shape: tuple[int, ...]
    params: int
    norm: bool
    shared: bool


@dataclass(frozen=True)
class GroupCount:
    """Layers with equal steps. All `*_per_layer` are parameters, all `*_per_token` FLOPs of one layer, forward."""

    stack: str
    layers: tuple[int, ...]
    kind: str
    d_ff: int
    experts: int
    top_k: int
    shared_experts: int
    shared_d_ff: int
    ffn_params_per_layer: int
    ffn_params_active_per_layer: int
    norm_params_per_layer: int
    matmul_flops_per_token: int
    elementwise_flops_per_token: int
    tensors: tuple[TensorCount, ...]


@dataclass(frozen=True)
class ModelCount:
    """One row of `ffn params`. Totals are over all layers (over the one block for bare dimensions).

    `*_flops_total` are the forward FLOPs of all layers on `tokens` tokens. `dtype` may be a packed format that is not
    counted in bytes; weight_bytes is None then.
    """

    name: str
    source: str
    citation: str
    d_model: int
    d_ff: int
    activation: str
    gated: bool
    bias: bool
    layers: int | None
    experts: int
    top_k: int
    shared_experts: int
    uniform: bool
    ffn_params_per_layer: int
    ffn_params_active_per_layer: int
    norm_params_per_layer: int
    matmul_flops_per_token: int
    elementwise_flops_per_token: int
    ffn_params_total: int
    ffn_params_active: int
    tokens: int
    matmul_flops_total: int
    elementwise_flops_total: int
    dtype: str
    weight_bytes: int | None
    evidence: tuple[str, ...]
    groups: tuple[GroupCount, ...]


def count(model: Model, dtype: str | None = None, tokens: int = 1) -> ModelCount:
    """Count a model. `dtype` sets the width of weight_bytes (default: the stored one, else fp32).

    Raises FFNError for an unknown `dtype`.
    """
    groups = [(group, cost(group.steps)) for group in model.groups]
    main, per_layer = next((g, c) for g, c in groups if g is model.main)
    total = sum((c.times(len(g.layers)) for g, c in groups), Cost())
    row = dtypes.find(model.dtype or "fp32") if dtype is None else dtypes.dtype(dtype)
    counted = tuple(_group(group, c) for group, c in groups)
    shape = _shape(main)
    return ModelCount(
        name=model.name,
        source=model.source,
        citation=model.citation,
        d_model=main.spec.d_model,
        d_ff=main.spec.d_ff,
        activation=main.spec.activation,
        gated=bool(main.spec.gated),
        bias=bool(main.spec.bias),
        layers=model.layer_count,
        **shape,
        uniform=len({group.spec for group, _ in groups}) == 1,
        **_per_layer(per_layer),
        ffn_params_total=total.params,
        ffn_params_active=total.params_active,
        tokens=tokens,
        matmul_flops_total=total.matmul_flops * tokens,
        elementwise_flops_total=total.elementwise_flops * tokens,
        dtype=row.name if row else str(model.dtype),
        weight_bytes=total.weight_bytes(row.bytes) if row else None,
        evidence=model.evidence,
        groups=counted,
    )


def tensors(steps: Sequence[Step]) -> tuple[TensorCount, ...]:
    """Every parameter tensor of a block, in step order."""
    norms = {step.output: step.op for _, step in walk(steps) if isinstance(step.op, Norm)}
    out = []
    for name, axes in parameters(steps).items():
        norm = norms.get(name.rpartition(".")[0])
        out.append(TensorCount(name, _sizes(axes), prod(_sizes(axes)), norm is not None, bool(norm and norm.shared)))
    return tuple(out)


def _sizes(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)


def _shape(group: Group) -> dict[str, int]:
    moe = group.spec.moe
    if moe is None:
        return {"experts": 0, "top_k": 0, "shared_experts": 0}
    return {"experts": moe.experts, "top_k": moe.top_k, "shared_experts": moe.shared_experts}


def _per_layer(one: Cost) -> dict[str, int]:
    return {
        "ffn_params_per_layer": one.params,
        "ffn_params_active_per_layer": one.params_active,
        "norm_params_per_layer": one.norm_params,
        "matmul_flops_per_token": one.matmul_flops,
        "elementwise_flops_per_token": one.elementwise_flops,
    }


def _group(group: Group, one: Cost) -> GroupCount:
    return GroupCount(
        stack=group.stack,
        layers=group.layers,
        kind="moe" if group.spec.moe else "dense",
        d_ff=group.spec.d_ff,
        **_shape(group),
        shared_d_ff=group.spec.shared_width,
        **_per_layer(one),
        tensors=tensors(group.steps),
    )
