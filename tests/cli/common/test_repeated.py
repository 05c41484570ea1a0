"""No value of an option is dropped: lists go on, anything else is refused."""

from __future__ import annotations

import pytest
import typer

from ffncli.cli.bench.options import GridOptions, ResultOptions
from ffncli.cli.common.options import TokenListOptions
from ffncli.cli.common.prompt_options import GivenOptions
from ffncli.cli.main import COMMANDS, _app
from ffncli.models.dimensions import Dimensions


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
    (("verify", "4x8", "--check", "kernels"), "--kernel", "eager", "packed"),
]
ADDED = {  # each repeated value is one of its own
    ("params", "--sweep"), ("params", "--assert"), ("activations", "--expect"), ("trace", "--explain"),
    ("trace", "--set"), ("trace", "--ablate"), ("trace", "--prompt"), ("experts", "--prompt"),
}  # fmt: skip
BELOW = {  # asked of the records below, since a run takes long
    ("trace", "--input-ids"), ("trace", "--position"), ("activations", "--input-ids"), ("activations", "--prompt"),
    ("activations", "--position"), ("bench", "--tokens"), ("bench", "--dtype"), ("bench", "--pass"),
    ("bench", "--cache"), ("bench", "--device"), ("bench", "--threads"), ("bench", "--kernel"),
    ("bench", "--certificate"), ("bench", "--routing"), ("bench", "--launcher-option"),
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
    grid = GridOptions(
        threads=[(1, 2), (4,)],
        dtype=["fp32", "bf16"],
        passes=["forward", "forward+backward"],
        cache=["warm", "flush"],
        device=["cpu", "cuda"],
    ).grid(None, Dimensions(), TokenListOptions(tokens=[(1,), (16, 64)]))
    assert (grid.threads, grid.tokens, grid.dtypes) == ((1, 2, 4), (1, 16, 64), ("fp32", "bf16"))
    assert (grid.passes, grid.caches, grid.devices) == (
        ("forward", "forward+backward"),
        ("warm", "flush"),
        ("cpu", "cuda"),
    )
    assert ResultOptions(certificate=["a.json", "b.json,c.json"]).certificates() == ("a.json", "b.json", "c.json")
    given = GivenOptions(input_ids=[(1, 2), (3,)], position=["0", "2:3"]).model_prompt
    assert (given.ids, given.positions) == ((1, 2, 3), "0,2:3")


def test_a_prompt_in_a_file_and_on_standard_input(tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_bytes("Zwölf\nZeilen\r\n".encode())
    assert GivenOptions(prompt=[f"@{tmp_path}/p.txt"]).model_input["prompt"] == "Zwölf\nZeilen"
    monkeypatch.setattr("sys.stdin", open(tmp_path / "p.txt"))  # noqa: SIM115
    given = GivenOptions(prompt=["-"])
    assert (given.model_input["prompt"], given.model_prompt.text) == ("Zwölf\nZeilen",) * 2
    assert GivenOptions(prompt=["a@b -"]).model_input["prompt"] == "a@b -"
    assert given.notes == ("--prompt -: its 2 lines are read as one prompt",)
    assert GivenOptions(prompt=["two\nlines"]).notes == ()
    (tmp_path / "one.txt").write_text("one line\n")
    assert GivenOptions(prompt=[f"@{tmp_path}/one.txt"]).notes == ()


def test_two_prompts_are_refused_where_one_is_read(call):
    code, out, err = call("activations", "gelu", "--source", "gpt2", "--prompt", "a", "--prompt", "b")
    assert (code, out, err) == (2, "", "error: --prompt takes one text, got 2; ffn trace takes several\n")


def test_a_prompt_that_cannot_be_read(call, tmp_path, monkeypatch):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, why in (("nix", "No such file or directory"), ("bytes", "not UTF-8 text"), ("", "Is a directory")):
        code, out, err = call("trace", "gpt2", "--prompt", f"@{tmp_path}/{name}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: --prompt: cannot read '")
        assert why in err
    monkeypatch.setattr("sys.stdin", None)
    assert call("trace", "gpt2", "--prompt", "-")[2] == "error: --prompt: cannot read standard input: it is closed\n"
