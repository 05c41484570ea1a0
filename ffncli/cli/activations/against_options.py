"""`ffn activations --against`: its options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ffncli.block.activations import gated_name, resolve
from ffncli.cli.common import values
from ffncli.cli.common.option import option
from ffncli.cli.common.options import Text
from ffncli.cli.common.parsers import from_zero, joined
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError, shown

if TYPE_CHECKING:
    from ffncli.block.analysis.difference import RoundedDifference
    from ffncli.block.analysis.gated import GatedDifference
    from ffncli.block.analysis.rounding import NumberFormat

difference_option = partial(option, "Differences and rounding")
DEFAULT_FORMATS = "bf16,fp16"


@dataclass(frozen=True)
class AgainstOptions:
    """--against, its --tolerance, and the formats of --dtype."""

    against: Annotated[
        Text,
        difference_option("--against", metavar="NAME", daily=True, values=values.activations,
                          help="Show the largest difference from NAME, and where it is."),
    ] = None  # fmt: skip
    tolerance: Annotated[
        float | None,
        difference_option("--tolerance", metavar="X", parser=from_zero("--tolerance"),
                          help="Exit 1 if a difference from --against is larger."),
    ] = None  # fmt: skip
    dtypes: Annotated[
        list[str] | None,
        difference_option("--dtype", metavar="NAME,...", daily=True, values=values.rounding_formats,
                          help="Formats to round to: bf16, fp16 or fp32; with --source, to compute in."
                               f" [default: {DEFAULT_FORMATS}]"),
    ] = None  # fmt: skip

    @property
    def dtype(self) -> str | None:
        """All values of --dtype as one comma-separated list."""
        return joined(self.dtypes)

    def check(self, names: Sequence[str], units: Sequence[str], source: str | None = None) -> None:
        """Raises FFNError for wrong options, options without effect, and a reference of another kind, before computing.

        `names` are the functions of one number that are shown, `units` the gated units.
        """
        self.reference()
        if self.dtype is not None and source is None:
            self.formats()
        if self.unit is not None and names:
            raise FFNError(
                f"--against {shown(self.against)} is a gated unit, a function of two inputs",
                f"name gated units alone, or compare with the function of its gate: --against {self._function()}",
            )
        if self.unit is not None and self.dtype is not None:
            raise FFNError("--dtype is for functions of one number, not gated units", "leave it out")
        if self.against is not None and self.unit is None and units:
            raise FFNError(
                f"--against {shown(self.against)} is a function of one number, unlike gated units",
                f"leave out {', '.join(units)}, or compare them with a gated unit: --against swiglu",
            )
        if self.tolerance is not None and self.against is None:
            raise FFNError("--tolerance is for differences", "name the reference with --against NAME")

    @property
    def unit(self) -> str | None:
        """The name of --against if it is a gated unit."""
        return gated_name(self.against or "")

    def _function(self) -> str:
        return resolve(self.against or "", "--against")[0]

    def reference(self) -> str | None:
        """The canonical name of --against where it is a function of one number. Raises FFNError for an unknown name."""
        function = None if self.against is None else self._function()
        return None if self.unit else function

    def formats(self) -> tuple[NumberFormat, ...]:
        """The formats to round to."""
        from ffncli.block.analysis.rounding import formats

        return formats(DEFAULT_FORMATS if self.dtype is None else self.dtype)

    def differences(self, names: Sequence[str], std: float) -> tuple[RoundedDifference, ...]:
        """The difference of each of `names` (canonical) from --against, also in the formats; none without it."""
        reference = self.reference()
        if reference is None:
            return ()
        from ffncli.block.analysis.difference import rounded_differences

        return rounded_differences(names, reference, self.formats(), std)

    def gated_differences(self, units: Sequence[str], std: float) -> tuple[GatedDifference, ...]:
        """The difference of each of `units` from the gated unit of --against; none without one."""
        if self.unit is None:
            return ()
        from ffncli.block.analysis.gated import gated_difference

        return tuple(gated_difference(name, self.unit, std) for name in units)

    def judge(self, differences: Sequence[RoundedDifference], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        """After the answer: FFNError (exit 1) if --tolerance is exceeded; by a gated unit, at a point that is shown."""
        if self.tolerance is None:
            return
        beyond = {row["name"]: most for row in rows if (most := _largest(row)) > self.tolerance} if self.unit else {}
        if beyond:
            texts = ", ".join(f"{name} by {most:.3g}" for name, most in beyond.items())
            raise FFNError(f"more than --tolerance {self.tolerance:g} from {self.unit}: {texts}", code=ExitCode.FAILED)
        over = [one.difference for one in differences if one.difference.exceeds(self.tolerance)]
        if over:
            from ffncli.cli.activations.against_page import excess_text

            excess = f"more than --tolerance {self.tolerance:g} from {over[0].against}"
            raise FFNError(f"{excess}: {', '.join(map(excess_text, over))}", code=ExitCode.FAILED)


def _largest(row: Mapping[str, Any]) -> float:
    """The largest |difference| of a gated unit's row; infinite if one is not a number."""
    sizes = [abs(value["difference"]) for value in row["values"]]
    return max((size if size == size else math.inf for size in sizes), default=0.0)
