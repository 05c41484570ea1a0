"""What a call gets: other contents, in another buffer, of the same kind; and which answer is taken aside."""

import gc
import random
from collections import Counter

import pytest
import torch

from ffncli.bench.records import Case
from ffncli.bench.referee.problem import CallSample, Problem
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.request.data import digest
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing import fresh_inputs, placed_kernel
from ffncli.bench.timing.fresh_inputs import FreshInputs, Reservoir
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.kernels import built_in
from tests.bench.request.test_data import rows_file


def placed_of(passes: str = "forward", tokens: int = 8, dtype: str = "fp32") -> tuple[PlacedKernel, Problem]:
    case = Case("s", "s", FFNSpec(16, 32, "swiglu"), tokens, dtype=dtype, passes=passes)  # type: ignore[arg-type]
    problem = refereed(Problem.of(case, 3))
    placed = PlacedKernel("mine", build_kernel(built_in("eager"), problem), problem, random.Random(0))
    placed.place(1)
    return placed, problem


def fresh_of(passes: str = "forward", **more) -> tuple[FreshInputs, PlacedKernel, Problem]:
    placed, problem = placed_of(passes)
    return FreshInputs(placed, problem, Reservoir(problem), **more), placed, problem


def shown(fresh: FreshInputs) -> list[CallSample]:
    """What the referee was shown and has not ruled on: one sample of each block."""
    return list(fresh._problem.referee._shown.values())


def block(fresh: FreshInputs, calls: int) -> list[torch.Tensor]:
    """A timed block; copies of every x."""
    entered = []
    fresh.before_block(calls)
    for _ in range(calls):
        fresh.before_call()
        entered.append(fresh.placed.x.detach().clone())
        fresh.placed.call()
    fresh.after_block()
    return entered


def test_the_attributes_of_all_arms_cost_the_same_in_a_call():
    """Reading an object's dict makes its attributes slower, and checks read those of the kernels, not of the twin."""
    placed, _ = placed_of()
    assert any(type(one) is dict and "ring" in one for one in gc.get_referents(placed))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_every_call_gets_contents_that_no_token_had_at_any_of_the_addresses(dtype):
    placed, problem = placed_of(dtype=dtype)
    fresh = FreshInputs(placed, problem, Reservoir(problem))
    versions, addresses, tokens = set(), Counter(), Counter()
    for _ in range(200):
        fresh.before_call()
        versions.add(placed.x._version)
        addresses[placed.x.data_ptr()] += 1
        tokens.update(tuple(row) for row in placed.x.tolist())
    assert len(addresses) == placed_kernel.RING == 4
    assert min(addresses.values()) > 20
    assert versions == {placed.x._version}
    assert max(tokens.values()) == 1


def test_they_are_normal_numbers_and_other_ones_in_each_placement():
    problem = placed_of()[1]
    source, seen = Reservoir(problem), []
    for _ in range(2):
        rows = torch.empty(500, 8, 16)
        for x in rows:
            source.write(x)
        assert abs(float(rows.mean())) < 0.02
        assert float(rows.std()) == pytest.approx(1, abs=0.02)
        assert float((rows.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.01)
        seen.append({tuple(token) for token in rows.flatten(0, 1)[:300].tolist()})
        source.draw()
    assert not seen[0] & seen[1]


def test_large_inputs_have_fewer_buffers(monkeypatch):
    monkeypatch.setattr(placed_kernel, "_LARGE", 1)
    assert len(placed_of()[0].ring) == 2


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_one_call_of_each_block_is_judged_and_any_may_be(passes):
    fresh, _, problem = fresh_of(passes)
    drawn = Counter()
    with correct.computing(problem.backward):
        for number in range(120):
            entered = block(fresh, 4)
            assert len(shown(fresh)) == number + 1
            sample = shown(fresh)[-1]
            calls = [n for n, x in enumerate(entered) if all(any(torch.equal(r, t) for t in x) for r in sample.x)]
            assert len(calls) == 1
            drawn[calls[0]] += 1
            assert sample.x.shape == sample.out.shape == (2, 16)
            assert (sample.gradient is None) == (passes == "forward")
    assert min(drawn[call] for call in range(4)) > 10
    errors = [error for error in problem.sampled(shown(fresh)) if error is not None]
    assert len(errors) == 120
    assert 0 < max(error.largest for error in errors) < 1e-6


def test_calls_outside_of_blocks_are_not_judged():
    fresh, placed, _ = fresh_of()
    with torch.inference_mode():
        for _ in range(30):
            fresh.before_call()
            placed.call()
        block(fresh, 1)
        for _ in range(30):
            fresh.before_call()
            placed.call()
    assert len(shown(fresh)) == 1


def test_a_block_of_one_content_is_judged_at_its_last_call():
    """As on a GPU."""
    fresh, placed, problem = fresh_of()
    with torch.inference_mode():
        for number in range(3):
            fresh.before_block(5, every_call=False)
            x = placed.x.clone()
            for _ in range(5):
                placed.call()
                assert torch.equal(placed.x, x)
            fresh.after_block()
            assert len(shown(fresh)) == number + 1
            assert all(any(torch.equal(row, token) for token in x) for row in shown(fresh)[-1].x)
    assert all(error.largest < 1e-6 for error in problem.sampled(shown(fresh)))


BREAKS = {
    "shape": (lambda out: out[:-1], "returns shape"),
    "type": (lambda out: out.tolist(), "returns a list"),
    "NaN": (lambda out: out * float("nan"), "its output has 128 NaN"),
    "dtype": (lambda out: out.double(), "returns float64"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_an_answer_that_is_none_is_kept_until_it_is_judged(what):
    change, words = BREAKS[what]
    fresh, placed, _ = fresh_of()
    plain = placed.call

    def call():
        plain()
        placed.out = change(placed.out)

    placed.call = call
    with torch.inference_mode():
        block(fresh, 3)
    assert fresh.ruling.wrong.startswith(words)
    assert shown(fresh) == []


def test_an_input_that_is_changed_in_the_judged_call_is_found():
    fresh, placed, _ = fresh_of()
    plain = placed.call

    def call():
        plain()
        placed.x.numpy()[3, 3] += 1

    placed.call = call
    with torch.inference_mode():
        block(fresh, 3)
    assert fresh.ruling.wrong == "changes its input x"


def test_the_whole_answer_is_judged_in_one_of_the_first_blocks():
    placed, problem = placed_of("forward+backward")
    whole, blocks = problem.inputs(99), Counter()
    for _ in range(60):
        fresh = FreshInputs(placed, problem, Reservoir(problem), whole, 4)
        with torch.enable_grad():
            for number in range(4):
                entered = block(fresh, 3)
                if any(torch.equal(x, whole.x) for x in entered):
                    blocks[number] += 1
        error = fresh.checked_ruling().error
        assert 0 < error.largest < 1e-5
        assert fresh.checked_ruling().error.largest == 0  # it is judged once
    assert sum(blocks.values()) == 60
    assert all(blocks[number] > 3 for number in range(4))


def test_a_sample_has_each_token_once():
    assert fresh_inputs.drawn_rows(1) == [0]
    assert all(len(set(fresh_inputs.drawn_rows(3))) == 2 for _ in range(50))
    assert {row for _ in range(200) for row in fresh_inputs.drawn_rows(9)} == set(range(9))


def test_rows_of_a_file_come_at_another_scale_every_time_and_no_token_twice(tmp_path):
    rows = torch.randn(40, 16, dtype=torch.float64)
    case = Case("s", "s", FFNSpec(16, 32, "swiglu"), 8, passes="forward+backward", **input_of(tmp_path, rows))
    problem = Problem.of(case, 3)
    source, seen, x = fresh_inputs.source_of(problem), Counter(), torch.empty(8, 16)
    nearest = torch.nn.functional.normalize(rows)
    for _ in range(100):
        source.write(x)
        seen.update(tuple(row) for row in x.tolist())
        along = x.double() @ nearest.T
        scale = along.amax(1) / rows[along.argmax(1)].norm(dim=1)
        assert torch.allclose(rows[along.argmax(1)] * scale[:, None], x.double(), atol=1e-6)
        assert float((scale - 1).abs().max()) <= 0.02 + 1e-6
    assert max(seen.values()) == 1
    source.write_gradient(x)
    assert float((torch.nn.functional.normalize(x.double()) @ nearest.T).max()) < 0.99
    checked = torch.nn.functional.normalize(problem.first.x.double()) @ nearest.T
    assert float(checked.amax(1).min()) > 1 - 1e-6


def input_of(tmp_path, rows: torch.Tensor) -> dict[str, str]:
    """A file of these rows as fields of a case."""
    name = rows_file(tmp_path / "x.safetensors", rows)
    return {"input": name, "input_sha256": digest("--input", name)}


def test_a_file_that_changed_while_the_run_went_on_is_refused(tmp_path):
    fields = input_of(tmp_path, torch.ones(2, 16))
    rows_file(tmp_path / "x.safetensors", torch.full((2, 16), 2.0))
    problem = Problem.of(Case("s", "s", FFNSpec(16, 32), 8, **fields), 3)
    with pytest.raises(FFNError, match=r"x\.safetensors has changed since the run began"):
        _ = problem.first


def test_real_rows_can_be_routed_too(tmp_path):
    rows = torch.randn(40, 16) + 3
    spec = FFNSpec(16, 32, "swiglu", moe=MoE(4, 2))
    problem = Problem.of(Case("s", "s", spec, 8, routing="uniform", **input_of(tmp_path, rows)), 3)
    source, x = fresh_inputs.source_of(problem), torch.empty(8, 16)
    for _ in range(5):
        source.write(x)
        chosen = (x @ problem.weights["router.weight"].T).topk(2).indices
        assert torch.bincount(chosen.flatten()).tolist() == [4] * 4
    assert 1.5 < float(x.mean()) < 4.5
