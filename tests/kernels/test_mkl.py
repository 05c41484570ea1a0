"""mkl against float64, and what it keeps of its weights for each number of tokens."""

from __future__ import annotations

import gc

import pytest
import torch

from ffncli.block.recipe import FFNSpec
from ffncli.kernels import built_in, mkl
from ffncli.kernels.per_weights import PerWeights
from tests.kernels.test_kernels import DENSE
from tests.kernels.test_onednn import block_of, right, tokens

KERNEL = built_in("mkl")
needs_mkl = pytest.mark.skipif(KERNEL.missing("cpu") is not None, reason="this build of torch has no MKL")


@needs_mkl
@pytest.mark.parametrize("label", DENSE)
def test_it_is_the_reference(label):
    block, weights = block_of(DENSE[label], torch.float32)
    call, params = KERNEL.build(block, "cpu", torch.float32), KERNEL.prepare(block, weights)
    for count in (9, 1, 9):
        x = tokens(count, 6, torch.float32)
        before = x.clone()
        assert right(block, weights, x, call(x, params), 24)
        assert torch.equal(x, before)


@needs_mkl
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "mish"])
def test_widths_that_fill_no_vector_and_a_strided_x(activation):
    block, weights = block_of(FFNSpec(129, 1023, activation, gated=True, bias=True), torch.float32)
    call, params = KERNEL.build(block, "cpu", torch.float32), KERNEL.prepare(block, weights)
    for x in (tokens(1, 129, torch.float32), tokens(129, 5, torch.float32).T, tokens(10, 129, torch.float32)[::2]):
        assert right(block, weights, x, call(x, params), 1023)


@needs_mkl
def test_other_weights_are_other_outputs_and_so_are_new_ones_in_the_same_memory():
    block, weights = block_of(DENSE["gated"], torch.float32)
    other = {name: -tensor for name, tensor in weights.items()}
    call, x = KERNEL.build(block, "cpu", torch.float32), tokens(4, 6, torch.float32)
    params = [KERNEL.prepare(block, one) for one in (weights, other)]
    for one, copy in zip((weights, other, weights), (params[0], params[1], params[0]), strict=True):
        assert right(block, one, x, call(x, copy), 24)
    for tensor in weights.values():
        tensor.mul_(2)
    assert right(block, weights, x, call(x, KERNEL.prepare(block, weights)), 24)


def test_what_it_refuses(monkeypatch):
    block, _ = block_of(DENSE["gated"], torch.float32)
    assert KERNEL.refusal(block, "cuda", "fp32").startswith("runs on a CPU only")
    assert KERNEL.refusal(block, "cpu", "fp32", "forward+backward").endswith("computes forward only")
    monkeypatch.setattr("ffncli.kernels.kernel._has_mkl", lambda: True)
    assert KERNEL.refusal(block, "cpu", "bf16") == "computes in fp32 only, not in bf16"
    assert KERNEL.refusal(block, "cpu", "fp32", cold=True) is None
    assert mkl.multiplies("cpu", torch.float32)
    assert not mkl.multiplies("cpu", torch.bfloat16)
    monkeypatch.setattr("ffncli.kernels.kernel._has_mkl", lambda: False)
    assert KERNEL.refusal(block, "cpu", "fp32") == "this build of torch has no MKL"
    assert not mkl.multiplies("cpu", torch.float32)


def test_what_is_made_is_kept_as_long_as_the_weights():
    made: list[tuple[int, int]] = []

    def make(x, params):
        made.append((len(x), int(params[0])))
        return len(made)

    kept, one, two = PerWeights(make), (torch.tensor(1),), (torch.tensor(2),)
    x = torch.zeros(3, 1)
    assert [kept.get(x, params) for params in (one, two, one, two)] == [1, 2, 1, 2]
    assert kept.get(x[:2], one) == 3
    assert kept.get(x, one) == 1
    with torch.inference_mode():
        assert kept.get(torch.zeros(3, 1), one) == 4  # torch.compile's graphs tell such an x apart
    assert made == [(3, 1), (3, 2), (2, 1), (3, 1)]
    del one
    gc.collect()
    assert len(kept._made) == 1
    assert kept.get(x, two) == 2
    for count in range(4, 12):
        kept.get(torch.zeros(count, 1), two)
    assert kept.get(x, two) == 13  # the latest eight of each
    assert kept.get(torch.zeros(11, 1), two) == 12
