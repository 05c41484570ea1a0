"""`ffn compare FILE.csv --plot`: the sweep of one stored result, drawn."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests import ROOT
from tests.bench.stored import row, write
from tests.oracles.checkpoints import expect_refusal

RATIOS = {1: 1.25, 16: 1.0, 256: 0.8}


@pytest.fixture
def sweep(tmp_path: Path) -> str:
    found = []
    for tokens, ratio in RATIOS.items():
        found.append(row(tokens=tokens, kernel="eager", ratio=1.0, verdict="same"))
        ends = {"ratio": ratio, "ratio_low": ratio / 1.1, "ratio_high": ratio * 1.1}
        found.append(row(tokens=tokens, verdict="inconclusive" if tokens == 16 else "faster", **ends))
    return write(tmp_path / "sweep.csv", found)


def test_a_table_and_curves_of_speed_against_size(call, sweep):
    code, out, err = call("compare", sweep, "--plot")
    assert (code, err) == (0, "")
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


def test_json_and_csv_have_the_points(call, sweep):
    body = json.loads(call("compare", sweep, "--plot", "--json")[1])
    (found,) = body["sweeps"]
    packed = found["curves"][1]
    assert (found["axis"], packed["kernel"]) == ("tokens", "packed")
    assert [(p["size"], p["speed"]) for p in packed["points"]] == [(t, 1 / r) for t, r in RATIOS.items()]
    listed = list(csv.DictReader(io.StringIO(call("compare", sweep, "--plot", "--csv")[1])))
    lows = [float(r["speed_low"]) for r in listed if r["kernel"] == "packed"]
    assert lows == [p["speed_low"] for p in packed["points"]]
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "json.md").read_text("utf-8")))
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
