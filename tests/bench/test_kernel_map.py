"""The map of kernels and shapes: its cases, its marks, its tables and its picture, from rows made by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping

import pytest

from benchmarks import auto_choices, kernel_map
from benchmarks.kernel_map import COLUMNS, beside, drawn_third, fastest, kernels_of, missed, picture, shapes, summary
from ffncli.bench.results.row import ResultRow
from ffncli.kernels import BUILT_IN

MACHINE = {"cpu": "a cpu, 2 cores", "isa": "avx2", "torch": "2.13", "blas": "MKL, oneDNN"}


def row(kernel: str, time_s: float | None, **cells: str) -> Mapping[str, str]:
    known = {"d_model": "1024", "d_ff": "4096", "tokens": "128", "dtype": "fp32", "threads": "1", "status": "ok"}
    figures = {"gemm_ratio": "0.8", "gemm_low": "0.79", "gemm_high": "0.81", "roof_fraction": "0.95"}
    figures["cache"] = "cold-weights"
    time = {"time_s": "" if time_s is None else str(time_s), "process_ratios": "1.0;1.0;1.0"}
    time["least_s"] = "" if time_s is None else str(time_s / 1.1)
    return dict.fromkeys(COLUMNS, "") | MACHINE | known | figures | time | {"kernel": kernel} | cells


def test_the_cases_are_those_of_the_question():
    every = shapes()
    assert len(every) == len(set(every)) == 2 * 2 * 4 * 3
    assert {shape.d_model for shape in every} == {1024, 4096}
    assert {shape.d_ff for shape in every} == {4096, 2752, 16384, 11008}
    assert {(shape.dtype, shape.threads) for shape in every} == {("fp32", 1), ("fp32", 2), ("bf16", 1)}
    assert [shape.seconds for shape in every] == sorted(shape.seconds for shape in every)
    third = drawn_third(every)
    assert len(third) == 16
    assert third == drawn_third(every[::-1])
    names = {name for shape in every for name in kernels_of(shape, shape in third)}
    assert names <= {*BUILT_IN}
    assert all("gemv" in kernels_of(shape, False) for shape in every if shape.tokens == 1)
    assert {*COLUMNS} - {"least_s"} <= set(ResultRow.__dataclass_fields__)
    assert all("compiled" not in kernels_of(shape, True) for shape in every if shape.seconds >= kernel_map.LONGEST)


def test_the_fastest_is_of_those_that_are_right():
    rows = [row("eager", 2.0), row("onednn", 1.0, status="wrong"), row("packed", None), row("conv1x1", 1.5)]
    assert fastest(rows)["kernel"] == "conv1x1"
    assert fastest(rows[1:3]) is None
    assert missed(rows[1:3]) == ["no kernel was timed"]


def test_two_kernels_are_compared_process_by_process():
    a, b = row("a", 1.0, process_ratios="0.5;0.6;0.7"), row("b", 1.0, process_ratios="1.0;1.2;1.4")
    value, low, high = beside(a, b)
    assert (value, low, high) == pytest.approx((0.5, 0.5, 0.5))
    assert beside(b, a)[0] == pytest.approx(2.0)


def test_the_least_time_is_that_of_the_best_block_of_any_process():
    rounds = [
        {"case": "a", "kernel": k, "inner": i, "seconds": s}
        for k, i, s in (("x", "2", "4"), ("x", "1", "1.5"), ("y", "4", "4"))
    ]
    assert kernel_map.least_seconds(rounds) == {("a", "x"): 1.5, ("a", "y"): 1.0}


def test_marks():
    good = row("onednn", 1.0)
    assert missed([good, row("eager", 1.3)]) == []
    assert missed([row("onednn", 1.0, gemm_low="1.01")]) == [
        "onednn takes 0.8 of the bare products' time, at least 1.01"
    ]
    assert missed([row("onednn", 1.0, roof_fraction="0.89")]) == [
        "onednn reaches 89 % of the best product, 98 % in its best block; target 90 %"
    ]
    (why,) = missed([row("gemv", 1.0, tokens="1", cache="shared", roof_fraction="0.9")])
    assert why.startswith("its weights were not cold")
    one = {"tokens": "1", "roof_fraction": "0.84"}
    assert missed([row("gemv", 1.0, **one)]) == [
        "gemv reaches 84 % of the bandwidth, 92 % in its best block; target 85 %"
    ]
    assert missed([row("gemv", 1.0, **one | {"dtype": "bf16"})]) == []
    assert missed([row("onednn", 1.0, tokens="16", roof_fraction="0.5")]) == []
    slow = row("onednn", 1.0, process_ratios="1.0;1.01;0.99")
    compiled = row("compiled", 1.1, process_ratios="0.9;0.905;0.895")
    assert missed([slow, compiled]) == ["onednn takes 1.111 of compiled's time"]
    assert missed([slow, {**compiled, "process_ratios": "0.9;1.2;0.95"}]) == []


def test_tables_and_picture_have_every_case():
    rows = [
        row("gemv", 1e-3, tokens="1", roof_fraction="0.9"), row("eager", 2e-3, tokens="1"), row("onednn", 1.0),
        row("eager", 1.2), row("onednn_packed", 3.0, dtype="bf16", gemm_low="1.2"),
    ]  # fmt: skip
    text = summary(rows)
    assert "| fp32, 1 thread | 1 token | 128 tokens |" in text
    assert "| 1024 × 4096 | `gemv` 0.80 [0.79, 0.81], 90 % (99 %) | `onednn` 0.80 [0.79, 0.81], 95 % (104 %) |" in text
    assert "3 cases." in text
    assert "Targets missed: 1." in text
    assert "- bf16, 1 thread, 1024 × 4096, 128 tokens: onednn_packed takes 0.8" in text
    root = ElementTree.fromstring(picture(rows))
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"gemv", "onednn", "onednn_packed", "95 % of the roof", "1024 × 4096, bf16, 1 thread"} <= {*words}
    assert picture(rows) == picture(rows[::-1])
    assert set(kernel_map._COLOURS) <= {*BUILT_IN}


def test_cases_of_few_tokens_have_cold_weights():
    every = shapes()
    assert len({shape.case.key for shape in every}) == 48
    assert {shape.case.cache for shape in every if shape.tokens <= 16} == {"cold-weights"}
    brief = [shape for shape in every if shape.seconds < kernel_map.TUNED]
    assert all(("frozen" in kernels_of(shape, True)) == (shape.tokens > 16) for shape in brief)


def test_drawn_cases_are_those_of_their_seed():
    cases = auto_choices.drawn("a commit", 40)
    assert [case.key for case in cases] == [case.key for case in auto_choices.drawn("a commit", 40)]
    assert [case.key for case in cases] != [case.key for case in auto_choices.drawn("another", 40)]
    assert len({case.key for case in cases}) == 40
    assert {case.threads for case in cases} == {1, 2}
    assert all(1 <= case.tokens <= 512 and 128 <= case.spec.d_model <= 4096 for case in cases)
    assert {*auto_choices.KERNELS} - {"auto"} <= {*BUILT_IN}


def test_auto_is_right_within_the_interval():
    more = {"activation": "silu", "gated": "true"}
    auto = {**row("auto", 1.0, note="onednn, in 0.5 of eager's time", process_ratios="0.50;0.52;0.51"), **more}
    eager = {**row("eager", 2.0, process_ratios="1.0;1.0;1.0"), **more}
    near, far = ({**row("packed", 0.9, process_ratios=r), **more} for r in ("0.49;0.53;0.50", "0.40;0.41;0.40"))
    assert auto_choices.verdict([auto, eager, near])[0]
    assert not auto_choices.verdict([auto, eager, far])[0]
    assert not auto_choices.verdict([{**auto, "process_ratios": "1.1;1.11;1.1"}, eager])[0]
    assert auto_choices.verdict([{**auto, "status": "failed"}, eager]) == (
        False, "auto is failed: onednn, in 0.5 of eager's time",
    )  # fmt: skip
    text = auto_choices.summary([auto, eager, near])
    assert text.splitlines()[0].startswith("right  1024 4096 silu true 128 fp32 1: onednn, fastest packed: ")
    assert text.endswith("right in 1 of 1 cases (100 %); target 95 %")
