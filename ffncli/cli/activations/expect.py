"""`--expect`: values stated in a text, marked right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from decimal import Decimal
from typing import Annotated

from ffncli.block.analysis.facts import Checked, Claim, check, claim
from ffncli.cli.common.option import option
from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError
from ffncli.show.parts import Answer, Fixed, Table

_OPTION = "--expect"


@dataclass(frozen=True)
class ExpectOptions:
    """--expect X=Y,..."""

    expect: Annotated[
        list[str] | None,
        option(
            "Values and curves",
            _OPTION,
            metavar="X=Y,...",
            help="Check that f(X) = Y to the digits given; exit 1 if not.",
        ),
    ] = None

    def claims(self) -> tuple[Claim, ...]:
        """The stated values. Raises FFNError for anything but pairs of numbers."""
        return tuple(claim(pair, _OPTION) for text in self.expect or () for pair in text.split(","))

    def checked(self, names: Sequence[str]) -> tuple[Checked, ...]:
        """Each claim checked for each activation."""
        claims = self.claims()
        return tuple(one for name in names for one in check(name, claims)) if claims else ()


def with_checked(page: Answer, checks: Sequence[Checked]) -> Answer:
    """The answer with the claims as its first table, the wrong ones in bold."""
    if not checks:
        return page
    several = len({one.name for one in checks}) > 1
    columns = ("name", "x", "stated", "f(x)", "f(x)/x", "verdict")
    rows = [
        (one.name, one.x, _Written(one.stated, one.text), _value(one),
         None if one.ratio is None else Fixed(one.ratio), "right" if one.right else "wrong")
        for one in checks
    ]  # fmt: skip
    wrong = frozenset(i for i, one in enumerate(checks) if not one.right)
    start = 0 if several else 1
    title = "As stated" if several else f"{checks[0].name} as stated"
    table = Table(columns[start:], [row[start:] for row in rows], title, wrong)
    expected = [{key: value for key, value in asdict(one).items() if key != "text"} for one in checks]
    return replace(page, body={**page.body, "expected": expected}, parts=[table, *page.parts])


def judge(checks: Sequence[Checked]) -> None:
    """Raises FFNError, exit 1, if a claim is wrong; the answer has already been shown."""
    wrong = [one for one in checks if not one.right]
    if wrong:
        values = ", ".join(f"{one.name}({one.x:g}) = {_value(one)}, not {one.text}" for one in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise FFNError(f"{len(wrong)} of {len(checks)} stated values wrong: {values}{more}", code=ExitCode.FAILED)


class _Written(Fixed):
    """A number that is shown as written."""

    text: str

    def __new__(cls, value: float, text: str) -> _Written:
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text


def _value(one: Checked) -> Fixed:
    """f(x) with at least one decimal more than the stated value."""
    decimals = 1 - int(Decimal(one.text).as_tuple().exponent)
    return _Written(one.value, f"{one.value:.{decimals}f}") if 4 < decimals <= 17 else Fixed(one.value)
