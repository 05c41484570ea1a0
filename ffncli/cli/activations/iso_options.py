"""--iso-params of `ffn activations`: the width at which a gated block is as large as a plain one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from ffncli.block.analysis.gated import UNITS
from ffncli.cli.common.option import option
from ffncli.cli.common.options import Count, Text
from ffncli.cli.common.parsers import positive
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.models.dimensions import whole, width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ffncli.models.counting.iso_params import IsoUnit

_iso = partial(option, "Gated units")
_D_MODEL, _D_FF = "512", "2048"  # the Transformer of 2017


@dataclass(frozen=True)
class IsoOptions:
    """--iso-params, and the plain block that the gated one should equal."""

    iso_params: Annotated[
        bool, _iso("--iso-params", help="Show the width at which a gated block has as many parameters as a plain one.")
    ] = False
    d_model: Annotated[
        Text, _iso("--d-model", metavar="N", help=f"With --iso-params: width of both blocks. [default: {_D_MODEL}]")
    ] = None
    d_ff: Annotated[
        Text, _iso("--d-ff", metavar="N|4x", help=f"With --iso-params: d_ff of the plain block. [default: {_D_FF}]")
    ] = None
    multiple_of: Annotated[
        Count,
        _iso(
            "--multiple-of",
            metavar="N",
            parser=positive("--multiple-of"),
            help="With --iso-params: round the gated d_ff up to a multiple of N.",
        ),
    ] = None

    def iso_units(self, gated: Sequence[str]) -> dict[str, IsoUnit]:
        """The record of each gated unit; empty without --iso-params. Raises FFNError for contradictory options."""
        options = {"--d-model": self.d_model, "--d-ff": self.d_ff, "--multiple-of": self.multiple_of}
        if not self.iso_params:
            for option, value in options.items():
                if value is not None:
                    raise FFNError(f"{option} needs --iso-params", "it compares blocks of equal size")
            return {}
        if not gated:
            raise FFNError("--iso-params needs a gated unit to compare", "name one: " + ", ".join(UNITS))
        from ffncli.models.counting.iso_params import iso_unit

        d_model = whole("--d-model", self.d_model or _D_MODEL)
        d_ff = width("--d-ff", self.d_ff or ("4x" if self.d_model else _D_FF), d_model)
        return {name: iso_unit(UNITS[name], d_model, d_ff, self.multiple_of or 1) for name in gated}
