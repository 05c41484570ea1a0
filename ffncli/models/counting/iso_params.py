"""Gated and plain blocks of equal size: a gated block has three matrices instead of two, so its d_ff is 2/3 of the
plain block's d_ff.

The rule is from Shazeer (2020, arXiv:2002.05202); Llama's code also rounds up to a multiple of 256.
"""

from dataclasses import dataclass, replace

from ffncli.block.analysis.gated import GatedUnit
from ffncli.block.analysis.operations import COUNTING, counted
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, size, steps
from ffncli.block.value import value
from ffncli.errors import option
from ffncli.models.model import Resolved


@dataclass(frozen=True)
class IsoParams:
    """A block and its counterpart. Parameters include biases and router, but not norms; `difference` is gated minus
    plain, and `difference_percent` is relative to the plain block."""

    multiple_of: int
    plain_d_ff: int
    gated_d_ff: int
    plain_params: int
    gated_params: int
    difference: int
    difference_percent: float


def counterpart(spec: FFNSpec, multiple_of: int = 1) -> FFNSpec:
    """Return the gated counterpart of a plain block, or the plain counterpart of a gated block; everything else is
    equal, including biases.

    d_ff (and the shared experts' width if it differs) is 2/3 or 3/2 of the given block's, rounded to the nearest
    integer, then up to a multiple of `multiple_of`.
    """
    size(option("multiple_of"), multiple_of)
    moe = spec.moe
    if moe and moe.shared_d_ff:
        moe = replace(moe, shared_d_ff=_scaled(moe.shared_d_ff, bool(spec.gated), multiple_of))
    d_ff = _scaled(spec.d_ff, bool(spec.gated), multiple_of)
    return replace(spec, gated=not spec.gated, d_ff=d_ff, moe=moe)


def counterparts(resolved: Resolved, multiple_of: int = 1) -> Resolved:
    """Return the model with every layer replaced by its counterpart, without any information about weights."""
    model, kind = resolved.model, "plain" if resolved.model.main.spec.gated else "gated"
    other = model.with_specs([counterpart(group.spec, multiple_of) for group in model.groups])
    other = replace(other, name=f"{model.name} ({kind})")
    return Resolved(other, resolved.source, resolved.citation, quantization=resolved.quantization)


def iso_params(spec: FFNSpec, multiple_of: int = 1) -> IsoParams:
    """Compare a block with its counterpart; the block may be plain or gated."""
    other = counterpart(spec, multiple_of)
    plain, gated = (other, spec) if spec.gated else (spec, other)
    few, many = cost(steps(plain)).params, cost(steps(gated)).params
    return IsoParams(multiple_of, plain.d_ff, gated.d_ff, few, many, many - few, 100 * (many - few) / few)


def _scaled(d_ff: int, gated: bool, multiple_of: int) -> int:
    """Return d_ff of the counterpart; halves round up."""
    times, over = (3, 2) if gated else (2, 3)
    nearest = (2 * times * d_ff + over) // (2 * over)
    return -(-nearest // multiple_of) * multiple_of


@dataclass(frozen=True)
class IsoUnit:
    """A plain and a gated block, of equal size and without biases: the elementwise work between their projections, per
    token.

    FLOPs are counted as in `cost` (1 per element of an activation or a multiplication), operations as in
    `analysis.operations`. The plain block uses the gate's function, including limits.
    """

    d_model: int
    widths: IsoParams
    plain_elementwise_flops_per_token: int
    gated_elementwise_flops_per_token: int
    plain_operations_per_token: int
    gated_operations_per_token: int


def iso_unit(unit: GatedUnit, d_model: int, d_ff: int, multiple_of: int = 1) -> IsoUnit:
    """Compare a gated unit with a plain block of d_model × d_ff."""
    plain = replace(unit.spec(d_model, d_ff), gated=False)
    widths = iso_params(plain, multiple_of)
    alone = counted(lambda x: value(unit.gate, x, COUNTING))
    return IsoUnit(
        d_model, widths, _flops(plain), _flops(counterpart(plain, multiple_of)),
        alone.total * widths.plain_d_ff, unit.operations().total * widths.gated_d_ff,
    )  # fmt: skip


def _flops(spec: FFNSpec) -> int:
    return cost(steps(spec)).elementwise_flops
