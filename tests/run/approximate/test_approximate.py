"""Trained blocks: their errors recomputed with torch's own modules, and what universal approximation says of them."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

import ffncli
from ffncli.block.activations import GATED, TABLE, UNITS_WITH_LIMITS
from ffncli.block.steps import Linear
from ffncli.run.approximate import approximate as module
from ffncli.run.approximate.approximate import fits
from ffncli.run.approximate.call import approximate, fitted
from ffncli.run.approximate.fit import _rate, _together, drawn, refitted, unscaled
from ffncli.run.approximate.question import FitQuestion, cases
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
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    (again,) = fitted(FitQuestion(activations=("gelu",), widths=("8",), **FAST))
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
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
