"""Every step alone computes what it computes within the block, on inputs and weights of its own."""

from __future__ import annotations

import pytest
import torch

from ffncli.bench.records import BLOCK
from ffncli.bench.timing.by_step import step_arms
from ffncli.block.cost import cost
from ffncli.block.limits import hard_limits
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
    arms = {arm.name: arm for arm in step_arms(block, weights, x)}
    names = [name for name, _ in walk(block)]
    assert list(arms) == [BLOCK, *names]
    (entry,) = block_inputs(block)
    within = {event.name: event.tensor for event in execute(block, weights, {entry: x})}
    for step in block:
        for _ in range(3):  # nothing that it is given has changed after a call
            assert torch.equal(arms[step.output].call(), within[step.output])
    assert torch.equal(arms[BLOCK].call(), arms[block[-1].output].call())
    assert torch.equal(arms[BLOCK].call(), run(block, weights, {entry: x}))


def test_inside_experts_every_expert_that_got_a_token_is_called():
    block, weights, x = made("mixtral")
    (entry,) = block_inputs(block)
    within = {event.name: event.tensor for event in execute(block, weights, {entry: x})}
    arms = {arm.name: arm for arm in step_arms(block, weights, x)}
    last = max(int(name.split(".")[1]) for name in within if name.startswith("experts."))
    for inner in ("gate", "up", "act", "hidden", "down"):
        arm = arms[f"experts[e].{inner}"]
        assert torch.equal(arm.call(), within[f"experts.{last}.{inner}"])
        received = [t for name, t in within.items() if name.startswith("experts.") and name.endswith(f".{inner}")]
        outputs = [call() for call in arm.call.args[0]]
        assert all(torch.equal(a, b) for a, b in zip(outputs, received, strict=True))


@pytest.mark.parametrize("label", BLOCKS)
def test_flops_of_the_steps_are_the_blocks(label):
    block, weights, x = made(label)
    arms = {arm.name: arm for arm in step_arms(block, weights, x)}
    assert arms[BLOCK].flops == cost(block, TOKENS).flops
    assert sum(arms[step.output].flops for step in block) == arms[BLOCK].flops


def test_bytes_are_what_a_step_reads_and_writes():
    block, weights, x = made("gated")
    arms = {arm.name: arm for arm in step_arms(block, weights, x)}
    wide, narrow, matrix = 4 * TOKENS * 24, 4 * TOKENS * 8, 4 * 8 * 24
    assert {arm.name: arm.bytes for arm in arms.values()} == {
        "block": 2 * narrow + 3 * matrix, "gate": narrow + matrix + wide, "up": narrow + matrix + wide,
        "act": 2 * wide, "hidden": 3 * wide, "down": wide + matrix + narrow,
    }  # fmt: skip
    assert [arms[name].op for name in ("block", "gate", "act", "hidden")] == [
        "block",
        "linear",
        "activation",
        "multiply",
    ]


def test_of_experts_only_those_that_are_used_are_read():
    block = kernel_steps(steps(FFNSpec(8, 24, "swiglu", moe=MoE(16, 2))))
    generator = torch.Generator().manual_seed(0)
    weights, x = random_weights(block, generator), torch.randn(1, 8, generator=generator)
    experts = next(arm for arm in step_arms(block, weights, x) if arm.name == "experts")
    assert experts.bytes == 4 * (2 * 3 * 8 * 24 + 8 + 16 + 8)  # two experts of sixteen; x, route, the output


def test_every_arm_has_buffers_of_its_own():
    block, weights, x = made("gated")
    placed: list[torch.Tensor] = []

    def own(tensor: torch.Tensor) -> torch.Tensor:
        placed.append(tensor.clone())
        return placed[-1]

    expected = run(block, weights, {block_inputs(block)[0]: x})
    arms = {arm.name: arm for arm in step_arms(block, weights, x, own)}
    assert len({t.data_ptr() for t in placed}) == len(placed) == 3 + 1 + (2 + 2 + 1 + 2 + 2)
    for tensor in (*weights.values(), x):
        tensor.zero_()
    assert torch.equal(arms[BLOCK].call(), expected)
    assert torch.equal(arms["down"].call(), expected)


def test_a_step_inside_experts_counts_every_expert_s_part_in_buffers_of_its_own():
    block, weights, x = made("mixtral")
    given: list[torch.Tensor] = []

    def own(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor.clone())
        return given[-1]

    (entry,) = block_inputs(block)
    within = execute(block, weights, {entry: x})
    used = {event.name.split(".")[1] for event in within if event.name.startswith("experts.")}
    arms = {arm.name: arm for arm in step_arms(block, weights, x, own)}
    assert len(used) > 1
    rows = TOKENS * 2  # every token goes to two
    for name, into, out in (("gate", 8, 24), ("up", 8, 24), ("down", 24, 8)):
        arm = arms[f"experts[e].{name}"]
        assert arm.flops == 2 * rows * 8 * 24
        assert arm.bytes == 4 * (rows * (into + out) + len(used) * 8 * 24)
    assert arms["experts[e].hidden"].bytes == 4 * 3 * rows * 24
    before = {name: arm.call() for name, arm in arms.items()}
    for tensor in (*weights.values(), x, *(event.tensor for event in within)):
        tensor.zero_()
    assert all(torch.equal(arm.call(), before[name]) for name, arm in arms.items())
    calls = [call for name, arm in arms.items() if "[e]" in name for call in arm.call.args[0]]
    held = [t for call in calls for t in (*call.args[0].values(), *call.args[1])]
    assert {t.data_ptr() for t in held} <= {t.data_ptr() for t in given}
