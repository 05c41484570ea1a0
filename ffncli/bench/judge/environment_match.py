"""Find the rows of two results that measure the same case, and whether they were measured on the same machine.

`host` is not compared: containers and CI runners get a new name each time, and two machines of the same model may
differ only in their names. The recorded hardware and software decide; different names only cause a remark, and the
anchor shows whether the machine runs as fast as before.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ffncli.bench.results.row import ASKED, BLOCK_COLUMNS, COMPARED, ResultRow, name_of
from ffncli.errors import FFNError, shown
from ffncli.show.text import plural

_KEY = (*BLOCK_COLUMNS, *ASKED, "kernel")
Key = tuple[object, ...]  # the values of _KEY, and the case's key if these values do not distinguish cases


@dataclass(frozen=True)
class EnvironmentMismatch:
    """An environment field that differs; `rows` is the number of affected rows."""

    field: str
    base: str
    new: str
    rows: int


@dataclass(frozen=True)
class RowPair:
    """One case and kernel: its rows in BASE and in NEW, one per run."""

    case: str
    kernel: str
    base: tuple[ResultRow, ...]
    new: tuple[ResultRow, ...]


@dataclass(frozen=True)
class Matching:
    """The row pairs that both sides have, in BASE's order, and the (case, kernel) pairs that only one side has."""

    pairs: tuple[RowPair, ...]
    only_base: tuple[tuple[str, str], ...]
    only_new: tuple[tuple[str, str], ...]


class NothingInCommon(FFNError):
    """Raised if two results have no case and kernel in common."""


def match(base: Sequence[ResultRow], new: Sequence[ResultRow]) -> Matching:
    """Match rows by block, by the requested setting (tokens, dtype, device, ...), and by kernel.

    A pair holds the rows of all runs of a side. A row that appears twice on one side (its file was given twice, or
    merged with itself) counts once. Raises FFNError if one run has two different results for one case, NothingInCommon
    if the sides have no case and kernel in common.
    """
    unclear = _unclear(base) | _unclear(new)
    left, right = runs_of("BASE", base, unclear), runs_of("NEW", new, unclear)
    pairs = tuple(RowPair(*name_of_case(right[key][0]), left[key], right[key]) for key in left if key in right)
    if not pairs:
        raise NothingInCommon("BASE and NEW have no case and kernel in common", _apart(base, new))
    only_base = tuple(name_of_case(left[key][0]) for key in left if key not in right)
    only_new = tuple(name_of_case(right[key][0]) for key in right if key not in left)
    return Matching(pairs, only_base, only_new)


def mismatches(pairs: Iterable[RowPair]) -> tuple[EnvironmentMismatch, ...]:
    """Return the environment fields that differ; a field recorded on only one side also differs."""
    counts: dict[tuple[str, str, str], int] = {}
    for pair in pairs:
        for field in COMPARED:
            values = ([getattr(row, field) for row in rows] for rows in (pair.base, pair.new))
            sides = [sorted({f"{v:g}" if isinstance(v, float) else str(v or "") for v in side}) for side in values]
            if len({*sides[0], *sides[1]}) > 1:
                texts = [" and ".join(value or "unknown" for value in side) for side in sides]
                counts[field, texts[0], texts[1]] = counts.get((field, texts[0], texts[1]), 0) + 1
    return tuple(EnvironmentMismatch(*key, rows) for key, rows in counts.items())


def environment(pairs: Iterable[RowPair]) -> str:
    """Return one line with the machine and versions that all rows of both sides share, such as `AMD EPYC 7B13, torch
    2.13.0, Python 3.12.1`."""
    rows = [row for pair in pairs for row in (*pair.base, *pair.new)]
    shared = {field: values.pop() for field in COMPARED if len(values := {getattr(row, field) for row in rows}) == 1}
    device = shared.get("device_name") or shared.get("cpu")
    named = (("torch", "torch"), ("python", "Python"), ("numpy", "numpy"), ("driver", "driver"))
    words = [f"{name} {shared[field]}" for field, name in named if shared.get(field)]
    return ", ".join(filter(None, (device, *words)))


def hosts(pairs: Iterable[RowPair]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the machines in BASE and in NEW, over the cases that were measured on different machines."""
    sides: tuple[set[str], set[str]] = (set(), set())
    for pair in pairs:
        base, new = ({row.host for row in rows if row.host} for rows in (pair.base, pair.new))
        if base and new and base != new:
            sides[0].update(base)
            sides[1].update(new)
    return frozenset(sides[0]), frozenset(sides[1])


def _key(row: ResultRow) -> Key:
    return tuple(getattr(row, field) for field in _KEY)


def _unclear(rows: Sequence[ResultRow]) -> set[Key]:
    """Return the keys that stand for several cases in one run, because their blocks differ in a property that has no
    column."""
    cases: dict[tuple[str, Key], set[str]] = {}
    for row in rows:
        cases.setdefault((row.run_id, _key(row)), set()).add(row.case)
    return {key for (_, key), texts in cases.items() if len(texts) > 1}


def runs_of(
    side: str, rows: Sequence[ResultRow], unclear: Collection[Key] | None = None
) -> Mapping[Key, tuple[ResultRow, ...]]:
    """Group rows by case and kernel, with a row per run. Raises FFNError, which names the `side`, if a run has two
    different results for one of them. `unclear` are the keys that need the case's name (default: those of `rows`)."""
    unclear = _unclear(rows) if unclear is None else unclear
    groups: dict[Key, dict[str, ResultRow]] = {}
    for row in rows:
        key = _key(row)
        key += (row.case,) if key in unclear else ()
        runs = groups.setdefault(key, {})
        if runs.setdefault(row.run_id, row) != row:
            case, kernel = name_of_case(row)
            raise FFNError(
                f"{side} has {shown(kernel)} twice with different figures: {shown(case, 120)}, run {shown(row.run_id)}",
                "leave one of them out",
            )
    return {key: tuple(runs.values()) for key, runs in groups.items()}


def name_of_case(row: ResultRow) -> tuple[str, str]:
    """Return the case in words, and the kernel."""
    threads = "" if row.threads is None else f"{row.threads} {plural('thread', row.threads)}"
    tokens = "" if row.tokens is None else f"{row.tokens} tokens"
    words = (row.source or block_of(row), tokens, row.dtype, row.passes, row.cache, row.device, threads)
    return row.case or ", ".join(word for word in words if word), row.kernel


def block_of(row: ResultRow) -> str:
    """Return the block as a user types it, as in `512x2048:gelu`."""
    return f"{row.d_model}x{row.d_ff}:{row.activation}" + (", gated" if row.gated else "")


def _apart(base: Sequence[ResultRow], new: Sequence[ResultRow]) -> str:
    """Return the reason why no row of one side matches a row of the other: the fields without a common value."""
    parts = []
    for field in _KEY:
        sides = [list(dict.fromkeys(str(getattr(row, field)) for row in rows)) for rows in (base, new)]
        if not set(sides[0]) & set(sides[1]):
            few = [", ".join(side[:3]) + (", ..." if len(side) > 3 else "") for side in sides]
            parts.append(f"{name_of(field)}: {few[0] or 'unknown'} in BASE, {few[1] or 'unknown'} in NEW")
    return "; ".join(parts) or f"rows are matched by block, {', '.join(map(name_of, ASKED))} and kernel"
