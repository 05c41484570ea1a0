"""`ffn activations --rounding`: its options, with those of --against, which share --dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ffncli.cli.against_options import AgainstOptions, option
from ffncli.cli.options import Text
from ffncli.errors import FFNError
from ffncli.show.parts import Answer


@dataclass(frozen=True)
class RoundingOptions(AgainstOptions):
    """--rounding and where it is computed."""

    rounding: Annotated[bool, option("--rounding", help="The error of each when torch computes it in --dtype.")] = False
    device: Annotated[Text, option("--device", metavar="WHERE", help="--rounding on cpu (default), cuda, cuda:1.")] = (
        None
    )

    def check(self, units: Sequence[str]) -> None:
        """Raises FFNError for an option that is wrong or would do nothing, and for gated units; before computing."""
        super().check(units)
        if self.rounding and units:
            raise FFNError(
                "--rounding is for functions of one number, not gated units", f"leave out {', '.join(units)}"
            )
        if self.device is not None and not self.rounding:
            raise FFNError("--device says where --rounding computes", "add --rounding")
        if self.dtype is not None and not self.rounding and self.against is None:
            raise FFNError("--dtype is what --against and --rounding round to", "add --against NAME or --rounding")

    def extended(self, page: Answer, names: Sequence[str], std: float) -> Answer:
        """`page` with the differences of `names` (canonical, in the order of its rows) and their rounding errors."""
        page = super().extended(page, names, std)
        if not self.rounding:
            return page
        from ffncli.cli.rounding_page import with_rounding
        from ffncli.run.activation_rounding import rounding_errors
        from ffncli.run.prepare import device_of

        device = device_of(self.device or "cpu")
        return with_rounding(page, rounding_errors(names, [form.name for form in self.formats()], std, device), std)
