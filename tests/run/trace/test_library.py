"""`ffncli.trace` on a caller's own arrays and modules, and what its answer gives: tensors, rows, a notebook's page."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import ffncli
from ffncli.errors import FFNError
from tests.oracles.prompted import PROMPT, made

X = [[1.0, -2.0, 3.0, 0.5], [0.0, 4.0, -1.0, 2.0], [8.0, 1.0, 0.25, -3.0]]


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(4, 12, bias=False), nn.Linear(4, 12, bias=False)
        self.w2, self.dropout = nn.Linear(12, 4, bias=False), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.dropout(nn.functional.silu(self.w1(x)) * self.w3(x)))


@pytest.mark.parametrize(
    "values",
    [
        X,
        [tuple(row) for row in X],
        numpy.array(X),
        numpy.array(X, numpy.float16),
        numpy.array(X, order="F"),
        torch.tensor(X, requires_grad=True),
        torch.tensor(X, dtype=torch.bfloat16),
        torch.tensor(X).to_sparse(),
    ],
)
def test_arrays_of_any_kind_are_one_input(values: Any):
    session = ffncli.trace("4x8:relu", values)
    assert torch.equal(session["x"], torch.tensor(X))
    assert session.steps == ffncli.trace("4x8:relu", input=";".join(",".join(map(str, row)) for row in X)
                                         .replace(";", "\n")).steps  # fmt: skip


def test_one_token_a_batch_and_whole_numbers():
    assert torch.equal(ffncli.trace("4x8:relu", X[0])["x"], torch.tensor(X[:1]))
    assert torch.equal(ffncli.trace("4x8:relu", numpy.arange(24).reshape(2, 3, 4))["x"].flatten(), torch.arange(24.0))
    double = torch.tensor(X).double() / 3
    assert torch.equal(ffncli.trace("4x8:relu", double, dtype="fp64")["x"], double)
    assert ffncli.survey("gpt2", d_model=4, d_ff=8, input=X).input == "an array, 3 tokens, the same for every layer"
    assert not ffncli.verify("4x8:relu", input=X, check="module").failed


def test_the_input_is_a_copy():
    for values in (numpy.array(X, numpy.float32), torch.tensor(X)):
        session = ffncli.trace("4x8:relu", values)
        values[0, 0] = 99
        assert session["x"][0, 0] == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[1, 2], [3]], "input is not a regular array of numbers"),
        (["a", "b", "c", "d"], "not real numbers"),
        ([1j, 2, 3, 4], "not real numbers"),
        (torch.zeros(4, dtype=torch.complex64), "complex numbers, not real ones"),
        ([[1, 2, 3]], "its last axis must be d_model = 4"),
        ([], "has 0 values"),
        (numpy.float64(3), "has 1 values, which is not a multiple of d_model = 4"),
        (5, r"input must be values \[tokens, d_model\] \(a list, a NumPy array, a tensor\), or text"),
        ({"x": 1}, "input must be values"),
    ],
)
def test_values_that_are_no_input(values: Any, words: str):
    with pytest.raises(FFNError, match=words) as error:
        ffncli.trace("4x8:relu", values)
    assert error.value.code == 2


def test_a_module_is_traced_with_its_own_weights():
    torch.manual_seed(3)
    module, x = SwiGLU(), torch.randn(2, 3, 4)
    before = torch.random.get_rng_state()
    session = ffncli.trace(module, x)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(part.training for part in module.modules())
    with torch.no_grad():
        expected = module.eval()(x)
        hidden = nn.functional.silu(module.w1(x)) * module.w3(x)
        module.w1.weight.zero_()
    torch.testing.assert_close(session["down"], expected)
    torch.testing.assert_close(session["hidden"], hidden)
    assert (session.block.activation, session.block.gated, session.block.weights) == (
        "silu", True, "the module's own weights",
    )  # fmt: skip
    assert session.block.name == "SwiGLU"
    verdict = ffncli.verify(module, check="module")
    assert not verdict.failed
    assert any(row.passed for row in verdict.rows)
    assert ffncli.count(module).ffn_params_total == 3 * 4 * 12


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(2, 3), "Linear returns"),
        (nn.ReLU(), "the module: ReLU has no weight matrix"),
        (SwiGLU, "or an nn.Module"),
    ],
)
def test_a_module_that_is_no_block(module: Any, words: str):
    with pytest.raises(FFNError, match=words):
        ffncli.trace(module)


def test_a_step_s_tensor_is_there_whether_it_was_kept_or_not():
    kept, again = ffncli.trace("4x8:relu", X, keep=True), ffncli.trace("4x8:relu", X)
    weights = kept.prepared.weights
    up = torch.tensor(X) @ weights["up.weight"].T + weights["up.bias"]
    for session in (kept, again):
        torch.testing.assert_close(session["up"], up)
        assert torch.equal(session["act"], session["up"].relu())
    assert set(again.tensors) == set()
    with pytest.raises(FFNError, match="no step 'gate'; steps: x, up, act, down"):
        again["gate"]
    random = ffncli.trace("4x8:relu", X, dropout=0.5, train=True, keep="dropout")
    assert torch.equal(random["dropout"] == 0, random.tensors["dropout"] == 0)
    with pytest.raises(FFNError, match=r"the tensor of 'act' was not kept; call trace with keep=\['act'\]"):
        random["act"]


def test_a_frame_has_a_row_for_each_value():
    session = ffncli.trace(made("mixtral").path, layer=1, prompt=PROMPT, position=[-1, 0], expert="all", dtype="bf16")
    name = next(record.name for record in session.steps if record.tokens and record.name.endswith(".act"))
    frame, record = session.frame(name), session.step(name)
    assert list(frame.columns) == ["layer", "token", "unit", "value"]
    assert set(frame["layer"]) == {1}
    table = frame.pivot(index="token", columns="unit", values="value")
    positions = [(3, 0)[row] for row in record.tokens]
    assert torch.equal(torch.tensor(table.loc[positions].to_numpy()), session[name].float())
    down = session.frame("moe" if any(r.name == "moe" for r in session.steps) else "experts")
    assert down["token"].unique().tolist() == [3, 0]
    session = ffncli.trace("4x8:relu", X)
    plain = session.frame()
    assert (len(plain), plain["value"].max(), set(plain["layer"])) == (24, session["act"].max(), {0})


def test_what_a_notebook_shows():
    session = ffncli.trace("4x8:relu", X)
    lines = repr(session).splitlines()
    assert lines[0] == "<Session of 4x8:relu"
    assert lines[1].split() == ["x", "[3,", "4]", "float32", "-3", "to", "8"]
    assert len(lines) == 5
    html = session._repr_html_()
    assert html.startswith("<table><caption>4x8:relu</caption><tr><th>step</th>")
    assert html.count("<tr>") == 1 + len(session.steps)
    assert "<td>x · W1 + b1</td>" in html
    many = ffncli.trace("8x16:swiglu", experts=4, expert="all")
    assert len(repr(many).splitlines()) == 8
