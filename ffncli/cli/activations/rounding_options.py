"""`ffn activations --rounding`: its option, with those of --against, which share --dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.activations.against_options import AgainstOptions, difference_option
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.run.engine.threads import set_threads

if TYPE_CHECKING:
    from ffncli.run.activations.rounding import RoundingError


@dataclass(frozen=True)
class RoundingOptions(AgainstOptions):
    """--rounding, with the options of --against."""

    rounding: Annotated[
        bool, difference_option("--rounding", help="Show the rounding error of each, computed by torch in --dtype.")
    ] = False

    def check(self, names: Sequence[str], units: Sequence[str], source: str | None = None) -> None:
        """Raises FFNError for an option that is wrong or would have no effect, and for gated units; before computing.

        With --source, --dtype is the dtype that the model runs in.
        """
        super().check(names, units, source)
        if self.rounding and units:
            raise FFNError(
                "--rounding is for functions of one number, not gated units", f"leave out {', '.join(units)}"
            )
        if self.dtype is not None and not self.rounding and self.against is None and source is None:
            raise FFNError("--dtype is the format for --against and --rounding", "add --against NAME or --rounding")

    def errors(self, names: Sequence[str], std: float, device: str = "cpu") -> list[RoundingError]:
        """Torch's rounding errors of `names` (canonical) in the formats, on `device`; none without --rounding."""
        if not self.rounding:
            return []
        set_threads()
        from ffncli.run.activations.rounding import rounding_errors
        from ffncli.run.engine.prepare import device_of

        return rounding_errors(names, [form.name for form in self.formats()], std, device_of(device))
