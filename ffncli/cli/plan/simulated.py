"""--simulate: the closed form of what is exchanged next to what a program on simulated ranks exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.block.ranks import Ranks
from ffncli.errors import ExitCode, FFNError
from ffncli.models.model import ranges
from ffncli.show.parts import Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import bytes_text

if TYPE_CHECKING:
    from ffncli.models.counting.plan import Collectives
    from ffncli.run.ranks.collective_check import CollectiveCheck

COLUMNS = ("layers", "split", "tokens each", "all-reduces", "all-to-alls", "simulated")


def records(rows: Sequence[CollectiveCheck]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [{**asdict(row), "same": row.same} for row in rows]


def simulated_parts(rows: Sequence[CollectiveCheck]) -> list[Part]:
    """The closed form, and where the simulation differs what it counts."""
    cells = [(*_labels(row), *_counts(row.counted), "the same" if row.same else "differs") for row in rows]
    parts: list[Part] = [
        Table(COLUMNS, cells, "collectives of one layer and one rank, counted and simulated", labels=3)
    ]
    parts += [Line(_difference(row)) for row in rows if not row.same]
    return [
        *parts,
        Line("tokens each: that a rank enters, in numbers that experts on other ranks share evenly", quiet=True),
    ]


def _labels(row: CollectiveCheck) -> tuple[object, ...]:
    return (f"{row.stack} {ranges(row.layers)}", str(Ranks(row.tp, row.ep)), row.entered)


def _counts(one: Collectives) -> tuple[str, ...]:
    """`2, 16.78 MB`: how many, and the bytes that enter them."""
    pairs = ((one.all_reduces, one.all_reduce_bytes), (one.all_to_alls, one.all_to_all_bytes))
    return tuple(f"{count}, {bytes_text(size)}" if count else "0" for count, size in pairs)


def _difference(row: CollectiveCheck) -> str:
    pairs = zip(vars(row.counted).items(), vars(row.simulated).values(), strict=True)
    wrong = [f"{name} {counted:,} and {simulated:,}" for (name, counted), simulated in pairs if counted != simulated]
    return f"{' '.join(map(str, _labels(row)))}: counted and simulated differ: {'; '.join(wrong)}"


def require_agreement(rows: Sequence[CollectiveCheck]) -> None:
    """Raises FFNError, exit 1, if the two ways differ anywhere."""
    different = [row for row in rows if not row.same]
    if different:
        more = f"; and {len(different) - 1} more" if len(different) > 1 else ""
        raise FFNError(f"--simulate: {_difference(different[0])}{more}", code=ExitCode.FAILED)
