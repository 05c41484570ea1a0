"""Every check passes for blocks that are right, and fails when the thing that it looks at is broken on purpose."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from ffncli.block.activations import TABLE, hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import Activation, Add, Linear
from ffncli.errors import FFNError
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.examples import notebook
from ffncli.models.model import Layer, block_model
from ffncli.run.engine import execute as executing
from ffncli.run.engine.execute import run
from ffncli.run.engine.reference import in_float64, output_and_experts, same_experts
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import tolerance_for
from ffncli.run.verify import verify as verify_module
from ffncli.run.verify.checks import implementations, properties
from ffncli.run.verify.checks.case import CheckedBlock, Judge, errors, not_finite
from ffncli.run.verify.verify import CHECKS, Verdict, check_names, verify_layer
from tests.bench.fake_memory import FakeMemory

SPECS = {
    "plain": FFNSpec(16, 24, "gelu", dropout=0.2, norm="layernorm", residual=True),
    "gated": FFNSpec(16, 24, "swiglu", norm="rmsnorm", residual=True),
    "bias": FFNSpec(16, 24, "geglu", bias=True, norm="layernorm", norm_position="post", residual=True),
    "parallel": FFNSpec(16, 24, "gelu_tanh", norm="layernorm", parallel=True),
    "gemma": FFNSpec(16, 24, "geglu_tanh", norm="rmsnorm", norm_position="pre+branch", norm_weight="one_plus"),
    "norm inside": FFNSpec(16, 24, "relu2", gated=True, norm="rmsnorm", sub_norm=True),
    "mixture": FFNSpec(16, 24, "swiglu", moe=MoE(4, 2, 1, shared_gate=True), norm="rmsnorm", residual=True),
    "gpt-oss": FFNSpec(
        16, 24, "quick_gelu", gated=True, bias=True, limits=hard_limits(0.3, 1.0),
        moe=MoE(4, 2, order="choose_first", renormalise=False, router_bias=True),
    ),
    "latent": FFNSpec(16, 24, "relu2", bias=False, moe=MoE(4, 2, latent=8)),
    "normed experts": FFNSpec(
        16, 24, "swiglu", norm="rmsnorm", norm_weight="one_plus", post_norm_weigh="input",
        moe=MoE(4, 2, latent=8, latent_norm=True, expert_norm=True, mixed_norm=True, mixed_bias=True),
    ),
}  # fmt: skip


def verified(spec: FFNSpec, *checks: str, **run) -> Verdict:
    return verify_layer(block_model(spec, "test"), **run, checks=checks or None)


def subjects(verdict: Verdict, passed: bool | None) -> list[str]:
    return [row.subject for row in verdict.rows if row.passed is passed]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "fp32") for name in SPECS), *((n, d) for n in ("bias", "mixture") for d in ("bf16", "fp16", "fp64"))],
)
def test_what_is_right_passes(name, dtype):
    found = verified(SPECS[name], dtype=dtype)
    assert [(row.check, row.subject, row.note) for row in found.failed] == []
    assert list(dict.fromkeys(row.check for row in found.rows)) == [
        name for name in CHECKS if name != "ranks"
    ]  # which takes several processes
    assert len(subjects(found, True)) > 30


def test_every_activation_passes():
    for name in TABLE:
        assert verified(FFNSpec(8, 12, name), "module", "kernels", "zero", "nonlinearity").failed == ()


def test_the_default_block():
    example = notebook()
    found = verify_layer(example)
    assert found.failed == ()
    assert found.ready.inputs["x"].shape == (2, 3, 4)


# --- each check, broken -----------------------------------------------------------------------------------------------


def breaking(monkeypatch, kind, change):
    """Let the reference execution be wrong for one kind of op."""
    right = executing.apply

    def wrong(step, own, x, mode):
        return change(step, own, x) if isinstance(step.op, kind) else right(step, own, x, mode)

    monkeypatch.setattr(executing, "apply", wrong)


def test_module_sees_a_wrong_residual(monkeypatch):
    breaking(monkeypatch, Add, lambda step, own, x: x[-1])
    assert subjects(verified(SPECS["plain"], "module"), False) == ["torch.nn, eval", "torch.nn, train, same mask"]


def test_module_in_train_mode_needs_the_same_mask(monkeypatch):
    found = verified(SPECS["plain"], "module")
    naive = next(row for row in found.rows if row.subject.endswith("called twice"))
    assert (naive.passed, naive.relative_error > 0.05) == (None, True)
    assert "draws its own dropout mask" in naive.note
    monkeypatch.setattr(implementations, "Mode", lambda train, masks: executing.Mode(train=True))
    assert subjects(verified(SPECS["plain"], "module"), False) == ["torch.nn, train, same mask"]


def test_module_without_dropout_has_no_train_row():
    (row,) = [row for row in verified(SPECS["gated"], "module").rows if row.passed is None]
    assert (row.subject, row.note) == ("torch.nn, train", "the block has no dropout, so train mode equals eval mode")
    mixed = replace(SPECS["mixture"], dropout=0.1)
    assert "every expert draws its own mask" in [row.note for row in verified(mixed, "module").rows]


def test_convolution_sees_a_transposed_weight(monkeypatch):
    right = functional.conv1d
    monkeypatch.setattr("torch.nn.functional.conv1d", lambda x, w, b=None: right(x, w.flip(0), b))
    assert subjects(verified(SPECS["gated"], "convolution"), False) == ["gate", "up", "down", "whole FFN"]


def test_tokens_sees_one_that_looks_at_its_neighbour(monkeypatch):
    breaking(monkeypatch, Linear, lambda step, own, x: functional.linear(x[0] - x[0].mean(0), own["weight"]))
    assert subjects(verified(SPECS["gated"], "tokens"), False) == ["split in two", "first 4, one at a time"]
    breaking(monkeypatch, Linear, lambda step, own, x: functional.linear(x[0].cumsum(0), own["weight"]))
    assert "permuted" in subjects(verified(SPECS["gated"], "tokens"), False)


def test_one_token_alone_is_said():
    (row,) = verified(SPECS["gated"], "tokens", leading=(1,)).rows
    assert (row.passed, row.note) == (None, "only one token: give --tokens 2 or more")


def test_collapse_is_one_matrix_and_no_other(monkeypatch):
    found = verified(FFNSpec(80, 96, "gelu"), "collapse")
    assert subjects(found, True) == ["one block", "a stack of 3"]
    assert "the first 64 rows of one matrix [80, 80]" in found.rows[0].note
    assert "one matrix [16, 16]" in verified(SPECS["plain"], "collapse").rows[0].note
    monkeypatch.setattr(properties, "_linear", lambda dense: dense)  # the activation stays
    assert subjects(verified(FFNSpec(80, 96, "gelu"), "collapse"), False) == ["one block", "a stack of 3"]


def test_collapse_of_a_gated_block_is_a_figure_and_it_is_quadratic(monkeypatch):
    figure, quadratic = verified(SPECS["bias"], "collapse").rows
    assert (figure.passed, figure.relative_error > 0.1) == (None, True)
    assert (quadratic.subject, quadratic.passed) == ("gated, as a quadratic", True)
    assert "does not collapse" in figure.note
    breaking(monkeypatch, Activation, lambda step, own, x: x[0] ** 2)
    assert verified(SPECS["bias"], "collapse").rows[1].passed is False  # of degree 6 with both activations


def test_collapse_says_what_it_cannot():
    assert verified(SPECS["norm inside"], "collapse").rows[0].note == "its norm over d_ff is not linear"
    mixed = verified(SPECS["mixture"], "collapse").rows
    assert "the mixture is not one matrix" in mixed[0].note
    assert mixed[2].passed is True


def test_nonlinearity_is_zero_for_identity_alone(monkeypatch):
    found = {row.subject: row for row in verified(FFNSpec(16, 24, "relu"), "nonlinearity").rows}
    assert list(found) == list(TABLE)
    assert found["identity"].max_error < 1e-14
    assert all(row.max_error > 1e-4 and row.passed for name, row in found.items() if name != "identity")
    monkeypatch.setattr(properties, "function", lambda name, learned: lambda x: 2 * x)
    flat = {row.subject: row.passed for row in verified(FFNSpec(16, 24, "relu"), "nonlinearity").rows}
    assert flat == {name: name == "identity" for name in TABLE}
    monkeypatch.setattr(properties, "function", lambda name, learned: torch.relu)
    assert subjects(verified(FFNSpec(16, 24, "relu"), "nonlinearity"), False) == ["identity"]


def test_nonlinearity_is_the_blocks_own_sum_written_out():
    """The same number from the notebook's block in plain torch, for relu."""
    example = notebook()
    found = verify_layer(example, checks=("nonlinearity",))
    relu = next(row for row in found.rows if row.subject == "relu")
    w = {name: torch.tensor(values).double() for name, values in example.example.weights.items()}
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(4, 4, generator=generator).double() for _ in range(2))

    def f(x):
        return torch.relu(x @ w["up.weight"].T + w["up.bias"]) @ w["down.weight"].T + w["down.bias"]

    defect = (f(a + b) - f(a) - f(b) + f(torch.zeros_like(a))).abs().max().item()
    assert relu.max_error == pytest.approx(defect, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spec", [FFNSpec(1, 1, "relu"), FFNSpec(1, 1, "swiglu"), FFNSpec(2, 1, "relu", bias=False)])
def test_a_block_of_one_unit_is_not_linear_either(spec, seed):
    """A few tokens may all lie on one side of the one bend there is."""
    found = verified(spec, "nonlinearity", seed=seed)
    assert [row.subject for row in found.failed] == []


def test_where_weights_are_all_zero_nothing_is_said_of_activations(monkeypatch):
    from ffncli.run.engine import weights

    drawn = weights.random_weights
    monkeypatch.setattr(
        weights, "random_weights", lambda *args: {name: 0 * tensor for name, tensor in drawn(*args).items()}
    )
    rows = verified(FFNSpec(4, 8, "swiglu"), "nonlinearity").rows
    assert {row.passed for row in rows} == {None}
    assert {row.note for row in rows} == {"gate.weight is all 0: nothing passes through the activation"}


def test_gated_blocks_are_not_linear_with_identity_either():
    row = verified(SPECS["gated"], "nonlinearity").rows[0]
    assert (row.subject, row.passed, row.note) == ("identity", True, "quadratic with a gate: must not be 0")


@pytest.mark.parametrize("name", ["plain", "gated", "mixture", "gpt-oss"])
def test_zero_stays_zero_without_biases(name):
    found = {row.subject: row for row in verified(SPECS[name], "zero").rows}
    assert (found["without biases"].max_error, found["without biases"].passed) == (0.0, True)
    assert found["with biases"].max_error > 0.1
    assert found["equal tokens"].passed
    assert "in train mode dropout makes equal tokens differ" in found["equal tokens"].note


def test_zero_where_the_function_of_zero_is_not(monkeypatch):
    found = verified(FFNSpec(16, 24, "sigmoid"), "zero").rows[0]
    assert (found.passed, found.note) == (True, "sigmoid(0) = 0.5, so the output is W2 times that")
    breaking(monkeypatch, Linear, lambda step, own, x: functional.linear(x[0], own["weight"]) + 0.1)
    assert subjects(verified(FFNSpec(16, 24, "sigmoid"), "zero"), False) == ["without biases"]
    assert subjects(verified(SPECS["gated"], "zero"), False) == ["without biases"]
    breaking(monkeypatch, Linear, lambda step, own, x: functional.linear(x[0], own["weight"]))
    assert subjects(verified(SPECS["gated"], "zero"), False) == ["with biases"]


def test_equal_tokens_must_stay_equal(monkeypatch):
    breaking(
        monkeypatch, Linear, lambda step, own, x: functional.linear(x[0], own["weight"]) + torch.rand(len(x[0]), 1)
    )
    assert "equal tokens" in subjects(verified(SPECS["gated"], "zero"), False)


def test_shards_are_those_that_divide():
    found = verified(SPECS["gated"], "shards").rows
    assert [row.subject for row in found] == [f"{n} ranks, d_ff 24 → {24 // n}" for n in (2, 3, 4, 8)]
    assert all(row.passed and row.note == "collectives: 1 (all-reduce of down)" for row in found)
    (row, *_) = [row for row in verified(FFNSpec(8, 10), "shards").rows if row.passed is None]
    assert row.note == "d_ff = 10 does not divide over 3 ranks"
    latent = verified(SPECS["latent"], "shards").rows
    assert {row.note for row in latent} == {"collectives: 1 (all-reduce of experts)"}
    normed = verified(SPECS["normed experts"], "shards").rows
    assert {(row.passed, row.note) for row in normed} == {(True, "collectives: 1 (all-reduce of experts[e].down)")}
    both = verified(replace(SPECS["latent"], moe=MoE(4, 2, 1, latent=8)), "shards")
    assert (both.rows[0].passed, both.rows[0].note[:14]) == (True, "collectives: 2")


def test_shards_see_a_bias_that_every_rank_adds(monkeypatch):
    from ffncli.block import shard as sharding

    right = sharding._split

    def wrong(step, rank, ranks, axis):
        return right(step, 0, ranks, axis)  # as if every rank were the first

    monkeypatch.setattr(sharding, "_split", wrong)
    assert len(subjects(verified(SPECS["plain"], "shards"), False)) == 4
    assert subjects(verified(SPECS["gated"], "shards"), False) == []  # no bias, no harm


def test_shards_refuse_a_norm_over_the_split_axis():
    assert {row.passed for row in verified(SPECS["norm inside"], "shards").rows} == {None}


def test_fused_sees_halves_that_are_swapped(monkeypatch):
    assert subjects(verified(SPECS["gated"], "fused"), True) == ["packed = eager"]
    right = torch.cat
    monkeypatch.setattr("ffncli.kernels.packed.torch.cat", lambda parts, *a: right([*parts][::-1], *a))
    assert subjects(verified(SPECS["gated"], "fused"), False) == ["packed = eager"]


# --- how much a wrong kernel must be wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(("d_model", "d_ff"), [(8, 12), (64, 256), (256, 2048)])
@pytest.mark.parametrize("bug", ["tanh for erf", "no bias", "one bias of many", "relu for gelu"])
def test_tolerance_in_float32_finds_real_bugs(monkeypatch, bug, d_model, d_ff):
    """The smallest of them is gelu's tanh form: 4.7e-4 at most, and seldom."""
    eager = "ffncli.kernels.eager.functional.linear"
    right = functional.linear
    if bug == "tanh for erf":
        monkeypatch.setattr(
            "ffncli.kernels.dense._function", lambda n: lambda x: functional.gelu(x, approximate="tanh")
        )
    elif bug == "relu for gelu":
        monkeypatch.setattr("ffncli.kernels.dense._function", lambda n: lambda x: torch.relu(x))
    elif bug == "no bias":
        monkeypatch.setattr(
            "ffncli.kernels.eager.functional", type("f", (), {"linear": lambda x, w, b=None: right(x, w)})
        )
    else:

        def forgets(x, w, b=None):
            b = None if b is None else b * (torch.arange(len(b)) != 3)
            return right(x, w, b)

        monkeypatch.setattr("ffncli.kernels.eager.functional", type("f", (), {"linear": forgets}))
    assert eager
    found = {row.subject: row for row in verified(FFNSpec(d_model, d_ff, "gelu"), "kernels").rows}
    assert found["eager"].passed is False
    assert found["eager"].relative_error > 2 * found["eager"].tolerance
    assert verified(FFNSpec(d_model, d_ff, "gelu"), "kernels", dtype="fp16").rows[0].subject == "eager"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tolerance_in_16_bits_finds_a_wrong_function(monkeypatch, dtype):
    monkeypatch.setattr("ffncli.kernels.dense._function", lambda n: lambda x: torch.relu(x))
    assert "eager" in subjects(verified(FFNSpec(64, 256, "gelu"), "kernels", dtype=dtype), False)


def test_tokens_that_rounding_routes_otherwise_are_left_out():
    spec = FFNSpec(16, 24, "swiglu", moe=MoE(64, 4))
    found = verified(spec, "kernels", dtype="bf16", leading=(256,))
    eager = found.rows[0]
    assert eager.passed is True
    assert "tokens left out: rounding sent them to other experts" in eager.note


# --- the whole --------------------------------------------------------------------------------------------------------


def test_values_that_are_no_numbers_stop_the_rest():
    spec = SPECS["gated"]
    from ffncli.block.recipe import steps
    from ffncli.run.engine.weights import random_weights

    weights = random_weights(steps(spec), torch.Generator().manual_seed(0))
    weights["gate.weight"][0, 0] = math.nan
    weights["down.weight"][0, :2] = math.inf
    found = verify_layer(replace(block_model(spec, "t"), weights={("block", 0): weights}))
    assert [(row.check, row.subject) for row in found.failed] == [("finite", "weights")]
    assert found.failed[0].note == "gate.weight has 1 NaN; down.weight has 2 Inf"
    assert {row.note for row in found.rows if row.check == "kernels"} == {"not run: weights with NaN or Inf"}
    inputs = verified(spec, input=",".join(["nan", *["1"] * 15]))
    assert [(row.check, row.subject) for row in inputs.failed] == [("finite", "input")]


def test_a_tolerance_of_ones_own():
    tight = verify_layer(block_model(SPECS["plain"], "t"), checks=("kernels",), tolerance=1e-12)
    assert {row.tolerance for row in tight.rows if row.tolerance} == {1e-12}
    assert tight.failed


def test_names_of_checks():
    assert check_names(None) == tuple(CHECKS)
    assert check_names(["kernels", "module"]) == ("module", "kernels")
    with pytest.raises(FFNError, match="unknown check 'modul'; did you mean 'module'"):
        check_names(["modul"])


def test_what_torch_does_not_have_is_no_failure(monkeypatch):
    def lacks(case):
        raise RuntimeError("\"conv\" not implemented for 'Half'\nmore")
        yield

    monkeypatch.setitem(CHECKS, "zero", replace(CHECKS["zero"], rows=lacks))
    (row,) = verified(SPECS["gated"], "zero").rows
    assert (row.passed, row.note) == (None, "torch does not support it here: \"conv\" not implemented for 'Half'")

    def broken(case):
        raise RuntimeError("a bug")
        yield

    monkeypatch.setitem(CHECKS, "zero", replace(CHECKS["zero"], rows=broken))
    with pytest.raises(RuntimeError):
        verified(SPECS["gated"], "zero")


def test_large_blocks_get_few_tokens(monkeypatch):
    monkeypatch.setattr(verify_module, "_LARGE", 100)
    assert verified(SPECS["gated"], "finite").ready.inputs["x"].shape == (4, 16)
    monkeypatch.setattr(verify_module, "_LARGE", 10**9)
    assert verified(SPECS["gated"], "finite").ready.inputs["x"].shape == (16, 16)


JUDGE = Judge("module", 1e-6, torch.float32)


def test_one_ulp_is_one():
    b = torch.tensor([1.0, -6.0, 0.25])
    a = torch.nextafter(b, torch.full_like(b, 100.0))
    largest, relative, ulps = errors(a, b, torch.float32)
    assert (largest, ulps) == (4 * 2.0**-23, 1.0)  # at -6, where the numbers are 4 times as far apart as at 1
    assert relative == largest / 6


def test_errors_where_the_reference_is_zero():
    zero = torch.zeros(3)
    assert errors(zero, zero, torch.float32) == (0.0, 0.0, 0.0)
    assert errors(zero + 0.5, zero, torch.float32) == (0.5, None, None)
    assert errors(torch.zeros(0), torch.zeros(0), torch.float32) == (0.0, 0.0, 0.0)


def test_equal_passes_within_the_tolerance_alone():
    one = torch.ones(2)
    assert JUDGE.equal("a", one + 9e-7, one).passed is True
    assert JUDGE.equal("a", one + 2e-6, one).passed is False
    assert JUDGE.equal("a", one, torch.zeros(2)).passed is False
    assert JUDGE.equal("a", torch.zeros(2), torch.zeros(2)).passed is True


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_never_passes(wrong):
    """Two NaN are no agreement, and no comparison with one is ever true."""
    bad, good = torch.tensor([1.0, wrong]), torch.ones(2)
    found = JUDGE.equal("a", bad, good)
    assert (found.passed, found.max_error) == (False, None)
    assert found.note == f"its output has 1 {'NaN' if math.isnan(wrong) else 'Inf'}"
    assert JUDGE.equal("a", good, bad).note.startswith("the reference has 1 ")
    assert JUDGE.equal("a", bad, bad).passed is False
    assert not_finite(torch.tensor([math.nan, math.inf, -math.inf])) == "1 NaN and 2 Inf"


def test_another_shape_fails():
    assert JUDGE.equal("a", torch.ones(2), torch.ones(3)).note == "shape [2], expected [3]"


def test_tolerances():
    eps = 2.0**-23
    assert tolerance_for(torch.float32, 256) == 4 * eps * 17
    assert tolerance_for(torch.float64, 256) == 4 * 2.0**-52 * 17
    assert tolerance_for(torch.float64, 256, torch.float32) == 4 * (eps + 2.0**-52 * 16)
    assert tolerance_for(torch.bfloat16, 256) == 4 * (2.0**-7 + eps * 16)  # it sums in float32


SHARED = [
    FFNSpec(8, 12, "gelu"),
    FFNSpec(8, 12, "swiglu", moe=MoE(16, 2, 1)),
    FFNSpec(8, 12, "swiglu", moe=MoE(4, 4, identity_experts=3)),
]


@pytest.mark.parametrize("spec", SHARED, ids=["dense", "experts", "identity experts"])
def test_in_float64_is_the_reference_in_float64(spec):
    block = kernel_steps(steps(spec))
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator)
    x = torch.randn(5, 8, generator=generator)
    found, went = in_float64(block, weights, {"x": x})
    doubled = {name: tensor.double() for name, tensor in weights.items()}
    assert torch.equal(found, run(block, doubled, {"x": x.double()}))
    theirs = output_and_experts(block, doubled, {"x": x.double()})[1]
    assert (went is None) == (theirs is None)
    assert went is None or torch.equal(went, theirs)


def test_in_float64_widens_one_expert_at_a_time():
    """All used experts of DeepSeek-V3's layer in float64 would be 90 GB, of Mixtral's 11 GB."""
    d_model, d_ff, tokens = 64, 256, 4
    block = kernel_steps(steps(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(16, 4))))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(tokens, d_model, generator=torch.Generator().manual_seed(1))
    with FakeMemory() as memory:
        in_float64(block, weights, {"x": x})
    expert = 8 * 3 * d_model * d_ff
    assert expert < memory.peak < 1.3 * expert
    assert memory.largest == 8 * d_model * d_ff


def case(spec: FFNSpec, dtype: torch.dtype) -> CheckedBlock:
    layer = Layer("block", 0, spec)
    return CheckedBlock(block_model(spec, "t"), layer, steps(spec), {}, {}, dtype)


def test_a_router_in_float32_limits_what_float64_can_agree_to():
    mixed = case(SHARED[1], torch.float64)
    assert mixed.judge("kernels").tolerance == tolerance_for(torch.float64, 12, torch.float32)
    assert mixed.judge("collapse", torch.float64).tolerance == tolerance_for(torch.float64, 12)  # one expert alone
    assert case(SHARED[0], torch.float64).judge("kernels").tolerance == tolerance_for(torch.float64, 12)
    own = case(FFNSpec(8, 12, "swiglu", moe=MoE(4, 2, score_dtype="input")), torch.float64)
    assert own.judge("kernels").tolerance == tolerance_for(torch.float64, 12)


def test_tokens_that_went_to_the_same_experts():
    a = torch.tensor([[True, False], [True, False], [False, True]])
    b = torch.tensor([[True, False], [False, True], [False, True]])
    same, note = same_experts(a, b, 3)
    assert same.tolist() == [True, False, True]
    assert note == "1 of 3 tokens left out: rounding sent them to other experts"
    assert same_experts(None, b, 2)[0].tolist() == [True, True]
    assert same_experts(a, a, 3)[1] == ""
