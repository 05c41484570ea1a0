"""Records of options as a command's own options: one field of two records is one option, whose value both get."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from ffncli.cli.common.spread import spread
from ffncli.options.accept import COUNT, TEXTS, Accepts
from ffncli.options.opt import Opt, Options


@dataclass(frozen=True, kw_only=True)
class Question(Options):
    words: Annotated[Sequence[str], Opt(metavar="WORD", repeat=True, accepts=TEXTS, help="Words.")] = ()
    force: Annotated[bool, Opt("--force", help="Force it.")] = False
    rows: Annotated[int, Opt("-r", "--rows", accepts=COUNT, help="Rows.")] = 4
    texts: Annotated[Sequence[str] | None, Opt("--text", accepts=TEXTS, repeat=True, help="Texts.")] = None
    turned: Annotated[bool | None, Opt("--turned/--straight", help="Turn it.")] = None


@dataclass(frozen=True, kw_only=True)
class Show(Options):
    force: Annotated[bool, Opt("--force", help="Not shown: the first declaration is.")] = False
    width: Annotated[str | None, Opt("--width", help="Width.", after="force")] = None
    keep: Annotated[
        bool | Sequence[str], Opt("--keep", help="Keep.", flag=True, accepts=Accepts("names", lambda kept: kept or ()))
    ] = ()


def answers(*words: str) -> list[Any]:
    seen: list[Any] = []

    @spread
    def command(*, question: Question, show: Show) -> None:
        """Do it."""
        seen.extend([question, show])

    app = typer.Typer()
    app.command(add_help_option=False)(command)
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None, result
    return seen


def test_defaults_are_those_of_the_records():
    assert answers() == [Question(), Show()]


def test_what_is_typed_is_what_python_would_pass():
    typed = answers("a", "b", "-r", "7", "--text", "x", "--text", "y", "--straight", "--force")
    assert typed == [Question(words=["a", "b"], force=True, rows=7, texts=["x", "y"], turned=False), Show(force=True)]


def test_a_flag_of_a_shell_may_be_more_in_python():
    assert [show.keep for _, show in (answers(), answers("--keep"))] == [(), True]


def test_an_option_stands_in_the_help_after_the_one_that_it_names():
    @spread
    def command(*, question: Question, show: Show) -> None:
        """Do it."""

    names = [*inspect.signature(command).parameters]
    assert names[:7] == ["words", "rows", "texts", "turned", "force", "width", "keep"]
