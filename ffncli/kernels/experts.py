"""Mixtures whose experts are computed together. All experts' gate and up matrices are one tensor; their down matrices
are another.

grouped: tokens are sorted by expert, and one grouped product computes each matrix for all experts. The router's choice
is never read on the host. torch has a single kernel for such a product in bf16 on GPUs of compute capability 9.0 or
more; elsewhere, and in other dtypes, torch itself loops over the experts, and a GPU then waits for the host.

batched: every token gets a copy of its experts' matrices, and one batched product computes all of them. It is meant for
few tokens: each token needs copies of top_k experts' matrices. The router's choice is never read on the host, so a GPU
never waits. Forward only: a backward pass would keep all copies.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Experts, parameters
from ffncli.kernels.dense import Body, Place, Weights, layer, norm, places
from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.routing import RoutedExperts, Summed, mixture, refuses_unknown_routing, routed_experts


def refuses(steps: Steps) -> str | None:
    """Return why these kernels cannot compute a block: they need experts that differ only in matrices and biases."""
    ops = [step.op for step in steps if isinstance(step.op, Experts)]
    if not ops:
        return "a dense block has no experts"
    others = (name for op in ops for name in op.parameters() if name not in _PARTS and not op.is_common(name))
    name = next(others, None)
    return refuses_unknown_routing(steps) or (name and f"cannot compute experts that each have a {name}")


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return the experts' matrices stacked as [experts, out, in] (one tensor with gate above up, one tensor with down),
    and their biases stacked as [experts, out]; then all other weights unchanged, in step order. Widths are zero-padded
    to the next multiple."""
    stacked = _stacked(steps, weights)
    return (*stacked.values(), *(weights[name] for name in _others(steps)))


@register(
    "grouped",
    "sorts tokens by expert, then computes one grouped matrix product (torch.nn.functional.grouped_mm) "
    "for gate and up of all experts, and another for down",
    prepare=prepare,
    refuses=refuses,
    dtypes=("fp32", "bf16", "fp16"),
)
def grouped(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the steps: sort, grouped product, activation and gate, grouped product, weigh, add."""
    return stacked_mixture(steps, dtype, partial(_in_groups, ordered=device.startswith("cuda")))


def _in_groups(made: "Made", weigh_output: bool, ordered: bool) -> Summed:
    """Compute the sum with grouped products; with `ordered`, the outputs of a token's experts are added in the order in
    which the token chose the experts."""

    def summed(x: Tensor, chosen: Tensor, share: Tensor, p: Weights) -> Tensor:
        top_k, entries = chosen.shape[1], p[_INWARD].shape[0]
        expert, order = chosen.flatten().sort(stable=True)  # stable: each expert's tokens stay in order
        token, weight = order // top_k, share.flatten().index_select(0, order)[:, None]
        numbers = torch.arange(entries, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)  # where each expert's rows end

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return functional.grouped_mm(rows, matrices.mT, offs=ends)

        received = x.index_select(0, token)
        out = made(received if weigh_output else received * weight, expert, p, product)
        out = out * weight if weigh_output else out
        if not ordered:  # faster on a CPU; on a GPU index_add adds in any order, so its last bits differ between calls
            return torch.zeros_like(x).index_add_(0, token, out)
        return torch.empty_like(out).index_copy_(0, order, out).view(*chosen.shape, -1).sum(1)

    return summed


MOST_TOKENS = 64  # maximum tokens for which `batched` is timed
MOST_BYTES = 1 << 28  # maximum bytes of copied matrices at a time: more tokens are computed in several parts


@register(
    "batched",
    "copies the matrices of each token's experts, at most 256 MiB at a time, and multiplies in batches",
    prepare=prepare,
    refuses=refuses,
    trains=False,
    most_tokens=MOST_TOKENS,
)
def batched(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the steps: copy the matrices, batched product, activation and gate, batched product, weigh, add."""
    return stacked_mixture(steps, dtype, _in_batches)


def _in_batches(made: "Made", weigh_output: bool) -> Summed:
    def summed(x: Tensor, chosen: Tensor, share: Tensor, p: Weights) -> Tensor:
        # copies for all tokens at once would take top_k expert matrices per token, so tokens go through in parts
        most = max(1, MOST_BYTES // (chosen.shape[1] * p[_INWARD][0].nbytes))  # tokens
        if len(x) <= most:
            return part_of(x, chosen, share, p)
        parts = zip(*(torch.split(t, most) for t in (x, chosen, share)), strict=True)
        return torch.cat([part_of(rows, experts, weights, p) for rows, experts, weights in parts])

    def part_of(x: Tensor, chosen: Tensor, share: Tensor, p: Weights) -> Tensor:
        expert, weight = chosen.flatten(), share.flatten()[:, None]
        received = x.repeat_interleave(chosen.shape[1], 0)

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return torch.bmm(matrices.index_select(0, expert), rows[..., None])[..., 0]

        out = made(received if weigh_output else received * weight, expert, p, product)
        out = out * weight if weigh_output else out
        return out.view(*chosen.shape, -1).sum(1)

    return summed


Product = Callable[[Tensor, Tensor], Tensor]  # (rows [n, in], matrices of all experts [experts, out, in]) → [n, out]
Made = Callable[[Tensor, Tensor, Weights, Product], Tensor]
# Widths are padded to a multiple: torch's grouped products need strides of 16 bytes, forward and backward, in every
# dtype.
_MULTIPLE = 8
_PARTS = tuple(f"{name}.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias"))
_STACKED = ("inward.weight", "inward.bias", "down.weight", "down.bias")
_INWARD = 0  # the place of the first of these, which every block has


def _stacked(steps: Steps, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `_STACKED` that the experts have; routed shared experts, if any, come last."""
    parts, sources = {}, routed_experts(steps).sources
    for name in _PARTS:
        of_steps = [weights[step.prefix + name] for step in sources if name in step.op.parameters()]
        if of_steps:
            parts[name] = padded(of_steps[0] if len(of_steps) == 1 else torch.cat(of_steps), 1)
    for kind in ("weight", "bias"):
        inward = [parts.pop(f"{name}.{kind}") for name in ("gate", "up") if f"{name}.{kind}" in parts]
        if inward:
            parts[f"inward.{kind}"] = inward[0] if len(inward) == 1 else torch.cat(inward, 1)
    return {name: padded(parts[name], -1) for name in _STACKED if name in parts}


def _others(steps: Steps) -> list[str]:
    """Return the parameters that are not stacked, in step order."""
    stacked = {step.prefix + name for step in routed_experts(steps).sources for name in _PARTS}
    return [name for name in parameters(steps) if name not in stacked]


def padded(x: Tensor, axis: int) -> Tensor:
    """Pad an axis of x with zeros up to the next multiple; return x itself if no padding is needed."""
    missing = -x.shape[axis] % _MULTIPLE
    after = x.dim() - 1 - axis % x.dim()  # functional.pad takes the axes from the last to the first
    return functional.pad(x, (0, 0) * after + (0, missing)) if missing else x


def stacked_mixture(steps: Steps, dtype: torch.dtype, summed: Callable[[Made, bool], Summed]) -> Computes:
    """Build the function of a kernel that computes all experts together.

    `summed` builds the sum over the chosen experts from two arguments: the function that maps rows of tokens to the
    outputs of their experts, and whether the route's weight multiplies these outputs (otherwise the rows).
    """
    experts = routed_experts(steps)
    parts = {name for step in experts.sources for name in step.op.parameters()}
    place = places([*(name for name in _STACKED if name.replace("inward", "up") in parts), *_others(steps)])
    return mixture(steps, place, dtype, summed(experts_together(experts, place), experts.weigh == "output"))


def experts_together(experts: RoutedExperts, place: Place) -> Made:
    """Return made(rows [n, width], expert of each row [n], weights, product) → the experts' outputs [n, width]."""
    body, normed = Body(experts.shape, place), norm(experts.after, "expert_norm", place)
    (_, inward_bias), (down, down_bias), is_gated = layer("inward", place), body.down, body.shape.gated
    d_ff = next(axes[-1].size for name, axes in experts.sources[0].op.parameters().items() if name == "down.weight")

    def made(rows: Tensor, expert: Tensor, p: Weights, product: Product) -> Tensor:
        inward = _with_bias(product(padded(rows, -1), p[_INWARD]), expert, p[inward_bias])
        gate, up = inward.chunk(2, -1) if is_gated else (None, inward)
        hidden = body.hidden(None if gate is None else gate[:, :d_ff], up[:, :d_ff], p=p)
        del inward, gate, up  # their memory is free for the next product
        out = _with_bias(product(padded(hidden, -1), p[down]), expert, p[down_bias])
        return normed(out[:, : rows.shape[1]], p)

    return made


def _with_bias(x: Tensor, expert: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.index_select(0, expert)
