"""`ffn activations --against`: its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ffncli.block.activations import resolve
from ffncli.cli.common import values
from ffncli.cli.common.option import option
from ffncli.cli.common.options import Text
from ffncli.cli.common.parsers import from_zero, joined
from ffncli.errors import ExitCode, FFNError, shown

if TYPE_CHECKING:
    from ffncli.block.analysis.formats import NumberFormat
    from ffncli.block.analysis.survival import RoundedDifference

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

    def check(self, units: Sequence[str], source: str | None = None) -> None:
        """Raises FFNError for wrong options, options without effect, and gated units, before computing."""
        self.reference()
        if self.dtype is not None and source is None:
            self.formats()
        if self.against is not None and units:
            raise FFNError("--against is for functions of one number, not gated units", f"leave out {', '.join(units)}")
        if self.tolerance is not None and self.against is None:
            raise FFNError("--tolerance is for differences", "name the reference with --against NAME")

    def reference(self) -> str | None:
        """The canonical name of --against. Raises FFNError for a gated unit, which is not a function of one number."""
        if self.against is None:
            return None
        name, gated = resolve(self.against, "--against")
        if gated:
            raise FFNError(
                f"--against {shown(self.against)} is a gated unit, a function of two inputs",
                f"compare with the function of its gate: --against {name}",
            )
        return name

    def formats(self) -> tuple[NumberFormat, ...]:
        """The formats to round to."""
        from ffncli.block.analysis.formats import formats

        return formats(DEFAULT_FORMATS if self.dtype is None else self.dtype)

    def differences(self, names: Sequence[str], std: float) -> tuple[RoundedDifference, ...]:
        """The difference of each of `names` (canonical) from --against, also in the formats; none without it."""
        reference = self.reference()
        if reference is None:
            return ()
        from ffncli.block.analysis.survival import rounded_differences

        return rounded_differences(names, reference, self.formats(), std)

    def judge(self, differences: Sequence[RoundedDifference]) -> None:
        """After the answer: FFNError (exit 1) if --tolerance is exceeded."""
        if self.tolerance is None:
            return
        over = [one.difference for one in differences if one.difference.exceeds(self.tolerance)]
        if over:
            from ffncli.cli.activations.against_page import excess_text

            excess = f"more than --tolerance {self.tolerance:g} from {over[0].against}"
            raise FFNError(f"{excess}: {', '.join(map(excess_text, over))}", code=ExitCode.FAILED)
