"""`ffn activations` from the outside."""

import math
import re
from contextlib import suppress

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from docs.schemas import keys_text
from ffncli.block.activations import TABLE
from ffncli.block.analysis import difference
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.run.activations.question import IN_USE, MOST, FunctionsQuestion, points
from ffncli.show.text import encodable
from tests.cli.test_main import HEAVY, loaded_by


def test_json_says_what_the_contract_promises(json_of):
    (row,) = json_of("activations", "gelu", "--at", "0.12,-0.08")["rows"]
    assert row["name"] == "gelu"
    assert row["formula"] == "x Φ(x)"
    first = row["values"][0]
    assert (first["x"], round(first["value"], 3), round(first["ratio"], 4)) == (0.12, 0.066, 0.5478)
    assert {"minimum", "minimum_at", "lipschitz", "zero_share", "mean", "variance"} <= set(row)
    assert row["mean"] == pytest.approx(1 / (2 * math.sqrt(math.pi)), abs=1e-14)
    assert row["maximum"] is None


def test_the_default_is_what_known_models_use(json_of):
    used = {group.spec.activation for name in catalog.names() for group in catalog.find(name).model.groups}
    assert used <= set(IN_USE)
    assert [row["name"] for row in json_of("activations")["rows"]] == list(IN_USE)
    assert all(TABLE[name].used_by for name in IN_USE)


def test_names_in_any_spelling_and_as_a_list(json_of):
    rows = json_of("activations", "GELU-New,swish", "gelu_tanh", "relu")["rows"]
    assert [row["name"] for row in rows] == ["gelu_tanh", "silu", "relu"]
    assert [row["name"] for row in json_of("activations", "--all")["rows"]] == list(TABLE)


def test_csv_has_a_line_per_activation_in_full_precision(csv_of):
    lines = csv_of("activations", "relu", "tanh", "--at", "0.5,2")
    assert [line["name"] for line in lines] == ["relu", "tanh"]
    assert lines[1]["value"] == f"{math.tanh(0.5)!r};{math.tanh(2)!r}"
    assert (lines[0]["maximum"], lines[0]["monotone"], lines[0]["x"]) == ("", "true", "0.5;2.0")


def test_the_page_reads(call, stdout_of):
    out = stdout_of("activations", "gelu", "relu")
    lines = [line.split() for line in out.splitlines()]
    assert ["gelu", "[-0.1700,", "∞)", "-0.7518", "1.1289", "1.4142", "no", "smooth"] in lines
    assert ["relu", "50", "50.04", "0.3989", "0.3408", "1.4142", "1.4142"] in lines
    assert ["-1", "-0.1587", "0.0000"] in lines
    assert "f(x)/x" not in out
    assert "f(x)/x" in call("activations", "gelu", "relu", "--at", "1")[1]


def test_stated_values_are_marked_and_decide_the_exit_code(call, json_of):
    code, out, err = call("activations", "gelu", "--expect", "0.12=0.066,0.21=0.115", "--expect=-0.15=-0.058")
    assert code == 1
    verdicts = [line.split()[-1] for line in out.splitlines()[2:5]]
    assert verdicts == ["right", "wrong", "wrong"]
    assert err.startswith("error: 2 of 3 stated values are wrong: gelu(0.21) = 0.1225, not 0.115")
    assert call("activations", "gelu", "--expect", "0.12=0.066")[0] == 0
    (one,) = json_of("activations", "gelu", "--expect", "0.18=0.103")["expected"]
    assert (one["right"], round(one["ratio"], 3)) == (True, 0.571)


def test_an_option_may_be_repeated_or_hold_a_comma_list(json_of):
    asked = {
        ("gelu", "--at", "0,1", "--at", "-0.5:0:0.5"): ("gelu", "--at", "0,1,-0.5:0:0.5"),
        ("swiglu", "--up", "1,2", "--up", "-1"): ("swiglu", "--up", "1,2,-1"),
        ("gelu", "--against", "silu", "--dtype", "bf16", "--dtype", "fp16,fp32"): (
            "gelu", "--against", "silu", "--dtype", "bf16,fp16,fp32",
        ),
        ("gelu", "--expect", "1=0.841", "--expect", "2=1.9545"): ("gelu", "--expect", "1=0.841,2=1.9545"),
    }  # fmt: skip
    for repeated, once in asked.items():
        assert json_of("activations", *repeated) == json_of("activations", *once)
    assert [v["x"] for v in json_of("activations", "gelu", "--at", "1", "--at", "2")["rows"][0]["values"]] == [1, 2]


def test_what_is_stated_reads_as_it_was_written_beside_digits_enough_to_judge_it(call):
    code, out, err = call("activations", "gelu", "--expect", "0.25=0.150,1=0.841345,1=0.8413451,-3=-4.05e-3")
    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert ["0.25", "0.150", "0.1497", "0.5987", "right"] in lines
    assert ["1", "0.841345", "0.8413447", "0.8413", "right"] in lines  # Φ(1) = 0.841344746...
    assert ["1", "0.8413451", "0.84134475", "0.8413", "wrong"] in lines
    assert ["-3", "-4.05e-3", "-0.004050", "0.0013", "right"] in lines
    assert "1 of 4 stated values are wrong: gelu(1) = 0.84134475, not 0.8413451" in err


def test_a_narrow_input_keeps_its_moments_on_the_page(call):
    """E[f²] of x ~ N(0, s²): of relu s² / 2, with mean s / √(2π); of tanh the mean is 0, whatever rounding leaves."""
    table = call("activations", "relu", "tanh", "--std", "1e-6", "--at", "0")[1]
    relu, tanh = (
        next(line for line in table.splitlines() if line.startswith(n) and " 100 " in line) for n in ("relu", "tanh")
    )
    mean = 1e-6 / math.sqrt(2 * math.pi)
    assert relu.split()[3:5] == [f"{mean:.3e}", f"{5e-13 - mean**2:.3e}"]
    assert tanh.split()[3:5] == ["0.0000", "1.000e-12"]
    assert "0.0000" in next(
        x for x in call("activations", "tanh", "--at", "0")[1].splitlines() if x.startswith("tanh  ") and "0.3943" in x
    )


@pytest.mark.parametrize("asked", ["--all --against gelu --at 1", "swiglu --iso-params --at 1"])
def test_an_output_without_our_symbols_reads_all_the_same(stdout_of, asked):
    """A question mark would stand for infinity, for ± or for an exponent."""
    out = stdout_of("activations", *asked.split())
    assert {mark for mark in set(out) if encodable(mark, "ascii") == "?"} <= {"?"}


def test_a_difference_is_computed_once_for_the_page_and_the_exit_code(call, monkeypatch):
    asked = []
    real = difference.difference
    monkeypatch.setattr(difference, "difference", lambda *which: asked.append(which) or real(*which))
    options = ("--against", "gelu", "--tolerance", "0.1", "--dtype", "bf16")
    code, _, error = call("activations", "silu", "gelu_tanh", *options)
    assert (code, asked) == (1, [("silu", "gelu", 1.0), ("gelu_tanh", "gelu", 1.0)])
    assert "silu by 0.19" in error
    assert "gelu_tanh" not in error


# --- --at: lists, ranges, and what is neither -------------------------------------------------------------------------


def test_lists_and_ranges():
    assert points("0.12,-0.08,0.25") == (0.12, -0.08, 0.25)
    assert points("-3:3:0.5") == tuple(i / 2 for i in range(-6, 7))
    assert points("0:3") == (0.0, 1.0, 2.0, 3.0)
    assert points("1:1:5") == (1.0,)
    assert points("5,0:1:0.5, 7") == (5.0, 0.0, 0.5, 1.0, 7.0)
    assert points("1e1") == (10.0,)
    assert points("-0.0") == (0.0,)


def test_a_range_is_counted_in_decimal():
    assert points("0:1:0.1") == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert points("-0.3:0.3:0.1") == (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a finite number"), ("a", "'a' is not a finite number"), ("nan", "not a finite number"),
        ("-inf", "not a finite number"), ("1e999", "not a finite number"), ("1,,2", "'' is not a finite number"),
        ("2e9", "out of range"), ("1:0", "empty"), ("0:1:0", "step"), ("0:1:-1", "step"), ("0:1:nan", "finite"),
        ("0:1:1:1", "A:B:STEP"), (":", "finite"), ("0:1:1e-9", "more than 10,000 points"),
        ("0:1e9:1e-300", "more than"), (",".join("1" * (MOST + 1)), "more than 10,000 points"), ("1/2", "finite"),
        ("0:5000,0:5000", "more than"), ("0x10", "finite"), ("1e-999999999:1:0.5", ""),
    ],
)  # fmt: skip
def test_what_is_no_list_of_points_is_refused(text, said):
    if not said:
        assert points(text) == (0.0, 0.5, 1.0)
        return
    with pytest.raises(FFNError, match=r"^at: ") as error:
        FunctionsQuestion(at=text)
    assert said in str(error.value)


@given(st.one_of(st.text(), st.from_regex(r"[-+]?[0-9e._:,]{0,20}", fullmatch=True)))
def test_any_text_gives_points_or_an_error(text):
    with suppress(FFNError):
        found = points(text)
        assert 0 < len(found) <= MOST
        assert all(abs(x) <= 1e9 for x in found)


# --- --against and --rounding in formats ------------------------------------------------------------------------------


def test_the_differences_of_the_gelus(json_of):
    rows = {
        row["name"]: row
        for row in json_of("activations", "gelu_new", "quick-gelu", "gelu", "--against", "gelu_erf")["rows"]
    }
    tanh, quick, itself = rows["gelu_tanh"], rows["quick_gelu"], rows["gelu"]
    assert (f"{tanh['max_difference']:.2e}", f"{tanh['max_difference_at']:.2f}") == ("4.73e-04", "2.70")
    assert f"{quick['max_difference']:.2e}" == "2.03e-02"
    assert tanh["max_difference_symmetric"] is True
    assert (itself["max_difference"], itself["max_difference_at"]) == (0, None)
    assert {row["against"] for row in rows.values()} == {"gelu"}
    assert [s["survives"] for s in tanh["rounded"]] == ["in part", "in part"]
    assert [s["survives"] for s in itself["rounded"]] == ["no", "no"]
    assert [m["ulps"] for m in tanh["rounded"][0]["at_max_difference"]] == [0, 8]


def test_the_page_says_it_in_sentences(stdout_of):
    out = stdout_of("activations", "gelu_tanh", "gelu", "relu2", "elu", "--against", "gelu")
    assert re.search(r"^gelu_tanh +4\.732e-04  ±2\.699 ", out, re.M)
    assert re.search(r"^relu2 +unbounded; 90 in \[-10, 10\]  10 ", out, re.M)
    assert re.search(r"^elu +1\.0000  towards -∞ ", out, re.M)
    assert re.search(
        r"^gelu_tanh in bf16  in part: 8\.8 % of inputs differ, .*; 0 ulps at x = 2\.703, 8 ulps at", out, re.M
    )
    assert "gelu in bf16" not in out


def test_unbounded_is_null_and_looked_at_nearby(json_of):
    (row,) = json_of("activations", "relu2", "--against", "gelu")["rows"]
    assert (row["max_difference"], row["max_difference_at"], row["max_difference_towards"]) == (None, None, None)
    assert row["max_difference_within"] == {"low": -10, "high": 10, "x": 10, "value": pytest.approx(90)}
    (row,) = json_of("activations", "elu", "--against", "gelu")["rows"]
    assert (row["max_difference"], row["max_difference_at"], row["max_difference_towards"]) == (1, None, "-inf")


def test_formats_are_chosen(json_of):
    (row,) = json_of("activations", "silu", "--against", "gelu", "--dtype", "float32,bf16,fp32")["rows"]
    assert [s["dtype"] for s in row["rounded"]] == ["fp32", "bf16"]
    assert row["rounded"][0]["inputs"] > 10_000
    entries = json_of("activations", "silu", "--rounding", "--dtype", "fp16")["rounding"]
    assert [(e["dtype"], e["way"]) for e in entries] == [("fp16", "native"), ("fp16", "formula")]


def test_std_reaches_both(json_of):
    (narrow,) = json_of("activations", "silu", "--against", "gelu", "--rounding", "--std", "0.1")["rows"]
    (wide,) = json_of("activations", "silu", "--against", "gelu", "--rounding", "--std", "3")["rows"]
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


def test_rounding_names_the_worst_point(json_of, stdout_of):
    body = json_of("activations", "gelu", "relu2", "--rounding")
    entries = {(e["name"], e["dtype"], e["way"]): e for e in body["rounding"]}
    formula = entries["gelu", "bf16", "formula"]
    assert formula["max_ulps"] > 100  # 1 + erf(x) cancels
    assert formula["value"] == 0
    native = entries["gelu", "fp16", "native"]  # below 3 ulps or 5.8, as the processor's vector instructions have it
    assert (native["at"], native["max_ulps"]) == pytest.approx(worst_of_torch_in_fp16(), rel=1e-6)
    assert native["max_ulps"] < 0.01 * entries["gelu", "fp16", "formula"]["max_ulps"]
    assert ("relu2", "bf16", "native") not in entries
    out = stdout_of("activations", "gelu", "relu2", "--rounding")
    assert "relu2 in fp16, formula: overflows from |x| = 256 on" in out
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    finite = torch.nn.functional.gelu(every).isfinite().all()  # not with every processor's vector instructions
    assert ("gelu in bf16, native: infinite or NaN from x = " in out) != bool(finite)


def test_csv_has_a_line_per_activation(json_of, csv_of):
    rows = csv_of("activations", "silu", "gelu_tanh", "--against", "gelu", "--rounding")
    assert [row["name"] for row in rows] == ["silu", "gelu_tanh"]
    assert rows[1]["max_difference_symmetric"] == "true"
    assert rows[1]["bf16_ulps_at_max_difference"] == "0;8"
    assert rows[1]["bf16_survives"] == "in part"
    assert float(rows[0]["fp16_native_max_ulps"]) > 0
    body = json_of("activations", "silu", "--against", "gelu")["rows"][0]
    assert float(rows[0]["max_difference"]) == body["max_difference"]


def test_a_line_of_csv_where_only_some_have_a_native_call(csv_of):
    rows = csv_of("activations", "relu2", "gelu", "--rounding")
    assert rows[0]["bf16_native_max_ulps"] == ""
    assert float(rows[1]["bf16_native_max_ulps"]) > 1


def test_every_key_is_described(json_of):
    section = keys_text("activations")
    body = json_of("activations", "gelu_tanh", "--against", "gelu", "--rounding")
    plain = json_of("activations", "gelu_tanh")
    row, plain_row = body["rows"][0], plain["rows"][0]
    keys = [k for k in row if k not in plain_row] + [k for s in row["rounded"] for k in s]
    keys += [k for s in row["rounded"] for m in s["at_max_difference"] for k in m] + [
        k for e in body["rounding"] for k in e
    ]
    keys += list(json_of("activations", "relu2", "--against", "gelu")["rows"][0]["max_difference_within"])
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
