"""Command lines that nobody would type: no text, and no options of any value, give a traceback."""

import contextlib
import io
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.oracles.checkpoints import harmful

pytestmark = pytest.mark.fuzz

HUGE = "1" + "0" * 30


def _run(words: list[str]) -> tuple[int, str, str]:
    """The command line in this process, with streams of its own."""
    from ffncli.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main(words)
    return int(stop.value.code or 0), out.getvalue(), err.getvalue()


SMALL = ["0", "1", "2", "3", "-1", "4x", "0.5", "1e3", "²", "nan", HUGE, "9" * 5000, ""]
COUNTED = "--d-model --d-ff --experts --top-k --shared-experts --tokens --batch --seq-len --seed".split()
COUNTED += ["--vocab", "--sample-top-k", "--sample-top-p"]
COUNTED += ["--tp", "--multiple-of", "--ridge", "--threads", "--digits", "--show", "--expert", "--layer", "--dropout"]
FLAGS = "--iso-params --all --plain --gated --bias --no-bias --residual --train --json --csv -q --help --".split()
OPTIONS = {
    **dict.fromkeys(COUNTED, SMALL), **{flag: [] for flag in FLAGS},
    "--activation": ["gelu", "swiglu", "gleu"], "--norm": ["none", "rmsnorm", "rms"], "--norm-position": ["pre", "x"],
    "--format": ["json", "csv", "md", "yaml"], "--dtype": ["fp64", "bf16", "int4", "int9"],
    "--device": ["cpu", "cuda:99"], "--example": ["notebook", "bert", "notbook", ""],
    "--input": ["arange", "-", "1,2,3,4", "[[1],[2,3]]", "nan,inf,-inf,0", "none.npy", "[" * 5000], "-o": ["-"],
    "--sweep": ["d_ff=1x,2x", "d_model=8:16:4", "tokens=1,2", "d_ff", "zz=1", "d_ff=1:99999999"],
    "--assert": ["d_ff == 8", "d_ff < 0", "gated == true", "zz == 1", "d_ff"],
}  # fmt: skip
SOURCES = ["0x0:", "4x4x", "gpt2x", "t5", ".", "..", "/", "-", "~", "~x/y", "hf://a", "none.json", "none/x.safetensors"]
HOSTILE = [
    "\0",
    "\udcff",
    "\x1b[31m[/x]",
    "a\nb",
    "%s%n",
    "$(id)",
    "'",
    '"',
    "`",
    "\\",
    "=",
    "--=",
    "--d-model=",
    "\u202e",
]
TEXT = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(HOSTILE)
GOOD = st.sampled_from(["4x8", "4x8:swiglu", "2x4:relu"])


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command, a source that is mostly good, and up to two options with values of their own or hostile ones."""
    words = [draw(st.sampled_from(["params", "trace", "trace"]))]
    words.append(draw(GOOD if draw(st.integers(0, 3)) else st.sampled_from(SOURCES) | TEXT))
    for option in draw(st.lists(st.sampled_from(list(OPTIONS)), max_size=2)):
        values = OPTIONS[option]
        hostile = option != "-o" and draw(st.integers(0, 3)) == 0
        words += [option, draw(TEXT if hostile else st.sampled_from(values))] if values else [option]
    return draw(st.permutations(words)) if draw(st.integers(0, 9)) == 9 else words


def _assert_survives(words: list[str]) -> None:
    """Not run: what writes files, shows tracebacks by design, or installs itself."""
    if any(w != "-o" and w.startswith(("--debug", "--install", "--show-c", "--o", "-o")) for w in words):
        return
    threads, before = torch.get_num_threads(), sys.stdin
    sys.stdin = io.StringIO("1,2,3,4")
    try:
        code, out, err = _run(words)
    finally:
        sys.stdin = before
        torch.set_num_threads(threads)
    assert code in ((0, 1, 2, 3) if "--assert" in words else (0, 2, 3)), err
    assert "Traceback" not in err
    assert not out or code == 0 or "--assert" in words
    assert err.startswith("Usage: ") or all(line.startswith(("error: ", "note: ")) for line in err.splitlines()), err
    assert harmful(out + err) == []


@given(st.lists(TEXT, max_size=4) | st.tuples(st.sampled_from(["params", "trace", "models"]), TEXT).map(list))
@example([])
@settings(max_examples=300)
def test_no_text_gives_a_traceback(words: list[str]):
    _assert_survives(words)


@given(command_lines())
@example(["trace", "4x8", "--expert", "²"])
@settings(max_examples=1000)
def test_no_options_give_a_traceback(words: list[str]):
    _assert_survives(words)
