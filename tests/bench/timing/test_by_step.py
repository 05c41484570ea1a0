"""Every step alone computes what it computes within the block, on inputs and weights of its own."""

import pytest
import torch

from ffncli.bench.records import BLOCK
from ffncli.bench.timing.modes.by_step import step_calls
from ffncli.block.activations import hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs, walk
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import execute, run
from ffncli.run.engine.weights import random_weights

BLOCKS = {
    "plain": FFNSpec(8, 24, "gelu"),
    "gated": FFNSpec(8, 24, "swiglu", norm="rmsnorm", residual=True),
    "clamped": FFNSpec(8, 24, "quick_gelu", gated=True, bias=True, limits=hard_limits(0.4, 1.0), gate_scale=0.3),
    "norm inside": FFNSpec(8, 24, "relu2", gated=True, norm="layernorm", sub_norm=True),
    "mixtral": FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)),
    "shared, weighed input": FFNSpec(8, 24, "swiglu", moe=MoE(4, 2, 1, shared_scale=0.5, weigh="input")),
    "identity experts": FFNSpec(8, 24, "swiglu", moe=MoE(4, 2, identity_experts=2)),
}
TOKENS = 5


def made(label: str):
    block = kernel_steps(steps(BLOCKS[label]))
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator)
    return block, weights, torch.randn(TOKENS, 8, generator=generator)


@pytest.mark.parametrize("label", BLOCKS)
def test_each_step_gives_what_it_gives_in_the_block(label):
    block, weights, x = made(label)
    arms = step_calls(block, weights, x)
    names = [name for name, _ in walk(block)]
    assert list(arms) == [BLOCK, *names]
    (entry,) = block_inputs(block)
    within = {event.name: event.tensor for event in execute(block, weights, {entry: x})}
    for step in block:
        for _ in range(3):  # nothing that it is given has changed after a call
            assert torch.equal(arms[step.output](), within[step.output])
    assert torch.equal(arms[BLOCK](), arms[block[-1].output]())
    assert torch.equal(arms[BLOCK](), run(block, weights, {entry: x}))


def test_inside_experts_every_expert_that_got_a_token_is_called():
    block, weights, x = made("mixtral")
    (entry,) = block_inputs(block)
    within = {event.name: event.tensor for event in execute(block, weights, {entry: x})}
    arms = step_calls(block, weights, x)
    last = max(int(name.split(".")[1]) for name in within if name.startswith("experts."))
    for inner in ("gate", "up", "act", "hidden", "down"):
        arm = arms[f"experts[e].{inner}"]
        assert torch.equal(arm(), within[f"experts.{last}.{inner}"])
        received = [t for name, t in within.items() if name.startswith("experts.") and name.endswith(f".{inner}")]
        outputs = [call() for call in arm.args[0]]
        assert all(torch.equal(a, b) for a, b in zip(outputs, received, strict=True))


def test_every_arm_has_buffers_of_its_own():
    block, weights, x = made("gated")
    placed: list[torch.Tensor] = []

    def own(tensor: torch.Tensor) -> torch.Tensor:
        placed.append(tensor.clone())
        return placed[-1]

    expected = run(block, weights, {block_inputs(block)[0]: x})
    arms = step_calls(block, weights, x, own)
    assert len({t.data_ptr() for t in placed}) == len(placed) == 3 + 1 + (2 + 2 + 1 + 2 + 2)
    for tensor in (*weights.values(), x):
        tensor.zero_()
    assert torch.equal(arms[BLOCK](), expected)
    assert torch.equal(arms["down"](), expected)


def test_a_step_inside_experts_calls_every_expert_s_part_in_buffers_of_its_own():
    block, weights, x = made("mixtral")
    given: list[torch.Tensor] = []

    def own(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor.clone())
        return given[-1]

    (entry,) = block_inputs(block)
    within = execute(block, weights, {entry: x})
    used = {event.name.split(".")[1] for event in within if event.name.startswith("experts.")}
    arms = step_calls(block, weights, x, own)
    assert len(used) > 1
    assert all(len(arm.args[0]) == len(used) for name, arm in arms.items() if "[e]" in name)
    before = {name: arm() for name, arm in arms.items()}
    for tensor in (*weights.values(), x, *(event.tensor for event in within)):
        tensor.zero_()
    assert all(torch.equal(arm(), before[name]) for name, arm in arms.items())
    calls = [call for name, arm in arms.items() if "[e]" in name for call in arm.args[0]]
    held = [t for call in calls for t in (*call.args[0].values(), *call.args[1])]
    assert {t.data_ptr() for t in held} <= {t.data_ptr() for t in given}
