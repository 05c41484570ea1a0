"""A case's reference: formulas of the blocks in numpy's float64 on the rounded numbers, gradients by differences."""

import numpy as np
import pytest
import torch

from ffncli.bench.records import Case
from ffncli.bench.referee import problem as module
from ffncli.bench.referee.problem import Problem
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.run.engine import reference
from tests.bench.fake_memory import FakeMemory

D, F, T = 8, 12, 6
SWIGLU = FFNSpec(D, F, "silu", gated=True, bias=False)
MIXTURE = FFNSpec(D, F, "silu", gated=True, bias=False, moe=MoE(4, 2))
RELU = FFNSpec(D, F, "relu", gated=False, bias=True)


def problem_of(spec, tokens=T, seed=5, **other) -> Problem:
    return Problem.of(Case("s", "s", spec, tokens, **other), seed)


def wide(t: torch.Tensor) -> np.ndarray:
    return t.double().numpy()


def silu(z):
    return z / (1 + np.exp(-z))


def gated(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def by_hand(problem: Problem, x: np.ndarray, weights: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """The block of one of the specs above."""
    w = weights or {name: wide(t) for name, t in problem.weights.items()}
    if problem.case.spec.moe is None:
        if "gate.weight" in w:
            return gated(x, w["gate.weight"], w["up.weight"], w["down.weight"])
        return np.maximum(x @ w["up.weight"].T + w["up.bias"], 0) @ w["down.weight"].T + w["down.bias"]
    scores = x @ w["router.weight"].T
    out = np.zeros_like(x)
    for n, score in enumerate(scores):
        best = np.argsort(-score)[:2]
        share = np.exp(score[best] - score[best].max())
        for e, s in zip(best, share / share.sum(), strict=True):
            own = (w[f"{part}.weight"][e] for part in ("gate", "up", "down"))
            out[n] += s * gated(x[n : n + 1], *own)[0]
    return out


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("spec", [SWIGLU, RELU, MIXTURE])
def test_the_reference_is_float64_of_the_rounded_numbers(spec, dtype):
    problem = problem_of(spec, dtype=dtype)
    inputs = problem.first
    assert inputs.out.dtype == torch.float64
    assert {problem.dtype} == {inputs.x.dtype} | {t.dtype for t in problem.weights.values()}
    rows = slice(None) if inputs.rows is None else inputs.rows.numpy()
    expected = by_hand(problem, wide(inputs.x))[rows]
    within = 1e-13 if spec.moe is None else 2**-24  # a router's scores are float32 by definition, for all dtypes
    assert np.abs(wide(inputs.out) - expected).max() < within * max(1, np.abs(expected).max())


@pytest.mark.parametrize("spec", [SWIGLU, RELU, MIXTURE])
def test_gradients_are_differences_of_the_formula(spec):
    problem = problem_of(spec, passes="forward+backward", dtype="bf16")
    inputs = problem.first
    assert set(inputs.grads) == {"x", *problem.weights}
    x, g = wide(inputs.x), wide(inputs.g)
    weights = {name: wide(t) for name, t in problem.weights.items()}
    draw, h = np.random.default_rng(0), 1e-6
    for name, gradient in inputs.grads.items():
        assert gradient.dtype == torch.float64
        for _ in range(3):
            if name == "x":
                step = draw.standard_normal(x.shape)
                ends = [by_hand(problem, x + s * h * step) for s in (1, -1)]
            else:
                step = draw.standard_normal(weights[name].shape)
                ends = [by_hand(problem, x, weights | {name: weights[name] + s * h * step}) for s in (1, -1)]
            slope = float((g * (ends[0] - ends[1])).sum()) / (2 * h)
            assert float((wide(gradient) * step).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-7), name


def test_which_experts_get_tokens():
    problem = problem_of(MIXTURE)
    scores = wide(problem.first.x) @ wide(problem.weights["router.weight"]).T
    best = np.argsort(-scores)[:, :2]
    expected = np.zeros((T, 4), bool)
    np.put_along_axis(expected, best, True, 1)
    assert np.array_equal(problem.experts.numpy(), expected)
    assert problem_of(SWIGLU).experts is None


def test_unlike_numbers_and_seeds_have_unlike_values_and_the_same_the_same():
    problem = problem_of(SWIGLU)
    drawn = [problem.inputs(1).x, problem.inputs(2).x, problem.other(1), problem_of(SWIGLU, seed=9).inputs(1).x]
    assert all(not torch.equal(a, b) for n, a in enumerate(drawn) for b in drawn[:n])
    assert torch.equal(drawn[0], problem_of(SWIGLU).first.x)
    assert not torch.equal(problem.weights["up.weight"], problem_of(SWIGLU, seed=9).weights["up.weight"])
    assert all(0.6 < x.std() < 1.5 for x in drawn)  # normal random, never zeros


def test_of_a_large_case_some_tokens_drawn_at_random_are_compared(monkeypatch):
    monkeypatch.setattr(module, "_MOST_FLOPS", 1.0)
    problem = problem_of(SWIGLU, tokens=200)
    inputs = problem.first
    assert len(set(inputs.rows.tolist())) == 16
    assert inputs.rows.tolist() != list(range(16))
    assert inputs.remark == "16 of 200 tokens checked, drawn at random"
    expected = by_hand(problem, wide(inputs.x))[inputs.rows.numpy()]
    assert np.abs(wide(inputs.out) - expected).max() < 1e-13


def test_tokens_at_a_kink_are_drawn_again_and_what_stays_there_has_no_gradient(monkeypatch):
    said = iter([torch.tensor([1, 4])] + [torch.tensor([0])] * 20)  # of those drawn again, the first one stays bad

    def near(steps, weights, inputs):
        yield next(said)

    monkeypatch.setattr(module, "near_kinks", near)
    inputs = problem_of(RELU, passes="forward+backward").first
    monkeypatch.undo()
    before = problem_of(RELU, passes="forward+backward").first
    same = (inputs.x == before.x).all(1).tolist()
    assert same == [True, False, True, True, False, True]
    assert inputs.rows.tolist() == [0, 2, 3, 4, 5]
    assert not inputs.g[1].any()
    assert inputs.g[4].all()
    assert inputs.remark == "5 of 6 tokens checked, the others depend on rounding and have no gradient"


def test_a_kink_is_where_rounding_may_cross_it():
    problem = problem_of(RELU)
    weights = {name: t.clone() for name, t in problem.weights.items()}
    x = problem.first.x.clone()
    z = wide(x) @ wide(weights["up.weight"]).T + wide(weights["up.bias"])
    weights["up.bias"][3] -= float(z[2, 3])  # token 2 now sits on the kink, to a rounding
    found = [tokens.tolist() for tokens in reference.near_kinks(problem.steps, weights, {problem.entry: x})]
    assert found == [[2]]
    smooth = problem_of(SWIGLU)
    assert list(reference.near_kinks(smooth.steps, smooth.weights, {smooth.entry: x})) == []


def test_kinks_of_experts_are_looked_for_with_one_expert_widened_at_a_time():
    """A backward case of a mixture with limits is as large as its forward case."""
    spec = FFNSpec(64, 256, "swiglu_oai", bias=False, moe=MoE(32, 4))
    problem, expert = problem_of(spec, tokens=4, dtype="bf16"), 8 * 3 * 64 * 256
    with FakeMemory() as memory:
        assert len(list(reference.near_kinks(problem.steps, problem.weights, {problem.entry: problem.first.x}))) > 8
    assert expert < memory.peak < 3 * expert


def test_a_kink_inside_an_expert_concerns_the_tokens_that_it_received():
    problem = problem_of(FFNSpec(D, F, "relu", bias=True, moe=MoE(4, 2)))
    weights, x = {name: t.clone() for name, t in problem.weights.items()}, problem.first.x
    best = torch.from_numpy(np.argsort(-wide(x) @ wide(weights["router.weight"]).T)[:, :2])
    expert = int(best[3, 1])
    z = wide(x[3]) @ wide(weights["up.weight"][expert]).T + wide(weights["up.bias"][expert])
    weights["up.bias"][expert, 5] -= float(z[5])
    found = [tokens.tolist() for tokens in reference.near_kinks(problem.steps, weights, {problem.entry: x})]
    assert [tokens for tokens in found if tokens] == [[3]]


def test_a_limit_after_the_function_is_a_kink_where_it_is_reached():
    """silu passes 7 at 7.0063428; a soft cap has no kink."""
    ops = {step.output: step.op for step in steps(FFNSpec(4, 8, "swiglustep"))}
    assert reference._kinks(ops["act"]) == pytest.approx((7.006342814601792,), rel=1e-12)
    assert reference._kinks(ops["lift"]) == (-7.0, 7.0)
    ops = {step.output: step.op for step in steps(FFNSpec(4, 8, "situ"))}
    assert (reference._kinks(ops["act"]), reference._kinks(ops["lift"])) == ((), ())


def test_the_longest_sum():
    assert problem_of(SWIGLU, tokens=500).width == F
    assert problem_of(SWIGLU, tokens=500, passes="forward+backward").width == 500
    assert problem_of(FFNSpec(24, 12, "relu")).width == 24
