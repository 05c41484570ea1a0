"""How one value is rounded, by hand; what follows, by runs of the block in torch."""

import pytest
import torch
from torch.nn import functional

import ffncli

SOURCE = "16x32:swiglu"


def test_a_weight_its_block_scale_and_code():
    session = ffncli.trace(SOURCE, tokens=3, keep=True)
    weights = {name: tensor.double() for name, tensor in session.prepared.weights.items()}
    (one,) = ffncli.precision(SOURCE, dtype="fp8", tokens=3, explain="W1[4,9]").explain
    row = session.prepared.weights["gate.weight"][9]
    scale = row.abs().max() / 448
    code = (row[4] / scale).to(torch.float8_e4m3fn)
    assert (one.tensor, one.index, one.block, one.block_shape) == ("gate.weight", (9, 4), (9, 0), (1, 16))
    assert (one.value, one.largest, one.scale) == (float(row[4]), float(row.abs().max()), float(scale))
    assert (one.code, one.unscaled) == (int(code.view(torch.uint8)), float(code))
    assert one.rounded == float(code.float() * scale)
    assert one.error == one.rounded - one.value

    def down(gate: torch.Tensor) -> torch.Tensor:
        x = session["x"].double()
        return (functional.silu(x @ gate.T) * (x @ weights["up.weight"].T)) @ weights["down.weight"].T

    changed = weights["gate.weight"].clone()
    changed[9, 4] = one.rounded
    last, exact = one.steps[-1], down(weights["gate.weight"])
    assert [step.name for step in one.steps] == ["gate", "act", "hidden", "down"]
    assert last.relative == pytest.approx(float((down(changed) - exact).norm() / exact.norm()))
    assert abs(last.difference) == pytest.approx(float((down(changed) - exact).abs().max()))


@pytest.mark.parametrize(
    ("place", "names"), [("x[2,-1]", ["gate", "up", "act", "hidden", "down"]), ("hidden[0,20]", ["down"])]
)
def test_what_a_matrix_reads(place, names):
    session = ffncli.trace(SOURCE, tokens=3, keep=True)
    (one,) = ffncli.precision(SOURCE, dtype="nvfp4", tokens=3, explain=place).explain
    name, index = place.partition("[")[0], (2, -1) if place[0] == "x" else (0, 20)
    assert one.value == pytest.approx(float(session[name][index]), rel=1e-5)
    quantized = ffncli.quantize(session[name], "nvfp4")
    assert one.rounded == pytest.approx(float(quantized.dequantize()[index]), rel=1e-5)
    assert one.block == ((2, 0) if name == "x" else (0, 1))
    assert [step.name for step in one.steps] == names
    rows = {"x": 2, "hidden": 0}
    assert {step.at[0] for step in one.steps if step.at} == {rows[name]}  # other tokens do not change
    change = one.steps[-1]
    if name == "hidden":
        assert change.difference == pytest.approx(
            one.error * float(session.prepared.weights["down.weight"][change.at[-1], 20]), rel=1e-4
        )


def test_an_expert_s_weight_and_a_format_without_scales():
    (one,) = ffncli.precision(SOURCE, experts=4, dtype="bf16", tokens=4, explain="experts.2.W2[5,1]").explain
    w = ffncli.trace(SOURCE, experts=4, tokens=4).prepared.weights["down.weight"][2, 1, 5]
    assert (one.index, one.value, one.scale) == ((2, 1, 5), float(w), None)
    assert one.rounded == float(w.bfloat16()) == one.unscaled


@pytest.mark.parametrize("name", ["x", "hidden"])
def test_an_input_of_an_expert_has_a_row_for_each_of_its_tokens(name):
    session = ffncli.trace(SOURCE, experts=4, tokens=6, keep=True)
    w = {key: tensor.double() for key, tensor in session.prepared.weights.items()}
    x, share = session["x"].double(), session["route"].double()[:, 2]
    mine = share.nonzero().flatten()
    assert len(mine) > 1
    (one,) = ffncli.precision(SOURCE, experts=4, dtype="nvfp4", tokens=6, explain=f"experts[2].{name}[-1,5]").explain

    def ffn(x: torch.Tensor, change: float | None = None) -> torch.Tensor:
        if name == "x" and change is not None:
            x = x.clone()
            x[-1, 5] = change
        hidden = functional.silu(x @ w["gate.weight"][2].T) * (x @ w["up.weight"][2].T)
        if name == "hidden" and change is not None:
            hidden[-1, 5] = change
        return hidden @ w["down.weight"][2].T

    rows = x[mine]
    read = rows if name == "x" else functional.silu(rows @ w["gate.weight"][2].T) * (rows @ w["up.weight"][2].T)
    assert (one.tensor, one.index, one.block) == (f"experts.2.{name}", (-1, 5), (len(mine) - 1, 0))
    assert one.value == pytest.approx(float(read[-1, 5]), rel=1e-6)
    assert one.rounded == pytest.approx(float(ffncli.quantize(read, "nvfp4").dequantize()[-1, 5]), rel=1e-6)
    after = {step.name: step for step in one.steps}
    assert [*after][-2:] == ["experts.2.down", "experts"]
    change = ffn(rows, one.rounded) - ffn(rows)
    assert after["experts.2.down"].relative == pytest.approx(float(change.norm() / ffn(rows).norm()), rel=1e-5)
    mixed = float((share[mine, None] * change).abs().max())
    assert abs(after["experts"].difference) == pytest.approx(mixed, rel=1e-5)
