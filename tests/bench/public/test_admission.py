"""What is admitted, and which condition each fault fails: one at a time, in a result that is good otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import ffncli
from ffncli.bench.public.admission import admit
from ffncli.bench.records import TWIN
from ffncli.errors import FFNError
from tests.bench.public.made import RUN, SHA256, SUITE, TIMES, changed, result

MIXTURE = 4  # the case of that number


def failing(path: Path) -> dict[str, tuple[str, ...]]:
    return {one.name: one.faults for one in admit(path).conditions if not one.passed}


def test_a_good_result_is_admitted(tmp_path):
    admission = ffncli.admit(result(tmp_path))
    assert admission.admitted
    assert failing(admission.path) == {}
    assert (admission.track, admission.suite.name, len(admission.rows)) == ("cpu", "ffn-1", 12)


@pytest.mark.parametrize(
    ("edit", "condition", "words"),
    [
        (changed("fast", suite=""), "suite", "has 'nothing', not ffn-1@"),
        (changed("fast", suite=f"ffn-1@{'0' * 64}"), "suite", "not ffn-1@"),
        (changed("fast", 2, tokens=256), "cases", "tokens is 256, not 512"),
        (changed("fast", 0, seed=7), "cases", "seed is 7, not 1"),
        (changed("eager", 0, cache="warm"), "cases", "cache is 'warm', not cold-weights"),
        (changed("fast", MIXTURE, routing="uniform"), "cases", "routing is 'uniform', not 'text'"),
        (changed("fast", baseline="packed"), "kernels", "compared with 'packed', not eager"),
        (changed("fast", note="mine.py"), "kernels", "has no sha256"),
        (changed("fast", 1, error_max=None), "verified", "has no error against float64"),
        (changed("fast", 1, error_max=1e-3), "verified", "error 0.001, at most"),
        (changed("fast", 1, computes="fp7"), "verified", "is not a known format"),
        (changed("fast", 1, referee="worker"), "referee", "has 'worker', not process"),
        (changed("fast", 3, ratio=0.5), "rounds", "ratio is 0.5, its blocks give 0.8"),
        (changed("fast", 3, time_s=1e-4), "rounds", "time_s is 0.0001"),
        (changed("fast", 3, process_ratios=(0.5,) * 5), "rounds", "process_ratios"),
        (changed("eager", 3, aa_high=1.0), "rounds", "aa_high is 1.0"),
        (changed("fast", 0, roof_fraction=0.001), "roof", "is of another roof"),
        (changed("fast", 0, roof_fraction=None), "roof", "no roof was measured"),
        (changed("fast", 0, datasheet_fraction=1.03), "roof", "103"),
        (changed("fast", 5, torch="2.12.0"), "environment", "torch is '2.13.0' and '2.12.0'"),
    ],
)
def test_a_changed_row_fails_its_condition(edit, condition, words, tmp_path):
    faults = failing(result(tmp_path, edit))
    assert condition in faults
    assert words in faults[condition][0]
    assert set(faults) - {condition} <= {"rounds", "roof"}  # what the change drags along


def test_a_wrong_kernel_and_a_missing_case_fail(tmp_path):
    first = SUITE.cases("cpu")[0].key
    path = result(tmp_path, changed("fast", 1, status="wrong", note=f"mine.py, sha256 {SHA256}; replay-by-id"))
    assert "is wrong: mine.py" in failing(path)["verified"][0]
    path = result(tmp_path, lambda row: replace(row, case="another") if row.case == first else row)
    assert failing(path)["cases"][:2] == (
        f"the case {first} is missing", "another is not a case of the track cpu",
    )  # fmt: skip
    skipped = changed("fast", MIXTURE, status="skipped", note="no experts", **dict.fromkeys(
        ("time_s", "ratio", "ratio_low", "ratio_high", "error_max", "error_rel", "roof_fraction"))
    )  # fmt: skip
    assert "verified" not in failing(result(tmp_path, skipped))


def test_too_few_processes_and_a_machine_that_cannot_resolve_fail(tmp_path):
    assert set(failing(result(tmp_path, processes=4))) == {"processes"}
    faults = failing(result(tmp_path, times={**TIMES, TWIN: 1.05e-2}))
    assert set(faults) == {"a/a"}
    assert "the same code twice reads 1.0" in faults["a/a"][0]


def test_faster_than_the_roof_fails(tmp_path):
    """A kernel that answers in no time, with blocks that say so: nothing else is wrong with its files."""
    faults = failing(result(tmp_path, times={**TIMES, "fast": 1e-5}))
    assert set(faults) == {"roof"}
    assert "% of the measured roof" in faults["roof"][0]


def test_the_rounds_file_is_needed_and_must_be_that_of_the_rows(tmp_path):
    path = result(tmp_path)
    rounds = path.with_suffix(".rounds.csv")
    lines = rounds.read_text("utf-8").splitlines(keepends=True)
    rounds.write_text("".join(lines[:-1]), "utf-8")
    assert set(failing(path)) == {"rounds"}
    rounds.write_text("".join(lines).replace(RUN["run_id"], "other"), "utf-8")
    assert "processes is 5" in failing(path)["rounds"][0] or "has no blocks" in failing(path)["rounds"][0]
    rounds.write_text("damaged\n", "utf-8")
    assert "rounds" in failing(path)
    rounds.unlink()
    assert failing(path)["rounds"] == (f"cannot read {rounds}: No such file or directory",)


def test_the_page_the_json_and_the_exit_codes(call, tmp_path):
    words = ("bench", "--suite", "ffn-1", "--admit")
    good, bad = result(tmp_path, name="good"), result(tmp_path, processes=3, name="bad")
    code, out, err = call(*words, str(good))
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:-1] if line] == ["PASS"] * 10
    assert out.splitlines()[-1] == "admitted"
    code, out, err = call(*words, str(bad), "--json")
    body = json.loads(out)
    assert (code, body["admission"]["admitted"]) == (1, False)
    assert [row["condition"] for row in body["rows"] if not row["passed"]] == ["processes"]
    assert err == "error: not admitted: processes\n"


def test_a_file_that_is_no_result_is_bad_input(tmp_path):
    with pytest.raises(FFNError, match=r"must end in \.csv"):
        admit(tmp_path / "a.txt")
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(FFNError, match="no column schema_version"):
        admit(tmp_path / "a.csv")
