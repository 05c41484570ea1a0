"""Options of a command: records of them, a field of two of them that is one option, and no value dropped."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from ffncli.bench.request.grid import Grid
from ffncli.bench.request.options import ResultOptions, certificate_files
from ffncli.cli.common.options import OutputOptions, lines_note, prompt_text
from ffncli.cli.common.spread import spread
from ffncli.cli.main import COMMANDS, _app
from ffncli.errors import FFNError, spelled
from ffncli.models.dimensions import leading_axes
from ffncli.options.accept import COUNT, TEXTS, Accepts
from ffncli.options.opt import Opt, Options, as_typed
from ffncli.run.activations.question import DataQuestion
from ffncli.run.precision.question import PrecisionQuestion
from ffncli.run.verify.question import VerifyQuestion


def test_tokens():
    assert leading_axes(None, None, None) is None
    assert leading_axes(4, None, None) == (4,)
    assert leading_axes(None, 2, 3) == (2, 3)
    assert (leading_axes(None, 2, None), leading_axes(None, None, 3)) == ((2, 1), (1, 3))
    for contradiction in ((1, 1, None), (1, None, 1)):
        with pytest.raises(FFNError, match="contradicts"):
            leading_axes(*contradiction)


@pytest.mark.parametrize(
    ("options", "style"),
    [
        ({}, "table"),
        ({"out": "x"}, "table"),
        ({"out": "x.md"}, "md"),
        ({"out": "x.csv"}, "csv"),
        ({"out": "x.htm"}, "html"),
        ({"out": "x.txt"}, "table"),
        ({"out": "x.JSON"}, "json"),
        ({"out": "x.txt", "csv": True}, "csv"),
        ({"out": "x", "format": "md"}, "md"),
        ({"out": "v1.5/x"}, "table"),
        ({"out": "-", "json": True}, "json"),
        ({"out": "x.json", "format": "json"}, "json"),
        ({"json": True, "format": "json"}, "json"),
    ],
)
def test_the_format(options, style, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1.5").mkdir()
    assert OutputOptions(**options).output().format == style


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "x.npz"}, "-o 'x.npz': cannot write .npz files; use .html, .json, .csv, .md, .txt or no suffix"),
        *(({"out": f"x{end}"}, f"cannot write {end} files") for end in (".svg", ".png", ".log")),
        ({"out": "x.npz", "format": "json"}, "cannot write .npz files"),
        ({"out": "x.json", "csv": True}, "-o 'x.json' contradicts --format csv; a .json file is written as json"),
        ({"out": "x.md", "format": "table"}, "-o 'x.md' contradicts --format table"),
    ],
)
def test_a_file_that_would_not_hold_what_its_name_says(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FFNError, match=re.escape(says)) as error:
        OutputOptions(**options).output()
    assert error.value.code == 2
    assert not list(tmp_path.iterdir())


def test_the_sink_has_what_was_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = OutputOptions(out="~/x", force=True, no_color=True, quiet=True).output()
    assert (found.path, found.force, found.color, found.quiet) == (str(tmp_path / "x"), True, "never", True)


def test_when_there_is_colour():
    assert OutputOptions().output().color == "auto"
    assert [OutputOptions(color=c).output().color for c in ("auto", "always", "never")] == ["auto", "always", "never"]
    assert OutputOptions(color="never", no_color=True).output().color == "never"
    with pytest.raises(FFNError, match="--no-color contradicts --color always; give one"):
        OutputOptions(color="always", no_color=True).output()
    with pytest.raises(FFNError, match="--color: unknown value 'purple'; use auto, always or never"):
        OutputOptions(color="purple").output()


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


def options(name):
    command = typer.main.get_command(_app([name], name))
    return [p for p in command.params if p.param_type_name == "option"]


ONE_VALUE = [
    (name, option.opts[-1], *option.secondary_opts)
    for name in COMMANDS
    for option in options(name)
    if not option.multiple and not (option.is_flag and not option.secondary_opts)
]


def test_there_are_many():
    assert len(ONE_VALUE) > 140
    assert {("trace", "--layer"), ("trace", "--gated", "--plain"), ("bench", "--output")} <= set(ONE_VALUE)


@pytest.mark.parametrize("words", ONE_VALUE, ids=" ".join)
def test_two_values_of_an_option_that_takes_one_are_refused(words, call):
    name, option, *other = words
    twice = (option, *other) if other else (option, "1", f"{option}=2")
    assert call(name, *twice) == (2, "", f"error: {'/'.join(words[1:])} takes one value, got 2\n")


def test_the_same_behind_an_option_of_the_root(call):
    code, _, err = call("--debug", "trace", "4x8", "--seed", "1", "--seed", "2")
    assert (code, err.splitlines()[-1]) == (2, "error: --seed takes one value, got 2")


def test_a_flag_that_says_the_same_twice_drops_nothing(call):
    assert call("params", "gpt2", "--json", "-q", "-q", "--json")[0] == 0


# command, option, two values: repeated, the option says what a list of both says, and not what either says alone
LISTS = [
    (("trace", "4x8:swiglu", "--experts", "4"), "--expert", "0", "1"),
    (("params", "gpt2"), "--tokens", "1", "32"),
    (("params", "gpt2"), "--dtype", "bf16", "q4_0"),
    (("params", "gpt2"), "--ridge", "h100", "b200"),
    (("activations", "gelu"), "--at", "0.5", "1.5"),
    (("activations", "swiglu"), "--up", "0.5", "1.5"),
    (("activations", "gelu", "--rounding"), "--dtype", "bf16", "fp16"),
    (("approximate", "--d-ff", "1", "--seeds", "1", "--steps", "1", "--activation", "relu"), "--target", "sin", "abs"),
    (("approximate", "--d-ff", "1", "--seeds", "1", "--steps", "1"), "--activation", "relu", "gelu"),
    (("approximate", "--activation", "relu", "--seeds", "1", "--steps", "1"), "--d-ff", "1", "2"),
    (("verify", "4x8"), "--check", "module", "tokens"),
    (("export", "gpt2", "--as", "latex"), "--tokens", "1", "32"),
    (("plan", "gpt2"), "--device", "h100", "b200"),
    (("plan", "gpt2"), "--dtype", "bf16", "fp8"),
    (("plan", "gpt2"), "--tokens", "1", "32"),
    (("plan", "gpt2"), "--tensor-parallel", "1", "2"),
    (("plan", "mixtral-8x7b"), "--expert-parallel", "1", "2"),
    (("precision", "16x16:relu"), "--dtype", "fp8", "nvfp4"),
    (("verify", "4x8", "--check", "kernels"), "--kernel", "eager", "packed"),
]
ADDED = {  # each repeated value is one of its own
    ("params", "--sweep"), ("params", "--assert"), ("activations", "--expect"), ("trace", "--explain"),
    ("trace", "--set"), ("trace", "--ablate"), ("trace", "--prompt"), ("experts", "--prompt"),
    ("precision", "--explain"),
}  # fmt: skip
BELOW = {  # asked of the records below, since a run takes long, or in tests of their own
    ("compare", "--history"), ("experts", "--cache"), ("experts", "--slots"),
    ("trace", "--input-ids"), ("trace", "--position"), ("activations", "--input-ids"), ("activations", "--prompt"),
    ("activations", "--position"), ("bench", "--tokens"), ("bench", "--dtype"), ("bench", "--pass"),
    ("bench", "--cache"), ("bench", "--device"), ("bench", "--threads"), ("bench", "--kernel"),
    ("bench", "--certificate"), ("bench", "--routing"), ("bench", "--launcher-option"), ("verify", "--tokens"),
    ("compare", "--prompt"), ("precision", "--input-ids"), ("precision", "--position"), ("precision", "--prompt"),
}  # fmt: skip


def test_every_list_is_asked_for_here():
    every = {(name, option.opts[-1]) for name in COMMANDS for option in options(name) if option.multiple}
    assert every == {(words[0], option) for words, option, *_ in LISTS} | ADDED | BELOW


@pytest.mark.parametrize(("words", "option", "a", "b"), LISTS, ids=lambda v: v if isinstance(v, str) else v[0])
def test_a_list_goes_on_where_its_option_is_repeated(words, option, a, b, call):
    both = call(*words, option, f"{a},{b}", "--csv")
    assert both[0] == 0
    assert call(*words, option, a, option, b, "--csv") == both
    assert both not in (call(*words, option, a, "--csv"), call(*words, option, b, "--csv"))


def test_lists_of_records():
    grid = Grid(
        threads=["1,2", "4"],
        dtype=["fp32", "bf16"],
        passes=["forward", "forward+backward"],
        cache=["warm", "flush"],
        device=["cpu", "cuda"],
        tokens=["1", "16,64"],
    )
    assert (grid.threads, grid.tokens, grid.dtype) == ((1, 2, 4), (1, 16, 64), ("fp32", "bf16"))
    assert (grid.passes, grid.cache, grid.device) == (
        ("forward", "forward+backward"),
        ("warm", "flush"),
        ("cpu", "cuda"),
    )
    named = ResultOptions(certificate=["a.json", "b.json,c.json"]).certificate
    assert certificate_files(named) == ("a.json", "b.json", "c.json")
    assert VerifyQuestion(tokens=["1", "16,64"]).tokens == (1, 16, 64)
    for given in (kind(input_ids=["1,2", "3"], position=["0", "2:3"]) for kind in (DataQuestion, PrecisionQuestion)):
        assert (given.input_ids, given.position) == ((1, 2, 3), "0,2:3")


def test_a_prompt_in_a_file_and_on_standard_input(tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_bytes("Zwölf\nZeilen\r\n".encode())
    assert prompt_text(f"@{tmp_path}/p.txt") == "Zwölf\nZeilen"
    monkeypatch.setattr("sys.stdin", open(tmp_path / "p.txt"))  # noqa: SIM115
    text = prompt_text("-")
    assert text == "Zwölf\nZeilen"
    assert prompt_text("a@b -") == "a@b -"
    assert [spelled(note, as_typed) for note in lines_note("-", text)] == [
        "--prompt -: its 2 lines are read as one prompt"
    ]
    assert lines_note("two\nlines", "two\nlines") == ()
    (tmp_path / "one.txt").write_text("one line\n")
    assert lines_note("@one.txt", prompt_text(f"@{tmp_path}/one.txt")) == ()


def test_a_prompt_that_cannot_be_read(call, tmp_path, monkeypatch):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, why in (("nix", "No such file or directory"), ("bytes", "not UTF-8 text"), ("", "Is a directory")):
        code, out, err = call("trace", "gpt2", "--prompt", f"@{tmp_path}/{name}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: --prompt: cannot read '")
        assert why in err
    monkeypatch.setattr("sys.stdin", None)
    assert call("trace", "gpt2", "--prompt", "-")[2] == "error: --prompt: cannot read standard input: it is closed\n"
