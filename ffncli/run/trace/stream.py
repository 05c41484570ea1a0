"""What lies between an FFN's output and the model's head: the norms of its branch, the scale of the residual."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import Add, Norm, Step, ffn_span
from ffncli.dataclass import dataclass
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import norm
from ffncli.run.engine.prepare import Prepared, dtype_of
from ffncli.run.engine.weights import stored_weights
from ffncli.run.trace.head import divisor


@dataclass(frozen=True)
class InStream:
    """Vectors [n, d_model] as the branch's norms give them, each normalised alone, and the factor [n] that makes each
    of them its part of the residual stream: NaN where a norm does more than divide and multiply.
    """

    vectors: Tensor
    factors: Tensor


def to_stream(ready: Prepared, vectors: Tensor, outputs: Tensor) -> InStream:
    """Vectors that are parts of the FFN's `outputs` (both [n, d_model]) on their way to the residual stream: Gemma-2
    and OLMo-2 normalise an output before it is added, Granite multiplies it.
    """
    block = steps(ready.layer.spec)
    _, name = ffn_span(block)
    factors = torch.ones(len(vectors), dtype=torch.float64)
    for step in block[[s.output for s in block].index(name) + 1 :]:
        match step.op:
            case Norm() as op if step.inputs == (name,):
                factors = factors * (divisor(vectors, op) / divisor(outputs, op)).cpu()
                factors = factors * torch.nan if op.bias or op.weigh == "input" else factors
                vectors, outputs = (normed(step, ready.weights, x) for x in (vectors, outputs))
                name = step.output
            case Add(scale=scale) if step.inputs[-1] == name:
                factors = factors * scale
                break
            case _:
                break
    return InStream(vectors, factors)


def last_norm(resolved: Resolved, layer: Layer, vectors: Tensor, dtype: str | None, device: str) -> Tensor:
    """Post-norm models have no final norm: the head reads the output of the last layer's norm (BERT)."""
    last = max((g for g in resolved.model.groups if g.stack == layer.stack), key=lambda g: max(g.layers))
    if last.spec.norm_position != "post" or last.spec.norm == "none":
        return vectors
    at = Layer(layer.stack, max(last.layers), last.spec)
    weights = stored_weights(resolved, at, dtype_of(dtype), device)
    step = last.steps[-1]
    return normed(step, weights or {}, vectors) if isinstance(step.op, Norm) else vectors


def normed(step: Step, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The output of a norm's step."""
    assert isinstance(step.op, Norm)
    return norm(step.op, {name.rpartition(".")[2]: weights[name] for name in step.parameters()}, x)
