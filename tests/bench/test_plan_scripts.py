"""The figures of benchmarks/plan_*.py, from rows small enough to count by hand, and the file of published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan_measured, plan_published
from benchmarks.plan_published import Figure, Prediction, csv_of, figures, median_error, median_of_sources, predicted
from benchmarks.script import Kept
from ffncli.system import hardware

PRODUCT = Figure("a page", "H100 SXM5", "product", (4096, 8192), 1024, "bf16", 500.0, "tflops")
MADE_UP = [
    Prediction(replace(PRODUCT, source=source, reported=1.0, unit="us"), seconds, "compute", cached)
    for source, seconds, cached in (
        ("a", 1.1e-6, False), ("a", 0.75e-6, False), ("a", 1.0e-6, False), ("b", 2.0e-6, False), ("b", 9e-6, True),
    )
]  # fmt: skip


def test_a_figure_is_a_time():
    assert PRODUCT.measured_s == pytest.approx(2 * 1024 * 4096 * 8192 / 500e12)
    assert replace(PRODUCT, unit="us", reported=3.0).measured_s == pytest.approx(3e-6)
    assert replace(PRODUCT, unit="ms", reported=3.0).measured_s == pytest.approx(3e-3)
    reduced = Figure("a page", "H200 SXM", "all-reduce", "", 8 << 20, "", 400.0, "busbw", ranks=8)
    assert reduced.measured_s == pytest.approx(2 * 7 / 8 * (8 << 20) / 400e9)


def test_a_product_is_predicted_by_its_roofline():
    """8192 x 4096 in bf16 on an H100: 80 % of 989.4 TFLOP/s with many tokens, 90 % of 3.35 TB/s with one."""
    many, one = predicted(PRODUCT), predicted(replace(PRODUCT, tokens=1))
    assert (many.bound, one.bound) == ("compute", "memory")
    assert many.seconds == pytest.approx(2 * 1024 * 4096 * 8192 / (0.80 * 989.4e12))
    assert one.seconds == pytest.approx(2 * (4096 * 8192 + 4096 + 8192) / (0.90 * 3.35e12))


def test_what_fits_in_the_cache_and_need_not_be_read_is_not_counted():
    small = replace(PRODUCT, shape=(1024, 1024), tokens=1)
    assert predicted(small).cached
    assert not predicted(replace(small, tokens=100_000)).cached  # bound by compute
    assert not predicted(replace(PRODUCT, tokens=1)).cached  # 67 MB, the cache has 52


def test_the_median_is_of_the_sizes_of_what_counts():
    """Errors +10 %, -25 %, 0 and +100 %; by source 10 % and 100 %."""
    assert [round(one.error, 6) for one in MADE_UP] == [0.1, -0.25, 0.0, 1.0, 8.0]
    assert median_error(MADE_UP) == pytest.approx(0.175)
    assert median_of_sources(MADE_UP) == pytest.approx(0.55)


def test_the_summary_says_whether_the_mark_is_reached():
    text = plan_published.summary(MADE_UP)
    assert "| median absolute error | 17.5 % of 4 | 20 % | reached |" in text
    assert "| product, bound by compute | 17.5 % of 4, worst +100 % (H100 SXM5, 1024) | |" in text.replace(
        "|  |", "| |"
    )
    assert "**missed**" in plan_published.summary(MADE_UP[1:])


def test_every_figure_names_a_device_and_none_is_there_twice():
    found = list(figures())
    assert {one.device for one in found} <= {device.name for device in hardware.devices()}
    keys = [(one.source, one.device, one.what, one.shape, one.tokens, one.dtype) for one in found]
    assert len(keys) == len(set(keys))


def test_the_file_is_what_the_tool_predicts_and_reaches_the_mark():
    """`make plan-published` writes it anew."""
    found = plan_published.all_predictions()
    assert plan_published.RESULTS.read_text("utf-8") == csv_of(found)
    assert median_error(found) <= plan_published.MARK
    stated = plan_published.RESULTS.with_name("README.md").read_text("utf-8")
    assert f"it is {100 * median_error(found):.1f} % of {sum(not one.cached for one in found)}" in stated


# --- measured on this CPU ---------------------------------------------------------------------------------------------


def test_blocks_are_predicted_from_the_file_of_the_others(monkeypatch, tmp_path):
    """`ffn bench` of each block into a file; `ffn plan` reads those of the blocks to learn from, and no other."""
    plans = []

    def run(words, codes=(0,)):
        if "plan" in words:
            plans.append(Path(words[words.index("--measured") + 1]).read_text("utf-8"))
            return json.dumps({"rows": [{"dtype": "fp32", "tokens": 4, "time_s": 0.006}]})
        path, tokens = Path(words[words.index("--save") + 1]), words[words.index("-n") + 1]
        source, rounds = words[words.index("bench") + 1], path.with_suffix(".rounds.csv")
        rounds.touch(exist_ok=False)  # `ffn bench` refuses to replace either file
        path.write_text(f"tokens,dtype,cache,time_s,processes,source\n{tokens},fp32,warm,0.004,3,{source}\n", "utf-8")
        return ""

    monkeypatch.setattr(plan_measured, "output_of", run)
    kept = Kept(None, plan_measured.COLUMNS, {"cpu": "c"})
    seen = [plan_measured.Block("plain", (f"{width}x8:gelu",), "1") for width in (2, 4)]
    new = [plan_measured.Block("gated", (f"{width}x8:swiglu", "--experts", "2"), "4") for width in (3, 5)]
    plan_measured.measure(kept, ["--processes", "3"], tmp_path, seen, new)
    assert [(row["part"], row["source"], row["error"]) for row in kept.rows] == [
        ("seen", "2x8:gelu", ""), ("seen", "4x8:gelu", ""), ("new", "3x8:swiglu --experts 2", "0.5"),
        ("new", "5x8:swiglu --experts 2", "0.5"),
    ]  # fmt: skip
    assert [text.count("x8:gelu") for text in plans] == [2, 2]
    assert not any("swiglu" in text for text in plans)


def test_the_summary_of_this_cpu():
    """Errors of +10, -30 and +20 %: a median of 20, of which two have few tokens."""
    about = {"date": "2026-11-23T00:00:00Z", "cpu": "c", "torch": "2", "ffncli": "0", "dtype": "fp32"}
    rows = [
        about | {"kind": kind, "tokens": tokens, "error": error}
        for kind, tokens, error in (
            ("plain", "1", ""), ("plain", "4", "0.1"), ("gated", "16", "-0.3"), ("gated", "32", "0.2"),
        )
    ]  # fmt: skip
    text = plan_measured.summary(rows)
    assert "| median absolute error | 20.0 % of 3, worst -30 % | 25 % | reached |" in text
    assert "| gated | 25.0 % of 2, worst -30 % |" in text
    assert "| up to 16 tokens | 20.0 % of 2, worst -30 % |" in text
    assert "**missed**" in plan_measured.summary([about | {"kind": "plain", "tokens": "1", "error": "0.26"}])
    assert "no data" in plan_measured.summary(rows[:1])


def test_no_block_that_is_predicted_was_measured_before():
    """Nor has a number of tokens in between been measured of any, but the least and the most."""
    seen = {(block.source, n) for block in plan_measured.SEEN for n in block.tokens.split(",")}
    for block in plan_measured.NEW:
        assert block.source not in {source for source, _ in seen}
        assert block.kind in {one.kind for one in plan_measured.SEEN}
        assert set(block.tokens.split(",")) & {n for _, n in seen} == {"1", "512"}
