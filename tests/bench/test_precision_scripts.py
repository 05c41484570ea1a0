"""The figures of the scripts on `ffn precision`, from rows small enough to count by hand."""

import pytest
import torch

import ffncli
from benchmarks import precision_families, precision_models, precision_planted


@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_mxfp8_by_hand_is_what_the_libraries_write(rule):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator) * torch.logspace(-6, 6, 256)
    x[0, :32] = 0
    name = "mxfp8" if rule == "floor" else "mxfp8:rceil"
    assert torch.equal(precision_families.mxfp8(x, rule), ffncli.quantize(x, name).dequantize().double())


def test_the_rest_by_hand_is_that_of_ffn_precision():
    how = {"d_model": 64, "d_ff": 96, "tokens": 16}
    for source in ("llama-2-7b", "bert-base"):
        (row,) = ffncli.precision(source, dtype="mxfp8", what="both", **how).rows
        by_hand = precision_families.by_hand(ffncli.trace(source, keep=True, **how), "floor")
        assert by_hand == pytest.approx(row.rest, abs=1e-3)
    assert precision_families.by_hand(ffncli.trace("mixtral-8x7b", keep=True, **how), "floor") is None


def test_the_families_are_different():
    found = [*precision_families.families()]
    assert len({family for family, _, _ in found}) == len(found) >= 40


def test_the_summary_of_families_judges_eight_bits_without_clipping():
    base = {"family": "a", "gap": "0", "by_hand": ""}
    names = (*precision_families.EIGHT, *precision_families.FOUR)
    rows = [{**base, "format": name, "rest": "-0.2" if name in ("mxfp8", "nvfp4") else "0.01"} for name in names]
    rows[4]["by_hand"] = "-0.2004"
    text, good = precision_families.summary(rows)
    assert good
    assert "| nvfp4: families with a rest of at most 5 % | 0 of 1; the largest 20.0% |  |  |" in text
    assert not precision_families.summary([{**row, "rest": "0.06"} if row["format"] == "fp8" else row for row in rows])[
        1
    ]
    assert not precision_families.summary([{**row, "gap": "1e-9"} for row in rows])[1]
    assert not precision_families.summary([{**row, "by_hand": "0.1"} for row in rows])[1]


def test_the_summary_of_planted_layers_counts_first_ranks():
    base = {"times": "300", "error_rel": "0.3", "median_error_rel": "0.1"}
    rows = [{**base, "format": name, "rank": rank} for name in precision_planted.FORMATS for rank in ("1", "1")]
    text, good = precision_planted.summary(rows)
    assert good
    assert "| first, × 300, nvfp4 | 2 of 2; its error is 3 × the median layer's | all | reached |" in text
    rows[0]["rank"] = "2"
    assert not precision_planted.summary(rows)[1]
    assert precision_planted.summary([{**row, "times": "10"} for row in rows])[1]


def test_the_order_of_shares_is_counted_layer_by_layer():
    base = {"model": "decoder", "run": "weights", "format": "int8"}
    rows = [
        {**base, "W1": "0.1", "W3": "0.3", "W2": "0.6"},
        {**base, "W1": "0.3", "W3": "0.3", "W2": "0.4"},
    ]
    assert precision_models.order_line(rows) == ("decoder", "int8", "20.0%", "30.0%", "50.0%", "1 of 2")
    plain = [{**base, "W1": "0.4", "W3": "", "W2": "0.6"}]
    assert precision_models.order_line(plain) == ("decoder", "int8", "40.0%", "–", "60.0%", "1 of 1")


def test_a_line_on_a_model_has_the_range_of_its_layers_and_the_worst():
    base = {
        "model": "decoder", "format": "int8", "rounded": "weights", "whole_output_error": "0.25", "seconds": "12.4",
        "whole_kl": "0.00327", "peak_bytes": "1730000000",
    }  # fmt: skip
    rows = [{**base, "layer": layer, "error_rel": error} for layer, error in (("3", "0.02"), ("0", "0.005"))]
    line = ("decoder", "int8", "weights", "0.50% to 2.00%", "25.00%", "0.00327", "3, 0", "12 s", "1.73 GB")
    assert precision_models.model_line(rows) == line
    assert precision_models.model_line([{**rows[0], "whole_kl": ""}])[5] == "–"


def test_mxfp8_takes_2_percent_of_values_that_are_spread_evenly_below_a_power_of_two():
    """Clipping at 7/8 of the power takes 3 ∫ (v - 7/8) v dv from 7/8 to 1, of ∫ v² dv = 1/3: 23/1024."""
    even = (torch.randperm(1 << 15, generator=torch.Generator().manual_seed(0)).double() + 0.5) / (1 << 15)
    for name, lost in (("mxfp8", 23 / 1024), ("mxfp8:rceil", 0)):
        stored = ffncli.quantize(even.float().reshape(64, -1), name).dequantize().double().flatten()
        assert float(((even - stored) * even).sum() / even.square().sum()) == pytest.approx(lost, abs=1e-3)
