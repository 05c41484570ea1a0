"""`--expect`: values that a text states, marked right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from ffncli.block.analysis.stated import Checked, Claim, check, claim
from ffncli.errors import ExitCode, FFNError
from ffncli.show.parts import Answer
from ffncli.show.tables import Fixed, Table

_OPTION = "--expect"


@dataclass(frozen=True)
class ExpectOptions:
    """--expect X=Y,..."""

    expect: Annotated[
        list[str] | None,
        typer.Option(_OPTION, metavar="X=Y,...", help="Values that a text states; exit 1 where one is wrong."),
    ] = None

    def claims(self) -> tuple[Claim, ...]:
        """What is stated. Raises FFNError for what is no pair of numbers."""
        return tuple(claim(pair, _OPTION) for text in self.expect or () for pair in text.split(","))

    def checked(self, names: Sequence[str]) -> tuple[Checked, ...]:
        """Each claim beside each activation."""
        claims = self.claims()
        return tuple(one for name in names for one in check(name, claims)) if claims else ()


def with_checked(page: Answer, found: Sequence[Checked]) -> Answer:
    """The answer with the claims as its first table, the wrong ones in bold."""
    if not found:
        return page
    several = len({one.name for one in found}) > 1
    columns = ("name", "x", "stated", "f(x)", "f(x)/x", "verdict")
    rows = [
        (one.name, one.x, one.stated, Fixed(one.value), None if one.ratio is None else Fixed(one.ratio), _verdict(one))
        for one in found
    ]
    wrong = frozenset(i for i, one in enumerate(found) if not one.right)
    start = 0 if several else 1
    title = "As stated" if several else f"{found[0].name} as stated"
    table = Table(columns[start:], [row[start:] for row in rows], title, wrong)
    return replace(page, body={**page.body, "expected": [asdict(one) for one in found]}, parts=[table, *page.parts])


def judge(found: Sequence[Checked]) -> None:
    """Raises FFNError, exit 1, where a claim is wrong; the answer has been shown before."""
    wrong = [one for one in found if not one.right]
    if wrong:
        said = ", ".join(f"{one.name}({one.x:g}) = {one.value:.4f}, not {one.stated:g}" for one in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise FFNError(f"{len(wrong)} of {len(found)} stated values wrong: {said}{more}", code=ExitCode.FAILED)


def _verdict(one: Checked) -> str:
    return "right" if one.right else "wrong"
