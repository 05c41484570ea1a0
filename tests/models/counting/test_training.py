"""Training's bytes and FLOPs, against real optimizers' states, torch's FLOP counter and closed forms."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ffncli.block.dtypes import dtype
from ffncli.block.kept import kept
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.models.counting.training import (
    TrainingMemory,
    TrainingOptions,
    optimizer_bytes,
    tensor_shapes,
    training_memory,
)
from ffncli.models.model import block_model
from ffncli.run.engine.execute import run
from tests.run.engine.test_backward import inputs_of, randomised

SPECS = {
    "plain": FFNSpec(64, 256, "gelu", bias=True, norm="layernorm"), "gated": FFNSpec(64, 176, "swiglu", norm="rmsnorm"),
    "mixture": FFNSpec(64, 96, "swiglu", moe=MoE(8, 2, 1)), "learned": FFNSpec(32, 64, "xielu"),
}  # fmt: skip


def memory(spec: FFNSpec, name: str = "adamw", tokens: int = 7, format: str = "fp32", tp: int = 1, ep: int = 1,
           **options: Any) -> TrainingMemory:  # fmt: skip
    model = block_model(spec, "a block").model
    return training_memory(model, TrainingOptions(training=name, **options), dtype(format), tokens, tp, ep)


def real_state(optimizer: Any, parameters: list[nn.Parameter]) -> int:
    """Bytes of a real optimizer's state after one step."""
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    built = optimizer(parameters)
    built.step()
    total = 0
    for state in built.state_dict()["state"].values():
        for value in state.values():
            parts = (
                [getattr(value, name) for name in ("codes", "scale", "qmap")] if hasattr(value, "codes") else [value]
            )
            total += sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))
    return total


def adamw8bit(parameters: list[nn.Parameter]) -> Any:
    optim = pytest.importorskip("torchao.optim")
    return optim.AdamW8bit(parameters)


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_optimizer_bytes_are_those_of_a_state_dict(name: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # of torchao's step: takes a minute
    kind: torch.dtype = getattr(torch, dtype(format).torch)
    shapes = [*tensor_shapes(steps(SPECS[name])).values()]
    parameters = [nn.Parameter(torch.randn(shape).to(kind)) for shape in shapes]
    for optimizer, real in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("adamw8bit", adamw8bit)):
        expected = real_state(real, parameters)
        assert sum(optimizer_bytes(optimizer, shape, kind.itemsize) for shape in shapes) == expected, optimizer
        assert memory(SPECS[name], optimizer, format=format).optimizer_bytes == expected
    matrices = [nn.Parameter(m) for p in parameters if p.dim() > 1 for m in p.detach().reshape(-1, *p.shape[-2:])]
    vectors = [p for p in parameters if p.dim() == 1]
    expected = real_state(torch.optim.Muon, matrices)
    expected += real_state(torch.optim.AdamW, vectors) if vectors else 0
    assert memory(SPECS[name], "muon", format=format).optimizer_bytes == expected


@pytest.mark.parametrize("name", ["plain", "gated", "mixture"])
def test_matmul_flops_are_those_of_torchs_counter(name: str) -> None:
    block = steps(SPECS[name])
    leaves = {n: t.requires_grad_() for n, t in randomised(block, torch.float32).items()}
    given = {n: t.requires_grad_() for n, t in inputs_of(block, torch.float32, (7,)).items()}
    with FlopCounterMode(display=False) as forward:
        out = run(block, leaves, given)
    with FlopCounterMode(display=False) as back:
        out.sum().backward()
    counted = memory(SPECS[name])
    assert counted.forward_matmul_flops == forward.get_total_flops()
    assert counted.backward_matmul_flops == back.get_total_flops()


def test_what_is_recomputed_is_not_kept() -> None:
    tokens, d, f = 11, 64, 176
    spec = FFNSpec(d, f, "swiglu")
    sizes = {name: memory(spec, tokens=tokens, recompute=name) for name in ("none", "act", "block")}
    assert sizes["none"].kept_bytes == 4 * tokens * (d + 4 * f)  # x, gate, act, up, hidden
    assert sizes["act"].kept_bytes == 4 * tokens * (d + 2 * f)  # x, gate, up
    assert sizes["block"].kept_bytes == 4 * tokens * d
    assert sizes["act"].recomputed_flops == tokens * 2 * f  # silu and the product
    assert sizes["block"].recomputed_flops == tokens * (6 * d * f + 2 * f)
    plain = kept(steps(FFNSpec(d, f, "relu")), tokens, recompute="act")
    assert {one.tensor: one.bytes for one in plain} == {"x": 4 * tokens * d, "up": 4 * tokens * f}
    moe = FFNSpec(d, f, "swiglu", moe=MoE(4, 2))
    inside = {one.tensor for one in kept(steps(moe), tokens, recompute="act") if one.step.startswith("experts[e]")}
    assert inside == {"rows of each expert", "gate", "up"}
    assert memory(moe, tokens=tokens, recompute="act").recomputed_flops == 2 * tokens * 2 * f


def test_ranks_and_zero() -> None:
    spec = FFNSpec(64, 96, "swiglu", moe=MoE(8, 2, router_bias=True))
    one, expert, router = memory(spec, format="bf16"), 8 * 3 * 64 * 96, 8 * 65
    assert one.weight_bytes == one.gradient_bytes == 2 * (expert + router)
    split = memory(spec, format="bf16", ep=4, tp=2)
    assert split.weight_bytes == 2 * (expert // 8 + router)
    for zero, weights, gradients, state in ((0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)):
        shared = memory(FFNSpec(64, 96, "swiglu"), "muon", zero=zero, dp=8)
        assert shared.weight_bytes == 4 * 3 * 64 * 96 // weights
        assert shared.gradient_bytes == 4 * 3 * 64 * 96 // gradients
        assert shared.optimizer_bytes == 4 * 3 * 64 * 96 // state
    both = memory(spec, "muon", format="bf16", ep=4, dp=2, zero=3)  # experts are copied twice, the router 8 times
    assert both.weight_bytes == 2 * expert // 4 // 2 + 2 * router // 8
    assert one.total_bytes == one.weight_bytes + one.gradient_bytes + one.optimizer_bytes + one.kept_bytes
    whole = memory(spec, tokens=64)
    part = memory(spec, tokens=64, tp=2)
    name = next(s for s in part.simplifications if "divided by tp" in s.name)
    assert (name.bytes, name.exact_bytes) == (4 * expert, 2 * expert)
    active = next(s for s in whole.simplifications if "active share" in s.name)
    assert active.bytes == 2 * 64 * 4 * (64 + 4 * 96) < active.exact_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "fp32", "tp": 5}, "does not divide"), ({"name": "adam"}, "unknown value"),
        ({"zero": 4}, "from 0 to 3"), ({"recompute": "all"}, "unknown value"), ({"dp": 0}, "from 1"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FFNError, match=message):
        memory(FFNSpec(64, 96, "swiglu"), **options)


def test_the_command_says_the_same_without_torch(json_of: Any, csv_of: Any, call: Any) -> None:
    arguments = ("params", "mixtral-8x7b", "--training", "adamw", "-n", "64", "--ep", "8", "--zero", "1")
    (row,) = json_of(*arguments)["rows"]
    (line,) = csv_of(*arguments)
    training = row["training"]
    assert training["weight_bytes"] == int(line["training_weight_bytes"])
    assert training["total_bytes"] == sum(training[f"{n}_bytes"] for n in ("weight", "gradient", "optimizer", "kept"))
    assert sum(k["bytes"] for k in training["layers"][0]["kept"]) == training["layers"][0]["kept_bytes"]
    assert call("params", "gpt2", "--training", "sgd", "--assert", "training_optimizer_bytes == 0")[0] == 0
    for wrong, words in (
        (("gpt2", "--zero", "1"), "--zero needs --training"), (("gpt2", "--training", "lion"), "unknown value 'lion'"),
        (("gpt2", "--training", "sgd", "--dtype", "q4_0"), "not trained"),
        (("gpt2", "--assert", "training_kept_bytes > 0"), "exists only with --training"),
    ):  # fmt: skip
        code, _, err = call("params", *wrong)
        assert code == 2
        assert words in err
    code = "import sys; from ffncli.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules], file=sys.stderr)"
    made = subprocess.run([sys.executable, "-c", code, *arguments, "--json"], capture_output=True, text=True)
    assert made.stderr.strip().endswith("[]")
    assert json.loads(made.stdout)["rows"][0]["training"] == training
