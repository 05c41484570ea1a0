"""Samples held to formulas in numpy's float64: how far off each is, and which are left out."""

from dataclasses import replace

import pytest
import torch

from ffncli.bench.referee import problem as module
from ffncli.bench.referee.problem import CallSample, Problem
from tests.bench.referee.test_problem import MIXTURE, RELU, SWIGLU, by_hand, problem_of, wide


def samples_of(problem: Problem, count: int = 3, kernel: str = "mine") -> list[CallSample]:
    """Exact answers, rounded to the dtype."""
    generator, made = torch.Generator().manual_seed(7), []
    for _ in range(count):
        x = torch.randn(2, 8, generator=generator).to(problem.dtype)
        made.append(CallSample(kernel, x, torch.from_numpy(by_hand(problem, wide(x))).to(problem.dtype)))
    return made


@pytest.mark.parametrize("spec", [SWIGLU, RELU, MIXTURE])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_a_sample_is_held_to_float64_of_its_own_tokens(spec, dtype):
    problem = problem_of(spec, dtype=dtype)
    samples = samples_of(problem)
    errors = [error for error in problem.sampled(samples) if error is not None]
    assert len(errors) == 3 or spec is MIXTURE
    within = torch.finfo(problem.dtype).eps + (2**-22 if spec is MIXTURE else 0)  # a router scores in float32
    assert max(error.largest for error in errors) <= within + 1e-15
    moved = [replace(samples[0], out=samples[1].out), *samples[1:]]
    errors = problem.sampled(moved)
    assert errors[0] is None or errors[0].largest > 0.1
    assert all(error is None or error.largest < 0.01 for error in errors[1:])


def test_an_error_is_relative_to_the_largest_value_of_the_first_inputs():
    problem = problem_of(SWIGLU, dtype="fp64")
    (sample,) = samples_of(problem, 1)
    sample = replace(sample, out=sample.out.clone())
    sample.out[1, 2] += 1e-3
    (error,) = problem.sampled([sample])
    largest = max(float(wide(problem.first.out).__abs__().max()), float(sample.out.abs().max()))
    assert error.largest == pytest.approx(1e-3 / largest, rel=1e-3)
    small = CallSample("mine", sample.x * 1e-3, torch.from_numpy(by_hand(problem, wide(sample.x * 1e-3))) + 1e-6)
    (error,) = problem.sampled([small])
    assert error.largest == pytest.approx(1e-6 / float(problem.first.out.abs().max()), rel=1e-3)


def test_gradients_of_x_are_judged_too():
    problem = problem_of(SWIGLU, passes="forward+backward", dtype="fp64")
    x, g = torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    h, out = 1e-6, torch.from_numpy(by_hand(problem, wide(x)))
    gradient = torch.zeros_like(x)
    for i in range(2):
        for j in range(8):
            step = torch.zeros_like(x)
            step[i, j] = h
            ends = by_hand(problem, wide(x + step)) - by_hand(problem, wide(x - step))
            gradient[i, j] = float((wide(g) * ends).sum()) / (2 * h)
    (error,) = problem.sampled([CallSample("mine", x, out, g, gradient)])
    assert error.largest < 1e-6
    (error,) = problem.sampled([CallSample("mine", x, out, g, gradient * 1.01)])
    assert error.largest == pytest.approx(0.01, rel=0.6)


def test_tokens_that_rounding_decides_are_left_out(monkeypatch):
    problem = problem_of(SWIGLU)
    samples = samples_of(problem)
    samples[1] = replace(samples[1], out=torch.stack([samples[1].out[0] + 1, samples[1].out[1]]))
    _ = problem.first
    marks = torch.tensor([True, True, True, False, False, False])  # of the six tokens
    monkeypatch.setattr(Problem, "unsteady", lambda self, x: marks)
    errors = problem.sampled(samples)
    assert errors[0] is None
    assert errors[1].largest < 1e-6


def test_of_many_samples_some_are_drawn_one_of_each_kernel_at_least(monkeypatch):
    problem = problem_of(SWIGLU)
    samples = [*samples_of(problem, 30, "a"), *samples_of(problem, 1, "b"), *samples_of(problem, 30, "c")]
    assert None not in problem.sampled(samples)
    monkeypatch.setattr(module, "_MOST_JUDGED", 20 * 2 * 3 * 8 * 12)  # of 20 tokens
    judged = set()
    for _ in range(1000):
        numbers = [n for n, error in enumerate(problem.sampled(samples)) if error is not None]
        assert {samples[n].kernel for n in numbers} == {"a", "b", "c"}
        assert 10 <= len(numbers) <= 13
        judged |= set(numbers)
        if len(judged) == 61:
            break
    assert judged == set(range(61))
    assert problem.sampled([]) == []
