"""Completion: what each shell is answered, in bash through the script that --show-completion prints."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ffncli.block.activations import GATED, TABLE
from ffncli.block.analysis.gated import UNITS
from ffncli.block.analysis.rounding import FORMATS
from ffncli.block.dtypes import STORED
from ffncli.block.dtypes import TABLE as DTYPES
from ffncli.cli.main import COMMANDS
from ffncli.kernels import BUILT_IN
from ffncli.models import catalog
from ffncli.models.examples import EXAMPLES
from ffncli.run.approximate.question import TARGETS
from ffncli.run.verify.question import CHECK_STATEMENTS
from tests.cli.common.test_help import options_of
from tests.cli.test_main import HEAVY, MAIN, PROBE

MODELS = {*catalog.names()}


@pytest.fixture
def complete(call, monkeypatch):
    """Asks as a shell does, the cursor at the line's end: (exit code, stdout)."""

    def ask(shell: str, line: str, **env: str) -> tuple[int, str]:
        words = line.split() + [""] * line.endswith(" ")
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": line, **env}
        for name, value in {"_FFN_COMPLETE": f"complete_{shell}", **asked}.items():
            monkeypatch.setenv(name, value)
        code, out, err = call()
        assert err == ""
        return code, out

    return ask


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ffn ", {*COMMANDS}),
        ("ffn par", {"params"}),
        ("ffn mod", {"models"}),
        ("ffn nope ", set()),
        ("ffn help ", {*COMMANDS}),
        ("ffn --ver", {"--version"}),
        ("ffn --debug tr", {"trace"}),
        ("ffn params --d-", {"--d-model", "--d-ff"}),
        ("ffn trace --no-b", {"--no-bias"}),
        ("ffn trace ", MODELS),
        ("ffn params llama-2", {name for name in MODELS if name.startswith("llama-2")}),
        ("ffn params gpt2 llama-2", {name for name in MODELS if name.startswith("llama-2")}),
        ("ffn bench ", MODELS),
        ("ffn verify --against ", MODELS),
        ("ffn activations --source ", MODELS),
        ("ffn activations ", {*TABLE, *UNITS}),
        ("ffn trace --activation ge", {name for name in (*TABLE, *GATED) if name.startswith("ge")}),
        ("ffn bench -k ", {*BUILT_IN, "auto"}),
        ("ffn bench --kernel pa", {"packed"}),
        ("ffn bench --kernel eager,", {f"eager,{name}" for name in (*BUILT_IN, "auto") if name != "eager"}),
        ("ffn bench --kernel=eager,pa", {"--kernel=eager,packed"}),
        ("ffn verify --check ", {*CHECK_STATEMENTS}),
        ("ffn trace --example ", {*EXAMPLES}),
        ("ffn approximate --target ", {*TARGETS}),
        ("ffn trace --dtype ", {row.name for row in DTYPES}),
        ("ffn params --dtype ", {row.name for row in (*DTYPES, *STORED)}),
        ("ffn activations --dtype ", {*FORMATS}),
        ("ffn trace --format ", {"table", "json", "csv", "md", "html"}),
        ("ffn trace --color a", {"auto", "always"}),
        ("ffn trace --norm ", {"none", "layernorm", "rmsnorm"}),
        ("ffn bench --pass forward,", {"forward,forward+backward"}),
        ("ffn trace --tokens ", set()),
        ("ffn trace --save ", set()),
        ("ffn trace ./my", set()),
        ("ffn trace --explain 'up[0", set()),
        ("ffn doctor ", set()),
    ],
)
def test_bash(line, words, complete):
    code, out = complete("bash", line)
    assert (code, set(out.split())) == (0, words)


def test_bash_breaks_words_at_the_equals_sign(complete):
    assert complete("bash", "", COMP_WORDS="ffn trace --color = al", COMP_CWORD="4") == (0, "always\n")
    assert complete("bash", "", COMP_WORDS="ffn trace --color =", COMP_CWORD="3")[1].split() == [
        "auto",
        "always",
        "never",
    ]


def test_bash_completes_where_the_cursor_is(complete):
    assert complete("bash", "", COMP_WORDS="ffn par --json", COMP_CWORD="1") == (0, "params\n")


def test_zsh_gets_words_with_what_they_mean(complete):
    code, out = complete("zsh", "ffn params --d-")
    assert code == 0
    assert out.startswith('_arguments \'*: :(("--d-model":"Width of the model.')
    assert '"--d-ff":"Width of one projection\\\\: a number' in out  # a colon is escaped
    assert "''" in complete("zsh", "ffn params --assert".replace("--assert", "--ass"))[1]  # and a quote is doubled
    assert complete("zsh", "ffn trace gpt2-x") == (0, "_arguments '*: :((\"gpt2-xl\"))'\n")
    assert complete("zsh", "ffn trace ./my") == (0, "_files\n")


def test_fish_asks_whether_there_are_words_and_then_for_them(complete):
    assert complete("fish", "ffn trace ./my", _TYPER_COMPLETE_FISH_ACTION="is-args") == (1, "")
    assert complete("fish", "ffn trace gpt2-x", _TYPER_COMPLETE_FISH_ACTION="is-args") == (0, "")
    assert complete("fish", "ffn trace gpt2-x", _TYPER_COMPLETE_FISH_ACTION="get-args") == (0, "gpt2-xl\n")
    assert complete("fish", "ffn mod") == (0, f"models\t{COMMANDS['models'][1]}\n")


def test_powershell_says_apart_which_word_it_completes(complete):
    typed = {"_TYPER_COMPLETE_WORD_TO_COMPLETE": "gpt2-x"}
    assert complete("powershell", "ffn trace gpt2-x", **typed) == (0, "gpt2-xl::: \n")
    code, out = complete("pwsh", "ffn trace --example", _TYPER_COMPLETE_WORD_TO_COMPLETE="")
    assert (code, out.split(":::")[0]) == (0, next(iter(EXAMPLES)))
    assert complete("pwsh", "ffn mod", _TYPER_COMPLETE_WORD_TO_COMPLETE="mod")[1].startswith("models:::List the known")


def test_every_option_of_names_completes(complete):
    """Where the metavar is NAME there are values to choose from, but for a device."""
    for name in COMMANDS:
        for option in options_of(name):
            if (option.metavar or "").startswith("NAME") and option.opts[-1] not in (
                "--device",
                "--explain",
                "--sweep",
            ):
                assert complete("bash", f"ffn {name} {option.opts[-1]} ")[1], (name, option.opts)


def probe(line: str) -> set[str]:
    env = {**os.environ, "_FFN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    done = subprocess.run([sys.executable, "-c", PROBE, MAIN], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("_arguments")
    return {*json.loads(done.stderr.splitlines()[-1])}


@pytest.mark.parametrize("line", ["ffn t", "ffn trace gp", "ffn bench -k e", "ffn verify --check m", "ffn trace --d"])
def test_completion_loads_no_tensor_library_and_no_rich(line):
    assert not probe(line) & {*HEAVY, "rich"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_a_real_bash(tmp_path: Path, ffn):
    """The script is loaded as a user's shell loads it, and its function called as on Tab."""
    script = ffn(_FFN_COMPLETE="source_bash").stdout
    (tmp_path / "ffn.sh").write_text(script)
    (tmp_path / "ffn").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ffncli "$@"\n')
    (tmp_path / "ffn").chmod(0o755)
    tab = """
    source ./ffn.sh
    tab() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _ffn_completion ffn; echo "${COMPREPLY[*]}"; }
    complete -p ffn
    tab ffn par
    tab ffn trace gpt2-x
    tab ffn bench -k eager,conv
    tab ffn trace --color = alw
    tab ffn verify --check ''
    tab ffn trace ./my
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", tab], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    first, *others = done.stdout.splitlines()
    assert first == "complete -o default -F _ffn_completion ffn"
    assert others == ["params", "gpt2-xl", "eager,conv1x1", "always", " ".join(CHECK_STATEMENTS), ""]
