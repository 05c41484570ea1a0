"""The cost of a gated unit in a block with as many parameters as a plain one."""

from __future__ import annotations

from dataclasses import replace

from ffncli.block.analysis.gated import GatedUnit
from ffncli.block.analysis.operations import COUNTING, counted
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.value import value
from ffncli.dataclass import dataclass
from ffncli.models.counting.iso_params import IsoParams, counterpart, iso_params


@dataclass(frozen=True)
class IsoUnit:
    """A plain block and the gated one with its parameters; the work of both between their projections, per token.

    FLOPs are `cost`'s, 1 per element of an activation or a product; operations are those of `analysis.operations`. The
    plain block has the gate's function, limits included. Neither has biases.
    """

    d_model: int
    widths: IsoParams
    plain_elementwise_flops_per_token: int
    gated_elementwise_flops_per_token: int
    plain_operations_per_token: int
    gated_operations_per_token: int


def iso_unit(unit: GatedUnit, d_model: int, d_ff: int, multiple_of: int = 1) -> IsoUnit:
    """For a plain block d_model × d_ff. Raises FFNError for invalid sizes."""
    plain = replace(unit.spec(d_model, d_ff), gated=False)
    widths = iso_params(plain, multiple_of)
    alone = counted(lambda x: value(unit.gate, x, COUNTING))
    return IsoUnit(
        d_model, widths, _flops(plain), _flops(counterpart(plain, multiple_of)),
        alone.total * widths.plain_d_ff, unit.operations().total * widths.gated_d_ff,
    )  # fmt: skip


def _flops(spec: FFNSpec) -> int:
    return cost(steps(spec)).elementwise_flops
