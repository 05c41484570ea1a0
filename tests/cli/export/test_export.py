"""`ffn export` as a user asks it."""

import json

import pytest

import ffncli
from tests.oracles.checkpoints import expect_refusal


@pytest.mark.parametrize("form", ["torch", "latex"])
def test_text_goes_to_stdout_or_to_a_file(form, call, tmp_path):
    made = ffncli.export("8x16:swiglu", form=form, tokens=(1, 4))
    arguments = ("export", "8x16:swiglu", "--as", form, "-n", "1,4")
    assert call(*arguments) == (0, made.text, "")
    assert call(*arguments, "-o", "-") == (0, made.text, "")
    path = tmp_path / {"torch": "a.py", "latex": "a.tex"}[form]
    code, out, err = call(*arguments, "-o", str(path))
    assert (code, err, path.read_text("utf-8")) == (0, f"note: wrote {path}\n", made.text)
    assert out == (
        f"8x16:swiglu: d_model 8, d_ff 16, silu, gated  {form}\n"
        "  384 parameters; error up to 2.38e-06 in fp32\n\n"
        "tokens  matmul FLOPs  elementwise FLOPs  bytes\n"
        "     1           768                 32  1,600\n"
        "     4         3,072                128  1,792\n"
    )
    expect_refusal(call(*arguments, "-o", str(path)), "exists already", "--force")
    assert call(*arguments, "-o", str(path), "--force")[0] == 0


def test_a_folder_for_the_arena(call, tmp_path):
    made = ffncli.export("mixtral-8x7b", form="flashinfer-trace", dtype="bf16")
    code, out, err = call("export", "mixtral-8x7b", "--as", "flashinfer-trace", "-o", str(tmp_path / "a"))
    assert code == 0
    assert err == f"note: {made.notes[0]}\nnote: wrote {tmp_path / 'a'}\n"
    assert {path: (tmp_path / "a" / path).read_text("utf-8") for path in made.files} == made.files
    assert out.count(f"\n  {tmp_path / 'a'}/") == 4
    expect_refusal(
        call("export", "4x8", "--as", "flashinfer-trace"), "--as flashinfer-trace needs --output; name the folder"
    )


def test_json_has_what_was_not_written(call, csv_of, tmp_path):
    made = ffncli.export("gpt2", form="latex")
    found = json.loads(call("export", "gpt2", "--as", "latex", "--json")[1])
    assert (found["command"], found["form"], found["part"], found["layer"]) == ("export", "latex", "block", "decoder.0")
    assert found["files"] == [{"path": "block.tex", "bytes": len(made.text.encode()), "text": made.text}]
    assert (found["tolerance"], found["params"]) == (made.problem.tolerance, made.problem.params)
    assert found["rows"] == [vars(one) for one in made.problem.workloads]
    path = tmp_path / "a.tex"
    found = json.loads(call("export", "gpt2", "--as", "latex", "-o", str(path), "--json")[1])
    assert found["files"] == [{"path": str(path), "bytes": path.stat().st_size, "text": None}]
    rows = csv_of("export", "gpt2", "--as", "latex")
    assert [int(row["bytes"]) for row in rows] == [one.bytes for one in made.problem.workloads]
    arena = json.loads(call("export", "gpt2", "--as", "flashinfer-trace", "--dtype", "bf16", "--json", "-q")[1])
    assert json.loads(arena["files"][0]["text"])["op_type"] == "ffn"


def test_a_file_that_cannot_be_written(call, tmp_path):
    refused = call("export", "4x8", "--as", "torch", "-o", str(tmp_path / "no" / "a.py"))
    expect_refusal(refused, "there is no directory", code=3)
