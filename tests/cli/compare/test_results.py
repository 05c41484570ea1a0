"""`ffn compare` of two results of ffn bench, as a user and a CI job ask it."""

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from docs.schemas import keys_text
from ffncli.bench.judge.compare import ComparedRow, Rules, compare
from ffncli.bench.results.row import ResultRow, name_of
from ffncli.cli.compare.results_page import LONGEST_COMMENT, change, words
from ffncli.show.text import width
from tests.bench.stored import row, table, write
from tests.oracles.checkpoints import expect_refusal


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write(tmp_path / "base.csv", table([1.0] * 6, "base"))


@pytest.fixture
def one_slower(tmp_path: Path) -> str:
    return write(tmp_path / "new.csv", table([1, 1, 1.12, 1, 0.9, 1], "new"))


GATE = ("--fail-if-slower", "3%")


def test_one_regression_exits_1_and_improvements_0(call, stdout_of, tmp_path, base, one_slower):
    code, out, err = call("compare", base, one_slower, *GATE)
    assert code == 1
    assert "fails --fail-if-slower 3 %\n" in out
    assert out.endswith("1 of 6 rows is slower by more than 3 %\n")
    assert re.fullmatch(
        r"error: 1 of 6 rows is slower by more than 3 %: packed \(.*, 4 tokens, .*\): 12 % slower .*\n", err
    )
    out = stdout_of("compare", base, write(tmp_path / "b.csv", table([0.8] * 6, "new")), *GATE)
    assert out.endswith("no kernel is certainly slower by more than 3 % (6 faster)\n")


def test_without_a_gate_nothing_fails(stdout_of, base, one_slower):
    out = stdout_of("compare", base, one_slower)
    assert out.endswith("1 slower, 1 faster, 4 same within 2 %\n")


@pytest.mark.parametrize("text", ["3%", " 3 %", "0.03", "3.0%"])
def test_the_threshold_is_a_percentage(call, base, one_slower, text):
    code, out, _ = call("compare", base, one_slower, "--fail-if-slower", text, "--json")
    assert (code, json.loads(out)["fail_if_slower"]) == (1, 0.03)
    assert call("compare", base, one_slower, "--fail-if-slower", "20%")[0] == 0


@pytest.mark.parametrize("text", ["3", "-3%", "nan", "inf%", "x", ""])
@pytest.mark.parametrize("option", ["--fail-if-slower", "--margin"])
def test_thresholds_that_are_none(call, base, option, text):
    expect_refusal(call("compare", base, base, f"{option}={text}"), f"{option} must be a percentage from 0 such as 3%")


def test_another_environment_is_refused_or_shown(call, stdout_of, tmp_path, base):
    other = write(tmp_path / "o.csv", table([1.5] * 6, "new", cpu="Intel Xeon", torch="2.14.0"))
    listed = "torch: 2.13.0 in BASE, 2.14.0 in NEW"
    expect_refusal(call("compare", base, other), "cpu: AMD EPYC 7B13 in BASE, Intel Xeon in NEW", listed)
    out = stdout_of("compare", base, other, *GATE, "--allow-mismatch")
    assert listed in out
    assert "shown only, without a gate: the environments differ (6 slower)" in out
    assert call("compare", base, other, *GATE, "--allow-mismatch", "--strict")[0] == 4


def test_strict_asks_for_a_decision(call, tmp_path, base, one_slower):
    single = write(tmp_path / "single.csv", table([1.0] * 6, "new", count=1))
    code, _, err = call("compare", base, single, *GATE)
    assert (code, err) == (
        0, "note: 6 of 6 rows were not gated by --fail-if-slower: only one process in NEW: not gated\n"
    )  # fmt: skip
    code, _, err = call("compare", base, single, *GATE, "--strict", "-q")
    assert code == 4
    assert err.startswith("error: 6 of 6 rows are inconclusive: packed (")
    assert "; and 1 more; measure with more --processes" in err
    assert call("compare", base, single, "--strict")[0] == 4
    assert call("compare", base, base, "--strict")[0] == 0
    assert call("compare", base, one_slower, *GATE, "--strict")[0] == 1  # a failure is a decision


def test_cases_that_new_does_not_have_leave_the_gate_open(call, tmp_path, base):
    whole = table([1.0] * 6, "new")
    for part in (whole[:-1], whole[:1], whole[1::2]):
        new, lost = write(tmp_path / "part.csv", part), len(whole) - len(part)
        words = f"{lost} {'rows of BASE are' if lost > 1 else 'row of BASE is'} not in NEW"
        code, out, err = call("compare", base, new, *GATE, "--json")
        body = json.loads(out)
        assert (code, err, body["counts"]["undecided"]) == (0, f"note: {words}\n", lost)
        assert body["verdict"].endswith(f"; {words}")
        code, _, err = call("compare", base, new, *GATE, "--strict", "-q")
        assert (code, err) == (4, f"error: {words}; measure all cases of BASE\n")
        assert call("compare", base, new, "--strict")[0] == 0  # without a gate, what both have is compared
        assert call("compare", new, base, *GATE, "--strict")[0] == 0  # cases that are new do no harm


def test_between_margin_and_gate_a_row_is_decided(call, tmp_path, base):
    """3 % slower is neither within 2 % nor surely beyond, but surely no more than 10 %."""
    new = write(tmp_path / "new.csv", table([1.02] * 6, "new"))
    assert call("compare", base, new, "--strict")[0] == 4
    assert call("compare", base, new, "--strict", "--fail-if-slower", "10%")[0] == 0
    assert call("compare", base, new, "--strict", "--margin", "10%")[0] == 0


def test_a_kernel_no_longer_right_fails_the_gate(call, tmp_path, base):
    rows = table([1.0] * 6, "new")
    new = write(tmp_path / "new.csv", [replace(rows[0], status="wrong", process_times_s=()), *rows[1:]])
    code, out, err = call("compare", base, new, *GATE)
    assert code == 1
    assert "wrong in NEW, ok in BASE" in out
    assert err.startswith("error: 1 of 6 rows was ok in BASE and is not ok in NEW: packed (")
    assert call("compare", base, new)[0] == 0


def test_several_files_a_side(call, tmp_path):
    names = {s: ",".join(write(tmp_path / f"{s}{i}.csv", table([f], f"{s}{i}", count=2)) for i in range(3))
             for s, f in (("base", 1.0), ("new", 1.1))}  # fmt: skip
    code, out, _ = call("compare", names["base"], names["new"], *GATE, "--json")
    found = json.loads(out)["rows"][0]
    assert (code, found["processes_base"], found["processes_new"]) == (1, 6, 6)
    odd = tmp_path / "a,b.csv"
    write(odd, table([1.0], "x"))
    assert call("compare", str(odd), names["base"])[0] == 0


def test_rows_of_one_side_alone_are_listed(call, stdout_of, tmp_path, base):
    new = write(tmp_path / "new.csv", [*table([1.0] * 2, "new"), *table([1.0], "new", kernel="mine")])
    out = stdout_of("compare", base, new, *GATE, notes=True)
    assert "only in BASE, not compared: packed (512x2048:swiglu, 4 tokens" in out
    assert "only in NEW, not compared: mine (" in out
    threads = write(tmp_path / "t.csv", table([1.0], "new", threads=1))
    expect_refusal(call("compare", base, threads), "no case and kernel in common", "threads: 2 in BASE, 1 in NEW")


# --- what files are ---------------------------------------------------------------------------------------------------


def test_files_of_two_kinds(call, tmp_path, base):
    trace = str(tmp_path / "t.npz")
    assert call("trace", "8x16:gelu", "--save", trace)[0] == 0
    expect_refusal(call("compare", base, trace), "holds results", "a saved trace; give two files of the same kind")
    expect_refusal(call("compare", trace, base), "give two files of the same kind")
    expect_refusal(call("compare", trace, trace, *GATE), "--fail-if-slower is for results of ffn bench")
    expect_refusal(call("compare", trace, trace, "--strict"), "--strict is for results")
    expect_refusal(call("compare", base, base, "--tolerance", "1"), "--tolerance is for saved traces")
    expect_refusal(call("compare", f"{base},{trace}", base), "t.npz' is not a CSV")
    renamed = tmp_path / "results"
    renamed.write_bytes(Path(base).read_bytes())
    assert call("compare", str(renamed), base)[0] == 0


@pytest.mark.parametrize("name", ["a.rounds.csv", "a.csv"])
def test_a_rounds_file_is_named(call, tmp_path, base, name):
    rounds = tmp_path / name
    rounds.write_text("run_id,process,case,placement,round,position,kernel,inner,seconds,flags\n")
    expect_refusal(call("compare", str(rounds), base), "is a rounds file; give a.csv, not " + name)


def test_files_that_are_no_results(call, tmp_path, base):
    for text in ("", "a,b\n1,2\n", "schema_version,run_id\n1,x\n", "\0\n", "schema_version," * 9 + "\n"):
        path = tmp_path / "x.csv"
        path.write_text(text)
        code, out, err = call("compare", base, str(path))
        assert (code, out, err.count("\n")) == (2, "", 1), text
        assert "x.csv" in err
    empty = write(tmp_path / "empty.csv", [])
    expect_refusal(call("compare", base, empty), "empty.csv' holds no rows")
    expect_refusal(call("compare", base, f"{base},missing.csv"), "'missing.csv' does not exist", "ffn bench --save")
    expect_refusal(call("compare", base, f"{base},"), "'' does not exist")


HOSTILE = (
    "\x1b[31mred",
    "=cmd|' /C calc'!A0",
    "<script>",
    "| a | b |",
    "`x`",
    "@here",
    "\u202eevil",
    "k" * 5000,
    "a\tb",
)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", ["kernel", "source", "host", "ffncli"])
def test_hostile_texts_are_written_out(call, tmp_path, field, text):
    rows = table([1.0, 1.2], "b", **{field: text})
    base = write(tmp_path / "a.csv", [replace(r, process_times_s=(1.0, 1.1, 0.9)) for r in rows])
    new = write(tmp_path / "b.csv", table([1.0, 1.2], "n", **{field: text}))
    for style in ("table", "md", "csv", "json"):
        code, out, _ = call("compare", base, new, "--format", style, "--fail-if-slower", "3%")
        assert code in (0, 1)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
        if style == "md":
            assert "<script>" not in out
            assert len(out) < 20_000
        if style == "csv":
            assert all(cell[:1] not in "=@+" for r in csv.reader(io.StringIO(out)) for cell in r if cell)


@pytest.mark.parametrize("value", ["inf", "nan", "-1.0", "0.0", "1e999", "0x10", "1;-1", "9" * 400, "=1+1", "\x1b"])
@pytest.mark.parametrize("column", ["process_times_s", "process_anchors_s"])
def test_hostile_times_are_one_line(call, tmp_path, base, column, value):
    marked = [replace(r, process_times_s=(0.125,) * 5, process_anchors_s=(0.125,) * 5) for r in table([1.0], "new")]
    path = tmp_path / "new.csv"
    write(path, marked)
    rows = list(csv.reader(io.StringIO(path.read_text("utf-8"))))
    rows[1][rows[0].index(column)] = value
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    code, out, err = call("compare", base, str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert column in err
    assert "\x1b" not in err


def test_extreme_times_are_valid_json_and_csv(call, tmp_path):
    base = write(tmp_path / "a.csv", [row((1e-300, 1e300))])
    new = write(tmp_path / "b.csv", [row((1e300, 1e-300), run_id="new")])
    code, out, _ = call("compare", base, new, "--json", *GATE)
    found = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert (code, found["rows"][0]["ratio_high"]) == (0, None)
    code, out, _ = call("compare", base, new, "--csv", *GATE)
    assert "inf" not in out
    assert "nan" not in out
    assert call("compare", base, new, "--format", "md", *GATE)[0] == 0
    assert "inconclusive" in call("compare", base, new)[1]


# --- pages ------------------------------------------------------------------------------------------------------------


def one(**figures: object) -> ComparedRow:
    plain = compare(table([1.0], "base"), table([1.0], "new"), Rules()).rows[0]
    return replace(plain, **figures)


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"verdict": "slower", "ratio": 1.12, "ratio_low": 1.08, "ratio_high": 1.16}, "12 % slower (8 to 16 %)"),
        ({"verdict": "faster", "ratio": 0.9, "ratio_low": 0.86, "ratio_high": 0.94}, "10 % faster (6 to 14 %)"),
        ({"verdict": "faster", "ratio": 0.25, "ratio_low": 0.2, "ratio_high": 0.5}, "4 times as fast (2 to 5)"),
        ({"verdict": "slower", "ratio": 2.5, "ratio_low": 2.25, "ratio_high": 3}, "2.5 times as slow (2.2 to 3)"),
        ({"verdict": "slower", "ratio": 1.2, "ratio_low": 1.199, "ratio_high": 1.201}, "20 % slower (19.9 to 20.1 %)"),
        ({"verdict": "same"}, "same within 2 %"),
        ({"verdict": "inconclusive", "ratio_low": 0.97, "ratio_high": 1.08}, "inconclusive (-3 % to +8 %)"),
        (
            {"verdict": "inconclusive", "ratio_low": 0.0, "ratio_high": float("inf")},
            "inconclusive (-100 % to far more)",
        ),
        ({"verdict": "inconclusive", "ratio": 1.04, "ratio_low": None}, "inconclusive (4 % slower, one process)"),
        (
            {"verdict": "inconclusive", "ratio": 1.1, "ratio_low": 1.08, "ratio_high": 1.12, "normalised_ratio": 0.998},
            "inconclusive (+10 %, anchored -0.2 %)",
        ),
        ({"verdict": "broken", "new_status": "oom"}, "oom in NEW, ok in BASE"),
    ],
)  # fmt: skip
def test_a_row_in_words(figures, text):
    assert words(one(**figures), 0.02) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "the same"),
        (0.9996, "0.04 % faster"),
        (1.004, "0.4 % slower"),
        (0.99, "1 % faster"),
        (2.0, "2 times as slow"),
        (0.0, "infinitely fast"),
    ],
)
def test_a_change_in_words(ratio, text):
    assert change(ratio) == text


def test_a_gate_says_which_rows_went_missing(call, base, tmp_path):
    new = write(tmp_path / "fewer.csv", table([1.0], "new"))
    code, _, err = call("compare", base, new, *GATE)
    assert (code, "5 rows of BASE are not in NEW" in err) == (0, True)
    assert "not in NEW" not in call("compare", base, new)[2]


def test_every_key_is_documented(call, csv_of, base, one_slower):
    section = keys_text("compare")
    found = json.loads(call("compare", base, one_slower, "--json")[1])
    named = set(re.findall(r"`([a-z_]+)`", section))
    assert {f.name for f in fields(ResultRow)} >= {"passes"}
    keys = set(found) | set(found["rows"][0]) | set(found["kernels"][0]) - {"cases"}
    assert keys - {"schema_version", "command", "conventions"} <= named
    assert {"comparable", "mismatches", "regressions", "rows"} <= set(found)
    wanted = "case kernel ratio ratio_low ratio_high normalised_ratio p_holm verdict".split()
    assert set(wanted) <= set(found["rows"][0])
    lines = csv_of("compare", base, one_slower)
    assert [float(line["ratio"]) for line in lines] == [r["ratio"] for r in found["rows"]]
    assert list(lines[0]) == [name_of(f.name) for f in fields(ComparedRow)]


def test_a_comment_has_the_verdict_first_and_folds_the_rest(call, base, one_slower):
    code, out, _ = call("compare", base, one_slower, *GATE, "--format", "md")
    assert code == 1
    assert out.startswith("### ffn compare: 1 of 6 rows is slower by more than 3 %\n")
    top, rest = out.split("<details>", 1)
    assert "| 4 | packed | 4.01 ms | 4.47 ms | 12 % slower (11 to 12 %) |" in top
    assert "same within" not in top
    assert rest.count("same within 2 %") == 4
    assert (out.count("<details>"), out.count("</details>"), out.count("<summary>5 other rows</summary>")) == (2, 2, 1)
    assert "AMD EPYC 7B13, torch 2.13.0" in rest
    assert "\x1b" not in out


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_a_comment_stays_below_the_limit_and_says_what_is_missing(call, tmp_path, slow):
    many = [r for k in range(20) for r in table([slow] * 30, "new", kernel=f"kernel-{k}-" + "x" * 150)]
    old = [r for k in range(20) for r in table([1.0] * 30, "base", kernel=f"kernel-{k}-" + "x" * 150)]
    base, new = write(tmp_path / "a.csv", old), write(tmp_path / "b.csv", many)
    code, out, _ = call("compare", base, new, *GATE, "--format", "md")
    assert code == (slow > 1)
    assert 0.9 * LONGEST_COMMENT < len(out) <= LONGEST_COMMENT
    left = re.search(r"([\d,]+) of 600 rows are left out", out)
    assert left
    assert len(re.findall(r"^\| [\d,]+ \| kernel-", out, re.M)) == 600 - int(left[1].replace(",", ""))


def test_the_page_fits_80_columns(call, base, one_slower):
    _, out, _ = call("compare", base, one_slower, *GATE)
    table_lines = [line for line in out.splitlines() if "packed" in line]
    assert len(table_lines) >= 6
    assert all(width(line) <= 80 for line in table_lines)
    assert "\x1b" not in out


def test_on_a_terminal_the_verdict_is_said_once(call, stdout_of, base, one_slower, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = call("compare", base, one_slower, *GATE, "--no-color")
    assert code == 1
    assert "rows is slower" not in out
    assert "1 of 6 rows is slower by more than 3 %" in err
    out = stdout_of("compare", base, one_slower, "--no-color")
    assert out.rstrip(" \n").endswith("1 slower, 1 faster, 4 same within 2 %")


def test_no_torch_no_numpy_no_pandas(ffn, base, one_slower):
    code = (
        "import sys\nfrom ffncli.cli.main import main\ntry:\n    main(['compare', *sys.argv[1:], '-q'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'pandas', 'rich') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, base, one_slower], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"
    assert ffn("compare", base, one_slower, *GATE).returncode == 1
