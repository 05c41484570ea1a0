"""Trained blocks: their errors recomputed with torch's own modules, and what universal approximation says of them."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

import ffncli
from ffncli.block.activations import GATED, NO_LIMITS, TABLE, UNITS_WITH_LIMITS, Limits
from ffncli.block.formulas import SCALAR
from ffncli.block.steps import Linear
from ffncli.errors import FFNError
from ffncli.run.approximate import approximate as module
from ffncli.run.approximate.approximate import _data, _rate, _together, drawn, fits, refitted, unscaled
from ffncli.run.approximate.call import approximate, fitted
from ffncli.run.approximate.question import TARGETS, FitQuestion, cases, find, parse_domain
from ffncli.run.engine.execute import run

MODULES = {"relu": torch.nn.ReLU(), "gelu": torch.nn.GELU(), "tanh": torch.nn.Tanh(), "silu": torch.nn.SiLU()}
FAST = {"seeds": 3, "steps": 150}


@pytest.mark.parametrize("activation", MODULES)
@pytest.mark.parametrize(("target", "f"), [("sin", np.sin), ("abs", np.abs)])
def test_errors_are_those_of_a_module_with_the_weights(activation, target, f):
    (fit,) = approximate(targets=(target,), activations=(activation,), widths=("8",), domain=(-1.0, 3.0), **FAST)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), MODULES[activation], torch.nn.Linear(8, 1)).double()
    for name, tensor in zip(("up.weight", "up.bias", "down.weight", "down.bias"), net.parameters(), strict=True):
        tensor.data = fit.weights[name]
    x = -1 + 4 * (torch.arange(2048, dtype=torch.float64) + 0.5) / 2048
    error = net(x[:, None]).detach().squeeze(1).numpy() - f(x.numpy())
    assert fit.row.rmse == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-6)
    assert fit.row.max_error == pytest.approx(np.abs(error).max(), rel=1e-6)
    assert abs(error[np.abs(x.numpy() - fit.row.worst[0]).argmin()]) == pytest.approx(fit.row.max_error, rel=1e-6)
    assert fit.row.params == sum(p.numel() for p in net.parameters())


def test_errors_of_a_gated_block_of_two_inputs():
    (fit,) = approximate(targets=("and",), activations=("swiglu",), widths=("8",), samples=256, **FAST)
    line = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    x = torch.cartesian_prod(line, line)
    w = fit.weights
    gate, up = (functional.linear(x, w[f"{n}.weight"], w[f"{n}.bias"]) for n in ("gate", "up"))
    error = functional.linear(functional.silu(gate) * up, w["down.weight"], w["down.bias"])[:, 0] - (x > 0.5).all(1) * 1
    assert fit.row.rmse == pytest.approx(float(error.square().mean().sqrt()), rel=1e-6)
    assert fit.row.params == sum(tensor.numel() for tensor in w.values())


@pytest.mark.parametrize("name", [*TABLE, *GATED, *UNITS_WITH_LIMITS])
def test_all_seeds_at_once_are_each_seed_alone(name):
    """What training differentiates is what `execute`, the reader of the steps, computes."""
    (case,) = cases(FitQuestion(targets=("and",), activations=(name,), widths=("6",)))
    start = [drawn(case.steps, seed) for seed in range(3)]
    x = torch.randn(3, 20, 2, dtype=torch.float64) * (9 if name in UNITS_WITH_LIMITS else 1)  # up to the limits
    together = _together(case.steps, {key: torch.stack([own[key] for own in start]) for key in start[0]}, x)
    for at, own in enumerate(start):
        alone = run(case.steps, own, {"x": x[at]})
        assert float((together[at] - alone).abs().max()) < 1e-12 * max(1.0, float(alone.abs().max()))


def test_the_learning_rate_rises_then_falls_as_a_cosine():
    """As the conventions say: over a twentieth of 200 steps, then 190 steps of half a cosine."""
    rates = [_rate(at, 200) for at in range(200)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10:] == pytest.approx([math.cos(math.pi * n / 380) ** 2 for n in range(190)])


def test_weights_for_x_itself():
    (case,) = cases(FitQuestion(targets=("and",), activations=("geglu",), widths=("8",)))
    own, x = drawn(case.steps, 1), torch.randn(9, 2, dtype=torch.float64)
    folded = run(case.steps, unscaled(case.steps, own, 0.7, 2.0), {"x": x})
    assert torch.allclose(folded, run(case.steps, own, {"x": (x - 0.7) / 2.0}), rtol=0, atol=1e-13)


def test_the_last_layer_is_least_squares():
    (case,) = cases(FitQuestion(activations=("tanh",), widths=("4",)))
    own, x = drawn(case.steps, 1), torch.linspace(-1, 1, 50, dtype=torch.float64)[:, None]
    found = refitted(case.steps, own, x, x.exp())
    hidden = np.hstack([np.tanh(x.numpy() @ own["up.weight"].numpy().T + own["up.bias"].numpy()), np.ones((50, 1))])
    best = hidden @ np.linalg.lstsq(hidden, np.exp(x.numpy()), rcond=None)[0]
    assert np.abs(run(case.steps, found, {"x": x}).numpy() - best).max() < 1e-9


# --- universal approximation ------------------------------------------------------------------------------------------


def test_errors_fall_with_width_but_for_identity_and_bilinear():
    names = ("relu", "gelu", "tanh", "swiglu", "identity", "bilinear")
    found = approximate(activations=names, widths=("1", "4", "16", "64"), **FAST)
    by = {(f.row.activation, f.row.d_ff_plain): f.row for f in found}
    for name in ("relu", "gelu", "tanh", "swiglu"):
        falling = [by[name, width].rmse for width in (1, 4, 16, 64)]
        assert all(wide < narrow for narrow, wide in pairwise(falling)), name
        assert falling[0] > 100 * falling[-1]
    floor = math.sqrt(0.5 - 3 / math.pi**2)
    for width in (1, 4, 16, 64):
        assert by["identity", width].rmse == pytest.approx(floor, rel=1e-3)
        assert by["identity", width].rmse >= by["identity", width].floor
        # a gated block with identity is a polynomial of degree 2, and an odd function's best parabola is its best line
        assert by["bilinear", width].rmse >= 0.999 * floor
    for f in found:
        assert f.row.rmse <= f.row.median_rmse
        assert f.row.rmse <= f.row.max_error
        assert f.row.diverged == 0


def test_a_parabola_is_what_bilinear_makes_of_abs():
    (fit,) = approximate(targets=("abs",), activations=("bilinear",), widths=("16",))
    x = np.linspace(-np.pi, np.pi, 4001)
    best = np.polyval(np.polyfit(x, np.abs(x), 2), x) - np.abs(x)
    assert fit.row.rmse == pytest.approx(np.sqrt(np.mean(best**2)), rel=1e-2)


def test_two_relus_make_abs():
    (fit,) = approximate(targets=("abs",), activations=("relu",), widths=("2",), seeds=8)
    assert fit.row.rmse < 0.03 < 0.9 < fit.row.floor


def test_step_and_bump_are_fitted_by_tanh():
    step, bump = approximate(targets=("step", "bump"), activations=("tanh",), widths=("16",))
    assert step.row.rmse < 0.3 * step.row.floor
    assert 0.4 < step.row.max_error < 0.7  # at the jump a continuous function is off by half
    assert abs(step.row.worst[0]) < 0.02
    assert bump.row.rmse < 0.05 * bump.row.floor


def test_few_noisy_samples_are_fitted_closer_than_what_is_held_out():
    few, many = (
        approximate(activations=("gelu",), widths=("64",), noise=0.3, samples=n, steps=500, seeds=2)[0].row
        for n in (12, 1000)
    )
    assert few.train_rmse < 0.3 < 1.1 * many.train_rmse
    assert many.train_rmse == pytest.approx(0.3, rel=0.1)  # the noise itself is left
    assert many.held_out_rmse < 0.3 * few.held_out_rmse
    assert few.held_out_rmse == few.median_rmse
    assert few.train_rmse < few.held_out_rmse


# --- the same numbers, and trouble ------------------------------------------------------------------------------------


def test_a_row_depends_on_its_own_question_alone():
    both = approximate(activations=("tanh", "gelu"), widths=("3", "8"), **FAST)
    (alone,) = approximate(activations=("gelu",), widths=("8",), **FAST)
    assert both[3].row == alone.row
    torch.set_num_threads(2)
    (again,) = fitted(FitQuestion(activations=("gelu",), widths=("8",), **FAST))
    assert torch.get_num_threads() == 2
    assert again.row == alone.row
    (other,) = approximate(activations=("gelu",), widths=("8",), seed=7, **FAST)
    assert other.row.rmse != alone.row.rmse


def test_a_narrow_gated_block_stands_for_two_widths():
    one, two = approximate(activations=("swiglu",), widths=("1", "2"), **FAST)
    assert (one.row.d_ff, one.row.d_ff_plain, two.row.d_ff, two.row.d_ff_plain) == (1, 1, 1, 2)
    assert dataclasses.replace(two.row, d_ff_plain=1) == one.row


def test_a_seed_that_diverges_is_counted_and_left_out(monkeypatch):
    def broken(steps, *arguments):
        trained = real(steps, *arguments)
        for own in trained[:lost]:
            own["up.weight"] = own["up.weight"] * math.nan
        return trained

    real, lost = module.train, 1
    (whole,) = approximate(activations=("relu",), widths=("4",), **FAST)
    monkeypatch.setattr(module, "train", broken)
    (some,) = approximate(activations=("relu",), widths=("4",), **FAST)
    assert (some.row.diverged, some.row.best_seed in (1, 2), math.isfinite(some.row.median_rmse)) == (1, True, True)
    assert some.row.rmse >= whole.row.rmse
    lost = 3
    (none,) = approximate(activations=("relu",), widths=("4",), **FAST)
    assert (none.row.diverged, none.row.rmse, none.row.max_error, none.weights) == (3, None, None, {})


def test_progress_comes_to_all_of_it():
    question = FitQuestion(activations=("relu", "swiglu"), widths=("1", "2"), seeds=1, steps=70)
    told: list[int] = []
    assert len(list(fits(question, cases(question), told.append))) == 4
    assert sum(told) == 4 * 70


def test_the_library_has_it():
    assert ffncli.approximate is approximate
    (fit,) = ffncli.approximate(targets=("sin",), activations=("swiglu",), widths=("4",), seeds=1, steps=5)
    assert isinstance(fit.case.steps[-1].op, Linear)
    assert fit.weights["down.weight"].shape == (1, fit.row.d_ff)


def test_points_of_two_inputs_step_by_the_powers_of_the_plastic_number():
    """R2: 1/g and 1/g² with g³ = g + 1, as a root of that polynomial."""
    (g,) = (float(root.real) for root in np.roots([1, 0, -1, -1]) if abs(root.imag) < 1e-12)
    points = module._evenly(5, 2).numpy()
    assert np.allclose(np.diff(points, axis=0) % 1, [[1 / g, 1 / g**2]] * 4, atol=1e-12)


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
