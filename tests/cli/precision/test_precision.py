"""`ffn precision` as a user asks it."""

import pytest

import ffncli
from tests.oracles.checkpoints import sensitive

WORDS = ("precision", "32x32:swiglu", "--dtype", "fp8,nvfp4", "--tokens", "4")


def test_the_answer_is_that_of_the_library(json_of):
    found, precision = json_of(*WORDS), ffncli.precision("32x32:swiglu", dtype="fp8,nvfp4", tokens=4)
    for row, record in zip(found["rows"], precision.rows, strict=True):
        assert row["by_tensor"] == record.by_tensor
        assert (row["error_rel"], row["rest"]) == (record.error_rel, record.rest)
        assert [one["tensor"] for one in row["tensors"]] == ["x", "W1", "W3", "hidden", "W2"]


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
def test_every_format(stdout_of, style):
    assert "nvfp4" in stdout_of(*WORDS, "--format", style)


def test_csv_has_a_column_for_each_share(csv_of):
    rows = csv_of(*WORDS)
    shares = [float(v) for name, v in rows[1].items() if name.startswith("share_") or name == "rest"]
    assert sum(shares) == pytest.approx(1)
    assert len(shares) == 16


def test_explain_shows_block_scale_code_and_what_follows(stdout_of):
    out = stdout_of(*WORDS, "--explain", "W1[0,3]", "--explain", "x[2,5]")
    for text in ("W1[0,3] in fp8", "x[2,5] in nvfp4", "gate.weight[3,0], block [3, 0] of 1 × 16 values", "× scale"):
        assert text in out


def test_a_budget_shows_the_choice_beside_others(json_of, stdout_of, csv_of):
    words = ("precision", "32x32:swiglu", "--dtype", "nvfp4,fp8", "--tokens", "4", "--budget", "7")
    found = json_of(*words)["budget"]
    assert (found["score"], found["what"], len(found["random"])) == ("error_rel", "weights", 5)
    assert [row["format"] for row in csv_of(*words)] == [one["format"] for one in found["choices"]]
    out = stdout_of(*words)
    assert "Formats within 7 bits a weight; inputs are not rounded" in out
    labels = [line.split()[0] for line in out.splitlines() if line.startswith(("nvfp4 ", "fp8 ", "random ", "this "))]
    assert labels == ["this", "nvfp4", "fp8", *["random"] * 5]
    assert "what a matrix reads has its format too" in stdout_of(*words, "--what", "both")


def test_a_recipe_is_written_once(call, tmp_path):
    source, file = sensitive(tmp_path / "m", 10, 1, 0), tmp_path / "types.txt"
    words = ("precision", source, "-l", "all", "-n", "2", "--dtype", "q8_0,q4_0", "--budget", "5")
    code, _, err = call(*words, "--recipe", f"llama.cpp:{file}")
    assert (code, err) == (0, f"note: wrote {file}\n")
    assert len(file.read_text("utf-8").split()) == 36
    file.write_text("kept", "utf-8")
    code, _, err = call(*words, "--recipe", f"llama.cpp:{file}")
    assert (code, err) == (2, f"error: {file} exists already; choose another --recipe FILE, or give --force\n")
    assert call(*words, "--recipe", f"llama.cpp:{file}", "--force")[0] == 0
    assert file.read_text("utf-8").startswith("^blk")


def test_findings_are_lines_below_the_tables(stdout_of):
    out = stdout_of("precision", "64x64:relu", "--dtype", "mxfp4", "--what", "weights")
    assert "mxfp4, layer 0, W1: " in out
    assert "values beyond the largest of the format, the first at [" in out
    assert "W3" not in out
