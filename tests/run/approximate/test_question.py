"""What is asked of `ffn approximate`: targets, widths, parameters, bounds; and floors against numpy's own fits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ffncli.block.activations import NO_LIMITS, Limits
from ffncli.block.formulas import SCALAR
from ffncli.errors import FFNError
from ffncli.run.approximate.approximate import _data
from ffncli.run.approximate.question import TARGETS, FitQuestion, cases, find, parse_domain

X = np.linspace(-2, 2, 401) + 1e-3
ORACLES = {
    "sin": np.sin,
    "abs": np.abs,
    "step": lambda x: np.heaviside(x, 1.0),
    "bump": lambda x: np.array([math.exp(1) * math.exp(-1 / (1 - v * v)) if abs(v) < 1 else 0.0 for v in x]),
}
# rmse of the best straight line over the whole domain, by integrals on [-π, π] (`and`: on the unit square):
# sin: slope 3/π², 1/2 - (3/π²)² π²/3; |x|: a constant, π²/3 - π²/4; step: slope 3/(4π), 1/4 - 3/16;
# and: slopes 3/4, 3/16 - 2 (3/4)²/12.
FLOORS = {
    "sin": math.sqrt(0.5 - 3 / math.pi**2),
    "abs": math.pi / math.sqrt(12),
    "step": 0.25,
    "and": math.sqrt(3 / 32),
}


@pytest.mark.parametrize("name", ORACLES)
def test_targets_are_what_numpy_computes(name):
    found = TARGETS[name].f(torch, torch.tensor(X)).numpy()
    assert np.abs(found - ORACLES[name](X)).max() < 1e-15 * 4


def test_and_is_true_of_two_truths_alone():
    table = {(a, b): TARGETS["and"].f(SCALAR, a, b) for a in (0.0, 1.0) for b in (0.0, 1.0)}
    assert table == {(0.0, 0.0): 0, (0.0, 1.0): 0, (1.0, 0.0): 0, (1.0, 1.0): 1}


@pytest.mark.parametrize("name", FLOORS)
def test_floors_are_the_integrals(name):
    assert _data(FitQuestion(), find(name)).floor == pytest.approx(FLOORS[name], rel=1e-3)


@pytest.mark.parametrize("domain", [None, (-1.0, 2.5), (3.0, 4.0)])
@pytest.mark.parametrize("name", TARGETS)
def test_floors_are_what_least_squares_gives(name, domain):
    data = _data(FitQuestion(domain=domain), find(name))
    x, y = data.points.numpy(), data.values.numpy()
    table = np.hstack([x, np.ones_like(y)])
    error = table @ np.linalg.lstsq(table, y, rcond=None)[0] - y
    assert data.floor == pytest.approx(math.sqrt((error**2).mean()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("name", "inputs"), [("sin", 1), ("and", 2)])
@pytest.mark.parametrize("activation", ["gelu", "prelu", "swiglu", "situ"])
@pytest.mark.parametrize("width", [1, 2, 3, 16, 64])
def test_parameters_are_those_of_torch_modules(name, inputs, activation, width):
    (case,) = cases(FitQuestion(targets=(name,), activations=(activation,), widths=(str(width),)))

    def parameters(d_ff: int, gated: bool) -> int:
        parts = [torch.nn.Linear(inputs, d_ff)] * (1 + gated) + [torch.nn.Linear(d_ff, 1)]
        parts += [torch.nn.PReLU()] if activation == "prelu" else []
        return sum(p.numel() for part in parts for p in part.parameters())

    gated = activation in ("swiglu", "situ")
    assert case.params == parameters(case.spec.d_ff, gated)
    assert case.d_ff_plain == width
    assert case.spec.limits == (Limits(gate_cap=4.0, up_cap=25.0) if activation == "situ" else NO_LIMITS)
    if not gated:
        assert case.spec.d_ff == width
    else:
        sought = parameters(width, False)
        assert min(abs(parameters(n, True) - sought) for n in range(1, 200)) == abs(case.params - sought)


def test_samples_are_spread_and_are_not_the_points_of_measurement():
    for name in TARGETS:
        data = _data(FitQuestion(seeds=1), find(name))
        low, high = TARGETS[name].domain
        for points in (data.x[0], data.points):
            assert points.min() >= low
            assert points.max() <= high
        assert torch.cdist(data.x[0], data.points).min() > 0
    noisy = _data(FitQuestion(seeds=3, noise=0.3, samples=20_000), find("sin"))
    off = noisy.y - noisy.x.sin()
    assert float(off.std()) == pytest.approx(0.3, rel=0.02)
    assert float(off.mean()) == pytest.approx(0, abs=0.005)
    assert not torch.equal(noisy.x[0], noisy.x[1])


def test_multiples_are_of_the_inputs():
    widths = [
        case.d_ff_plain
        for case in cases(FitQuestion(targets="sin,and", activations="relu", widths=("1x", "4x", 8, "8x")))
    ]
    assert widths == [1, 4, 8, 2, 8, 16]  # one block of 8, asked for twice


def test_domains():
    assert parse_domain("-3:2.5") == (-3.0, 2.5)
    assert parse_domain("-pi:2pi") == (-math.pi, 2 * math.pi)
    for text in ("1:1", "2:1", "nan:1", "0:inf", "1e7:2e7", "1", "1:2:3", "a:b", ":", "0:1e-9", "pipi:1"):
        with pytest.raises(FFNError, match=r"^domain: "):
            FitQuestion(domain=text)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"noise": -1.0}, "noise must be a number from 0 to 1e+06"),
        ({"noise": math.nan}, "noise must be a number from 0 to 1e+06"),
        ({"noise": math.inf}, "noise must be a number from 0 to 1e+06"),
        ({"seeds": 0}, "seeds must be a whole number from 1 to 100"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"steps": 0}, "steps must be a whole number from 1 to 100000"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"domain": (1.0, 1.0)}, "no width"),
        ({"targets": ("sine",)}, "'sin'"),
        ({"activations": ("gleu",)}, "'gelu'"),
        ({"widths": ("0",)}, "widths"),
        ({"widths": ("1000000000",)}, "4,096"),
        ({"widths": ("4096",), "samples": 100_000}, "limit"),
        ({"widths": tuple(map(str, range(1, 200)))}, "1,000"),
    ],
)
def test_what_cannot_be_asked(choices, words):
    with pytest.raises(FFNError) as refused:
        cases(FitQuestion(**choices))
    assert words in str(refused.value)
