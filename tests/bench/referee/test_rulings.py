"""What the referee rules: limits, answers of a wrong form, and what is kept of each kernel."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ffncli.bench.records import TWIN, Finding
from ffncli.bench.referee import problem as module
from ffncli.bench.referee.problem import GRADIENT, OUTPUT, CallSample, Problem
from ffncli.bench.referee.rulings import TIMES, Rulings, allowed
from ffncli.bench.verdict import Ruling, WrongCode
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.run.engine.reference import in_float64, output_and_experts
from ffncli.system.files import sha256_of
from tests.bench.referee.test_problem import MIXTURE, RELU, SWIGLU, by_hand, problem_of, wide


def rulings_of(passes: str = "forward", baseline: str = "eager", **fields) -> Rulings:
    return Rulings(problem_of(SWIGLU, passes=passes, **fields), baseline)


def answer(rulings: Rulings, kernel: str, off: float = 0.0, number: int = 1, **gradients) -> Ruling:
    """To a whole question: the reference, off by that share of its largest value."""
    inputs = rulings.inputs(number)
    out = inputs.out + off * inputs.out.abs().max()
    given = {OUTPUT: out.to(inputs.x.dtype)}
    given |= {GRADIENT + name: grad.to(inputs.x.dtype) for name, grad in {**(inputs.grads or {}), **gradients}.items()}
    return rulings.ruling(kernel, number, given)


def found(rulings: Rulings, kernel: str) -> Finding:
    return next(finding for finding in rulings.report().findings if finding.outcome.kernel == kernel)


def test_others_may_have_four_times_the_error_of_a_right_baseline():
    rulings = rulings_of()
    bound = allowed(rulings._problem)
    assert not answer(rulings, "eager", 0.9 * bound).wrong
    for kernel, times in (("mine", 0.9 * TIMES), ("eager", 1.0), (TWIN, 1.0)):
        assert rulings.limit(kernel) == pytest.approx(times * bound, rel=0.15)
    assert rulings.limit(TWIN) == rulings.limit("eager") == bound
    assert not answer(rulings, "mine", 3 * bound).wrong
    assert "the limit is" in answer(rulings, "mine", 5 * bound).wrong


@pytest.mark.parametrize("what", ["wrong", "on other inputs", "declared"])
def test_a_baseline_raises_no_limit_where_it_is(what):
    rulings = rulings_of()
    bound = allowed(rulings._problem)
    if what == "declared":
        rulings.declare("eager", "int4")
    answer(
        rulings, "eager", 3 * bound if what == "wrong" else 0.9 * bound, number=2 if what == "on other inputs" else 1
    )
    assert rulings.limit("mine") == bound


def test_the_first_declaration_holds_and_an_unknown_format_is_an_error():
    rulings = rulings_of()
    rulings.declare("mine", "int8")
    limit = rulings.limit("mine")
    rulings.declare("mine", "int4")
    assert rulings.limit("mine") == limit
    assert found(rulings, "mine").outcome.computes == "int8"
    with pytest.raises(FFNError, match="not a known format"):
        rulings.declare("other", "half")


def test_an_answer_of_another_form_is_wrong():
    rulings = rulings_of("forward+backward")
    inputs = rulings.inputs(1)
    whole = {OUTPUT: inputs.out.to(inputs.x.dtype)} | {GRADIENT + n: g for n, g in inputs.grads.items()}
    assert not rulings.ruling("mine", 1, whole).wrong
    for change, words in (
        ({OUTPUT: whole[OUTPUT][:-1]}, "returns shape"),
        ({OUTPUT: whole[OUTPUT].double()}, "returns float64, expected float32"),
        ({OUTPUT: whole[OUTPUT] / 0}, "its output has"),
        ({GRADIENT + "x": whole[GRADIENT + "x"][:1]}, "its gradient of x has shape"),
    ):
        assert rulings.ruling("mine", 1, whole | change).wrong.startswith(words)
    for left_out in (OUTPUT, GRADIENT + "x", GRADIENT + "up.weight"):
        rest = {name: tensor for name, tensor in whole.items() if name != left_out}
        assert rulings.ruling("mine", 1, rest).wrong in ("has no output", f"{left_out} is missing")


def test_samples_are_ruled_on_by_kernel():
    rulings = rulings_of()
    x = rulings.inputs(1).x[:2]
    out = rulings.inputs(1).out[:2].float()
    for sample in (CallSample("right", x, out), CallSample("mine", x, out + 1), CallSample("odd", x, out[:1])):
        rulings.show(sample)
    rulings.show(CallSample("right", x, out + 1, block=1))
    rulings.show(CallSample("right", x, out, block=1))  # of a block the last one counts
    ruled = rulings.timed()
    assert rulings.timed() == {}
    assert {kernel: bool(ruling.wrong) for kernel, ruling in ruled.items()} == {
        "right": False,
        "mine": True,
        "odd": True,
    }
    assert ruled["mine"].code == WrongCode.WRONG_WHEN_TIMED
    assert ruled["odd"].note == "wrong-when-timed: returns shape [1, 8], expected [2, 8]"
    assert [(f.outcome.kernel, f.samples, f.answers) for f in rulings.report().findings] == [
        ("right", 2, 0), ("mine", 1, 0), ("odd", 1, 0),
    ]  # fmt: skip


def test_the_first_fault_stays():
    rulings = rulings_of()
    answer(rulings, "mine")
    rulings.accuse("mine", "patched-clock: half of it")
    assert answer(rulings, "mine", 0.5).wrong
    assert not answer(rulings, "mine").wrong
    finding = found(rulings, "mine")
    assert (finding.outcome.note, finding.answers) == ("patched-clock: half of it", 3)
    assert finding.outcome.error_max == pytest.approx(0.5, rel=1e-3)
    assert torch.isfinite(torch.tensor(finding.outcome.error_rel))


def test_rows_of_a_file_may_come_again(tmp_path):
    """A row of zeros is the same at every scale."""
    save_file({"x": torch.cat([torch.zeros(1, 32), torch.randn(3, 32)])}, tmp_path / "x.safetensors")
    problem = problem_of(FFNSpec(32, 12, "swiglu"))
    case = replace(
        problem.case, input=str(tmp_path / "x.safetensors"), input_sha256=sha256_of(tmp_path / "x.safetensors")
    )
    rulings = Rulings(replace(problem, case=case), users=("mine",))
    x, out = rulings.inputs(1).x[:2], rulings.inputs(1).out[:2].float()
    for block in range(2):
        rulings.show(CallSample("mine", x, out, block=block))
        (ruling,) = rulings.timed().values()
        assert ruling.note == ""


@pytest.mark.parametrize(
    ("kernel", "wide", "wrong"), [("mine", True, True), ("eager", True, False), ("mine", False, False)]
)
def test_an_input_that_comes_twice_is_a_user_s_doing(kernel, wide, wrong):
    """Of few numbers a token may come twice by chance, and a kernel of ours enters nothing."""
    rulings = Rulings(problem_of(FFNSpec(32 if wide else 8, 12, "swiglu")), users=("mine",))
    x, out = rulings.inputs(1).x[:2], rulings.inputs(1).out[:2].float()
    for block in range(2):
        rulings.show(CallSample(kernel, x, out, block=block))
        (ruling,) = rulings.timed().values()
        expected = "patched-ffn: an input of its timed calls was repeated" if wrong and block else ""
        assert ruling.note == expected


@pytest.mark.parametrize(
    ("kernel", "rank", "span"), [("mine", 64, None), ("mine", 8, 7), ("mine", 1, 1), ("eager", 1, 0)]
)
def test_inputs_span_the_dimensions_of_drawn_ones(kernel, rank, span):
    """32 tokens of 64 normal numbers span 32 · 64 / 97 = 21 dimensions, of 8 numbers about 32 · 8 / 41, of one 1."""
    problem = problem_of(FFNSpec(64, 12, "swiglu"))
    rulings, generator = Rulings(problem, users=("mine",)), torch.Generator().manual_seed(0)
    x = torch.randn(32, rank, generator=generator)
    x = x if rank == 64 else x @ torch.linalg.qr(torch.randn(64, rank, generator=generator)).Q.T
    out = in_float64(problem.steps, problem.weights, {problem.entry: x})[0].float()
    for block, (some, given) in enumerate(zip(x.split(2), out.split(2), strict=True)):
        rulings.show(CallSample(kernel, some, given, block=block))
    (ruling,) = rulings.timed().values()
    text = f"patched-ffn: the inputs of its timed calls span {span} dimensions, drawn ones 21"
    assert ruling.note == (text if span else "")


def test_rounding_is_that_of_the_samples_own_tokens():
    """The first x may round less than others: of a single token, the router's rounding is in every value."""
    problem = problem_of(FFNSpec(256, 512, "silu", gated=True, bias=False, moe=MoE(4, 2)), dtype="bf16", tokens=1)
    problem.__dict__["first"] = replace(problem.first, rounding=problem.first.rounding / 4)  # as if it did
    weights = {name: w if "router" in name else in_8_bits(w) for name, w in problem.weights.items()}
    rulings = Rulings(problem, "eager")
    for kernel, used in (("honest", problem.weights), ("8 bits", weights)):
        for block in range(40):
            x = torch.randn(1, 256, generator=torch.Generator().manual_seed(block)).mul(3).bfloat16()
            out, _ = output_and_experts(problem.steps, used, {problem.entry: x})
            rulings.show(CallSample(kernel, x, out, block=block))
    found = rulings.timed()
    assert not found["honest"].wrong
    assert found["8 bits"].code == WrongCode.LOWER_PRECISION


def in_8_bits(weights: torch.Tensor) -> torch.Tensor:
    scale = weights.float().abs().amax(-1, keepdim=True) / 127
    return ((weights / scale).round() * scale).to(weights.dtype)


# --- samples, held to formulas ----------------------------------------------------------------------------------------


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
