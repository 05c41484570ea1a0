"""Measured products and mixtures as aiconfigurator stores them: reading, the work that they stand for, and fitting."""

import gzip
import random
from collections import Counter
from dataclasses import replace
from math import exp, log
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffncli.errors import FFNError
from ffncli.models.counting.times.fit import (
    MeasuredKernels,
    _errors,
    ends,
    ends_of,
    errors_of_mixtures,
    errors_of_products,
    experts_factor,
    fitted_constants,
    left_out,
    part_of,
    quantile,
)
from ffncli.models.counting.times.fitted import fitted
from ffncli.models.counting.times.kernels import Loads, PlannedKernel, TimeConstants, chip_of, kernel_time
from ffncli.models.counting.times.published import (
    _NUMBERS,
    PublishedTime,
    PublishedTimes,
    _add,
    _rows,
    read_csv,
    user_fits,
)
from ffncli.system.hardware import named

H100, H200 = named("h100", "--device"), named("h200", "--device")
CHIP = chip_of(H100, "bf16")
TRUE = TimeConstants(0.77, 0.83, 3.3, 0.45, 90.0, 2.2)
PRODUCTS = "dtype,tokens,n,k,ms,device\n"
MIXTURES = "distribution,hidden_size,inter_size,ms,dtype,num_experts,tokens,topk,device\n"


def product(tokens: int, n: int, k: int) -> PlannedKernel:
    return PlannedKernel(2.0 * tokens * n * k, 2.0 * n * k, 0, k, n, Loads.of([(tokens, 1)]))


def measured(noise: float = 0.0, seed: int = 0) -> list[MeasuredKernels]:
    """Products that take what TRUE says, times a normal error."""
    draw = random.Random(seed)
    return [
        MeasuredKernels((n, k), (one,), kernel_time(one, CHIP, TRUE).seconds * exp(draw.gauss(0, noise)))
        for n in (2048, 3072, 4096, 6144, 12288) for k in (2048, 3072, 5120, 8192) for t in (1, 16, 64, 256, 1024, 4096)
        for one in [product(t, n, k)]
    ]  # fmt: skip


def read(tmp_path, text: str, kind: str = "product") -> PublishedTimes:
    path, found = tmp_path / "a.csv", PublishedTimes()
    path.write_text(text, "utf-8")
    read_csv(path, kind, found)
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_csv_is_read_packed_or_not_and_the_shortest_time_counts(tmp_path):
    rows = "bfloat16,16,4096,2048,0.02,h100_sxm\nbfloat16,16,4096,2048,0.01,NVIDIA H100 80GB HBM3\n"
    (one,) = read(tmp_path, PRODUCTS + rows).products
    assert (one.device.name, one.kind, one.work, one.seconds) == ("H100 SXM5", "bf16", (16, 4096, 2048), 1e-5)
    (kernel,) = one.measured.kernels
    assert (kernel.flops, kernel.weight_bytes, kernel.loads.rows) == (2 * 16 * 4096 * 2048, 2 * 4096 * 2048, 16)
    found = PublishedTimes()
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((PRODUCTS + rows).encode()))
    read_csv(tmp_path / "a.csv.gz", "product", found)
    assert found.products == [one]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("bfloat16,16,4096,2048,0.01,h99", "device 'h99' is not in the table"),
        ("w4afp8,16,4096,2048,0.01,h100_sxm", "dtype 'w4afp8' is not known"),
        ("fp8,16,4096,2048,0.01,a100_sxm", "A100 80GB SXM has no rate for fp8"),
        ("bfloat16,16,4096,2048,x,h100_sxm", "a number is missing or wrong"),
        ("bfloat16,16,4096,2048,nan,h100_sxm", "a number is not positive, or too large"),
        ("bfloat16,-1,4096,2048,1,h100_sxm", "a number is not positive, or too large"),
    ],
)
def test_rows_that_cannot_be_used_are_counted_by_reason(tmp_path, row, why):
    found = read(tmp_path, PRODUCTS + row + "\n")
    assert (found.products, found.left_out) == ([], {why: 1})


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("zipf,64,64,1,bfloat16,8,4,2,h100_sxm", "distribution 'zipf' is not known"),
        ("power_law_1,64,64,1,bfloat16,8,4,2,h100_sxm", "distribution 'power_law_1' is not known"),
        ("balanced,64,64,1,bfloat16,8,4,9,h100_sxm", "top_k is larger than the number of experts"),
    ],
)
def test_mixtures_that_cannot_be_used(tmp_path, row, why):
    assert read(tmp_path, MIXTURES + row + "\n", "mixture").left_out == {why: 1}


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(FFNError, match="a file of products needs the columns k, ms"):
        read(tmp_path, "dtype,tokens,n,device\n")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FFNError, match="is not a CSV in UTF-8"):
        read_csv(tmp_path / "a.csv", "product", PublishedTimes())


def test_a_mixture_that_would_read_faster_than_the_memory_is_not_gated(tmp_path):
    """128 experts of 2688 x 2048 in bf16 are 4.2 GB gated, 2.8 GB plain; an H100 reads 3.35 in a millisecond."""
    row = "balanced,2688,2048,{},bfloat16,128,256,6,h100_sxm\n"
    (fast,) = read(tmp_path, MIXTURES + row.format(1.0), "mixture").mixtures
    (slow,) = read(tmp_path, MIXTURES + row.format(1.4), "mixture").mixtures
    assert (fast.gated, slow.gated) == (False, True)
    up, act, down, mixed = fast.measured.kernels
    assert (up.k, up.n, down.k, down.n, act.k, mixed.k) == (2688, 2048, 2048, 2688, 0, 0)
    assert slow.measured.kernels[0].n == 2 * 2048
    assert up.weight_bytes == 2 * 128 * 2688 * 2048
    assert (up.loads.rows, up.loads.products, up.loads.spread) == (256 * 6, 128, 1)


def test_a_known_model_without_gates_is_not_gated_whatever_it_takes(tmp_path):
    """Nemotron 3 Super: experts of width 2688 without a gate, in a latent space of 1024."""
    for width in (1024, 4096):
        row = f"balanced,{width},2688,99,bfloat16,512,256,22,h100_sxm\n"
        (one,) = read(tmp_path, MIXTURES + row, "mixture").mixtures
        assert not one.gated


@pytest.mark.parametrize("distribution", ["balanced", "power_law_1.01", "power_law_1.2"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 256), (16, 2, 8), (64, 6, 128), (4096, 2, 8)])
def test_rows_of_experts_are_all_choices(distribution, tokens, top_k, experts):
    rows = list(_rows(distribution, tokens, top_k, experts))
    assert sum(rows) == tokens * top_k
    assert len(rows) == experts
    assert 0 <= min(rows) <= max(rows) <= tokens
    if distribution == "balanced":
        assert max(rows) - min(rows) <= 1


def test_a_larger_exponent_is_more_uneven():
    most = [max(_rows(f"power_law_{a}", 4096, 8, 256)) for a in (0.5, 1.01, 1.2)]
    assert most == sorted(most)
    spread = [Loads.of(Counter(_rows(d, 4096, 8, 256)).items(), 256).spread for d in ("balanced", "power_law_1.2")]
    assert spread[0] == pytest.approx(1)
    assert spread[1] > 3


CELLS = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.integers(1, 5000), st.text(max_size=8),
    st.sampled_from(["bfloat16", "nvfp4", "balanced", "power_law_1.2", "h100_sxm", "NVIDIA B200", "inf", "1e400"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["product", "mixture"]), st.data())
def test_whatever_a_file_says_a_row_is_used_or_left_out(kind, data):
    names = ["dtype", "ms", "device", "distribution", *_NUMBERS[kind]]
    good = {
        "dtype": "bfloat16",
        "ms": 1.0,
        "device": "h100_sxm",
        "distribution": "balanced",
        **dict.fromkeys(names[4:], 8),
    }
    row = {name: data.draw(st.one_of(CELLS, st.just(good[name]))) for name in names}
    times = PublishedTimes()
    _add([row], names, kind, "a file", times)
    used = [*times.products, *times.mixtures]
    assert len(used) + sum(times.left_out.values()) == 1
    for one in used:
        assert one.measured.predicted_s(chip_of(one.device, one.kind), TRUE, 0.1) > 0


# --- fitting ----------------------------------------------------------------------------------------------------------


def test_constants_of_made_up_times_are_found():
    one = fitted_constants(measured(), CHIP, quantizes=False)
    for name, most in (("peak", 0.01), ("bandwidth", 0.01), ("launch_us", 0.05), ("overlap", 0.1), ("wave", 0.1)):
        assert getattr(one, name) == pytest.approx(getattr(TRUE, name), rel=most), name
    errors = [row.error(CHIP, one, 0.0) for row in measured()]
    assert median(map(abs, errors)) < 0.003
    assert fitted_constants([], CHIP, TRUE) == TRUE


def test_errors_of_all_products_at_once_are_those_of_each():
    rows, chip, by = measured(), chip_of(H100, "fp8"), replace(TRUE, quantize=2.0)
    assert _errors(rows, chip)(by).tolist() == pytest.approx([row.error(chip, by, 0.0) for row in rows])


def test_errors_of_left_out_shapes_are_the_noise_and_the_interval_holds():
    rows = measured(noise=0.06)
    errors = errors_of_products(rows, CHIP, quantizes=False)
    assert len(errors) == len(rows)
    low, high = ends([-error for _, error in errors])
    assert (low, high) == (pytest.approx(exp(-1.28 * 0.06), abs=0.025), pytest.approx(exp(1.28 * 0.06), abs=0.025))
    others = measured(noise=0.06, seed=1)
    one, widths = fitted_constants(rows, CHIP, quantizes=False), ends_of(errors, CHIP, TRUE)
    inside = [
        widths[row.bound(CHIP, one)][0] <= exp(-row.error(CHIP, one, 0)) <= widths[row.bound(CHIP, one)][1]
        for row in others
    ]
    assert 0.7 < sum(inside) / len(inside) < 0.9


def test_an_interval_from_few_shapes_is_wider_for_another_shape():
    """Shapes with normal errors, alike for their rows: a new shape is within 10 to 90 % of five shapes' in 67 %."""
    draw, inside = random.Random(0), [0, 0]
    for _ in range(600):
        new, *own = (draw.gauss(0.3, 0.1) for _ in range(6))
        errors = [(MeasuredKernels(n, (product(1, 2048, 2048),), 1.0), e) for n, e in enumerate(own)] * 2
        of_new, of_these = ends_of(errors, CHIP, TRUE)["memory"], ends([-e for _, e in errors])
        for at, (low, high) in enumerate((of_new, of_these)):
            inside[at] += low <= exp(-new) <= high
    assert inside[0] / 600 == pytest.approx(0.76, abs=0.04)
    assert inside[1] / 600 == pytest.approx(0.67, abs=0.04)


def test_no_row_is_predicted_from_its_own_shape():
    rows = measured()
    seen = []

    def fit(others):
        shapes = {row.shape for row in others}
        return lambda row: seen.append(row.shape in shapes) or 0.0

    for folds in (3, len(rows)):
        assert len(left_out(rows, fit, folds)) == len(rows)
    assert seen == [False] * 2 * len(rows)
    assert {part_of(n, 2) for n in range(20)} == {0, 1}
    assert part_of((1, 2), 5, salt=1) == part_of((1, 2), 5, salt=1)


def test_the_factor_of_experts_is_the_median_drawn_to_1():
    rows = [
        MeasuredKernels("a", (product(64, 2048, 2048),), 2 * kernel_time(product(64, 2048, 2048), CHIP, TRUE).seconds)
    ] * 12
    routed = [
        MeasuredKernels(r.shape, tuple(PlannedKernel(**{**vars(k), "routed": True}) for k in r.kernels), r.seconds)
        for r in rows
    ]
    assert experts_factor(routed, CHIP, TRUE, 0.0) == pytest.approx(2**0.5)
    assert experts_factor([], CHIP, TRUE, 0.0) == 1
    assert errors_of_mixtures([], CHIP, TRUE, 0.0) == []


def test_quantiles_are_between_values():
    assert [quantile((3.0, 1.0, 2.0), share) for share in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]
    assert ends([0.0] * 4) == (0.5, 2.0)
    assert ends([log(2)] * 5) == pytest.approx((2, 2))


# --- parquet ----------------------------------------------------------------------------------------------------------


def folder(tmp_path, **changed):
    """A folder as collectors write it: products that take 1.3 times what is expected, and a mixture."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    of_h200 = chip_of(H200, "bf16")
    rows = [
        {"framework": "VLLM", "version": "1", "device": "NVIDIA H200", "op_name": "gemm", "kernel_source": "x",
         "gemm_dtype": "bfloat16", "m": t, "n": n, "k": k,
         "latency": 1.3e3 * kernel_time(product(t, n, k), of_h200, fitted(H200, "bf16").constants).seconds}
        for n in (2048, 4096, 8192) for k in (2048, 4096, 8192) for t in (1, 64, 1024)
    ]  # fmt: skip
    experts = [
        {"device": "NVIDIA H200", "kernel_source": kind, "moe_dtype": "bfloat16", "num_tokens": 64, "hidden_size": 2048,
         "inter_size": 768, "topk": 8, "num_experts": 128, "moe_tp_size": tp, "moe_ep_size": 1,
         "distribution": "balanced", "latency": 0.4}
        for kind, tp in (("moe_torch_flow", 1), ("moe_torch_flow_nongated", 1), ("moe_torch_flow", 2))
    ]  # fmt: skip
    for name, some in (("gemm", rows), ("moe", experts)):
        path = tmp_path / "h200_sxm" / name / "vllm" / "1" / f"{name}_perf.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist([{**row, **changed} for row in some]), path)
    return tmp_path


def test_a_folder_of_parquet_files_is_fitted(tmp_path):
    own = user_fits(folder(tmp_path))["H200 SXM"]
    (products, mixtures), one = own.cells["bf16"], own.of("bf16")
    assert (len(products), [row.gated for row in mixtures]) == (27, [True, False])
    row = PublishedTime(H200, "bf16", (512, 4096, 4096), "", 1.0).measured
    usual = row.predicted_s(chip_of(H200, "bf16"), fitted(H200, "bf16").constants, 0.0)
    assert row.predicted_s(chip_of(H200, "bf16"), one.constants, 0.0) == pytest.approx(1.3 * usual, rel=0.05)
    assert [(held.work, held.shapes, held.rows) for held in own.checks] == [("products", 9, 27), ("mixtures", 1, 2)]
    assert own.checks[0].median_error < 0.1
    assert own.of("fp8") is None


def test_a_plan_by_a_folder(tmp_path, json_of, call):
    words = ("plan", "4096x4096:relu", "--dtype", "bf16", "--tp", "1", "-n", "512", "--measured")
    answer = json_of(*words, f"aiconfigurator:{folder(tmp_path)}")
    (usual,) = json_of(*words[:-1], "--device", "h200")["rows"]
    assert answer["rows"][0]["device"] == "H200 SXM"
    assert answer["rows"][0]["time_s"] == pytest.approx(1.3 * usual["time_s"], rel=0.1)
    assert answer["held_out"][0]["work"] == "products"
    assert "held out: each shape predicted" in call(*words, f"aiconfigurator:{tmp_path}")[1]
    assert "no times for A100" in call(*words, f"aiconfigurator:{tmp_path}", "--device", "a100")[2]


def test_what_is_wrong_with_a_folder_is_one_line(tmp_path, call):
    words = ("plan", "gpt2", "--measured")
    code, _, err = call(*words, f"aiconfigurator:{tmp_path / 'none'}")
    assert (code, err.count("\n")) == (2, 1)
    assert "no gemm_perf.parquet" in err
    folder(tmp_path, device="NVIDIA H99")
    _, _, err = call(*words, f"aiconfigurator:{tmp_path}")
    assert "has no usable times" in err
    assert "device 'NVIDIA H99' is not in the table" in err
    path = next(tmp_path.rglob("gemm_perf.parquet"))
    path.write_bytes(b"PAR1 no")
    code, _, err = call(*words, f"aiconfigurator:{tmp_path}")
    assert (code, err.count("\n")) == (2, 1)
    assert "is not a parquet file" in err


def test_a_parquet_file_without_a_column(tmp_path, call):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"m": [1], "n": [2]}), tmp_path / "gemm_perf.parquet")
    code, _, err = call("plan", "gpt2", "--measured", f"aiconfigurator:{tmp_path}")
    assert (code, err.count("\n")) == (2, 1)
    assert "needs the columns device, dtype, k, ms" in err
