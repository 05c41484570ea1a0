"""liger, liger_act and quack call their packages rightly: stand-ins in torch take what these take, in their layout."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from ffncli.block.activations import hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs
from ffncli.kernels import built_in
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from tests.kernels.test_kernels import drawn
from tests.oracles.modules import relative_error


class MLP:
    """LigerMLPFunction: x [batch, tokens, d_model], then gate, up and down as nn.Linear has them."""

    @staticmethod
    def apply(x, gate, up, down):
        batch, tokens, d_model = x.shape
        return functional.linear(functional.silu(x @ gate.T) * (x @ up.T), down).view(batch, tokens, d_model)


class SiLUMul:
    @staticmethod
    def apply(gate, up):
        return functional.silu(gate) * up


class GELUMul:
    @staticmethod
    def apply(gate, up):
        return functional.gelu(gate, approximate="tanh") * up


UNITS = {
    "swiglu": functional.silu, "reglu": functional.relu, "glu": torch.sigmoid,
    "geglu": lambda gate: functional.gelu(gate, approximate="tanh"),
}  # fmt: skip


def mlp_func(x, weight1, weight2, activation, *, concat_layout=False):
    """quack's: gate above up with `concat_layout`, else a row of each in turn."""
    both = functional.linear(x, weight1)
    gate, up = both.chunk(2, -1) if concat_layout else (both[..., ::2], both[..., 1::2])
    return functional.linear(UNITS[activation](gate) * up, weight2)


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """The modules, as Python finds them once they are imported."""
    for name, members in {
        "liger_kernel": {},
        "liger_kernel.ops": {"LigerMLPFunction": MLP, "LigerSiLUMulFunction": SiLUMul, "LigerGELUMulFunction": GELUMul},
        "quack": {},
        "quack.mlp": {"mlp_func": mlp_func},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


GATED = {name: FFNSpec(8, 24, name, gated=True) for name in ("silu", "gelu_tanh", "relu", "sigmoid")}
MORE = {
    "bias": FFNSpec(8, 24, "swiglu", bias=True),
    "norm inside": FFNSpec(8, 24, "swiglu", norm="rmsnorm", sub_norm=True),
}
REFUSED = {
    "gelu": (FFNSpec(8, 24, "geglu"), "cannot compute gelu, only silu"),
    "plain": (FFNSpec(8, 24, "silu", bias=False), "cannot compute a plain block"),
    "clamped": (FFNSpec(8, 24, "silu", gated=True, limits=hard_limits(0.4, 1.0)), "cannot compute a limited or scaled"),
    "scaled": (FFNSpec(8, 24, "swiglu", gate_scale=0.3), "cannot compute a limited or scaled gate"),
    "experts": (FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)), "cannot compute experts"),
}
SUPPORTED = {
    "liger": {"silu": GATED["silu"]},
    "liger_act": {"silu": GATED["silu"], "gelu_tanh": GATED["gelu_tanh"], **MORE},
    "quack": GATED,
}


@pytest.mark.parametrize(("name", "label"), [(name, label) for name, specs in SUPPORTED.items() for label in specs])
def test_what_is_called_is_the_reference(name, label):
    block, kernel = kernel_steps(steps(SUPPORTED[name][label])), built_in(name)
    assert kernel.refuses(block) is None
    generator = torch.Generator().manual_seed(0)
    weights, x = drawn(block, generator), torch.randn(9, 8, generator=generator).double()
    out = kernel.build(block, "cpu", x.dtype)(x, kernel.prepare(block, weights))
    assert relative_error(out, run(block, weights, {block_inputs(block)[0]: x})) < 1e-14


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_they_do_not_compute_is_refused(name):
    kernel = built_in(name)
    for label, (spec, reason) in REFUSED.items():
        assert (kernel.refuses(kernel_steps(steps(spec))) or "").startswith(reason), label
    for label, reason in {"bias": "cannot compute biases", "norm inside": "cannot compute a norm inside"}.items():
        refused = kernel.refuses(kernel_steps(steps(MORE[label])))
        assert refused is None if label in SUPPORTED[name] else refused.startswith(reason)


def test_quack_needs_widths_that_are_multiples_of_8():
    block = kernel_steps(steps(FFNSpec(8, 1023, "swiglu")))
    assert built_in("quack").refuses(block) == "computes widths that are multiples of 8 only, not 1023"


def test_where_they_cannot_run(monkeypatch):
    for name, package in {"liger": "liger_kernel", "liger_act": "liger_kernel", "quack": "quack"}.items():
        assert built_in(name).compiles
        assert built_in(name).missing("cpu") == "runs on a GPU only"
        monkeypatch.setattr("ffncli.kernels.kernel.find_spec", lambda name: None)
        assert built_in(name).missing("cuda") == f"needs the module {package}"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        older = "needs the module liger_kernel" if name == "liger_act" else "needs a GPU of compute capability 9.0"
        assert built_in(name).missing("cuda").startswith(older)
        monkeypatch.undo()
