"""The script that compares two versions of ffn: what it runs, masks and shows."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ffncli
from benchmarks.unchanged import COMMANDS, chosen, commands, from_help, main
from benchmarks.unchanged_compare import MEASURED, Output, Reworded, compare, differences, read
from benchmarks.unchanged_forks import plain
from ffncli.block.recipe import MoE
from ffncli.cli.main import COMMANDS as SUBCOMMANDS

SAME = Output(0, "a\nb\n", "")
LINES = commands(COMMANDS.read_text("utf-8"))


def bench(**changes: Any) -> str:
    row = {"kernel": "eager", "d_ff": 16, "time_s": 1.5e-5, "ratio_low": None, "warnings": ["load: 2"], "inner": 64}
    return json.dumps({"command": "bench", "spent": {"start": 2.5}, "rows": [{**row, **changes}]}, indent=2) + "\n"


def changed(line: str, before: str, after: str) -> list[str | Reworded]:
    return [*differences(line, Output(0, before, ""), Output(0, after, ""))]


def test_nothing_changed(capsys):
    assert compare({"params": SAME}, {"params": replace(SAME, seconds=9.0)}) == 0
    assert capsys.readouterr().out == (
        "1 and 1 lines: 0 changed, 0 refusals with other numbers,\n0 sentences reworded\n"
    )


@pytest.mark.parametrize(
    ("after", "shown"),
    [
        (replace(SAME, code=1), "exit code 0 → 1"),
        (replace(SAME, stdout="a 1\nb\n"), "stdout: -a"),
        (replace(SAME, stderr="note 3\n"), "stderr: +note 3"),
        (replace(SAME, files={"a.json": "{}"}), "a.json: written only AFTER"),
    ],
)
def test_every_part_of_an_output_counts(after, shown, capsys):
    assert next(differences("params", SAME, after)) == shown
    assert compare({"params": SAME}, {"params": after}) == 1
    assert capsys.readouterr().out.startswith(f"CHANGED: params\n    {shown}\n")


def test_a_line_that_went_is_a_change_and_one_that_came_is_new(capsys):
    assert compare({"params": SAME, "trace": SAME}, {"params": SAME}) == 1
    assert capsys.readouterr().out.startswith("CHANGED: trace\n    only in BEFORE\n")
    assert compare({"params": SAME}, {"params": SAME, "trace": SAME}) == 0
    assert capsys.readouterr().out.startswith("new: trace\n")


# --- words, and what is no words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("error: --layer 9 is out of range\n", "error: layer 9 is out of range\n"),
        ("the 2 that were found\n", "2 found\n"),
        ("a\nb\n", "a\nc\n"),
    ],
)
def test_a_line_of_text_may_be_worded_anew(before, after):
    assert all(isinstance(difference, Reworded) for difference in changed("params", before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("layer 9\n", "layer 8\n"),
        ("9 of 12\n", "12, of which 9\n"),
        ("at -1\n", "at 1\n"),
        ("in 1.50 s\n", "in 1.5 s\n"),
        ("5 layers\n", "five layers\n"),
    ],
)
def test_a_number_in_it_may_not(before, after):
    assert all(isinstance(difference, str) for difference in changed("params", before, after))


def test_the_lines_of_a_text_are_paired_and_those_that_were_wrapped_joined():
    before = "Usage\n  -n N   Number of tokens; several\n                              give one row each.\nend\n"
    after = "Usage\n  -n N   Numbers of tokens,\n                              one row each.\nend\n"
    assert changed("params -h", before, after) == [
        Reworded("-n N Number of tokens; several give one row each.", "-n N Numbers of tokens, one row each.")
    ]
    assert changed("params", "a\n", "a\nb\n") == [Reworded("", "b")]
    assert changed("params", "a  1\n──\n", "a    1\n────\n") == [Reworded("(spaces and line ends)", "(others)")]


@pytest.mark.parametrize(
    ("before", "after", "reworded"),
    [
        ({"note": "that of layer 3"}, {"note": "the one of layer 3"}, True),
        ({"note": "that of layer 3"}, {"note": "that of layer 4"}, False),
        ({"kernel": "eager"}, {"kernel": "plain"}, False),
        ({"case": "8x16; 2 tokens; warm"}, {"case": "8x16; 2 tokens, warm"}, False),
        ({"rows": [1]}, {"rows": [1, 1]}, False),
        ({"rows": [{"a": 1}]}, {"rows": [{"b": 1}]}, False),
        ({"d_ff": 1}, {"d_ff": 1.0}, False),
        ({"d_ff": 1}, {"d_ff": True}, False),
        ({"d_ff": 1}, {"d_ff": None}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
    ],
)
def test_of_json_only_sentences_may_be_worded_anew(before, after, reworded):
    found = changed("trace --json", json.dumps(before), json.dumps(after))
    assert len(found) == 1
    assert isinstance(found[0], Reworded) == reworded


def test_that_pythons_error_becomes_a_message_is_a_rewording_and_not_the_other_way_round():
    bug = json.dumps({"value": {"at=-1": {"error": "TypeError", "code": 70, "message": "not iterable"}}})
    message = json.dumps({"value": {"at=-1": {"error": "FFNError", "code": 2, "message": "at: -1 is no list"}}})
    assert changed('> wrong("activation", "at")', bug, message) == [
        Reworded("TypeError: not iterable", "FFNError: at: -1 is no list")
    ]
    assert isinstance(changed('> wrong("activation", "at")', message, bug)[0], str)


def test_the_way_a_number_is_written_counts():
    assert changed("trace --json", '{"seed": 1e-5}', '{"seed": 0.00001}') == [
        "stdout.seed: '1e-5 float' → '0.00001 float'"
    ]


def test_a_table_of_csv_is_compared_by_its_cells():
    old = "kernel,d_ff,note\neager,16,as the model does\n"
    assert changed("trace --csv", old, old.replace("as the model", "like a model")) == [
        Reworded("as the model does", "like a model does")
    ]
    assert changed("trace --csv", old, old.replace("16", "17")) == ["stdout[0].d_ff: '16' → '17'"]
    assert changed("trace --csv", old, old.replace("d_ff", "width"))[0] == "stdout[0]: keys ['d_ff'] → ['width']"


def test_rewordings_are_one_table_of_distinct_rows(tmp_path: Path, capsys):
    before, after = (Output(2, "", f"error: {word} | 3\n") for word in ("that", "this"))
    records = {"a": before, "b": before}, {"a": after, "b": after}
    assert compare(*records, tmp_path / "prose.md") == 0
    table = (tmp_path / "prose.md").read_text("utf-8")
    assert table.splitlines()[2:] == ["| error: that &#124; 3 | error: this &#124; 3 | 2 | `a` |"]
    assert capsys.readouterr().out.endswith(f"1 sentences reworded\n\nReworded sentences\n\n{table}")


def test_refusals_with_other_numbers_are_a_table_of_their_own_and_changes(capsys):
    before, after = (Output(2, "", f"error: --tokens must be {limits}\n") for limits in ("from 1", "1 to 9"))
    assert compare({"trace --tokens 0": before}, {"trace --tokens 0": after}) == 1
    shown = "| error: --tokens must be from 1 | error: --tokens must be 1 to 9 | 1 | `trace --tokens 0` |"
    assert shown in capsys.readouterr().out
    failed = differences("trace", replace(before, code=1), replace(after, code=1))
    assert all(isinstance(change, str) for change in failed)
    old, new = (
        json.dumps({"error": "FFNError", "code": 2, "message": text}) for text in ("tokens: 1", "tokens: from 1 to 2")
    )
    assert changed("> ffncli.trace(tokens=0)", old, new) == [Reworded("tokens: 1", "tokens: from 1 to 2", True)]


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"time_s": 2e-4}, {"warnings": []}, {"inner": 1}])
@pytest.mark.parametrize("line", ["bench 8x16 --json", "$ ffn bench 8x16 --json", "merge out/p1.csv --json"])
def test_what_was_measured_is_masked(line, change):
    assert changed(line, bench(), bench(**change)) == []


@pytest.mark.parametrize(
    "change", [{"d_ff": 17}, {"kernel": "module"}, {"time_s": None}, {"ratio_low": 0.9}, {"more": 1}, {"inner": "x"}]
)
def test_a_value_that_is_not_measured_and_the_kind_of_one_that_is_are_not(change):
    assert changed("bench 8x16 --json", bench(), bench(**change)) != []


def test_other_lines_are_not_masked_at_all():
    assert changed("trace 8x16 --json", bench(), bench(time_s=2e-4)) != []
    assert changed("compare base.csv new.csv --json", bench(), bench(time_s=2e-4)) != []
    assert changed("trace 8x16 --save out/values.csv", "min 1\n", "min 2\n") != []
    assert changed("bench --help", "default: 5\n", "default: 6\n") != []
    assert [*differences("bench --tokens 0", Output(2, "", "got 0\n"), Output(2, "", "got 1\n"))] != []


def test_when_a_line_ran_and_for_how_long_is_masked_everywhere():
    old, new = (
        json.dumps({"seconds": seconds, "at": f"{at}Z", "state": json.dumps({"seconds": seconds, "n": 1})})
        for seconds, at in ((1.5, "2026-01-02T10:00:00"), (2.5, "2026-01-03T11:00:00"))
    )
    assert changed("experts --json", old, new) == []
    assert changed("experts --json", old, new.replace("1}", "2}")) == ["stdout.state.n: 1 → 2"]
    assert changed("verify --referee", "a call takes 745 µs, so\n", "a call takes 1.2 ms, so\n") == []


def test_csv_is_masked_by_its_columns():
    old, new = (f"kernel,d_ff,time_s,note\neager,16,{time},\n" for time in ("1e-5", "2e-5"))
    assert changed("bench --csv", old, new) == []
    assert changed("bench --csv", old, new.replace("16", "17")) == ["stdout[0].d_ff: '16' → '17'"]
    assert changed("bench --csv", old, new.replace("time_s", "seconds")) != []
    assert changed("bench --csv", old, new.replace("2e-5", "")) != []


def test_of_the_rounds_only_which_kernels_were_timed_where():
    header = "run_id,process,kernel,seconds,flags"
    few, many = f"{header}\na,0,eager,1.5,\n", f"{header}\nb,0,eager,2.5,cpu\nb,0,eager,3.5,\n"
    rounds = [Output(0, "", "", {"b.rounds.csv": text}) for text in (few, many, few.replace("eager", "module"))]
    assert [*differences("bench", rounds[0], rounds[1])] == []
    assert [*differences("bench", rounds[0], rounds[2])] != []


def test_of_a_text_that_measures_only_words():
    before, after = "kernel  time\neager   18 µs\nwarning: busy\n", "kernel     time\neager   2.5 ms\n"
    assert changed("bench 8x16", before, after) == []
    assert changed("bench 8x16", before, after.replace("kernel", "name")) == [Reworded("kernel time", "name time")]


def test_of_doctor_only_the_rows_about_this_minute():
    load, python = ({"name": name, "value": "1", "status": "ok", "advice": ""} for name in ("load", "python"))
    old, new = (json.dumps({"rows": [row]}) for row in (load, {**load, "status": "note"}))
    assert changed("doctor --json", old, new) == []
    old, new = (json.dumps({"rows": [row]}) for row in (python, {**python, "value": "2"}))
    assert changed("doctor --json", old, new) != []


def test_no_key_of_a_question_is_masked():
    """Keys of computed or requested values are not masked, because they are not measured."""
    questions = {"d_model", "d_ff", "tokens", "kernel", "status", "flops", "bytes", "tolerance", "case", "note"}
    assert not MEASURED & questions


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_is_run_in_every_form_and_refuses_something(name, call):
    asked = [line for line in LINES if re.match(rf"{name}( |$)", line)]
    assert [line for line in asked if not re.search(r"--(json|csv|format)", line)]
    assert all([line for line in asked if option in line] for option in ("--json", "--csv"))
    helped = [*from_help(lambda words: call(*words.split(), "--help")[1])]
    assert {f"{name} -h", f"{name} --help", f"{name} --no-such-option"} <= {*helped}
    assert re.search(rf"^{name} .*--output '?x\?", "\n".join(helped), re.MULTILINE)


def test_options_are_read_from_the_help_and_given_wrong_values():
    texts = {
        "": "Commands:\n  trace    Run a block.\n  export   Write it.\n\nOutput:\n  --debug    Print\n",
        "trace": "  -l, --layer N|all        Layer, counted\n      --gated, --plain       With\n"
        "      --set W[i,j]=VALUE     Set a weight\n                           --tokens 2 more\nExamples:\n  --as it\n",
        "export": "      --as FORM              The form\n",
    }
    lines = [*from_help(texts.__getitem__)]
    assert [line for line in lines if re.search("-h|--no-such", line)] == [
        f"{name} {option}" for name in ("trace", "export") for option in ("-h", "--help", "--no-such-option")
    ]
    assert [line for line in lines if not re.search("-h|--no-such", line)] == [
        "trace 4x8:relu --layer 'x?'", "trace 4x8:relu --layer -1", "trace 4x8:relu --set 'x?'",
        "export 8x16:gelu --as 'x?'",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ffncli.__all__)
def test_every_call_is_made_rightly_and_wrongly(name):
    calls = [line for line in LINES if line.startswith("> ") and f"ffncli.{name}(" in line]
    takes_nothing = name in ("kernel_names", "steps", "cost")  # or only the result of another call
    assert calls or name == "FFNError"
    assert takes_nothing or name == "FFNError" or any(line.startswith(f'> wrong("{name}", ') for line in LINES)


def test_a_line_is_there_once():
    assert len(LINES) > 700
    with pytest.raises(ValueError, match="repeated: params"):
        commands("params\n# more\nparams\n")


def test_some_lines_are_chosen_with_those_that_write_their_files():
    lines = ["params", "trace --save out/a.json", "compare out/a.json base.csv", "trace --save out/b.json"]
    assert chosen(lines, []) == lines
    assert chosen(lines, ["compare", "params"]) == [lines[0], lines[2]]
    assert chosen(lines, ["compare", "params"], with_files=True) == lines[:3]


def test_what_a_call_returns_as_json():
    value = plain({"moe": (MoE(2, 1),), "text": "a", "type": int})
    assert (value["moe"][0]["experts"], value["text"], value["type"]) == (2, "a", "<class 'int'>")


def test_records_are_read_from_folders(tmp_path: Path, capsys):
    for name, text in (("before", "1"), ("after", "2")):
        (tmp_path / name).mkdir()
        record = {"params": {"code": 0, "stdout": text, "stderr": "", "files": {}, "seconds": 0.1}}
        (tmp_path / name / "record.json").write_text(json.dumps(record), "utf-8")
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "before")]) == 0
    with pytest.raises(SystemExit, match="no record in"):
        read(tmp_path)
