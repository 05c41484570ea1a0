"""What a kernel is caught at: errors of a known size, gradients, answers kept by address."""

import contextlib
import random
import weakref
from dataclasses import replace

import pytest
import torch

from ffncli.bench.machine.machine import KernelMemory
from ffncli.bench.records import Case, Outcome, Ranks
from ffncli.bench.referee.problem import Inputs, Problem, error_of
from ffncli.bench.referee.rulings import allowed, refereed
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.outcomes import BrokenArm, Skipped, after_breaking, verdict_of
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.bench.verdict import Error, WrongResult
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.kernels import BY_DEFAULT, built_in
from ffncli.kernels.kernel import Kernel, canonical
from ffncli.run.measure.gap import rms_tolerance

EAGER = built_in("eager")


def kernel_of(change) -> Kernel:
    """eager, and `change(x, params, y)` of what it gives."""

    def build(steps, device, dtype):
        right = EAGER.build(steps, device, dtype)
        return lambda x, params: change(x, params, right(x, params))

    return Kernel("mine", build)


def placed_of(kernel: Kernel, dtype: str = "fp32", passes="forward", copies: int = 1) -> tuple[PlacedKernel, Problem]:
    problem = refereed(Problem.of(Case("s", "s", FFNSpec(64, 256, "swiglu"), 8, dtype=dtype, passes=passes), 3))
    placed = PlacedKernel("mine", build_kernel(kernel, problem), problem, random.Random(0))
    placed.place(copies)
    return placed, problem


def one_off(share: float) -> Kernel:
    def change(x, params, y):
        y = y.clone()
        y[2, 5] += share * y.abs().max()
        return y

    return kernel_of(change)


@pytest.mark.parametrize(("dtype", "share"), [("fp32", 1e-2), ("fp32", 1e-4), ("fp16", 1e-2), ("bf16", 4e-2)])
def test_one_element_off_by_a_share_of_the_largest_is_found(dtype, share):
    placed, problem = placed_of(one_off(share), dtype)
    with pytest.raises(WrongResult, match="its output is off by") as caught:
        correct.before(placed, problem)
    assert caught.value.ruling.error.largest == pytest.approx(share, rel=0.2)
    right, problem = placed_of(EAGER, dtype)
    assert 0 < correct.before(right, problem).largest < share / 8


def test_a_kernel_is_slow_on_a_single_rank_alone(monkeypatch):
    """Over ranks, all make the same calls: one that made fewer would leave the others waiting in a collective."""
    placed, problem = placed_of(EAGER)
    assert placed.slow_s is None  # never called
    for seconds, slow in ((0.2, None), (0.3, 0.3)):
        placed.first_s = seconds
        assert placed.slow_s == slow
    monkeypatch.setattr(placed, "_problem", replace(problem, case=replace(problem.case, ranks=Ranks(tp=2))))
    assert placed.slow_s is None


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_without_a_whole_check_the_first_call_s_answer_is_the_one_that_is_checked(passes):
    calls = []
    placed, problem = placed_of(kernel_of(lambda x, params, y: calls.append(1) or y), passes=passes)
    memory = KernelMemory("cpu")
    assert correct.first_call(placed, problem, memory) is None
    assert 0 < correct.before(placed, problem, whole=False).largest < 1e-5
    assert len(calls) == 1
    placed.forget()
    correct.before(placed, problem, whole=False)
    assert len(calls) == 2
    correct.before(placed, problem)  # on other tokens, and twice on these
    assert len(calls) == 5
    wrong, problem = placed_of(kernel_of(lambda x, params, y: y * 1.01), passes=passes)
    correct.first_call(wrong, problem, memory)
    with pytest.raises(WrongResult, match=r"its (output|gradient of .*) is off by"):
        correct.before(wrong, problem, whole=False)


@pytest.mark.parametrize(
    ("dtype", "passes", "mode", "bound"),
    [  # 4 · (eps + 2⁻²³ · √width), twice that with gradients, and 4 times what products are rounded to first
        ("fp32", "forward", "highest", 4 * 2**-23 * 17), ("bf16", "forward", "highest", 4 * (2**-7 + 16 * 2**-23)),
        ("fp16", "forward", "high", 4 * (2**-10 + 16 * 2**-23)), ("fp64", "forward", "medium", 4 * 2**-52 * 17),
        ("fp32", "forward+backward", "highest", 8 * 2**-23 * 17),
        ("fp32", "forward", "high", 4 * (2**-23 * 17 + 2**-10)),
        ("fp32", "forward+backward", "medium", 8 * (2**-23 * 17 + 2**-7)),
    ],
)  # fmt: skip
def test_the_bound(dtype, passes, mode, bound):
    problem = Problem.of(Case("s", "s", FFNSpec(64, 256, "swiglu"), 8, dtype=dtype, passes=passes), 3)
    assert allowed(problem, mode) == pytest.approx(bound, rel=1e-12)


KEYS = {
    "address": lambda x: x.data_ptr(),
    "address and version": lambda x: (x.data_ptr(), x._version),
    "the object": id,
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_an_answer_kept_for_a_buffer_is_found_as_the_buffers_are_used_again(key, passes):
    kept: dict = {}

    def change(x, params, y):
        if passes == "forward":
            return kept.setdefault(KEYS[key](x), y)
        return kept.setdefault(KEYS[key](x), y.detach()) + (y - y.detach())  # its gradients are right

    placed, problem = placed_of(kernel_of(change), passes=passes)
    with pytest.raises(WrongResult, match="its output is off by"):
        correct.before(placed, problem)
    kept.clear()
    placed.enter(problem.first.x)
    with correct.computing(problem.backward):
        placed.call()
    ruling = correct.fresh(placed, problem, problem.inputs(2))
    assert ruling.wrong.startswith("on a fresh seed: its output is off by")


def test_tokens_that_are_not_compared_may_be_anything_and_the_others_not():
    def first_row(x, params, y):
        y = y.clone()
        y[0] += 1
        return y

    placed, problem = placed_of(kernel_of(first_row))
    with torch.inference_mode():
        placed.call()
    whole = problem.first
    for rows, wrong in (([1, 2, 7], False), ([0, 3], True)):
        some = torch.tensor(rows)
        inputs = problem.referee._known[7] = Inputs(whole.x, whole.out[some], some, number=7)
        ruling = correct.compared(placed, problem, inputs)
        assert bool(ruling.wrong) == wrong
        assert (ruling.error.largest < 1e-6) != wrong


def test_figures_of_an_error_by_hand():
    b = torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64)
    found = error_of(torch.tensor([3.0, -4.0, 1e-40]) + torch.tensor([0.5, 0, 0]), b, 0.0)
    assert (found.largest, found.rel, found.subnormal) == (pytest.approx(0.5 / 4), pytest.approx(0.5 / 5), 1)
    small = error_of(b.float() * 1.5, b, 40.0)  # judged as if its largest were 40
    assert (small.largest, small.rel) == (pytest.approx(2 / 40), pytest.approx(2.5 / 50))
    worst = Error(1, 4, 2).worst(Error(3, 2, 5))
    assert worst == Error(3, 4, 5)


@pytest.mark.parametrize("which", ["x", "gate.weight", "up.weight", "down.weight"])
def test_a_gradient_of_any_weight_that_is_off_is_found(which):
    placed, problem = placed_of(EAGER, passes="forward+backward")
    assert correct.before(placed, problem).largest < allowed(problem) / 4
    names = ["x", *problem.weights]
    y, gradients = placed.out
    off = [g * 1.01 if name == which else g for name, g in zip(names, gradients, strict=True)]
    placed.out = (y, tuple(off))
    assert correct.compared(placed, problem, problem.first).wrong.startswith(f"its gradient of {which} is off by 0.01")


def test_weights_that_changed_are_found_in_any_copy_and_behind_torch_in_a_users_first():
    placed, _ = placed_of(EAGER, copies=3)
    assert not correct.untouched(placed).wrong
    placed.copies[2][0][0, 0] += 0
    assert correct.untouched(placed).note == "changed-weights: changes its weights"
    placed, _ = placed_of(replace(EAGER, origin="mine.py"), copies=3)
    assert not correct.untouched(placed).wrong
    placed.copies[0][0].numpy()[0, 0] += 1
    assert correct.untouched(placed).note == "changed-weights: changes its weights"


# --- 16 bits ----------------------------------------------------------------------------------------------------------

SHAPES = ((16, 40, 5), (64, 256, 1), (100, 300, 64), (512, 1024, 16))
BLOCKS = ("relu", "gelu", "swiglu", "relu2", "mixture")


def in_bits(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to whole steps, `2^(bits-1) - 1` of them up to the largest of each row."""
    step = weight.float().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((weight.float() / step).round() * step).to(weight.dtype)


def spec_of(block: str, d_model: int, d_ff: int) -> FFNSpec:
    return FFNSpec(d_model, d_ff, "swiglu", moe=MoE(4, 2)) if block == "mixture" else FFNSpec(d_model, d_ff, block)


def asked(spec: FFNSpec, tokens: int, dtype: str) -> Problem:
    """A problem of which the rms error alone is asked; one serves all kernels, as in a run."""
    problem = refereed(Problem.of(Case("s", "s", spec, tokens, dtype=dtype), 7))
    problem.referee._allowed = problem.referee._others = 1.0
    return problem


def checked(kernel: Kernel, problem: Problem) -> Error:
    placed = PlacedKernel("mine", build_kernel(kernel, problem), problem, random.Random(0))
    placed.place(1)
    return correct.before(placed, problem)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_no_built_in_kernel_is_accused_of_fewer_bits(block, dtype):
    for d_model, d_ff, tokens in SHAPES:
        problem = asked(spec_of(block, d_model, d_ff), tokens, dtype)
        for name in BY_DEFAULT:
            with contextlib.suppress(Skipped):
                checked(built_in(name), problem)


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("bf16", 6), ("fp16", 8), ("fp16", 6)])
@pytest.mark.parametrize("block", BLOCKS)
def test_weights_of_8_or_6_bits_are_told_from_16(block, dtype, bits):
    def prepare(steps, weights):
        return canonical(
            steps, {n: w if "router" in n or w.dim() < 2 else in_bits(w, bits) for n, w in weights.items()}
        )

    with pytest.raises(WrongResult, match=r"^its output has an rms error of"):
        checked(Kernel("mine", EAGER.build, prepare), asked(spec_of(block, 512, 1024), 16, dtype))


def test_a_kernel_may_round_more_often_than_every_step():
    """Four partial sums over d_ff and a bias that is added by itself; and less often, in float32 throughout."""

    def build(wide):
        def compute(x, params):
            gate, up, down = (p.to(wide) for p in params)
            hidden = torch.nn.functional.silu(x.to(wide) @ gate.T) * (x.to(wide) @ up.T)
            parts = [h @ d.T for h, d in zip(hidden.chunk(4, -1), down.chunk(4, -1), strict=True)]
            return (((parts[0] + parts[1]) + parts[2]) + parts[3]).to(x.dtype)

        return lambda steps, device, dtype: compute

    for wide in (torch.bfloat16, torch.float32):
        spec = FFNSpec(512, 1024, "swiglu", bias=False)
        assert checked(Kernel("mine", build(wide)), asked(spec, 16, "bf16")).rel < 0.006


def test_the_rms_bound_by_hand():
    assert rms_tolerance(torch.bfloat16, 0.0037, 10**8) == pytest.approx(
        (0.0037**2 + 10 * 2**-14 / 28) ** 0.5, rel=1e-3
    )
    assert rms_tolerance(torch.float16, 0.0, 9) == pytest.approx(2 * 2**-10 * (10 / 28) ** 0.5)
    drawn = torch.rand(10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1  # a binade
    rounded = drawn.to(torch.bfloat16).double()
    rms = float((rounded - drawn).norm() / drawn.norm())
    assert rms == pytest.approx(2**-7 / 28**0.5, rel=1e-2)


# --- what becomes of an outcome when its kernel raises ----------------------------------------------------------------


def raised_in_a_kernel():
    """(what a guarded call raises, a weak reference to a tensor of the kernel's frame)"""

    def kernel():
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    held = []
    try:
        try:
            try:
                kernel()
            except torch.OutOfMemoryError as error:
                raise FFNError("mine.py, line 3: OutOfMemoryError", "raised when it was called") from error
        except FFNError as error:
            raise BrokenArm("mine") from error
    except BrokenArm as broken:
        return broken, held[0]


def test_what_a_kernel_raised_keeps_none_of_its_tensors():
    """A GPU's memory is given back before the next kernel: frames of the first exception hold tensors as well."""
    broken, tensor = raised_in_a_kernel()
    assert tensor() is not None
    outcome = after_breaking(Outcome("mine"), broken)
    assert tensor() is None
    assert (outcome.status, outcome.note) == ("oom", "mine.py, line 3: OutOfMemoryError")
    assert isinstance(broken.__cause__, FFNError)


def test_a_sentence_of_torchs_and_what_it_was_raised_by_are_one_line():
    error = FFNError("k.py, line 13: IndexError: max(): Expected non-zero size.", "raised when it was called")
    why = "k.py, line 13: IndexError: max(): Expected non-zero size; raised when it was called"
    assert verdict_of(error) == ("failed", why)
