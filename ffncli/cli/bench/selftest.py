"""`ffn bench --selftest`: its run and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from ffncli.bench.request.grid import BenchRequest
from ffncli.errors import ExitCode, FFNError
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part, Table

if TYPE_CHECKING:
    from ffncli.bench.selftest import KnownDifference, SelfTest

_WORDS = {"again": "the same code again", "slowed": "the same code, made 5 % slower"}


def show_selftest(request: BenchRequest, output: Output) -> None:
    """Measure known differences and show whether the gate finds them; exit 1 if it does not."""
    from ffncli.bench.selftest import selftest
    from ffncli.cli.bench.progress import unit_progress

    with unit_progress(request, 0, output) as shown:
        outcome = selftest(request, shown)
    output.show(_answer(outcome))
    if outcome.failed:
        what = "; ".join(map(_verdict, outcome.failed))
        why = "; ".join(outcome.reasons) or "the machine may be busy"
        raise FFNError(f"selftest failed: {what}", f"{why}: see ffn doctor", ExitCode.FAILED)


def _answer(outcome: SelfTest) -> Answer:
    parts: list[Part] = [Heading("selftest", f"--fail-if-slower {outcome.allowed:.0%}, on known differences")]
    for case in dict.fromkeys(row.case for row in outcome.rows):
        parts += [Line(case, quiet=True)]
        parts += [Line(_verdict(row)) for row in outcome.rows if row.case == case]
    parts.append(Heading("failed" if outcome.failed else "passed"))
    body = {
        "selftest": {"allowed": outcome.allowed, "passed": not outcome.failed},
        "rows": [*map(asdict, outcome.rows)],
    }
    return Answer("bench", body, _table(outcome.rows), parts)


def _table(rows: Sequence[KnownDifference]) -> Table:
    from ffncli.bench.selftest import KnownDifference

    names = tuple(field.name for field in fields(KnownDifference))
    return Table(names, [tuple(getattr(row, name) for name in names) for row in rows])


def _verdict(row: KnownDifference) -> str:
    """`the same code, made 5 % slower: ratio 1.051 [1.049, 1.053], flagged, as it should be`."""
    result = ("flagged" if row.flagged else "not flagged") + (", as it should be" if row.passed else ", which is wrong")
    return f"{_WORDS[row.kernel]}: ratio {row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}], {result}"
