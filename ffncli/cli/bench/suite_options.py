"""`ffn bench --suite`: its options, and which others it takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.common.option import option
from ffncli.cli.common.options import Text
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError

if TYPE_CHECKING:
    from ffncli.bench.request.suite import PublicSuite

_suite = partial(option, "Public suite")

# What leaves the cases, the weights, the arithmetic and the baseline as they are defined.
_TAKEN = frozenset((
    "--suite", "--kernel", "--device", "--shard", "--processes", "--precision", "--max-time", "--quick", "--load-time",
    "--call-time", "--memory-limit",
))  # fmt: skip


def _names() -> Iterable[str]:
    from ffncli.bench.request.suite import SUITES

    return SUITES


@dataclass(frozen=True)
class SuiteOptions:
    """--suite and --admit."""

    suite: Annotated[
        Text, _suite("--suite", metavar="NAME", values=_names,
                     help="Measure the cases of a public suite, ffn-1: on a CPU 6, with --device cuda 12. Kernels are"
                          " yours to choose; cases, seed and baseline are not."),
    ] = None  # fmt: skip
    admit: Annotated[
        Text, _suite("--admit", metavar="FILE.csv",
                     help="Judge a result of the suite by the conditions of its table, without timing anything. Exit 1"
                          " if one does not hold."),
    ] = None  # fmt: skip

    def public(self) -> PublicSuite | None:
        """The suite, if one is named. Raises FFNError for an unknown one, and for --admit without --suite."""
        if self.suite is None:
            if self.admit is not None:
                raise FFNError("--admit needs --suite", "as in ffn bench --suite ffn-1 --admit FILE.csv")
            return None
        from ffncli.bench.request.suite import public_suite

        return public_suite(self.suite)

    def judged(self) -> Path | None:
        """The file of --admit."""
        return None if self.admit is None else Path(os.path.expanduser(self.admit))


def require_of_suite(options: Mapping[str, str], name: str) -> None:
    """Raises FFNError, naming it, for an option that would change what a suite has fixed."""
    unlike = next((option for option in options if option not in _TAKEN), None)
    if unlike is not None:
        named = "a SOURCE" if unlike == "--source" else unlike
        hint = "a suite's cases, seed and baseline are fixed: leave it out"
        raise FFNError(f"--suite {name} contradicts {named}", hint)


def require_admission_alone(options: Mapping[str, str]) -> None:
    """Raises FFNError for an option next to --admit, which measures nothing."""
    other = next((option for option in options if option != "--suite"), None)
    if other is not None:
        raise FFNError(f"--admit contradicts {'a SOURCE' if other == '--source' else other}", "it measures nothing")
