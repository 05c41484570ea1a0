"""Every kernel computes what the reference computes, changes nothing it is given, and says what it cannot."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ffncli.block.activations import TABLE, Limits, hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import Activation, Dropout, block_inputs, parameters
from ffncli.errors import FFNError
from ffncli.kernels import BUILT_IN, COMPILING, IN_FEWER_BITS, OF_EXPERTS, built_in
from ffncli.kernels.dense import activation
from ffncli.kernels.inplace import changed
from ffncli.kernels.kernel import REGISTERED, Kernel, canonical, kernel_steps, register
from ffncli.kernels.per_weights import widened, widened_weights
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights
from tests.oracles.activations import ORACLES
from tests.oracles.modules import ClampedGated, Gated, Plain, Situ, SwigluStep, relative_error
from tests.oracles.modules import MoE as Mixture

PLAIN = {
    "plain": FFNSpec(6, 24, "gelu", dropout=0.1, norm="layernorm", residual=True),
    "no bias": FFNSpec(6, 24, "relu", bias=False),
    "learned": FFNSpec(6, 24, "xielu"),
}
GATED = {
    "gated": FFNSpec(6, 24, "swiglu", norm="rmsnorm", residual=True),
    "bias": FFNSpec(6, 24, "geglu", bias=True),
    "bias below only": FFNSpec(6, 24, "geglu", bias=False, down_bias=True),
    "clamped": FFNSpec(6, 24, "quick_gelu", gated=True, bias=True, limits=hard_limits(0.4, 1.0)),
    "limited after": FFNSpec(6, 24, "silu", gated=True, limits=Limits(act_high=0.2, up_limit=0.4)),
    "soft-capped": FFNSpec(6, 24, "silu", gated=True, limits=Limits(gate_cap=0.3, up_cap=0.5)),
    "every limit": FFNSpec(6, 24, "identity", gated=True, bias=True, limits=Limits(0.7, 0.2, 0.3, 0.6, 0.5, 0.25)),
    "scaled gate": FFNSpec(6, 24, "swiglu", gate_scale=0.3),
    "norm inside": FFNSpec(6, 24, "relu2", gated=True, norm="rmsnorm", norm_weight="one_plus", sub_norm=True),
    "layernorm inside": FFNSpec(6, 24, "relu2", gated=True, norm="layernorm", sub_norm=True),
}
MIXED = {
    "mixtral": FFNSpec(6, 24, "swiglu", moe=MoE(4, 2)),
    "gpt-oss": FFNSpec(
        6, 24, "quick_gelu", gated=True, bias=True, limits=hard_limits(0.4, 1.0),
        moe=MoE(4, 2, order="choose_first", renormalise=False, router_bias=True),
    ),
    "deepseek": FFNSpec(
        6, 24, "swiglu",
        moe=MoE(16, 3, 2, groups=4, top_groups=2, group_best=2, score="sigmoid", correction=True, scale=2.5),
    ),
    "shared gate, dropout": FFNSpec(6, 24, "swiglu", dropout=0.5, moe=MoE(4, 2, 1, shared_gate=True)),
    "weighed input": FFNSpec(6, 24, "swiglu", moe=MoE(4, 2, 1, shared_scale=0.5, weigh="input")),
    "narrower space": FFNSpec(6, 24, "swiglu", norm="rmsnorm", moe=MoE(4, 2, 1, latent=3, mixed_norm=True)),
    "norm of every expert": FFNSpec(
        6, 24, "swiglu", norm="rmsnorm", norm_weight="one_plus", post_norm_eps=1e-3, post_norm_weigh="input",
        moe=MoE(4, 2, latent=3, latent_norm=True, expert_norm=True, router_scale=0.2),
    ),
    "norm at the end": FFNSpec(
        6, 24, "swiglu", norm="rmsnorm", norm_position="pre+branch", post_norm_inside=True, residual=True,
        moe=MoE(4, 2, 1),
    ),
    "norm inside, without weights": FFNSpec(
        6, 24, "relu2", gated=True, norm="rmsnorm", norm_weight="none", sub_norm=True, moe=MoE(4, 2)
    ),
    "bias of the sum": FFNSpec(6, 24, "swiglu", moe=MoE(4, 2, order="choose_first", mixed_bias=True)),
    "sqrtsoftplus": FFNSpec(
        6, 24, "swiglu", moe=MoE(8, 3, 1, score="sqrtsoftplus", correction=True, eps=1e-3, score_dtype="input")
    ),
    "one by one": FFNSpec(
        6, 24, "swiglu", moe=MoE(8, 3, order="one_by_one", renormalise=False, threshold=0.6, score_dtype="input")
    ),
    "shared routed": FFNSpec(
        6, 24, "swiglu", learned_scale=True,
        moe=MoE(5, 2, 3, score="sigmoid", correction=True, scale=8.0, shared_routed=True),
    ),
}  # fmt: skip
BLOCKS = {**PLAIN, **GATED, **MIXED}
DENSE = PLAIN | GATED
SUPPORTED = {
    "eager": BLOCKS, "module": DENSE, "packed": GATED, "inplace": DENSE, "conv1x1": DENSE, "numpy": DENSE,
    "compiled": DENSE, "grouped": MIXED, "batched": MIXED,
}  # fmt: skip
IN_SINGLE = ("onednn", "onednn_packed", "mkl")  # not in float64
# Those that compile, and those without float64, have files of their own.
QUICK = [name for name in BUILT_IN if name not in (*COMPILING, *IN_FEWER_BITS) and name not in IN_SINGLE]
SINGLE = "grouped"  # computes in float32 at most
ALLOWED, ALLOWED_OF_SINGLE = 1e-14, 1e-6


def drawn(block, generator):
    """Large weights, so that clips and kinks are met, and no norm is all ones. In float32 they are the same numbers."""
    shapes = {name: [axis.size for axis in axes] for name, axes in parameters(block).items()}
    return {name: 0.5 * torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def computed(kernel, block, weights, x):
    dtype = torch.float32 if kernel.name == SINGLE else x.dtype
    params = kernel.prepare(block, {name: tensor.to(dtype) for name, tensor in weights.items()})
    return kernel.build(block, "cpu", dtype)(x.to(dtype), params).to(x.dtype)


def allowed(name):
    return ALLOWED_OF_SINGLE if name == SINGLE else ALLOWED


def block_of(name):
    """A block that the kernel computes."""
    return kernel_steps(steps(MIXED["mixtral"] if name in OF_EXPERTS else FFNSpec(6, 24, "swiglu")))


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("label", BLOCKS)
def test_every_kernel_is_the_reference_or_refuses(name, label):
    generator = torch.Generator().manual_seed(0)
    block, kernel = kernel_steps(steps(BLOCKS[label])), built_in(name)
    weights, x = drawn(block, generator), torch.randn(9, 6, generator=generator).double()
    before = {**{n: t.clone() for n, t in weights.items()}, "x": x.clone()}
    refused = kernel.refuses(block)
    assert (refused is None) == (label in SUPPORTED[name])
    if refused is not None:
        return
    dtype = torch.float32 if name == SINGLE else x.dtype
    weights, x = {n: t.to(dtype) for n, t in weights.items()}, x.to(dtype)
    call, params = kernel.build(block, "cpu", dtype), kernel.prepare(block, weights)
    for tokens in (9, 4, 9):  # buffers of another size, and the same ones again
        found = call(x[:tokens], params)
        expected = run(
            block, {n: t.double() for n, t in weights.items()}, {block_inputs(block)[0]: x[:tokens].double()}
        )
        assert found.shape == expected.shape
        assert relative_error(found.double(), expected) < allowed(name)
    assert all(torch.equal(before[n], t) for n, t in {**weights, "x": x}.items())


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(
    ("spec", "module"),
    [
        (FFNSpec(6, 24, "gelu"), Plain(6, 24, act=torch.nn.functional.gelu)),
        (FFNSpec(6, 24, "swiglu"), Gated(6, 24)),
        (
            FFNSpec(6, 24, "quick_gelu", gated=True, bias=True, limits=hard_limits(7.0, 1.0)),
            ClampedGated(6, 24, bias=True),
        ),
        (FFNSpec(6, 24, "situ"), Situ(6, 24)),
        (FFNSpec(6, 24, "swiglustep"), SwigluStep(6, 24)),
        (FFNSpec(6, 8, "swiglu", moe=MoE(4, 2, 1, score_dtype="input")), Mixture(6, 8, 4, 2, 1)),
    ],
)
def test_every_kernel_is_the_module(name, spec, module):
    block, module = kernel_steps(steps(spec)), module.double()
    kernel, state = built_in(name), {n: p.detach() for n, p in module.named_parameters()}
    if kernel.refuses(block):
        return
    if spec.moe:
        for part in ("gate", "up", "down"):
            state[f"{part}.weight"] = torch.stack([e.get_parameter(f"{part}.weight").detach() for e in module.experts])
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2)).double() * 4
    with torch.no_grad():
        expected = module(x)
    assert relative_error(computed(kernel, block, state, x), expected) < allowed(name)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("label", BLOCKS)
def test_gradients_are_those_of_the_reference(name, label):
    """Of x and of every weight, through prepare, for a drawn gradient of the output; in float64."""
    block, kernel = kernel_steps(steps(BLOCKS[label])), built_in(name)
    if kernel.refuses(block) or not kernel.trains:
        assert kernel.refusal(block, "cpu", "fp64", "forward+backward")
        return
    generator = torch.Generator().manual_seed(1)
    weights, x = drawn(block, generator), torch.randn(9, 6, generator=generator).double()
    g = torch.randn(9, 6, generator=generator).double()
    found = gradients(lambda x, w: computed(kernel, block, w, x), weights, x, g)
    expected = gradients(lambda x, w: run(block, w, {block_inputs(block)[0]: x}), weights, x, g)
    assert len(found) == len(weights) + 1
    for name_, a, b in zip(["x", *weights], found, expected, strict=True):
        assert (a - b).abs().max() <= 100 * allowed(name) * b.abs().max(), name_


def gradients(function, weights, x, g):
    leaves = [t.clone().requires_grad_() for t in (x, *weights.values())]
    out = function(leaves[0], dict(zip(weights, leaves[1:], strict=True)))
    found = torch.autograd.grad(out, leaves, g, allow_unused=True)
    return [torch.zeros_like(t) if d is None else d for d, t in zip(found, leaves, strict=True)]


def test_gradients_are_those_of_finite_differences():
    """torch's own oracle, for the reference and all of these at once."""
    block = kernel_steps(steps(FFNSpec(3, 5, "swiglu", bias=True)))
    generator = torch.Generator().manual_seed(1)
    weights, x = drawn(block, generator), torch.randn(2, 3, generator=generator).double()
    leaves = [t.requires_grad_() for t in (x, *weights.values())]
    for name in QUICK:
        kernel = built_in(name)
        if kernel.trains and not kernel.refuses(block):
            assert torch.autograd.gradcheck(
                lambda x, *own, kernel=kernel: computed(kernel, block, dict(zip(weights, own, strict=True)), x), leaves
            )


@pytest.mark.parametrize("name", QUICK)
def test_other_weights_are_other_outputs(name):
    """Nothing of an earlier call's params is kept, whichever copy of the weights comes next."""
    block, kernel = block_of(name), built_in(name)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if name == SINGLE else torch.float64
    copies = [{n: t.to(dtype) for n, t in drawn(block, generator).items()} for _ in range(3)]
    x = torch.randn(9, 6, generator=generator).to(dtype)
    call, params = kernel.build(block, "cpu", dtype), [kernel.prepare(block, weights) for weights in copies]
    for at in (0, 1, 1, 2, 0):
        wide = {n: t.double() for n, t in copies[at].items()}
        expected = run(block, wide, {block_inputs(block)[0]: x.double()})
        assert relative_error(call(x, params[at]).double(), expected) < allowed(name)


@pytest.mark.parametrize("name", QUICK)
def test_in_inference_mode_and_out_of_it(name):
    block, kernel = block_of(name), built_in(name)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if name == SINGLE else torch.float64
    weights = {n: t.to(dtype) for n, t in drawn(block, generator).items()}
    x = torch.randn(9, 6, generator=generator).to(dtype)
    call, params = kernel.build(block, "cpu", x.dtype), kernel.prepare(block, weights)
    with torch.inference_mode():
        first = call(x, params).clone()
    with torch.no_grad():
        assert torch.equal(call(x, params), first)


@pytest.mark.parametrize("name", TABLE)
def test_activations_are_those_of_the_formulas(name):
    x = torch.linspace(-12, 12, 97, dtype=torch.float64)
    learned = [torch.tensor([v], dtype=torch.float64) for v in TABLE[name].learned.values()]
    found = activation(Activation(name))(x, *learned)
    with torch.no_grad():
        assert torch.allclose(found, ORACLES[name](x), rtol=1e-12, atol=1e-12)
    shifted = activation(Activation(name, -1.0, 0.5, 2.0))(x, *learned)
    assert torch.allclose(shifted, activation(Activation(name))(x.clamp(-1.0, 0.5), *learned) + 2.0)


def test_a_function_that_is_not_written_out_runs_by_its_formula(monkeypatch):
    monkeypatch.setattr("ffncli.kernels.dense._WRITTEN", {})
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    assert torch.equal(activation(Activation("quick_gelu"))(x), x * torch.sigmoid(1.702 * x))


def test_kernels_see_no_dropout():
    for spec in (PLAIN["plain"], MIXED["shared gate, dropout"]):
        assert "dropout" in str(steps(spec))
        assert not any(isinstance(step.op, Dropout) for step in kernel_steps(steps(spec)))
        assert "Dropout" not in repr(kernel_steps(steps(spec)))
    plain = kernel_steps(steps(PLAIN["plain"]))
    assert (plain[0].inputs, plain[-1].output, plain[-1].inputs) == (("norm",), "down", ("act",))


def test_what_is_refused_is_said():
    wide = kernel_steps(steps(FFNSpec(6, 24, "swiglu", moe=MoE(4, 2, identity_experts=2))))
    assert built_in("eager").refuses(wide) == "cannot compute identity experts"
    step = kernel_steps(steps(MIXED["mixtral"]))
    other = (*step, replace(step[-1], output="again", inputs=(step[-1].output, "route")))
    assert built_in("eager").refuses(other) == "cannot compute this routing"
    plain = kernel_steps(steps(PLAIN["plain"]))
    assert built_in("packed").refuses(plain) == "a plain block has no gate to pack"
    assert built_in("eager").refuses(plain[:1]) == "cannot compute this block"
    with pytest.raises(FFNError, match=r"unknown kernel 'eagre'; did you mean 'eager'"):
        built_in("eagre")


def test_registration_and_needs(monkeypatch):
    assert all(built_in(name).name == name for name in BUILT_IN)  # registered before what follows replaces the table
    monkeypatch.setattr("ffncli.kernels.kernel.REGISTERED", dict(REGISTERED))
    build = register("fast", "as fast as light", needs=("cuda", "no_such_module"))(
        lambda steps, device, dtype: lambda x, params: x
    )
    from ffncli.kernels.kernel import REGISTERED as now

    assert now["fast"] == Kernel("fast", build, canonical, ("cuda", "no_such_module"), does="as fast as light")
    assert now["fast"].missing("cpu") == "runs on a GPU only"
    assert now["fast"].missing("cuda:1") == "needs the module no_such_module"
    assert built_in("eager").missing("cpu") is None
    assert built_in("numpy").missing("cuda") == "runs on a CPU only"


def test_a_refusal_says_every_reason():
    plain, experts = (kernel_steps(steps(spec)) for spec in (PLAIN["plain"], MIXED["mixtral"]))
    kernel = built_in("onednn")
    assert kernel.refusal(plain, "cpu", torch.float32) is None
    assert built_in("packed").refusal(plain, "cpu", "fp32") == "a plain block has no gate to pack"
    assert kernel.refusal(experts, "cuda:0", torch.float64, "forward+backward") == (
        "runs on a CPU only; cannot compute experts; computes in fp32, bf16 and fp16 only, not in fp64; "
        "computes forward only"
    )
    assert built_in("inplace").refusal(plain, "cpu", "bf16", "forward+backward") == "computes forward only"
    assert built_in("eager").refusal(plain, "cuda", "fp16", "forward+backward") is None


def test_a_former_name_is_understood():
    assert built_in("conv") is built_in("conv1x1")
    assert "conv" not in BUILT_IN


def test_names_of_kernels_load_no_torch():
    code = "import sys, ffncli.kernels; assert 'torch' not in sys.modules; print(*ffncli.kernels.BUILT_IN)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(BUILT_IN)


def test_the_manual_has_every_kernel():
    page = (Path(__file__).parents[2] / "docs/benchmarking.md").read_text("utf-8")
    table = page.partition("These are the built-in kernels")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(BUILT_IN)


NEW = {"softplus", "sqrtsoftplus", "laplace", "prelu", "xielu"}  # torch has none of these in place


@pytest.mark.parametrize("name", TABLE)
def test_activations_in_place(name):
    x = torch.linspace(-12, 12, 97, dtype=torch.float64)
    learned = [torch.tensor([v], dtype=torch.float64) for v in TABLE[name].learned.values()]
    given = x.clone()
    found = changed(Activation(name))(given, *learned)
    with torch.no_grad():
        assert torch.allclose(found, ORACLES[name](x), rtol=1e-12, atol=1e-12)
        limited = changed(Activation(name, -1.0, 0.5, 2.0))(x.clone(), *learned)
        assert torch.allclose(limited, ORACLES[name](x.clamp(-1.0, 0.5)) + 2.0, rtol=1e-12, atol=1e-12)
    assert (found.data_ptr() == given.data_ptr()) == (name not in NEW)


def test_a_call_writes_over_the_last_one():
    block = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))
    kernel, generator = built_in("inplace"), torch.Generator().manual_seed(0)
    params = kernel.prepare(block, random_weights(block, generator))
    one, two = (kernel.build(block, "cpu", torch.float32) for _ in range(2))
    x, y = torch.randn(2, 5, 8, generator=generator)
    first = one(x, params)
    kept = first.clone()
    assert two(y, params).data_ptr() != first.data_ptr()  # what another build writes is its own
    assert torch.equal(first, kept)
    assert one(y, params).data_ptr() == first.data_ptr()
    assert not torch.equal(first, kept)


BLOCK = kernel_steps(steps(FFNSpec(2, 3, "relu", bias=False)))
WEIGHTS = {"up.weight": torch.ones(3, 2, dtype=torch.bfloat16), "down.weight": torch.ones(2, 3, dtype=torch.bfloat16)}


@pytest.mark.parametrize(("multiplied", "inside"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_dtype_that_is_not_multiplied_is_widened(multiplied, inside):
    def multiplies(dtype):
        return multiplied or dtype != torch.bfloat16

    seen = []

    @widened(multiplies)
    def build(steps, device, dtype):
        seen.append(dtype)
        return lambda x, params: seen.append(x.dtype) or x + params[0].sum()

    params = widened_weights(canonical, multiplies)(BLOCK, WEIGHTS)
    assert [p.dtype for p in params] == [inside, inside]
    assert (params[0] is WEIGHTS["up.weight"]) == multiplied
    out = build(BLOCK, "cpu", torch.bfloat16)(torch.zeros(4, 2, dtype=torch.bfloat16), params)
    assert seen == [inside, inside]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.full((4, 2), 6.0, dtype=torch.bfloat16))
