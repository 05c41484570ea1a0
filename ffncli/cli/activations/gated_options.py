"""--up: where gated units are evaluated."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.activations.points import MOST, points
from ffncli.cli.common.option import option
from ffncli.cli.common.parsers import joined
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError

if TYPE_CHECKING:
    from collections.abc import Sequence

_gated = partial(option, "Gated units")
DEFAULT_UP = (1.0,)
COMPARED_UP = (1.0, 12.0)


@dataclass(frozen=True)
class GatedOptions:
    """--up: the other input of a gated unit; --at is its gate."""

    up_lists: Annotated[
        list[str] | None,
        _gated(
            "--up",
            metavar="X,...",
            help="Values of the up input; --at gives those of the gate. [default: 1; for differences 1,12]",
        ),
    ] = None

    @property
    def up(self) -> str | None:
        """All values of --up as one comma-separated list."""
        return joined(self.up_lists)

    def ups(self, gated: Sequence[str], at: Sequence[float], compared: bool = False) -> tuple[float, ...]:
        """The values of up, by default more where units are compared with one. FFNError without units, or too many."""
        if self.up is None:
            return COMPARED_UP if compared else DEFAULT_UP
        ups = points(self.up, "--up")
        if not gated:
            raise FFNError("--up needs a gated unit", "plain functions have one input: --at")
        if len(ups) * len(at) > MOST:
            raise FFNError(f"--up: {len(at):,} points at {len(ups):,} values of up are more than {MOST:,}",
                           "choose fewer of either")  # fmt: skip
        return ups
