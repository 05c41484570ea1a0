"""The two helps of every command: what stands in them, in which order, and that their examples run."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ffncli.bench.doctor import noise
from ffncli.cli.main import COMMANDS, load
from ffncli.errors import ExitCode
from ffncli.options.opt import COMPUTE, HELP, INPUT, OUTPUT, SOURCE
from ffncli.run.quantize.quantized import quantize
from tests.bench.stored import table, write
from tests.cli.test_doctor import QUIET
from tests.cli.test_main import loaded_by
from tests.oracles import edited
from tests.oracles.prompted import made
from tests.show.test_output import ESCAPE, in_terminal

NAMES = [*COMMANDS]
FIRST, LAST = [SOURCE, INPUT], [COMPUTE, OUTPUT, HELP]
SHORT = {"-n": "--tokens", "-l": "--layer", "-k": "--kernel", "-p": "--prompt", "-o": "--output", "-q": "--quiet",
         "-v": "--verbose"}  # fmt: skip


def command_of(name: str):
    return load(name or None)


def options_of(name: str) -> list:
    return [param for param in command_of(name).params if param.param_type_name == "option"]


def titles(text: str) -> list[str]:
    return re.findall(r"^(\S.*):$", text, re.M)


def section(text: str, title: str) -> list[str]:
    return text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines()


def spellings(text: str, title: str) -> list[set[str]]:
    """What each row of a section may be typed as; a row's names end before two spaces."""
    found = []
    for line in section(text, title):
        names = re.fullmatch(r"  (?:    )?(-.*?)(?:  .*)?", line)
        if names:
            words = re.findall(r"(?<![\w\]-])--?[\w\[][\w\]-]*", names[1])
            found.append({w.replace("[no-]", on) for w in words for on in (("", "no-") if "[no-]" in w else ("",))})
    return found


def examples(name: str) -> list[str]:
    return [line.partition("#")[0].strip() for line in section(f"\n{command_of(name).help}", "Examples")]


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_help_has_every_option_once_in_its_group(stdout_of, name):
    text = stdout_of(name, "--help")
    expected: dict[str, list[set[str]]] = {}
    for option in options_of(name):
        expected.setdefault(str(option.rich_help_panel), []).append({*option.opts, *option.secondary_opts})
    groups = [title for title in titles(text) if title not in ("Arguments", "Examples")]
    assert {title: spellings(text, title) for title in groups} == expected


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_one_order_everywhere_and_help_is_last(call, name):
    text = call(name, "--help")[1]
    groups = [title for title in titles(text) if title not in ("Arguments", "Examples")]
    assert groups[-1] == HELP
    assert [g for g in groups if g in FIRST] == groups[: len([g for g in groups if g in FIRST])]
    ends = [g for g in groups if g in LAST]
    assert groups[-len(ends) :] == ends == [g for g in LAST if g in groups]
    assert [g for g in groups if g in FIRST] == [g for g in FIRST if g in groups]
    assert section(text, HELP)[-1].split()[0] == "--help"


@pytest.mark.parametrize("name", NAMES)
def test_the_short_help_has_four_examples_and_the_options_of_daily_use(call, stdout_of, name):
    text = stdout_of(name, "-h")
    assert titles(text)[0] == "Examples"
    assert len(section(text, "Examples")) == 4
    whole = " ".join(call(name, "--help")[1].split())
    options = section(text, "Options")
    begun = [line for line in options if line[:8].strip()]
    assert 3 <= len(begun) <= 14
    assert options[-1].split()[0] == "--help"
    for line in begun:
        assert line.split("  ")[-1].strip()[:20] in whole
    if len(options_of(name)) > 16:
        assert len(text.splitlines()) < 0.7 * len(call(name, "--help")[1].splitlines())


@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("form", ["-h", "--help"])
def test_it_fits_80_columns_and_a_pipe_gets_100(call, name, form, monkeypatch):
    arguments = [name, form] if name else [form]
    for columns, most in (("80", 80), ("140", 100), (None, 100)):
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
        text = call(*arguments)[1]
        assert max(map(len, text.splitlines())) <= most
        assert "\x1b" not in text
        assert not re.search(r"\[default:$", text, re.M)


@pytest.mark.parametrize("name", NAMES)
def test_what_to_type_is_said(call, name):
    """A metavar for every option with a value, in plain words; a default once."""
    text = call(name, "--help")[1]
    assert "<" not in re.sub(r"<utc>-<host>", "", text)
    for option in options_of(name):
        assert option.help, option.opts
        assert option.help[0].isupper() or option.opts[0] in ("--input", "--format", "--pass", "--allocator"), (
            option.help
        )
        assert option.help.endswith((".", "]", "stdin.")), option.help
        if not option.is_flag:
            assert option.metavar, option.opts
            assert ("TEXT" in option.metavar) == ("--prompt" in option.opts)


def test_an_option_has_one_short_form_everywhere():
    for name in NAMES:
        for option in options_of(name):
            short = [spelling for spelling in option.opts if len(spelling) == 2]
            long = [spelling for spelling in option.opts if spelling in SHORT.values()]
            assert [SHORT.get(s, s) for s in short] == long or short == ["-h"]


def test_a_terminal_gets_the_same_text_in_colour():
    text = in_terminal(90, "params", "--help")
    assert "\x1b[1mInput:\x1b[0m" in text
    assert "\x1b[36m-n\x1b[0m, \x1b[36m--tokens\x1b[0m N,..." in text
    assert ESCAPE.sub("", text) == in_terminal(90, "params", "--help", "--no-color", NO_COLOR="1")
    assert max(map(len, ESCAPE.sub("", text).splitlines())) <= 90


@pytest.mark.parametrize("command", ["-h", "--help", "trace -h", "bench --help"])
def test_help_needs_no_rich(command):
    assert "rich" not in loaded_by(command)


def test_help_is_a_command_too(call):
    assert call("help", "trace") == call("trace", "--help")
    assert call("--debug", "trace", "-h")[1] == call("trace", "-h")[1]


def test_the_help_of_ffn_itself(call):
    short, whole = call("-h")[1], call("--help")[1]
    assert short != whole
    for text in (short, whole):
        assert [line.split()[0] for line in section(text, "Commands")] == NAMES
    assert "--install-completion" in whole
    assert "--install-completion" not in short
    code, out, err = call()
    assert (code, out, err) == (2, "", short)


def test_a_required_argument_is_not_needed_for_help(call):
    assert call("compare", "-h")[1].startswith("Usage: ffn compare [BASE] [NEW] [OPTIONS]\n")
    assert call("compare", "a.csv", "--nope", "-h")[0] == ExitCode.USAGE


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """A directory with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made("llama").path, tmp_path / "my-model")
    shutil.copytree(made("qwen3_moe").path, tmp_path / "my-mixture")
    (tmp_path / "texts.txt").write_text("the cat sat\non the mat\n")
    (tmp_path / "mine.py").write_text(
        "import torch.nn.functional as F\n\n"
        "def mlp(x, gate, up, down):\n    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)\n"
    )
    for name in ("main", "branch", "run", "before", "after"):
        write(tmp_path / f"{name}.csv", table([1.0] * 6, name))
    for at, row in enumerate(table([1.0] * 2, "part"), 1):
        write(tmp_path / f"part-{at}.csv", [row])
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "main.csv", table([1.0] * 6, "main"))
    block, gate = table([1.0] * 2, "steps")
    write(
        tmp_path / "steps.csv",
        [
            replace(row, kernel=kernel, case=block.case, time_s=1e-3)
            for row, kernel in ((block, "block"), (gate, "step gate"))
        ],
    )
    return tmp_path


@pytest.mark.docs
@pytest.mark.parametrize("name", ["", *(name for name in NAMES if name != "bench")])
def test_the_examples_run(call, stdout_of, name, place, monkeypatch):
    """Trainings are cut to two steps, and the noise test does not wait: their options are read all the same."""
    monkeypatch.setattr(noise, "measure_noise", lambda *arguments: QUIET)
    for file in {"compare": ("base.npz", "new.npz"), "report": ("trace.safetensors",)}.get(name, ()):
        assert call("trace", "4x8:relu", "--save", file)[0] == 0
    if name == "compare":
        base = edited.tensors("gated")
        rounded = edited.every("gated", base, lambda w: quantize(w, "q4_1").dequantize())
        for folder, stored in (("base", base), ("tuned", edited.noisy(base, 0.01)), ("quantized", rounded)):
            edited.write(place / folder, "gated", stored)
    assert len(examples(name)) == 4
    for line in examples(name):
        words = shlex.split(line)
        assert words[:2] == (["ffn", name] if name else ["ffn", words[1]])
        less = ["--steps", "2", "--seeds", "1"] if name == "approximate" else []
        out = stdout_of(*words[1:], *less, notes=True)
        assert out, line


def test_the_examples_of_bench_are_read(stdout_of, place, monkeypatch):
    """Their requests are built, kernels and all; the measuring is left out."""
    requests = []
    monkeypatch.setattr(
        "ffncli.cli.bench.command._measure", lambda journal, request, plot, output: requests.append(request)
    )
    for line in examples("bench"):
        stdout_of(*shlex.split(line)[1:], "--force", notes=True)
    quick, own, known, saved = requests
    assert (quick.method.processes, quick.method.precision) == (3, 0.03)
    assert [choice.label for choice in own.kernels] == ["eager", "mine.py:mlp"]
    assert [case.label for case in known.cases] == ["llama-2-7b"]  # one of two
    assert len(saved.cases) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_help_text_names_only_options_that_its_command_has(name: str):
    has = {text for option in options_of(name) for text in (*option.opts, *option.secondary_opts)}
    for option in options_of(name):
        text = re.sub(r"ffn \w+ --[\w-]+", "", option.help or "")  # another command's
        for named in re.findall(r"(?<!\w)--[a-z][\w-]*", text):
            assert named in has, (option.opts, named)
