"""Model → the bytes that a forward pass of all its FFN blocks moves, and its arithmetic intensity, by tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.shard import Ranks
from ffncli.block.traffic import Traffic, rank_experts_touched, tokens_at, traffic
from ffncli.dataclass import dataclass
from ffncli.models.counting.ranks import steps_of
from ffncli.models.model import Model


@dataclass(frozen=True)
class TokenCost:
    """All layers' FFNs (the one block of bare dimensions) on `tokens` tokens, forward, on one of `ranks` ranks.

    `dtype` is the weights' format, `activation_dtype` the activations'. Bytes and FLOPs are rank 0's; expert-parallel
    ranks enter so many tokens each. `*_fused` is the
    least that any implementation moves: each block's input and output. `experts_touched` are the routed experts of a
    main layer that are expected to be read; None without experts. Conventions: `block/traffic.py`.
    """

    name: str
    tokens: int
    dtype: str
    activation_dtype: str
    ranks: int
    experts_touched: float | None
    weight_bytes_read: int
    activation_bytes: int
    activation_bytes_fused: int
    matmul_flops: int
    flops_per_byte: float
    flops_per_byte_fused: float


def token_costs(
    model: Model, weights: DType, tokens: Sequence[int], ranks: int = 1, ep: int = 1
) -> tuple[TokenCost, ...]:
    """One record for each number of tokens, over `ranks` tensor-parallel times `ep` expert-parallel ranks.

    Raises FFNError if rows do not divide into the format's blocks, or widths over the ranks; call
    `tensor_parallel.split` first, whose error says what would divide.
    """
    moe = model.main.spec.moe
    out = []
    for number in tokens:
        moved = model_traffic(model, weights, number, ranks, ep)
        out.append(
            TokenCost(
                model.name,
                number,
                weights.name,
                activation_dtype(weights).name,
                ranks * ep,
                rank_experts_touched(moe.experts // ep, moe.top_k, number, ep) if moe else None,
                moved.weight_bytes_read,
                moved.activation_bytes,
                moved.activation_bytes_fused,
                moved.matmul_flops,
                moved.flops_per_byte(),
                moved.flops_per_byte(fused=True),
            )
        )
    return tuple(out)


def model_traffic(model: Model, weights: DType, tokens: int = 1, ranks: int = 1, ep: int = 1) -> Traffic:
    """The traffic of rank 0 for all layers. Raises FFNError as `token_costs`."""
    activations, grid = activation_dtype(weights), Ranks(ranks, ep)
    parts = (
        traffic(steps_of(group, 0, grid), weights, activations, tokens).times(len(group.layers) * group.runs)
        for group in model.groups
    )
    return sum(parts, Traffic())


def ridge_tokens(
    model: Model, weights: DType, flops_per_byte: float, ranks: int = 1, fused: bool = False, ep: int = 1
) -> int | None:
    """The least number of tokens at which the FFNs reach this intensity, an accelerator's FLOPs per byte.

    None where no number of tokens does. Raises FFNError as `token_costs`, and for a number that is not positive.
    """
    return tokens_at(flops_per_byte, lambda tokens: model_traffic(model, weights, tokens, ranks, ep), fused)
