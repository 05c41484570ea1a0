"""What the script that holds ffn to its former output masks, and what it shows, on made-up records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.unchanged import COMMANDS, MEASURED, Output, commands, differences, main, masked, read, report

SAME = Output(0, "a\nb\n", "")


def bench(**changes: Any) -> str:
    row = {"kernel": "eager", "d_ff": 16, "time_s": 1.5e-5, "ratio_low": None, "warnings": ["load: 2"], "inner": 64}
    return json.dumps({"command": "bench", "spent": {"start": 2.5}, "rows": [{**row, **changes}]}, indent=2) + "\n"


def changed(line: str, before: str, after: str) -> list[str]:
    return differences(line, Output(0, before, ""), Output(0, after, ""))


def test_nothing_changed(capsys):
    assert report({"params": SAME}, {"params": replace(SAME, seconds=9.0)}) == 0
    assert capsys.readouterr().out == "1 and 1 commands: 0 changed, 0 changed on purpose\n"


@pytest.mark.parametrize(
    ("after", "shown"),
    [
        (replace(SAME, code=1), ["exit code 0 → 1"]),
        (replace(SAME, stdout="a\nc\n"), ["stdout:", "-b", "+c"]),
        (replace(SAME, stderr="note\n"), ["stderr:", "+note"]),
        (replace(SAME, stdout="a\nb"), ["stdout:", "(the ends of lines differ)"]),
        (replace(SAME, files={"a.json": "{}"}), ["a.json: written only AFTER"]),
    ],
)
def test_every_part_of_an_output_counts(after, shown, capsys):
    assert differences("params", SAME, after) == shown
    assert report({"params": SAME}, {"params": after}, {}) == 1
    assert capsys.readouterr().out.startswith("CHANGED: params\n    " + shown[0])


def test_what_was_meant_is_shown_with_its_reason_and_does_not_fail(capsys):
    records = {"params": SAME, "trace": SAME}, {"params": replace(SAME, code=1), "trace": SAME}
    assert report(*records, {"params": "a bug mended"}) == 0
    assert capsys.readouterr().out.startswith("meant: params\n    a bug mended\n")


def test_a_command_that_one_record_lacks_is_a_change():
    assert differences("params", None, SAME) == ["only in AFTER"]
    assert report({"params": SAME}, {}, {}) == 1


@pytest.mark.parametrize("change", [{"time_s": 2e-4}, {"warnings": []}, {"inner": 1}])
def test_what_was_measured_is_masked(change):
    assert changed("bench 8x16 --json", bench(), bench(**change)) == []
    assert changed("$ ffn bench 8x16 --json", bench(), bench(**change)) == []


@pytest.mark.parametrize(
    "change", [{"d_ff": 17}, {"kernel": "module"}, {"time_s": None}, {"ratio_low": 0.9}, {"more": 1}, {"inner": "x"}]
)
def test_a_value_that_is_not_measured_and_the_kind_of_one_that_is_are_not(change):
    assert changed("bench 8x16 --json", bench(), bench(**change)) != []


def test_other_commands_are_not_masked_at_all():
    assert changed("trace 8x16 --json", bench(), bench(time_s=2e-4)) != []
    assert changed("compare base.csv new.csv --json", bench(), bench(time_s=2e-4)) != []


def test_the_order_of_keys_and_the_way_a_number_is_written_count():
    assert masked('{"d_ff": 1, "bias": 2}') != masked('{"bias": 2, "d_ff": 1}')
    assert masked('{"seed": 1e-5}') != masked('{"seed": 0.00001}')


def test_csv_is_masked_by_its_columns():
    old, new = (f"kernel,d_ff,time_s,note\neager,16,{time},\n" for time in ("1e-5", "2e-5"))
    assert changed("bench --csv", old, new) == []
    assert changed("bench --csv", old, new.replace("16", "17")) == ["stdout:", "-d_ff: 16", "+d_ff: 17"]
    assert changed("bench --csv", old, new.replace("time_s", "seconds")) != []
    assert changed("bench --csv", old, new.replace("2e-5", "")) != []


def test_of_the_rounds_only_which_kernels_were_timed_where():
    header = "run_id,process,kernel,seconds,flags"
    few, many = f"{header}\na,0,eager,1.5,\n", f"{header}\nb,0,eager,2.5,cpu\nb,0,eager,3.5,\n"
    assert masked(few, distinct=True) == masked(many, distinct=True)
    assert masked(few, distinct=True) != masked(few.replace("eager", "module"), distinct=True)


def test_of_doctor_only_the_rows_about_this_minute():
    load, python = ({"name": name, "value": "1", "status": "ok", "advice": ""} for name in ("load", "python"))
    assert masked(json.dumps({"rows": [load]})) == masked(json.dumps({"rows": [{**load, "status": "note"}]}))
    assert masked(json.dumps({"rows": [python]})) != masked(json.dumps({"rows": [{**python, "value": "2"}]}))


def test_no_key_of_a_question_is_masked():
    """What is computed or asked for, and not measured."""
    assert not MEASURED & {
        "d_model",
        "d_ff",
        "tokens",
        "kernel",
        "status",
        "flops",
        "bytes",
        "error_rel",
        "case",
        "note",
    }


def test_the_list_of_commands_is_long_and_has_none_twice():
    assert len(commands(COMMANDS.read_text("utf-8"))) > 400
    with pytest.raises(ValueError, match="there twice: params"):
        commands("params\n# more\nparams\n")


def test_records_are_read_from_folders(tmp_path: Path, capsys):
    for name, text in (("before", "1"), ("after", "2")):
        (tmp_path / name).mkdir()
        record = {"params": {"code": 0, "stdout": text, "stderr": "", "files": {}, "seconds": 0.1}}
        (tmp_path / name / "record.json").write_text(json.dumps(record), "utf-8")
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "before")]) == 0
    with pytest.raises(SystemExit, match="no record in"):
        read(tmp_path)
