"""Kernels on the parts of a block: their sum is the block's output, and what one rank meets, all hear."""

import pytest
import torch

from ffncli.bench.records import Case
from ffncli.bench.timing.outcomes import Skipped
from ffncli.bench.timing.ranks import kernels
from ffncli.bench.timing.ranks.kernels import SplitKernel, in_step, part_of, split_kernels
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.recipe import steps as steps_of
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.kernels import built_in
from ffncli.kernels.choice import choices
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights
from tests.bench.fake_ranks import all_reduce, on_ranks

BLOCKS = {
    "plain": FFNSpec(8, 24, "relu", bias=True),
    "gated": FFNSpec(8, 24, "swiglu"),
    "gated, biased": FFNSpec(8, 24, "geglu", bias=True),
    "mixture": FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)),
}


@pytest.fixture(autouse=True)
def _threads_reduce(monkeypatch):
    monkeypatch.setattr(kernels.dist, "all_reduce", all_reduce)


def _weights(steps):
    return random_weights(steps, torch.Generator().manual_seed(1), torch.float64, "cpu")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["eager", "packed", "module"])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_parts_of_all_ranks_sum_to_the_whole_block(block, name, ranks):
    steps = kernel_steps(steps_of(BLOCKS[block]))
    weights = _weights(steps)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = run(steps, weights, {"x" if "x" in steps[0].inputs else steps[0].inputs[0]: x})

    def computed(channel):
        split = SplitKernel(built_in(name), channel)
        if refused := split.whole.refuses(steps):
            return refused
        params = split.whole.prepare(steps, weights)
        compute = split.whole.build(steps, "cpu", torch.float64)
        part, careful = split.alone(x, params).clone(), compute(x, params).clone()
        split.careful = False
        return part, careful, compute(x, params).clone()

    found = on_ranks(Ranks(ranks), computed)
    if isinstance(found[0], str):
        assert len(set(found)) == 1
        assert built_in(name).refuses(steps), found  # it computes no mixture at all
        return
    for part, careful, out in found:
        assert torch.allclose(out, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))
        assert torch.equal(careful, out)
        assert not torch.allclose(part, whole)
    assert torch.allclose(sum(part for part, _, _ in found), whole)


def test_a_part_with_a_sum_in_its_middle_is_left_to_dtensor():
    steps = kernel_steps(steps_of(FFNSpec(8, 24, "swiglu")))

    def refused(channel):
        with pytest.raises(Skipped, match="only dtensor"):
            part_of(steps, channel)
        return SplitKernel(built_in("eager"), channel).whole.refuses(steps)

    assert (
        on_ranks(Ranks(1, 2), refused) == ["tokens are sent to the ranks of their experts, which only dtensor does"] * 2
    )


def test_what_one_rank_raises_all_raise():
    def raised(channel):
        def act():
            if channel.rank == 1:
                raise ValueError("out of luck")
            return 7

        return in_step(channel, act)

    first, second = on_ranks(Ranks(2), raised)
    assert isinstance(first, FFNError)
    assert str(first) == "rank 1: ValueError: out of luck"
    assert isinstance(second, ValueError)


@pytest.mark.parametrize("bad", ["a shape", "a dtype", "no tensor", "an error"])
def test_a_kernel_is_asked_for_its_part_before_anybody_waits_for_it(bad):
    steps = kernel_steps(steps_of(FFNSpec(8, 24, "relu")))

    def computed(channel):
        split = SplitKernel(built_in("eager"), channel)
        params = split.whole.prepare(steps, _weights(steps))
        compute = split.whole.build(steps, "cpu", torch.float64)
        x = torch.randn(5, 8, dtype=torch.float64)
        if channel.rank == 1:
            given = {"a shape": lambda: x[:2], "a dtype": x.float, "no tensor": lambda: 3, "an error": lambda: 1 / 0}
            split.alone = lambda x, params: given[bad]()
        before = channel.told
        with pytest.raises((TypeError, ZeroDivisionError, FFNError)) as error:
            compute(x, params)
        return str(error.value), channel.told - before

    (first, told), (second, _) = on_ranks(Ranks(2), computed)
    assert first.startswith("rank 1: ")
    assert first.endswith(second)
    assert told == 1  # no all-reduce was begun


def test_a_users_file_is_given_a_ranks_part(tmp_path):
    file = tmp_path / "k.py"
    file.write_text(
        "import torch\nfrom torch.nn.functional import relu\n"
        "def mine(x, up, up_bias, down, down_bias):\n    return relu(x @ up.T + up_bias) @ down.T + down_bias\n"
        "class Mine(torch.nn.Module):\n"
        "    def __init__(self, d_model, d_ff):\n        super().__init__()\n"
        "        self.up, self.down = torch.nn.Linear(d_model, d_ff), torch.nn.Linear(d_ff, d_model)\n"
        "    def forward(self, x):\n        return self.down(relu(self.up(x)))\n"
    )
    case = Case("b", "b", FFNSpec(8, 24, "relu", bias=True), 5, dtype="fp64", ranks=Ranks(2))
    steps = kernel_steps(steps_of(case.spec))
    weights = _weights(steps)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = run(steps, weights, {steps[0].inputs[0]: x})

    def computed(channel):
        found = split_kernels(choices([f"{file}:mine,{file}:Mine"]), case, channel)
        return [
            one.whole.build(steps, "cpu", torch.float64)(x, one.whole.prepare(steps, weights)).detach()
            for one in found.values()
        ]

    for outputs in on_ranks(Ranks(2), computed):
        assert not isinstance(outputs, BaseException), outputs
        assert len(outputs) == 2
        for out in outputs:
            assert torch.allclose(out, whole)
