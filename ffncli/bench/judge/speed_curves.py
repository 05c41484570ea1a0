"""speed_sweeps: how fast each kernel is against its baseline while one size changes. Pure: rows to records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffncli.bench.judge.environment_match import block_of
from ffncli.bench.results.row import ASKED, BLOCK, ResultRow, columns
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError

SIZES = ("tokens", "d_ff", "d_model", "threads")  # what may be swept, the first of equals in front
_NO_SWEEP = "--plot draws speed against a size, and no size has two values here"


@dataclass(frozen=True)
class SpeedPoint:
    """One size. `speed` is the baseline's time over the kernel's in the same rounds, with its 95 % interval."""

    size: int
    speed: float
    speed_low: float | None
    speed_high: float | None
    verdict: str


@dataclass(frozen=True)
class SpeedCurve:
    """One kernel, its points from the smallest size to the largest."""

    kernel: str
    points: tuple[SpeedPoint, ...]


@dataclass(frozen=True)
class SpeedSweep:
    """Cases that differ in `axis`, and in what that decides, as the cache by the number of tokens.

    `block` is what was measured, `where` what tells this sweep from the others of the same rows; empty for the only
    one.
    """

    axis: str
    baseline: str
    block: str
    where: str
    curves: tuple[SpeedCurve, ...]


def speed_sweeps(rows: Sequence[ResultRow]) -> tuple[SpeedSweep, ...]:
    """The sweeps of a result, in its order; none where no size has two values, or nothing was timed."""
    timed = [row for row in rows if row.status == "ok" and row.ratio]
    axis = _axis({name: [getattr(row, name) for row in timed] for name in SIZES})
    if axis is None:
        return ()
    several = () if _are_of_one_grid(timed) else ("run_id",)
    others = (*several, *BLOCK, *ASKED, "baseline")
    varying = [name for name in others if name != axis and not _decided_by(axis, name, timed)]
    if len({row.hardware for row in timed}) > 1:  # no curve is across kinds of machines, even if sizes decide these
        varying.append("hardware")
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in timed:
        if getattr(row, axis) is not None:
            groups.setdefault(tuple(getattr(row, name) for name in varying), []).append(row)
    sweeps = []
    for values, group in groups.items():
        if len({getattr(row, axis) for row in group}) > 1:
            where = ", ".join(_value(name, value) for name, value in zip(varying, values, strict=True))
            sweeps.append(SpeedSweep(axis, group[0].baseline, _block(axis, group), where, tuple(_curves(axis, group))))
    return tuple(sweeps)


def require_sweeps(rows: Sequence[ResultRow]) -> tuple[SpeedSweep, ...]:
    """The sweeps of a stored result. Raises FFNError if it has none."""
    sweeps = speed_sweeps(rows)
    if not sweeps:
        raise FFNError(_NO_SWEEP, "measure one with ffn bench --tokens 1,16,256 --save FILE.csv")
    return sweeps


def _axis(sizes: Mapping[str, Sequence[int | None]]) -> str | None:
    """The size with most values; None where all have one."""
    counts = {name: len({value for value in sizes[name] if value is not None}) for name in SIZES}
    axis = max(SIZES, key=lambda name: counts[name])
    return axis if counts[axis] > 1 else None


def _are_of_one_grid(rows: Sequence[ResultRow]) -> bool:
    """Whether rows of several runs can be parts of one grid: nothing twice, and of one version."""
    shared = columns("environment", one_per_grid=True)
    versions = {tuple(getattr(row, name) for name in shared) for row in rows}
    return len({(row.case, row.kernel) for row in rows}) == len(rows) and len(versions) == 1


def _decided_by(axis: str, name: str, rows: Sequence[ResultRow]) -> bool:
    """Whether rows of one size all have one value of `name`, so that it tells no sweeps apart."""
    values: dict[Any, set[Any]] = {}
    for row in rows:
        values.setdefault(getattr(row, axis), set()).add(getattr(row, name))
    return all(len(some) == 1 for some in values.values())


def _curves(axis: str, rows: Sequence[ResultRow]) -> Iterator[SpeedCurve]:
    """Every kernel's curve, the baseline's first."""
    baseline = rows[0].baseline
    for kernel in sorted(dict.fromkeys(row.kernel for row in rows), key=lambda name: name != baseline):
        points = sorted((_point(axis, row) for row in rows if row.kernel == kernel), key=lambda point: point.size)
        yield SpeedCurve(kernel, tuple(points))


def _point(axis: str, row: ResultRow) -> SpeedPoint:
    """The ratio is of times; its reciprocal, ends exchanged, is of speeds."""
    assert row.ratio is not None  # of a timed row
    low, high = (1 / end if end else None for end in (row.ratio_high, row.ratio_low))
    return SpeedPoint(getattr(row, axis), 1 / row.ratio, low, high, row.verdict)


def _block(axis: str, rows: Sequence[ResultRow]) -> str:
    """What all rows measure; a width that is swept is not named."""
    names = list(dict.fromkeys(block_of(row) for row in rows))
    return names[0] if len(names) == 1 else f"{rows[0].activation}, {axis} from {_ends(axis, rows)}"


def _ends(axis: str, rows: Sequence[ResultRow]) -> str:
    values = [getattr(row, axis) for row in rows]
    return f"{min(values)} to {max(values)}"


def _value(name: str, value: Any) -> str:
    """`bf16`, `32 tokens`, `d_ff 512`."""
    if name in ("tokens", "threads"):
        return f"{value} {name}"
    return str(value) if isinstance(value, str) else f"{name} {value}"
