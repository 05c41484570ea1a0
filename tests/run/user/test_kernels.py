"""`--kernel file.py:name`: functions, classes and Kernels of users, right ones and wrong ones."""

import hashlib
import json
import os
from contextlib import suppress

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs
from ffncli.cli.main import _terminated
from ffncli.errors import FFNError
from ffncli.kernels import BUILT_IN, COMPILING
from ffncli.kernels.choice import argument, choices, parse
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.model import block_model
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights
from ffncli.run.user.kernels import kernel_of, kernels_of, unguarded
from ffncli.run.user.python_file import user_code
from ffncli.run.verify.verify import verify_layer
from tests.oracles.modules import relative_error
from tests.oracles.own_modules import MODULES

GATED = FFNSpec(8, 24, "swiglu")
KERNELS = """
import functools, torch, torch.nn.functional as F
from ffncli.kernels.kernel import Kernel

def good(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
def swapped(x, gate, up, down):
    return good(x, up, gate, down)
def scaled(x, down, gate, up, scale=1.0):
    return scale * good(x, gate, up, down)
def everything(x, **w):
    return good(x, w["gate"], w["up"], w["down"])
def by_position(x, gate, up, down, /):
    return good(x, gate, up, down)
def by_name(x, up, scale=1.0, *, down, gate):
    return scale * good(x, gate, up, down)
@functools.wraps(good)
def hidden(x, **w):
    return everything(x, **w)
def raises(x, gate, up, down):
    raise ValueError("no such luck")
def leaves(x, gate):
    raise SystemExit(3)
def shape(x, gate):
    return F.linear(x, gate)
def changes_x(x, gate, up, down):
    y = good(x, gate, up, down)
    x.zero_()
    return y
def changes_w(x, gate, up, down):
    y = good(x, gate, up, down)
    gate.mul_(1.5)
    return y
def halves(x, gate, up, down):
    return good(x, gate, up, down).half()
def nothing(x, gate):
    pass
def nan(x, gate):
    return x * float("nan")
_first = []
def keeps(x, gate, up, down):
    _first.append(good(x, gate, up, down))
    return _first[0]
def biased(x, up, up_bias, down, down_bias):
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
def forgets(x, up, down, down_bias):
    return F.linear(F.gelu(F.linear(x, up)), down, down_bias)
def no_x():
    return 1
class Callable:
    def __call__(self, x, gate, up, down):
        return good(x, gate, up, down)
instance = Callable()
number = 3
record = Kernel("r", lambda steps, device, dtype: lambda x, p: good(x, *p))
packed = Kernel("p", lambda steps, device, dtype: lambda x, p: x, lambda steps, w: (w["nope"],))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(KERNELS + MODULES)
    return path


def verified(file, *names: str, spec: FFNSpec = GATED, **run):
    named = choices(f"{file}:{name}" for name in names)
    rows = verify_layer(block_model(spec, "test"), **run, checks=("kernels",), kernels=named).rows
    return {row.subject.removeprefix("mine.py:"): row for row in rows}


RIGHT = ["good", "scaled", "everything", "by_position", "by_name", "hidden", "record", "SwiGLU", "instance"]


@pytest.mark.parametrize("name", RIGHT)
def test_right_ones_pass(file, name):
    row = verified(file, name)[name]
    assert row.passed is True
    assert row.note.endswith(f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}")


WRONG_FOR = """
from torch.nn.functional import linear, silu
def good(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)
def one(x, gate, up, down):
    return good(x, gate, up, down) * (2 if len(x) == 1 else 1)
def odd(x, gate, up, down):
    y = good(x, gate, up, down)
    y[len(x) // 2 * 2:] = 0
    return y
def many(x, gate, up, down):
    return good(x[:64], gate, up, down).repeat(2, 1)[:len(x)] if len(x) > 64 else good(x, gate, up, down)
def raises(x, gate, up, down):
    if len(x) == 17:
        raise ValueError("17 tokens")
    return good(x, gate, up, down)
def writes(x, gate, up, down):
    y = good(x, gate, up, down)
    if len(x) == 2:
        x[1] = 0
    return y
"""


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("one", "with 1 token"),
        ("odd", "with 1 token"),
        ("many", "with 127 tokens"),
        ("raises", "with 17 tokens: "),
        ("writes", "with 2 tokens: changes its input x"),
        ("good", ""),
    ],
)
def test_the_token_counts_that_the_referee_tries(tmp_path, name, note):
    path = tmp_path / "mine.py"
    path.write_text(WRONG_FOR)
    for dtype in ("fp32", "bf16"):
        row = verified(path, name, dtype=dtype)[name]
        assert (row.passed, note in row.note) == (name == "good", True)
    assert verified(path, "good", spec=GATED, leading=(9,))["good"].passed


COMPILED_AND_WRAPPED = """
import torch, torch.nn.functional as F
def good(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        ctx.save_for_backward(x)
        return good(x, gate, up, down)
class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x, up, gate, down, scale=1.0):
        return scale * good(x, gate, up, down)
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4])
applied = WithContext.apply
@torch.jit.script
def scripted(x: torch.Tensor, down: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, scale: float = 1.0):
    return scale * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
@torch.library.custom_op("ffncli_tests::ffn", mutates_args=())
def operator(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return good(x, gate, up, down)
overload = torch.ops.ffncli_tests.ffn.default
class Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, gate, down):
        return good(x, up, gate, down)
"""
TAKEN = ["WithContext", "Separate", "applied", "scripted", "operator", "overload", "Swapped"]


def test_functions_that_torch_wraps_are_taken_with_their_arguments(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(COMPILED_AND_WRAPPED)
    for name in TAKEN:  # one by one: importing the file again defines its operator anew
        assert verified(path, name)[name].passed is (name != "Swapped")


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_in_other_dtypes(file, dtype):
    found = verified(file, "good", "SwiGLU", dtype=dtype)
    assert found["good"].passed
    assert found["SwiGLU"].passed


def test_biases(file):
    found = verified(file, "biased", "forgets", spec=FFNSpec(8, 24, "gelu"))
    assert (found["biased"].passed, found["forgets"].passed) == (True, False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "mine.py, line 21: ValueError: no such luck"),
        ("leaves", "SystemExit: 3"),
        ("shape", "returns shape [16, 24], expected [16, 8]"),
        ("changes_x", "changes its input x"),
        ("changes_w", "changes the weight gate.weight"),
        ("halves", "returns float16, expected float32"),
        ("nothing", "returns a NoneType, not a tensor"),
        ("nan", "its output has 128 NaN"),
        ("packed", "KeyError: 'nope'"),
    ],
)
def test_wrong_ones_are_a_failed_row_with_the_reason(file, name, why):
    row = verified(file, name)[name]
    assert (row.passed, row.relative_error) == (False, None)
    assert why in row.note


@pytest.mark.parametrize("name", ["swapped", "keeps"])
def test_wrong_numbers_fail(file, name):
    row = verified(file, name)[name]
    assert row.passed is False
    assert row.relative_error > 0.01


def test_a_kernel_that_writes_spoils_nothing_for_the_next(file):
    found = verified(file, "changes_w", "good")
    assert (found["changes_w"].passed, found["good"].passed) == (False, True)


def test_a_dense_class_is_no_kernel_of_a_mixture(file):
    words = "SwiGLU is 8x24, but this block is 8x24 with 4 experts, top 2"
    assert words in refusal(file, "FILE:SwiGLU", FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)))


CLASSES = [
    ("SwiGLU", GATED),
    ("OtherOrder", FFNSpec(8, 24, "geglu_tanh")),
    ("Fused", FFNSpec(8, 24, "geglu", bias=True)),
    ("Interleaved", FFNSpec(8, 24, "glu", bias=True)),
    ("Pointwise", FFNSpec(8, 24, "relu")),
    ("GPT2MLP", FFNSpec(8, 24, "gelu_tanh")),
    ("Raw", FFNSpec(8, 24, "silu", bias=True)),
    ("built", FFNSpec(8, 24, "gelu_tanh")),
]


@pytest.mark.parametrize(("name", "spec"), CLASSES)
def test_a_class_runs_on_the_blocks_weights(file, name, spec):
    """Whatever its parameters are called and however they lie: it gives what the block gives."""
    block = kernel_steps(steps(spec))
    weights = random_weights(block, torch.Generator().manual_seed(3), torch.float64)
    kernel = kernel_of(parse(f"{file}:{name}"), block, spec)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(4)).double()
    found = kernel.build(block, "cpu", torch.float64)(x, kernel.prepare(block, weights))
    assert relative_error(found, run(block, weights, {block_inputs(block)[0]: x})) < 1e-12


def test_a_class_that_computes_another_function_fails(file):
    """OtherOrder is a tanh-GELU block; its weights fit a SwiGLU block, its numbers do not."""
    assert verified(file, "OtherOrder")["OtherOrder"].passed is False


def refusal(file, text: str, spec: FFNSpec = GATED) -> str:
    with pytest.raises(FFNError) as caught:
        kernels_of(choices([text.replace("FILE", str(file))]), kernel_steps(steps(spec)), spec)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FILE:biased", "needs up_bias, which this block does not have; this block has gate, up, down"),
        ("FILE:no_x", "no_x() has no argument for x"),
        ("FILE:Callable", "Callable keeps no weight matrices of torch as attributes; keep them there, or write"),
        ("FILE:number", "number is not a kernel (it is a int)"),
        ("FILE:goood", "did you mean 'good'"),
        ("FILE", "kernels; name one, as in mine.py:name"),
        ("FILE:", "is not a kernel; write it as file.py:name"),
        ("/nowhere/x.py:f", "does not exist; give file.py:name"),
        ("FILE:good,./FILE:good", "two kernels are called 'mine.py:good'"),
        ("eagr", "did you mean 'eager'"),
        ("FILE:Fused", "computes a block with down.bias"),
        ("FILE:BadForward", "RuntimeError"),
        ("FILE:Wants", "needs flavour, which no option sets"),
    ],
)
def test_what_cannot_be_a_kernel_is_one_line(file, text, why):
    assert why in refusal(file, text)


LOUD = """
import ctypes, os, torch.nn.functional as F
def mlp(x, gate, up, down):
    print("by print")
    os.write(1, b"by descriptor\\n")
    os.system("echo by a program")
    ctypes.CDLL(None).puts(b"by C")
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
"""


def test_what_a_kernel_writes_leaves_the_answer_whole(ffn, tmp_path):
    (tmp_path / "loud.py").write_text(LOUD)
    words = ("verify", "8x24:swiglu", "--check", "kernels", "--kernel", "loud.py:mlp", "--json")
    done = ffn(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert any("loud.py:mlp" in row["subject"] for row in json.loads(done.stdout)["rows"])
    assert all(f"by {what}\n" in done.stderr for what in ("print", "descriptor", "a program", "C"))


@pytest.mark.parametrize("closed", [(), (1,), (2,), (1, 2)])
def test_descriptors_are_afterwards_what_they_were(closed, tmp_path):
    """Also after an exception, and where the user's program was started without one of them."""
    before = {number: os.dup(number) for number in (1, 2)}
    files = {number: os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR) for number in (1, 2)}
    try:
        for number in (1, 2):
            os.dup2(files[number], number)
        for number in closed:
            os.close(number)
        with suppress(FFNError), user_code(tmp_path / "mine.py", "raised"):
            os.write(1, b"loud")
            raise ValueError
        found = []
        for number in (1, 2):
            try:
                found.append(os.fstat(number).st_ino)
            except OSError:
                found.append(None)
    finally:
        for number in (1, 2):
            os.dup2(before[number], number)
            os.close(before[number])
            os.close(files[number])
    texts = [(tmp_path / str(number)).read_bytes() for number in (1, 2)]
    assert texts == [b"", b"" if 2 in closed else b"loud"]
    assert found == [None if number in closed else (tmp_path / str(number)).stat().st_ino for number in (1, 2)]


def test_a_termination_is_no_failure_of_the_users_code(tmp_path):
    with pytest.raises(SystemExit) as stop, user_code(tmp_path / "mine.py", "raised"):
        _terminated(15, None)
    assert stop.value.code == 143
    with pytest.raises(FFNError, match="SystemExit: 3"), user_code(tmp_path / "mine.py", "raised"):
        raise SystemExit(3)


def test_a_file_that_does_not_run_is_one_line(tmp_path):
    (tmp_path / "bad.py").write_text("import torch\n1 / 0\n")
    assert "bad.py, line 2: ZeroDivisionError" in refusal(tmp_path / "bad.py", "FILE:f")


def test_which_kernels_are_chosen(file):
    block = kernel_steps(steps(GATED))

    def names(*texts: str) -> list[str]:
        return [k.name for k in kernels_of(choices(t.replace("FILE", str(file)) for t in texts), block, GATED)]

    assert names() == list(BUILT_IN)
    assert names("conv1x1") == names("conv") == names("conv,conv1x1") == ["conv1x1"]
    assert names("FILE:good") == [*names(), "mine.py:good"]
    assert names("eager, a=FILE:good", "b=FILE:swapped") == ["eager", "a", "b"]


def test_what_compiles_is_run_where_it_is_named():
    block = kernel_steps(steps(GATED))

    def why(*texts: str) -> list[str | None]:
        return [k.refuses(block) for k in kernels_of(choices(texts), block, GATED, compiling=False)]

    for name, reason in zip(BUILT_IN, why(), strict=True):
        said = f"not run by default, because it takes seconds to compile: --kernel {name}"
        assert (reason == said) == (name in COMPILING)
    assert why("eager,compiled") == [None, None]
    assert [k.refuses(block) for k in kernels_of((), block, GATED) if k.name == "compiled"] == [None]


def gradients(function, weights, x, g):
    leaves = [t.detach().clone().requires_grad_() for t in (x, *weights.values())]
    out = function(leaves[0], dict(zip(weights, leaves[1:], strict=True)))
    return torch.autograd.grad(out, leaves, g)


@pytest.mark.parametrize(("name", "spec"), [("good", GATED), ("record", GATED), *CLASSES])
def test_gradients_are_the_references(file, name, spec):
    """Through prepare, to the canonical weights: however a module packs them."""
    block = kernel_steps(steps(spec))
    weights = random_weights(block, torch.Generator().manual_seed(3), torch.float64)
    kernel = kernel_of(parse(f"{file}:{name}"), block, spec)
    x, g = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4)).double()
    call = kernel.build(block, "cpu", torch.float64)
    found = gradients(lambda x, w: call(x, kernel.prepare(block, w)), weights, x, g)
    expected = gradients(lambda x, w: run(block, w, {block_inputs(block)[0]: x}), weights, x, g)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-12


def test_a_module_takes_the_params_of_each_call(file):
    block = kernel_steps(steps(GATED))
    kernel = kernel_of(parse(f"{file}:SwiGLU"), block, GATED)
    copies = [random_weights(block, torch.Generator().manual_seed(seed), torch.float64) for seed in (1, 2)]
    params, x = [kernel.prepare(block, weights) for weights in copies], torch.randn(5, 8).double()
    call, other = (kernel.build(block, "cpu", torch.float64) for _ in range(2))
    assert unguarded(call)._module is not unguarded(other)._module
    for at in (0, 1, 1, 0):
        expected = run(block, copies[at], {block_inputs(block)[0]: x})
        assert relative_error(call(x, params[at]), expected) < 1e-12


TIED = """
import torch.nn as nn, torch.nn.functional as F
class Tied(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate, self.up = (nn.Linear(d_model, d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.also = self.gate
        self.again = nn.ParameterList([self.up.weight])
    def forward(self, x):
        return self.down(F.silu(self.also(x)) * F.linear(x, self.again[0]))
"""


def test_a_parameter_is_replaced_wherever_a_module_has_it(tmp_path):
    path = tmp_path / "tied.py"
    path.write_text(TIED)
    assert verified(path, "Tied")["tied.py:Tied"].passed is True


def test_without_its_guard_a_kernel_is_what_the_user_wrote(file):
    block = kernel_steps(steps(GATED))
    call = kernel_of(parse(f"{file}:raises"), block, GATED).build(block, "cpu", torch.float32)
    x, params = torch.zeros(2, 8), (torch.zeros(24, 8), torch.zeros(24, 8), torch.zeros(8, 24))
    with pytest.raises(FFNError, match=r"mine.py, line 21: ValueError: no such luck"):
        call(x, params)
    with pytest.raises(ValueError, match="no such luck"):
        unguarded(call)(x, params)
    ours = kernel_of(parse("eager"), block, GATED).build(block, "cpu", torch.float32)
    assert unguarded(ours) is ours


def test_names_of_arguments():
    assert [argument(n) for n in ("up.weight", "up.bias", "act.weight", "shared.up.weight", "route.correction")] == [
        "up", "up_bias", "act_weight", "shared__up", "route_correction",
    ]  # fmt: skip
    moe = kernel_steps(steps(FFNSpec(8, 24, "swiglu", moe=MoE(4, 2, 1, shared_gate=True))))
    from ffncli.block.steps import parameters

    assert len({argument(name) for name in parameters(moe)}) == len(parameters(moe))
