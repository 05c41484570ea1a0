"""Scripts' figures: the map of kernels and its picture, benchmarks/plan_*.py; from rows made or counted by hand."""

import json
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import auto_choices, kernel_map, plan_fit, plan_measured, plan_published
from benchmarks.kernel_map import COLUMNS, beside, drawn_third, fastest, kernels_of, missed, picture, shapes, summary
from benchmarks.plan_published import Figure, Prediction, csv_of, figures, median_error, median_of_sources, predicted
from benchmarks.script import Kept
from ffncli.bench.results.row import ResultRow
from ffncli.kernels import BUILT_IN
from ffncli.models.counting.times.fitted import fitted
from ffncli.models.counting.times.kernels import Loads, PlannedKernel, chip_of, kernel_time
from ffncli.models.counting.times.published import PublishedTimes, read_csv
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
    """8192 x 4096 in bf16 on an H100: its rates at the fitted shares, and the time of starting a kernel."""
    many, one = predicted(PRODUCT), predicted(replace(PRODUCT, tokens=1))
    by = fitted(hardware.named("h100", "--device"), "bf16").constants
    assert (many.bound, one.bound) == ("compute", "memory")
    assert many.seconds == pytest.approx(2 * 1024 * 4096 * 8192 / (by.peak * 989.4e12), rel=0.1)
    least = 2 * (4096 * 8192 + 4096 + 8192) / (by.bandwidth * 3.35e12)
    assert least + 1e-6 * by.launch_us < one.seconds < 1.1 * least + 1e-6 * by.launch_us


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
    assert "| matrix product, bound by compute | 17.5 % of 4, worst +100 % (H100 SXM5, 1024) | |" in text.replace(
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


# --- judged by measured products and mixtures -------------------------------------------------------------------------


def products_csv(path: Path, factor=lambda n: 1.0) -> str:
    """Products on an H100 that take `factor` times what the plan says, and a row that cannot be used."""
    device = hardware.named("h100", "--device")
    chip, by = chip_of(device, "bf16"), fitted(device, "bf16").constants
    rows = ["dtype,tokens,n,k,ms,device", "w4afp8,1,2048,2048,1,h100_sxm"]
    widths = [(n, k) for n in (2048, 4096, 8192, 3072) for k in (2048, 4096, 8192, 5120)]
    sizes = [(t, n, k) for n, k in widths for t in (1, 64, 256, 512, 1024, 4096)]
    for number, (t, n, k) in enumerate(sizes):
        kernel = PlannedKernel(0, 2 * n * k, 0, k, n, Loads.of([(t, 1)]))
        rows.append(f"bfloat16,{t},{n},{k},{1e3 * factor(number) * kernel_time(kernel, chip, by).seconds!r},h100_sxm")
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return str(path)


def judged_main(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["plan_published", *words])
    code = plan_published.main()
    return code, capsys.readouterr().out


def test_a_file_is_judged_and_what_was_left_out_is_said(monkeypatch, capsys, tmp_path):
    """One in ten is far too fast, one far too slow: the rest is in the interval, which holds in 80 %."""
    path = products_csv(tmp_path / "a.csv", lambda n: {0: 0.5, 1: 2.0}.get(n % 10, 1.0))
    code, out = judged_main(monkeypatch, capsys, "--products", path)
    assert "left out: 1 rows: dtype 'w4afp8' is not known" in out
    last = out.splitlines()[-1]
    assert last.startswith("all 96: median error 0.0 %; bf16 products 0.0 % (at most 7 %); in the 80 % interval ")
    assert (code, "MISSED" in last) == (0, False)
    assert "| H100 SXM5 | bf16 | products | memory |" in out


@pytest.mark.parametrize(("factor", "what"), [(1.0, "in the 80 % interval"), (1.2, "bf16 products")])
def test_a_missed_target_is_exit_1(monkeypatch, capsys, tmp_path, factor, what):
    code, out = judged_main(monkeypatch, capsys, "--products", products_csv(tmp_path / "a.csv", lambda n: factor))
    assert code == 1
    assert any(part.strip().startswith(what) and part.endswith("MISSED") for part in out.splitlines()[-1].split(";"))


def test_files_that_cannot_be_read_are_exit_2(monkeypatch, capsys, tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n", "utf-8")
    assert judged_main(monkeypatch, capsys, "--mixtures", str(tmp_path / "a.csv"))[0] == 2
    assert judged_main(monkeypatch, capsys, "--mixtures", str(tmp_path / "b.csv"))[0] == 2


def test_what_is_fitted_is_written_and_read_again(tmp_path):
    times = PublishedTimes()
    read_csv(products_csv(tmp_path / "a.csv"), "product", times)
    rows = plan_fit.measured_rows(times)
    ((cell, one),) = plan_fit.intervals(rows, plan_fit.fits(rows, 0.1), 0.1).items()
    assert cell == ("H100 SXM5", "bf16")
    true = fitted(hardware.named("h100", "--device"), "bf16").constants
    assert one.constants.peak == pytest.approx(true.peak, rel=0.03)
    text = tomllib.loads(plan_fit.toml({cell: one}, {"bf16": one}, 0.1, (0.8, 2.0), "a page"))
    (row,) = text["fitted"]
    assert (row["device"], text["skew"], text["links"], text["source"]) == ("H100 SXM5", 0.1, [0.8, 2.0], "a page")
    assert row["bf16"]["constants"] == pytest.approx(list(vars(one.constants).values()), rel=1e-3)
    first, second = plan_fit.halves(rows, 0)
    shapes = [{row.shape for row in half[cell][0]} for half in (first, second)]
    assert all(shapes)
    assert not shapes[0] & shapes[1]


def test_the_constants_are_at_most_eight_and_no_faster_than_the_sheet():
    for device, kind, one in plan_fit.stored():
        assert len(vars(one)) == 8
        assert 0 < one.peak <= 1, (device, kind)
        assert 0 < one.bandwidth <= 1, (device, kind)
        assert one.overlap >= 1, (device, kind)
    names = {row["device"] for row in plan_fit.script.read(plan_fit.script.RESULTS / "plan_fit.csv")} - {"all"}
    assert names == {device for device, _, _ in plan_fit.stored()}
    root = ElementTree.fromstring(plan_fit.picture())
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 8 * len(plan_fit.stored()) + len(names)


def test_the_results_are_those_that_are_stated():
    """Medians and coverage of shapes that were not fitted: the targets."""
    rows = {(row["class"], row["work"]): row for row in plan_fit.script.read(plan_fit.script.RESULTS / "plan_fit.csv")
            if (row["part"], row["device"]) == ("shape", "all")}  # fmt: skip
    for names, most in ((("bf16", "fp8", "fp8_block", "fp8_static", "nvfp4"), 0.07),
                        (("int4_weights", "int8_weights", "int8"), 0.10)):  # fmt: skip
        for name in names:
            assert float(rows[name, "products"]["median_error"]) <= most
            assert 0.75 <= float(rows[name, "products"]["coverage"]) <= 0.85


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
        "onednn takes 0.8 of the bare matrix products' time, at least 1.01"
    ]
    assert missed([row("onednn", 1.0, roof_fraction="0.89")]) == [
        "onednn reaches 89 % of the best matrix product, 98 % in its best block; target 90 %"
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
    assert "<summary>Right in 1 of 1 cases (100 %); target 95 %.</summary>" in text
    assert "\nright  1024 4096 silu true 128 fp32 1: onednn, fastest packed: " in text
