"""`ffn activations --against` and `--rounding`, as a user asks for them."""

import csv
import io
import json
import re

import numpy
import pytest
import torch

from tests import ROOT
from tests.cli.test_main import HEAVY, loaded_by

JSON_DOC = (ROOT / "docs" / "json.md").read_text("utf-8")


def found(call, *arguments: str) -> dict:
    code, out, err = call("activations", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_differences_of_the_gelus(call):
    rows = {row["name"]: row for row in found(call, "gelu_new", "quick-gelu", "gelu", "--against", "gelu_erf")["rows"]}
    tanh, quick, itself = rows["gelu_tanh"], rows["quick_gelu"], rows["gelu"]
    assert (f"{tanh['max_difference']:.2e}", f"{tanh['max_difference_at']:.2f}") == ("4.73e-04", "2.70")
    assert f"{quick['max_difference']:.2e}" == "2.03e-02"
    assert tanh["max_difference_symmetric"] is True
    assert (itself["max_difference"], itself["max_difference_at"]) == (0, None)
    assert {row["against"] for row in rows.values()} == {"gelu"}
    assert [s["survives"] for s in tanh["rounded"]] == ["in part", "in part"]
    assert [s["survives"] for s in itself["rounded"]] == ["no", "no"]
    assert [m["ulps"] for m in tanh["rounded"][0]["at_max_difference"]] == [0, 8]


def test_the_page_says_it_in_sentences(call):
    code, out, _ = call("activations", "gelu_tanh", "gelu", "relu2", "elu", "--against", "gelu")
    assert code == 0
    assert re.search(r"^gelu_tanh +4\.732e-04  ±2\.699 ", out, re.M)
    assert re.search(r"^relu2 +unbounded; 90 in \[-10, 10\]  10 ", out, re.M)
    assert re.search(r"^elu +1\.0000  towards -∞ ", out, re.M)
    assert re.search(
        r"^gelu_tanh in bf16  in part: 8\.8 % of inputs differ, .*; 0 ulps at x = 2\.703, 8 ulps at", out, re.M
    )
    assert "gelu in bf16" not in out


def test_unbounded_is_null_and_looked_at_nearby(call):
    (row,) = found(call, "relu2", "--against", "gelu")["rows"]
    assert (row["max_difference"], row["max_difference_at"], row["max_difference_towards"]) == (None, None, None)
    assert row["max_difference_within"] == {"low": -10, "high": 10, "x": 10, "value": pytest.approx(90)}
    (row,) = found(call, "elu", "--against", "gelu")["rows"]
    assert (row["max_difference"], row["max_difference_at"], row["max_difference_towards"]) == (1, None, "-inf")


def test_formats_are_chosen(call):
    (row,) = found(call, "silu", "--against", "gelu", "--dtype", "float32,bf16,fp32")["rows"]
    assert [s["dtype"] for s in row["rounded"]] == ["fp32", "bf16"]
    assert row["rounded"][0]["inputs"] > 10_000
    entries = found(call, "silu", "--rounding", "--dtype", "fp16")["rounding"]
    assert [(e["dtype"], e["way"]) for e in entries] == [("fp16", "native"), ("fp16", "formula")]


def test_std_reaches_both(call):
    (narrow,) = found(call, "silu", "--against", "gelu", "--rounding", "--std", "0.1")["rows"]
    (wide,) = found(call, "silu", "--against", "gelu", "--rounding", "--std", "3")["rows"]
    assert narrow["rms_difference"] < wide["rms_difference"]
    assert narrow["rounded"][0]["rounding_rms"] < wide["rounded"][0]["rounding_rms"]


def worst_of_torch_in_fp16() -> tuple[float, float]:
    """Over every fp16 number, the (x, error in ulps) of torch's gelu there, the exact value by the normal integral."""
    x = numpy.arange(2**16, dtype=numpy.uint16).view(numpy.float16)
    x = x[numpy.isfinite(x)]
    exact = (torch.special.ndtr(torch.from_numpy(x).double()) * torch.from_numpy(x).double()).numpy()
    computed = torch.nn.functional.gelu(torch.from_numpy(x)).double().numpy()
    ulp = numpy.spacing(numpy.minimum(abs(exact), 65472).astype(numpy.float16)).astype(float)
    errors = abs(computed - exact) / ulp
    return float(x[errors.argmax()]), float(errors.max())


def test_rounding_names_the_worst_point(call):
    body = found(call, "gelu", "relu2", "--rounding")
    entries = {(e["name"], e["dtype"], e["way"]): e for e in body["rounding"]}
    formula = entries["gelu", "bf16", "formula"]
    assert formula["max_ulps"] > 100  # 1 + erf(x) cancels
    assert formula["value"] == 0
    native = entries["gelu", "fp16", "native"]  # below 3 ulps or 5.8, as the processor's vector instructions have it
    assert (native["at"], native["max_ulps"]) == pytest.approx(worst_of_torch_in_fp16(), rel=1e-6)
    assert native["max_ulps"] < 0.01 * entries["gelu", "fp16", "formula"]["max_ulps"]
    assert ("relu2", "bf16", "native") not in entries
    code, out, _ = call("activations", "gelu", "relu2", "--rounding")
    assert code == 0
    assert "relu2 in fp16, formula: overflows from |x| = 256 on" in out
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    finite = torch.nn.functional.gelu(every).isfinite().all()  # not with every processor's vector instructions
    assert ("gelu in bf16, native: infinite or NaN from x = " in out) != bool(finite)


def test_csv_has_a_line_per_activation(call):
    code, out, _ = call("activations", "silu", "gelu_tanh", "--against", "gelu", "--rounding", "--csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["name"] for row in rows] == ["silu", "gelu_tanh"]
    assert rows[1]["max_difference_symmetric"] == "true"
    assert rows[1]["bf16_ulps_at_max_difference"] == "0;8"
    assert rows[1]["bf16_survives"] == "in part"
    assert float(rows[0]["fp16_native_max_ulps"]) > 0
    body = found(call, "silu", "--against", "gelu")["rows"][0]
    assert float(rows[0]["max_difference"]) == body["max_difference"]


def test_a_line_of_csv_where_only_some_have_a_native_call(call):
    code, out, _ = call("activations", "relu2", "gelu", "--rounding", "--csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert rows[0]["bf16_native_max_ulps"] == ""
    assert float(rows[1]["bf16_native_max_ulps"]) > 1


def test_every_key_is_described(call):
    section = JSON_DOC[JSON_DOC.index("\n## activations\n") :].split("\n## ")[1]
    body = found(call, "gelu_tanh", "--against", "gelu", "--rounding")
    plain = found(call, "gelu_tanh")
    row, plain_row = body["rows"][0], plain["rows"][0]
    keys = [k for k in row if k not in plain_row] + [k for s in row["rounded"] for k in s]
    keys += [k for s in row["rounded"] for m in s["at_max_difference"] for k in m] + [
        k for e in body["rounding"] for k in e
    ]
    keys += list(found(call, "relu2", "--against", "gelu")["rows"][0]["max_difference_within"])
    assert [key for key in dict.fromkeys(keys) if f"`{key}`" not in section] == []


def test_tolerance_decides_the_exit_code(call):
    assert call("activations", "gelu_tanh", "--against", "gelu", "--tolerance", "1e-3")[0] == 0
    code, out, err = call(
        "activations", "gelu_tanh", "silu", "relu2", "elu", "--against", "gelu", "--tolerance", "1e-4"
    )
    assert code == 1
    assert "Difference from g = gelu" in out
    assert err == (
        "error: more than --tolerance 0.0001 from gelu: gelu_tanh by 0.000473 at x = ±2.699, "
        "silu by 0.193 at x = ±1.965, relu2 without bound, elu by 1 towards -∞\n"
    )
    assert call("activations", "gelu", "--against", "gelu", "--tolerance", "0")[0] == 0


def test_against_needs_no_tensor_library():
    assert not loaded_by("activations --against gelu --dtype bf16") & HEAVY
