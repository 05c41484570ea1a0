"""`--assert`: conditions on the keys of a row, for CI. 0 where all hold, 1 where one does not, 2 where one is none."""

import json
import operator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.models.counting.assertions import check, parse, require
from ffncli.models.counting.figures import KEYS
from tests.oracles.checkpoints import LLAMA, expect_difference, expect_refusal, folder, tensors

OPERATORS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
ROW = {"name": "a model", "d_ff": 3072, "share": 0.5, "gated": False, "layers": None, "activation": "gelu_tanh"}


def holds(text: str) -> bool:
    """Whether a condition holds for ROW."""
    try:
        require(check(parse([text], list(ROW)), [ROW]))
    except FFNError as error:
        if error.code == 1:
            return False
        raise
    return True


@given(st.sampled_from(list(OPERATORS)), st.integers(3070, 3074), st.sampled_from(["", " ", "  "]))
def test_operators_on_numbers(sign: str, value: int, space: str):
    assert holds(f"d_ff{space}{sign}{space}{value}") == OPERATORS[sign](3072, value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d_ff == 3_072", True), ("d_ff == 3,072", True), ("d_ff == 3072.0", True), ("d_ff == 3.072e3", True),
        ("d_ff == +3072", True), ("d_ff > -1", True), ("share == .5", True), ("share == 0.5", True),
        ("share != 5e-1", False), (" d_ff==3072 ", True),
        ("gated == false", True), ("gated == no", True), ("gated == FALSE", True), ("gated == true", False),
        ("gated != yes", True), ("layers == null", True), ("layers == none", True), ("layers != 12", True),
        ("d_ff == null", False), ("d_ff != null", True), ("activation == gelu_tanh", True),
        ("activation == 'gelu_tanh'", True), ('activation == "gelu_tanh"', True), ("activation != gelu", True),
        ("activation == GELU_TANH", False), ("name == a model", True), ("name == 'a model'", True),
        ("name == \"a model'", False),
        ("d_ff == 3.072K", True), ("d_ff < 1M", True), ("d_ff > 1m", False), ("d_ff < 60 GB", True),
        ("d_ff == 0.000003072B", True), ("d_ff >= 3.072e-6GB", True), ("d_ff < 1T", True), ("share < 1K", True),
        ("d_ff == 3072 and gated == false", True), ("d_ff == 3072 AND share == 1", False),
        ("d_ff > 1 and d_ff < 4000 and layers == null", True), ("name == 'rock and roll'", False),
    ],
)  # fmt: skip
def test_values_of_every_kind(text: str, expected: bool):
    assert holds(text) == expected


@pytest.mark.parametrize(
    "text", ["", "d_ff", "==", "== 3072", "d_ff ==", "d_ff = 3072", "d_ff =! 3", "d_ff 3072", "3072 == d_ff"]
)
def test_what_is_no_condition(text: str, call):
    out = expect_refusal(call("params", "gpt2", "--assert", text), "--assert")
    assert "is not a condition" in out or "no key '3072'" in out


@pytest.mark.parametrize(
    ("key", "hint"),
    [("ffn_params_totl", "did you mean 'ffn_params_total'"), ("d_fff", "did you mean 'd_ff'"),
     ("zzz", "any key of the row"), ("groups", "no key 'groups'"), ("evidence", "no key 'evidence'"),
     ("__class__", "no key '__class__'"), ("name.x", "no key 'name.x'")],
)  # fmt: skip
def test_a_key_that_no_row_has(key: str, hint: str, call):
    expect_refusal(call("params", "gpt2", "--assert", f"{key} == 1"), hint)


@pytest.mark.parametrize(
    "text", [" " * 2000, "d_ff" + " " * 2000, "d_ff ==" + " " * 2000, " and " * 500, "d_ff" + " and " * 500]
)
def test_many_blanks_are_one(text: str, call):
    """A pattern that tried every blank as a border took 20 s for these."""
    expect_refusal(call("params", "gpt2", "--assert", text), "is not a condition")


@pytest.mark.parametrize("text", ["d_ff < gelu", "d_ff < null", "d_ff > true", "d_ff <> 3", "layers >= '1'"])
def test_what_no_number_can_be_compared_by(text: str, call):
    expect_refusal(call("params", "./nowhere", "--assert", text), "is not a number, so ")


@pytest.mark.parametrize(
    "text",
    ["activation < 5", "activation == 5", "gated > 0", "gated == 0", "gated != 0", "gated == 'false'", "layers >= 1",
     "d_ff == true", "d_ff == 307_2", "d_ff != 3072x", "d_ff == '3072'", "d_ff == 4.3Q"],
)  # fmt: skip
def test_two_kinds_cannot_be_compared(text: str):
    """A typo in a CI job must not pass as `!=` nor fail as if the model were wrong."""
    with pytest.raises(FFNError, match="asserted ") as error:
        holds(text)
    assert error.value.code == 2


def test_a_wrong_condition_is_said_before_anything_is_read(call):
    expect_refusal(call("params", "./nowhere", "--assert", "zzz == 1"), "no key 'zzz'")


def test_conditions_that_hold(call, stdout_of):
    words = ["params", "llama-2-7b", "--assert", "ffn_params_total == 4_328_521_728", "--assert", "gated == true"]
    out = stdout_of(*words, "--assert", "d_ff >= 11008", "--assert", "experts < 1")
    page = call("params", "llama-2-7b")[1]
    assert out.removeprefix(page).splitlines() == [
        "", "assertions", "  ok  ffn_params_total == 4,328,521,728", "  ok  gated == true",
        "  ok  d_ff >= 11008 (actual 11,008)", "  ok  experts < 1 (actual 0)",
    ]  # fmt: skip


def test_conditions_that_do_not_are_all_named_beside_the_whole_answer(call):
    wrong = ["--assert", "d_ff == 1", "--assert", "layers == 32", "--assert", "activation == gelu"]
    code, out, err = call("params", "llama-2-7b", *wrong, "--json")
    assert (code, err) == (1, "error: assertion failed: d_ff == 1 (actual 11008); activation == gelu (actual 'silu')\n")
    assert json.loads(out)["rows"][0]["d_ff"] == 11008


def test_every_row_is_held_to_them(call):
    code, _, err = call("params", "gpt2", "llama-2-7b", "--assert", "gated == false")
    assert (code, err) == (1, "error: assertion failed: gated == false (actual true in 'llama-2-7b')\n")
    assert call("params", "gpt2", "bert-base", "--assert", "gated == false")[0] == 0


def test_every_point_of_a_sweep_is_held_to_them(call):
    sweep = ["params", "64x256:gelu", "--sweep", "d_ff=1x,2x"]
    assert call(*sweep, "--assert", "d_ff <= 128")[0] == 0
    code, out, err = call(*sweep, "--assert", "d_ff <= 64")
    assert (code, bool(out)) == (1, True)
    assert err.startswith("error: assertion failed: d_ff <= 64 (actual 128")


def test_a_name_as_the_page_shows_it(call):
    """Every row of a page, and every row side by side, can be asserted by its own words."""
    one = table(call("params", "mixtral-8x7b")[1].partition("quantity")[2].partition("\n\n")[0], "  ")
    beside = table(call("params", "gpt2", "mixtral-8x7b")[1].replace("≠", " ").replace("... ", "..."), "   ")
    for label, value in [*one, *beside]:
        label = label.replace("...", "... ")
        if label in ("rounded", "quantity"):
            continue
        rounded = float(value.removesuffix(" %")) if value.endswith("%") else None
        exact = f"{label} == {value}"
        between = f"{label} > {(rounded or 0) - 0.06} % and {label} < {(rounded or 0) + 0.06}%"
        assert call("params", "mixtral-8x7b", "-q", "--assert", exact if rounded is None else between) == (0, "", "")
    for label, key in (("parameters per MoE layer", "ffn_params_per_layer"), ("Weight Bytes (fp8)", "weight_bytes")):
        assert parse([f"{label} == 1"], KEYS)[0].key == key


def table(text: str, gap: str) -> list[tuple[str, str]]:
    """Labels and last values of lines in which columns stand at least `gap` apart."""
    cells = [[cell.strip() for cell in line.split(gap) if cell.strip()] for line in text.splitlines()]
    return [(row[0], row[1] if gap == "  " else row[-1].split("  ")[-1]) for row in cells if len(row) > 1]


def test_json_has_what_was_asserted(call):
    code, out, _ = call("params", "gpt2", "--assert", "d_ff == 3072 and parameters > 60B", "--json")
    assert code == 1
    assert json.loads(out)["assertions"] == [
        {"name": "gpt2", "text": "d_ff == 3072", "key": "d_ff", "operator": "==", "operand": 3072, "actual": 3072,
         "holds": True},
        {"name": "gpt2", "text": "parameters > 60B", "key": "ffn_params_total", "operator": ">",
         "operand": 60_000_000_000, "actual": 56_669_184, "holds": False},
    ]  # fmt: skip
    assert "assertions" not in json.loads(call("params", "gpt2", "--json")[1])


def test_quiet_prints_what_failed_alone(call):
    assert call("params", "gpt2", "-q", "--assert", "d_ff == 3072") == (0, "", "")
    found = call("params", "gpt2", "-q", "--assert", "d_ff == 3072", "--assert", "d_ff == 1")
    assert found == (1, "", "error: assertion failed: d_ff == 1 (actual 3072)\n")
    assert call("params", "gpt2", "-q")[1]
    assert json.loads(call("params", "gpt2", "-q", "--json", "--assert", "d_ff == 3072")[1])["assertions"]


def test_csv_keeps_its_rows_and_notes_what_holds(call):
    code, out, err = call("params", "gpt2", "--csv", "--assert", "d_ff == 3072")
    assert (code, out, err) == (0, call("params", "gpt2", "--csv")[1], "note: ok  d_ff == 3,072\n")


def test_a_file_of_conditions(call, tmp_path: Path):
    file = tmp_path / "facts.txt"
    file.write_text("# GPT-2\nd_ff == 3072\n\n  layers == 12  \n", "utf-8")
    out = call("params", "gpt2", "--assert-file", str(file), "--assert", "d_model == 768")[1]
    assert out.splitlines()[-3:] == ["  ok  d_model == 768", "  ok  d_ff == 3,072", "  ok  layers == 12"]
    file.write_text("d_ff == 3072\nd_f == 3\n", "utf-8")
    expect_refusal(call("params", "./nowhere", "--assert-file", str(file)), "no key 'd_f'; did you mean 'd_ff'")
    file.write_bytes(b"\xff")
    expect_refusal(call("params", "gpt2", "--assert-file", str(file)), "--assert-file: cannot read", "not UTF-8 text")
    expect_refusal(call("params", "gpt2", "--assert-file", str(tmp_path)), "cannot read", "Is a directory")


def test_rows_of_one_model_are_told_apart(call):
    tokens = call("params", "gpt2", "--tokens", "1,32", "--dtype", "fp32", "--assert", "tokens < 2")
    assert tokens[1].endswith(
        "  ok  gpt2 tokens=1: tokens < 2 (actual 1)\n  FAILED  gpt2 tokens=32: tokens < 2 (actual 32)\n"
    )
    assert tokens[2] == "error: assertion failed: tokens < 2 (actual 32 in 'gpt2 tokens=32')\n"
    swept = call("params", "64x64", "--sweep", "d_ff=1x,2x", "--assert", "d_ff == 64")
    assert "64x64 d_ff=2x: d_ff == 64 (actual 128)" in swept[1]
    both = call("params", "gpt2", "--dtype", "fp32,bf16", "--assert", "weight bytes < 200MB")
    assert "actual 226676736 in 'gpt2 dtype=fp32')" in both[2]


def test_beside_a_disagreement(call, tmp_path: Path):
    """A file that contradicts its config fails either way; a condition that does not hold is said first."""
    source = folder(tmp_path, {**LLAMA, "intermediate_size": 8}, tensors("llama"))
    expect_difference(call("params", source, "--assert", "d_ff == 8"), "intermediate_size: the config says 8")
    expect_difference(call("params", source, "--assert", "d_ff == 6"), "assertion failed: d_ff == 6 (actual 8)")


@given(st.text(max_size=12))
def test_any_text_is_a_condition_or_refused(text: str):
    for attempt in (text, f"d_ff == {text}", f"{text} == 1"):
        said = ""
        try:
            parse([attempt], list(ROW))
        except FFNError as error:
            said = str(error)
        assert said.isprintable()
