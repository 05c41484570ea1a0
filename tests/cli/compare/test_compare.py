"""`ffn compare` as a user asks it: tiny checkpoints read rightly and then wrongly; the sweep of a result, drawn."""

import csv
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ffncli
from docs.schemas import keys_text
from ffncli.models.tensors import layout
from ffncli.models.tensors.slices import StoredSlice
from ffncli.run.engine import execute
from tests.bench.stored import row, write
from tests.oracles.checkpoints import expect_refusal
from tests.oracles.huggingface import make

Change = Mapping[str, Callable[[StoredSlice], StoredSlice]]
_SWAP: Change = {
    f"{step}.{kind}": lambda piece: replace(piece, part=1 - piece.part)
    for step in ("gate", "up") for kind in ("weight", "bias")
}  # fmt: skip
_HALVES: Change = {name: lambda piece: replace(piece, interleaved=False) for name in _SWAP}
_WOVEN: Change = {name: lambda piece: replace(piece, interleaved=True) for name in _SWAP}


def misread(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Change how tensors are taken to be stored."""
    right = layout.slices

    def wrong(*asked: Any) -> dict[str, StoredSlice]:
        return {name: change[name](part) if name in change else part for name, part in right(*asked).items()}

    monkeypatch.setattr(layout, "slices", wrong)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make(name, made[name])
        return made[name]

    return of


def save(call, path: Path, *arguments: object) -> Path:
    code, _, err = call("trace", *map(str, arguments), "--save", str(path))
    assert code == 0, err
    assert "note: saved " in err
    return path


def twice(call, monkeypatch, tmp_path: Path, model: Path, change: Change, *options: str):
    """(exit code, JSON, stderr) of comparing the model read rightly with the same read wrongly."""
    right = save(call, tmp_path / "right.safetensors", model, *options)
    misread(monkeypatch, change)
    wrong = save(call, tmp_path / "wrong.npz", model, *options)
    code, out, err = call("compare", str(right), str(wrong), "--json")
    return code, json.loads(out), err


def test_the_same_trace_agrees_in_every_kind_of_file(call, tmp_path, models):
    paths = [
        save(call, tmp_path / f"a{kind}", models("llama"), "--layer", "1") for kind in (".safetensors", ".npz", ".json")
    ]
    for a in paths:
        for b in paths:
            code, out, err = call("compare", str(a), str(b), "--tolerance", "0", "--json")
            found = json.loads(out)
            assert (code, err, found["first"], found["comparable"], found["mismatches"]) == (0, "", None, True, [])
            assert all(row["agrees"] and row["worst"] is None for row in (*found["rows"], *found["weights"]))
            assert [row["step"] for row in found["rows"]][:2] == ["x", "norm"]


WEIGHTS = [(), ("--no-save-weights",)]


@pytest.mark.parametrize("options", WEIGHTS)
def test_swapped_halves_are_named(call, monkeypatch, tmp_path, models, options):
    code, found, err = twice(call, monkeypatch, tmp_path, models("phi3"), _SWAP, *options)
    assert (code, found["first"]) == (1, "gate")
    assert found["causes"][0] == "gate and up are swapped"
    assert err.startswith("error: gate differs first: gate[")
    assert "gate and up are swapped" in err


@pytest.mark.parametrize("options", WEIGHTS)
def test_halves_read_as_interleaved_are_named(call, monkeypatch, tmp_path, models, options):
    code, found, _ = twice(call, monkeypatch, tmp_path, models("phi3"), _WOVEN, *options)
    assert (code, found["first"]) == (1, "gate")
    assert found["causes"][0] == "gate and up come from one fused matrix: halves were read as interleaved columns"


@pytest.mark.parametrize("options", [(), ("--no-save-weights", "--expert", "all")])
def test_interleaved_columns_read_as_halves_are_named(call, monkeypatch, tmp_path, models, options):
    code, found, _ = twice(call, monkeypatch, tmp_path, models("gpt_oss"), _HALVES, *options)
    assert (code, found["first"].split(".")[0]) == (1, "experts")
    assert found["causes"][0].endswith("come from one fused matrix: interleaved columns were read as halves")


def test_a_wrong_way_as_reference_is_named_from_its_side(call, monkeypatch, tmp_path, models):
    misread(monkeypatch, _HALVES)
    wrong = save(call, tmp_path / "wrong.json", models("gpt_oss"))
    monkeypatch.undo()
    right = save(call, tmp_path / "right.json", models("gpt_oss"))
    code, _, err = call("compare", str(wrong), str(right))
    assert code == 1
    assert "halves were read as interleaved columns" in err


def square_gpt2(path: Path) -> Path:
    """GPT-2 whose matrices are square: nothing in their shapes says that they are stored as [in, out]."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_positions=8, n_embd=12, n_inner=12, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("step", ["up", "down"])
def test_a_square_conv1d_read_untransposed_is_named(call, monkeypatch, tmp_path, step):
    model = square_gpt2(tmp_path / "model")
    change: Change = {f"{step}.weight": lambda piece: replace(piece, transposed=False)}
    code, found, _ = twice(call, monkeypatch, tmp_path, model, change)
    assert (code, found["first"], found["causes"]) == (1, step, [f"{step}.weight is transposed"])
    departing = [row["step"] for row in found["weights"] if not row["agrees"]]
    assert departing == [f"{step}.weight"]


def test_a_transposed_matrix_is_named_where_only_one_side_kept_it(call, monkeypatch, tmp_path):
    model = square_gpt2(tmp_path / "model")
    right = save(call, tmp_path / "right.npz", model)
    misread(monkeypatch, {"up.weight": lambda piece: replace(piece, transposed=False)})
    wrong = save(call, tmp_path / "wrong.npz", model, "--no-save-weights")
    for pair in ((right, wrong), (wrong, right)):
        code, out, _ = call("compare", *map(str, pair), "--json")
        assert (code, json.loads(out)["causes"]) == (1, ["up.weight is transposed"])


def test_a_norm_with_one_plus_its_weight_is_named(call, monkeypatch, tmp_path, models):
    right = save(call, tmp_path / "right.npz", models("gemma"))
    plain = execute.norm
    monkeypatch.setattr(execute, "norm", lambda op, own, x: plain(replace(op, weight="plain"), own, x))
    wrong = save(call, tmp_path / "wrong.npz", models("gemma"))
    code, out, err = call("compare", str(right), str(wrong), "--json")
    found = json.loads(out)
    assert (code, found["first"]) == (1, "norm")
    assert found["causes"] == ["norm is times 1 + w in BASE, times w in NEW"]
    assert "times w in NEW" in err


def test_another_function_is_named_by_its_formula(call, tmp_path):
    base = save(call, tmp_path / "a.npz", "8x16:gelu")
    new = save(call, tmp_path / "b.npz", "8x16:gelu_tanh")
    code, out, _ = call("compare", str(base), str(new), "--json")
    found = json.loads(out)
    assert (code, found["first"]) == (1, "act")
    assert found["causes"] == ["act: formula is gelu(up) in BASE, gelu_tanh(up) in NEW"]
    assert {"field": "act: formula", "base": "gelu(up)", "new": "gelu_tanh(up)"} in found["mismatches"]
    assert call("compare", str(base), str(new), "--tolerance", "0.01")[0] == 0


def test_the_rows_are_numpys(call, tmp_path):
    base = save(call, tmp_path / "a.npz", "8x16:swiglu", "--tokens", "3")
    new = save(call, tmp_path / "b.npz", "8x16:geglu", "--tokens", "3")
    a, b = np.load(base), np.load(new)
    code, out, _ = call("compare", str(base), str(new), "--csv")
    rows = {row["step"]: row for row in csv.DictReader(io.StringIO(out))}
    assert code == 1
    for name in ("act", "hidden", "down"):
        gap = np.abs(b[name].astype(float) - a[name])
        at = np.unravel_index(gap.argmax(), gap.shape)
        row = rows[name]
        assert float(row["max_error"]) == gap.max()
        assert float(row["relative_error"]) == pytest.approx(gap.max() / np.abs(a[name]).max(), rel=1e-12)
        assert row["worst"] == f"{name}[{at[0]},{at[1]}]"
        assert (float(row["base"]), float(row["new"])) == (float(a[name][at]), float(b[name][at]))
        assert float(row["ulps"]) == pytest.approx(gap.max() / np.spacing(np.abs(a[name][at])), rel=1e-12)
        assert (row["agrees"], row["dtype"]) == ("false", "float32")


def test_two_dtypes_are_held_to_the_narrower(call, tmp_path):
    wide = save(call, tmp_path / "a.safetensors", "16x32:swiglu")
    narrow = save(call, tmp_path / "b.safetensors", "16x32:swiglu", "--dtype", "bf16")
    code, out, _ = call("compare", str(wide), str(narrow), "--json")
    found = json.loads(out)
    assert (code, found["mismatches"]) == (0, [{"field": "dtype", "base": "float32", "new": "bfloat16"}])
    assert {(row["dtype"], row["tolerance"]) for row in found["rows"]} == {("bfloat16", 0.01)}
    assert call("compare", str(wide), str(narrow), "--tolerance", "1e-4")[0] == 1


def test_inputs_that_differ_are_said_to(call, tmp_path):
    base = save(call, tmp_path / "a.npz", "8x16:gelu", "--input", "ones")
    new = save(call, tmp_path / "b.npz", "8x16:gelu", "--input", "zeros")
    code, out, err = call("compare", str(base), str(new), "--json")
    found = json.loads(out)
    assert (code, found["first"], found["comparable"]) == (1, "x", False)
    assert "the inputs already differ" in err


def test_nan_in_both_agrees_and_in_one_departs(call, tmp_path):
    values = ["1,2,nan,4", "1,2,nan,4", "1,2,3,4"]
    a, b, c = (
        save(call, tmp_path / f"{i}.json", "4x8:relu", "--input", text, "--tokens", "1")
        for i, text in enumerate(values)
    )
    assert call("compare", str(a), str(b))[0] == 0
    code, out, err = call("compare", str(a), str(c), "--json")
    row = json.loads(out)["rows"][0]
    assert (code, row["agrees"], row["nonfinite"], row["worst"]) == (1, False, 1, "x[0,2]")
    assert (row["base"], row["new"], row["max_error"]) == (None, 3.0, 0.0)
    assert "x[0,2] is nan in BASE, 3.0 in NEW (1 values are finite in only one trace)" in err


def test_experts_that_got_other_tokens_are_left_out(call, json_of, tmp_path):
    options = ("8x16:swiglu", "--experts", "4", "--expert", "all")
    base = save(call, tmp_path / "a.npz", *options)
    new = save(call, tmp_path / "b.npz", *options, "--input", "ones")
    code, out, _ = call("compare", str(base), str(new), "--json")
    assert (code, json.loads(out)["first"]) == (1, "x")
    assert any(m["field"].endswith(": tokens") for m in json.loads(out)["mismatches"])
    plain = save(call, tmp_path / "c.npz", *options[:-2])
    assert {m["new"] for m in json_of("compare", str(base), str(plain))["mismatches"]} == {"not saved"}


def test_another_block_is_refused(call, tmp_path):
    gated = save(call, tmp_path / "gated.npz", "8x16:swiglu")
    plain = save(call, tmp_path / "plain.npz", "8x16:gelu")
    wide = save(call, tmp_path / "wide.npz", "8x32:gelu")
    more = save(call, tmp_path / "more.npz", "8x16:gelu", "--tokens", "5")
    longer = save(call, tmp_path / "longer.npz", "8x16:gelu", "--residual")
    expect_refusal(
        call("compare", str(gated), str(plain)), "from a different block", f"gate = x · W1 in {gated}, up = x · W1"
    )
    shapes = f"up has shape [4, 16] in {plain} but [4, 32] in {wide}"
    expect_refusal(call("compare", str(plain), str(wide)), "from a different block", shapes)
    shapes = f"x has shape [4, 8] in {plain} but [5, 8] in {more}"
    expect_refusal(call("compare", str(plain), str(more)), "a different input", shapes)
    expect_refusal(call("compare", str(plain), str(longer)), "only", "longer.npz has the step out")


@pytest.mark.parametrize("name", ["a.txt", "a.npz", "a.safetensors", "a.json", "a.csv"])
def test_files_that_are_no_saved_trace(call, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"step,max_error\n")
    expect_refusal(call("compare", str(path), str(path)), name)


def test_tensors_that_no_trace_saved(call, tmp_path):
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    (tmp_path / "x.json").write_text('{"x": [1, 2]}')
    expect_refusal(call("compare", *[str(tmp_path / "x.npz")] * 2), "is not a saved trace", "ffn trace --save FILE")
    for name in ("x.json", "x.safetensors"):  # these may be a config and weights
        expect_refusal(call("compare", *[str(tmp_path / name)] * 2), name)


def test_the_page_names_the_first_step_and_why(call, tmp_path):
    base = save(call, tmp_path / "a.npz", "8x16:gelu")
    new = save(call, tmp_path / "b.npz", "8x16:relu")
    code, out, _ = call("compare", str(base), str(new))
    assert code == 1
    assert "act differs first: act[" in out
    assert "all 2 steps" not in out
    assert "\x1b" not in out
    assert out.split("\n\n")[-1].startswith("act differs first: act[")
    assert "\n\nall 4 steps agree\n" in call("compare", str(base), str(base))[1]


@pytest.mark.parametrize("both", [True, False, None])
def test_on_a_terminal_the_verdict_is_said_once(call, tmp_path, monkeypatch, both):
    """By the error under the page; where stderr goes elsewhere, by the page."""
    base = save(call, tmp_path / "a.npz", "8x16:gelu")
    new = save(call, tmp_path / "b.npz", "8x16:relu")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if both is None:
        monkeypatch.setattr(sys, "stderr", None)  # closed
    else:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: both)
    code, out, err = call("compare", str(base), str(new), "--no-color")
    assert code == 1
    assert err.startswith("error: act differs first: act[") == (both is not None)
    assert ("differs first" in out, "act: formula is" in out) == (not both, not both)


def test_a_step_that_is_zero_in_base_has_no_relative_error(call, tmp_path):
    base = save(call, tmp_path / "a.npz", "4x8", "--no-bias", "--input", "zeros")
    new = save(call, tmp_path / "b.npz", "4x8", "--no-bias", "--input", "ones")
    code, out, err = call("compare", str(base), str(new))
    assert code == 1
    assert "x differs first: x[0,0] is 0.0 in BASE, 1.0 in NEW; the whole step is 0 in BASE" in err
    assert not re.search(r"\binf\b|ulps of", out + err)


def test_ulps_are_said_of_values_that_are_near(call, tmp_path):
    base, far, near = (
        save(call, tmp_path / f"{name}.npz", "4x8", "--input", values)
        for name, values in (("a", "1e-30,0,0,1"), ("b", "2,0,0,1"), ("c", "1.5e-30,0,0,1.5"))
    )
    assert "ulps of" not in call("compare", str(base), str(far))[2]
    assert "4.194e+06 ulps of float32" in call("compare", str(base), str(near))[2]


def test_another_op_under_the_same_formula_is_named(call, tmp_path):
    base = save(call, tmp_path / "a.json", "4x8")
    record = base.read_text()
    assert record.count('"linear"') == 2
    other = tmp_path / "b.json"
    other.write_text(record.replace('"linear"', '"conv"', 1).replace('"bias": "True"', '"bias": "False"', 1))
    err = expect_refusal(call("compare", str(base), str(other)))
    assert re.search(
        r"up = x · W1 \+ b1 is linear \(bias True\) in \S+a\.json, conv \(bias False\) in \S+b\.json", err
    ), err


RATIOS = {1: 1.25, 16: 1.0, 256: 0.8}


@pytest.fixture
def sweep(tmp_path: Path) -> str:
    found = []
    for tokens, ratio in RATIOS.items():
        found.append(row(tokens=tokens, kernel="eager", ratio=1.0, verdict="same"))
        ends = {"ratio": ratio, "ratio_low": ratio / 1.1, "ratio_high": ratio * 1.1}
        found.append(row(tokens=tokens, verdict="inconclusive" if tokens == 16 else "faster", **ends))
    return write(tmp_path / "sweep.csv", found)


def test_a_table_and_curves_of_speed_against_size(call, stdout_of, sweep):
    out = stdout_of("compare", sweep, "--plot")
    table, _, plot = out.partition("speed against eager, ")
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    assert lines[0] == ["speed against eager", "512x2048:silu, gated"]
    assert lines[2:6] == [
        ["tokens", "packed"], ["1", "0.800 [0.727, 0.880]"], ["16", "1.000 [0.909, 1.100] ?"],
        ["256", "1.250 [1.136, 1.375]"],
    ]  # fmt: skip
    *_, labels, name, legend = plot.rstrip().splitlines()
    assert (labels.split(), name.strip(), legend) == (["1", "16", "256"], "tokens", "  a eager (baseline)   b packed")
    marks = [line.index("b") for line in plot.splitlines()[2:-3] if "b" in line]
    assert marks == sorted(marks, reverse=True)  # 1.25 stands to the right of and above 0.8
    assert "?" not in call("compare", sweep, "--plot-file", str(Path(sweep).with_suffix(".svg")))[2]


def test_a_file_has_the_curves_with_their_intervals(call, sweep, tmp_path):
    path = tmp_path / "s.svg"
    code, out, err = call("compare", sweep, "--plot-file", str(path))
    assert (code, err, "times as fast" in out) == (0, f"note: wrote {path}\n", False)
    texts = {e.text for e in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert {"tokens", "times as fast as eager", "packed", "eager (baseline)", "1", "16", "256"} <= texts


def test_json_and_csv_have_the_points(call, csv_of, sweep):
    body = json.loads(call("compare", sweep, "--plot", "--json")[1])
    (found,) = body["sweeps"]
    packed = found["curves"][1]
    assert (found["axis"], packed["kernel"]) == ("tokens", "packed")
    assert [(p["size"], p["speed"]) for p in packed["points"]] == [(t, 1 / r) for t, r in RATIOS.items()]
    listed = csv_of("compare", sweep, "--plot", notes=True)
    lows = [float(r["speed_low"]) for r in listed if r["kernel"] == "packed"]
    assert lows == [p["speed_low"] for p in packed["points"]]
    documented = set(re.findall(r"`(\w+)`", keys_text("compare") + keys_text("")))
    assert {*body, *found, *packed, *packed["points"][0]} <= documented


def test_what_cannot_be_drawn(call, sweep, tmp_path):
    expect_refusal(call("compare", sweep), "NEW is missing", "--plot")
    expect_refusal(call("compare", sweep, sweep, "--plot"), "leave out NEW")
    expect_refusal(call("compare", sweep, "--plot", "--strict"), "--strict compares two files")
    expect_refusal(call("compare", sweep, "--plot", "--tolerance", "1"), "--tolerance compares two files")
    flat = write(tmp_path / "flat.csv", [row(), row(dtype="bf16")])
    expect_refusal(call("compare", flat, "--plot"), "no size has two values", "--tokens 1,16,256")
    trace = tmp_path / "t.json"
    trace.write_text("{}")
    expect_refusal(call("compare", str(trace), "--plot"), "is not a result of ffn bench")


def test_two_files_of_routes(call, json_of, csv_of, tmp_path):
    base, new = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    Path(base).write_text("pos,layer,e0,e1\n0,0,3,1\n1,0,2,0\n", "utf-8")
    Path(new).write_text("pos,layer,e0,e1\n0,0,1,3\n1,0,2,3\n", "utf-8")
    code, out, err = call("compare", base, new)
    assert (code, err) == (1, "error: 1 of 4 choices differ, at 1 of 2 tokens\n")
    assert "0          1     0    3" in out
    assert "Choices that differ" in out
    assert call("compare", base, base)[0] == 0
    assert "all 4 choices of 1 layer agree" in call("compare", base, base)[1]
    assert json_of("compare", base, base)["rows"] == [vars(row) for row in ffncli.compare(base, base).rows]
    assert [one["choices"] for one in csv_of("compare", base, base)] == ["4"]
