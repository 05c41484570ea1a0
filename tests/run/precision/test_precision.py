"""Errors and their shares, against runs of the formulas in torch; faults that were planted, found by name."""

from dataclasses import replace
from itertools import combinations
from math import fsum

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ffncli
from ffncli.block.recipe import steps
from ffncli.errors import FFNError
from ffncli.run.precision.diagnosis import diagnose
from ffncli.run.precision.rounding import matrices
from ffncli.run.quantize.quantized import quantize
from tests.models.files.test_dequantize import DEEPSEEK, GPT_OSS, deepseek, gpt_oss
from tests.oracles.checkpoints import folder, sensitive

GATED = ("x", "W1", "W3", "hidden", "W2")


def drawn(source: str, tokens: int, **dimensions: object) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weights and the input that `ffncli.precision` draws for a block, with seed 0."""
    session = ffncli.trace(source, tokens=tokens, keep=True, **dimensions)  # type: ignore[arg-type]
    return {n: t.double() for n, t in session.prepared.weights.items()}, session["x"].double()


def near(x: Tensor, to: str) -> Tensor:
    return quantize(x, to).dequantize().double()


def swiglu(w: dict[str, Tensor], x: Tensor, to: str, chosen: set[str]) -> Tensor:
    """Compute a gated block by hand, with the tensors `chosen` rounded."""

    def one(name: str, tensor: Tensor) -> Tensor:
        return near(tensor, to) if name in chosen else tensor

    x, w1, w3 = one("x", x), one("W1", w["gate.weight"]), one("W3", w["up.weight"])
    hidden = functional.silu(x @ w1.T) * (x @ w3.T)
    return one("hidden", hidden) @ one("W2", w["down.weight"]).T


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4", "int4:g32", "bf16"])
@pytest.mark.parametrize("what", ["weights", "inputs", "both"])
def test_errors_and_shares_are_those_of_the_formulas(name, what):
    weights, x = drawn("64x96:swiglu", 6)
    (row,) = ffncli.precision("64x96:swiglu", dtype=name, tokens=6, what=what).rows
    names = [n for n in GATED if what == "both" or (n in ("x", "hidden")) == (what == "inputs")]
    exact = swiglu(weights, x, name, set())
    error = swiglu(weights, x, name, {*names}) - exact
    assert row.error_rel == pytest.approx(float(error.norm() / exact.norm()))
    assert row.error_max == pytest.approx(float(error.abs().max() / exact.abs().max()))
    alone = {n: swiglu(weights, x, name, {n}) - exact for n in names}
    whole = float(error.square().sum())
    for n in GATED:
        share = float(alone[n].square().sum()) / whole if n in names else None
        assert row.by_tensor[n] == (None if share is None else pytest.approx(share))
    for a, b in combinations(GATED, 2):
        share = 2 * float((alone[a] * alone[b]).sum()) / whole if {a, b} <= {*names} else None
        assert row.by_pair[f"{a},{b}"] == (None if share is None else pytest.approx(share, abs=1e-12))
    together = sum(alone.values(), torch.zeros_like(error))
    assert row.rest == pytest.approx(1 - float(together.square().sum()) / whole, abs=1e-9)
    assert fsum(row.shares) == pytest.approx(1, abs=1e-15)


def test_a_plain_block_with_a_norm_has_no_w3_and_starts_behind_the_norm():
    weights, x = drawn("32x64:relu", 5, norm="layernorm", residual=True)
    (row,) = ffncli.precision("32x64:relu", dtype="fp8", tokens=5, norm="layernorm", residual=True).rows
    normed = functional.layer_norm(x, (32,), weights["norm.weight"], weights["norm.bias"])

    def out(to: str) -> Tensor:
        w1, w2 = near(weights["up.weight"], to), near(weights["down.weight"], to)
        hidden = functional.relu(near(normed, to) @ w1.T + weights["up.bias"])
        return near(hidden, to) @ w2.T + weights["down.bias"]

    plain = functional.relu(normed @ weights["up.weight"].T + weights["up.bias"])
    exact = plain @ weights["down.weight"].T + weights["down.bias"]
    assert row.error_rel == pytest.approx(float((out("fp8") - exact).norm() / exact.norm()), rel=1e-4)
    assert (row.by_tensor["W3"], row.by_pair["W1,W3"]) == (None, None)
    assert [one.tensor for one in row.tensors] == ["x", "W1", "hidden", "W2"]


def test_a_mixture_rounds_every_expert_and_never_the_router():
    spec = ffncli.FFNSpec(32, 64, "swiglu", moe=ffncli.MoE(4, 2, shared_experts=1))
    block = steps(spec)
    assert matrices(block) == {
        "gate.weight": "W1", "up.weight": "W3", "down.weight": "W2",
        "shared.gate.weight": "W1", "shared.up.weight": "W3", "shared.down.weight": "W2",
    }  # fmt: skip
    session = ffncli.trace("32x64:swiglu", experts=4, shared_experts=1, tokens=6, keep=True)
    w = {name: tensor.double() for name, tensor in session.prepared.weights.items()}
    x, route = session["x"].double(), session["route"].double()

    def out(to: str | None) -> Tensor:
        def one(t: Tensor) -> Tensor:
            return t if to is None else near(t, to)

        def ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
            x = one(x)
            return one(functional.silu(x @ one(gate).T) * (x @ one(up).T)) @ one(down).T

        total = ffn(x, *(w[f"shared.{name}.weight"] for name in ("gate", "up", "down")))
        for e in range(4):
            mine = route[:, e] > 0
            if bool(mine.any()):
                each = ffn(x[mine], *(w[f"{name}.weight"][e] for name in ("gate", "up", "down")))
                total[mine] += route[mine, e, None] * each
        return total

    (row,) = ffncli.precision("32x64:swiglu", experts=4, shared_experts=1, tokens=6, dtype="mxfp8").rows
    assert row.error_rel == pytest.approx(float((out("mxfp8") - out(None)).norm() / out(None).norm()), rel=1e-5)
    blocks = {one.tensor: one.blocks for one in row.tensors}
    assert (blocks["W1"], blocks["W2"]) == (5 * 64 * 1, 5 * 32 * 2)


def test_a_shared_expert_may_be_wider_than_the_routed_ones():
    wide = quantize(torch.ones(2, 64), "fp8")
    narrow = torch.ones(2, 32)
    narrow[:, 5] = 40.0
    found = diagnose("hidden", [(narrow, quantize(narrow, "fp8")), (torch.ones(2, 64), wide)])
    assert [(one.channel, one.times) for one in found.outliers] == [(5, 40.0)]
    zeros = torch.zeros(2, 32)
    assert diagnose("hidden", [(zeros, quantize(zeros, "fp8")), (torch.ones(2, 64), wide)]).outliers == ()


def test_an_exact_output_has_no_shares():
    source = "16x16:relu"
    (row,) = ffncli.precision(source, dtype="fp8", input="zeros", tokens=2, bias=False).rows
    assert (row.error_rel, row.rest, row.shares) == (None, None, ())
    (row,) = ffncli.precision(source, dtype="bf16", input="ones", tokens=2, what="inputs", bias=False).rows
    assert row.by_tensor["x"] == 0  # 1 is a value of bf16


def test_defaults_are_what_deployments_round():
    rows = ffncli.precision("32x32:swiglu", dtype=["fp8", "mxfp4", "int8", "q8_0", "bf16"], tokens=2).rows
    assert [row.what for row in rows] == ["both", "both", "weights", "weights", "both"]


def test_the_rest_is_small_where_errors_are() -> None:
    """Not for mxfp8's default rule: it clips, so that errors have a bias, and products of biases add up."""
    for name in ("fp8", "mxfp8:rceil", "int8", "q8_0"):
        (row,) = ffncli.precision("256x512:swiglu", dtype=name, tokens=64, what="both").rows
        assert row.rest is not None
        assert abs(row.rest) <= 0.05


def test_sums_in_fewer_bits_are_those_of_a_loop() -> None:
    weights, x = drawn("8x16:relu", 3, bias=False)
    (row,) = ffncli.precision("8x16:relu", bias=False, dtype="fp8", tokens=3, what="weights", sums=True).rows
    w1, w2 = near(weights["up.weight"], "fp8"), near(weights["down.weight"], "fp8")
    exact = functional.relu(x @ weights["up.weight"].T) @ weights["down.weight"].T
    for one, dtype in zip(row.sums, (torch.float32, torch.bfloat16), strict=True):

        def product(a: Tensor, w: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            out = torch.zeros(len(a), len(w), dtype=torch.float64)
            for token, unit in torch.cartesian_prod(torch.arange(len(a)), torch.arange(len(w))).tolist():
                total = torch.zeros((), dtype=dtype)
                for k in range(w.shape[1]):
                    total = (total.double() + a[token, k] * w[unit, k]).to(dtype)
                out[token, unit] = total.double()
            return out

        found = product(functional.relu(product(x, w1)), w2)
        assert one.error_rel == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-9)
    assert row.sums[0].error_rel == pytest.approx(row.error_rel, rel=1e-3)
    assert row.sums[1].dtype == "bf16"


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_a_scale_of_zero_is_named():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    good = quantize(x, "nvfp4:compressed-tensors")
    assert good.scales is not None
    scales = good.scales.clone()
    scales[3, 2] = 0
    found = diagnose("W1", [(x, replace(good, scales=scales))])
    assert (found.zero_scales, found.saturated, found.transposed) == (1, 0, False)
    assert found.findings == (
        "W1: 1 of 32 blocks has a scale of 0 and values that are not 0, the first at [3, 2]",
    )  # fmt: skip
    assert diagnose("W1", [(x, good)]).findings == ()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_saturated_block_is_named(sign):
    x = sign * torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).abs()
    good = quantize(x, "mxfp8:rceil")
    assert good.scales is not None
    scales = good.scales.float()
    scales[5, 1] /= 8
    found = diagnose("W2", [(x, replace(good, scales=scales.to(good.scales.dtype)))])
    assert (found.saturated, found.zero_scales) == (1, 0)
    assert "W2: 1 of 16 blocks has values beyond the largest of the format, the first at [5, 1]" in found.findings
    assert found.headroom is not None
    assert found.headroom < 0.5
    assert diagnose("W2", [(x, good)]).saturated == 0


def test_a_transposed_layout_of_the_scales_is_named():
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 8)[:, None]
    good = quantize(x, "int4:g64")
    assert good.scales is not None
    swapped = replace(good, scales=good.scales.t().contiguous().reshape(good.scales.shape))
    found = diagnose("W3", [(x, swapped)])
    assert found.transposed
    assert found.findings[-1].startswith("W3: the scales fit in the transposed layout: the error falls from ")
    assert not diagnose("W3", [(x, good)]).transposed


def test_outlier_channels_underflow_and_headroom():
    x = torch.ones(4, 32)
    x[:, 5] = 300.0
    quantized = quantize(x, "nvfp4")
    found = diagnose("x", [(x, quantized)])
    assert [(o.channel, o.times, o.error_share) for o in found.outliers] == [(5, 300.0, pytest.approx(1, abs=1e-4))]
    assert found.underflow == 15 / 32  # the other values of the block of channel 5: 1 of 300 / 6 = 50 per step
    plain = torch.tensor([[1000.0, 0.5]])
    assert diagnose("x", [(plain, quantize(plain, "fp16"))]).headroom == 65.504
    assert diagnose("x", [(torch.zeros(2, 16), quantize(torch.zeros(2, 16), "nvfp4"))]).underflow is None


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [10, 300])
def test_the_planted_layer_is_first(tmp_path, times):
    for seed in range(3):
        source = sensitive(tmp_path / str(seed), times, seed * 4 + 1, seed)
        rows = ffncli.precision(source, layer="all", dtype="nvfp4", what="weights", tokens=16).rows
        assert len(rows) == 12
        assert rows[0].layer == seed * 4 + 1
        assert [row.error_rel for row in rows] == sorted((row.error_rel for row in rows), reverse=True)
        if times == 300:
            assert rows[0].tensors[0].outliers[0].channel == 7


@pytest.mark.parametrize(("config", "made", "dtype"), [(GPT_OSS, gpt_oss, "mxfp4"), (DEEPSEEK, deepseek, "fp8")])
def test_a_packed_source_is_measured_from_its_own_format(tmp_path, config, made, dtype):
    source = folder(tmp_path / "q", config, made(True))
    precision = ffncli.precision(source, layer=1, dtype=dtype, what="weights", tokens=8)
    assert any("the errors are measured from its own format" in note for note in precision.notes)
    if dtype == "mxfp4":  # it is what the source stores
        assert precision.rows[0].error_rel == 0
        assert precision.rows[0].rest is None


# --- bad input --------------------------------------------------------------------------------------------------------


def test_nan_in_weights_is_one_line(tmp_path):
    source = sensitive(tmp_path / "nan", float("nan"), 2, 0)
    what = r"the layer's output has NaN or infinite values: input norm has 4 NaN; ffn trace shows"
    with pytest.raises(FFNError, match=f"^{what}"):
        ffncli.precision(source, layer=2, dtype="fp8")
    with pytest.raises(FFNError, match=f"^decoder layer 2: {what}"):
        ffncli.precision(source, layer="all", dtype="fp8")


def test_the_name_of_the_matrix_that_does_not_fit_is_said():
    with pytest.raises(FFNError, match=r"^W2: nvfp4:torchao needs rows of whole blocks of 16 values, got rows of 24"):
        ffncli.precision("16x24:swiglu", dtype="nvfp4", what="weights")
    with pytest.raises(FFNError, match=r"^hidden: nvfp4:torchao needs rows of whole blocks"):
        ffncli.precision("16x24:swiglu", dtype="nvfp4", what="inputs")


def test_the_frame_has_a_row_for_each_row():
    found = ffncli.precision("32x32:swiglu", dtype=["fp8", "nvfp4"], tokens=2)
    frame = found.frame()
    assert frame["format"].tolist() == ["fp8", "nvfp4"]
    assert frame["share_x_W1"].tolist() == [row.by_pair["x,W1"] for row in found.rows]
    assert "nvfp4" in repr(found)
