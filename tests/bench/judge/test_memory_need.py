"""What a case needs of memory, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.bench.judge.memory_need import explained, holders, memory_need, memory_text
from ffncli.bench.records import Case, Outcome
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels.choice import choices

CASE = Case("s", "64x256:swiglu", FFNSpec(64, 256, "swiglu"), 1000)
BACKWARD = replace(CASE, passes="forward+backward", dtype="bf16")
WEIGHTS = 4 * 3 * 64 * 256
ACTIVATIONS = 4 * 1000 * (4 * 256 + 64)  # gate, up, act, hidden; the output


def test_forward():
    need = memory_need(CASE, 3)
    assert (need.weights, need.activations, need.gradients) == (WEIGHTS, ACTIVATIONS, 0)
    assert need.total == 3 * WEIGHTS + ACTIVATIONS


def test_backward_has_gradients_and_the_reference_of_them():
    need = memory_need(BACKWARD, 1)
    params = WEIGHTS // 4
    assert need.total == 2 * params + ACTIVATIONS + 2 * params + 2 * 8 * params


def test_of_a_mixture_one_expert_is_widened_at_a_time():
    """64 experts: their gradients are all there in float64, their weights are not."""
    mixture = replace(BACKWARD, spec=FFNSpec(64, 256, "swiglu", moe=MoE(64, 2)))
    expert, router, tokens = 3 * 64 * 256, 64 * 64, 1000
    params = 64 * expert + router
    need = memory_need(mixture, 1)
    assert need.weights == 2 * params
    assert need.gradients == 2 * params + 8 * params + 8 * (expert + router)
    assert need.activations > 2 * 2 * tokens * 2 * 4 * 256


@pytest.mark.parametrize(
    ("case", "arms", "each", "free", "end"),
    [
        (CASE, 0, 1, None, "and 4.352 MB of activations"),
        (CASE, 0, 1, 10_000_000, "; 10.00 MB was free"),
        (CASE, 0, 1, 3_000_000, "; 3.000 MB was free; --tokens 512 or --dtype bf16 would fit"),
        (CASE, 0, 1, 2_000_000, "; --tokens 256 would fit"),
        (CASE, 3, 10, 6_000_000, "; --dtype bf16 or --cache warm would fit"),
        (CASE, 0, 1, 1000, "; take a smaller block"),
        (replace(CASE, dtype="bf16"), 0, 1, 1_000_000, "; --tokens 256 would fit"),
        (BACKWARD, 0, 1, 2_300_000, "; --tokens 256 or --pass forward would fit"),
    ],
)
def test_what_would_fit(case, arms, each, free, end):
    text = memory_text(case, arms, each, free)
    assert text.startswith("64x256:swiglu with 1,000 tokens needs at least")
    assert text.endswith(end)


def test_one_copy_and_several():
    assert "at least 4.549 MB: 1 copy of its weights, 196.6 KB, and 4.352 MB of activations" in memory_text(
        CASE, 0, 1, 9
    )
    assert "at least 4.942 MB: 3 copies of its weights, 196.6 KB each, and 4." in memory_text(CASE, 2, 1, 9)


def test_only_oom_is_explained():
    fine = Outcome("eager")
    assert explained(fine, CASE, 0, 1, 1) is fine
    outcome = explained(replace(fine, status="oom", note="out of memory"), CASE, 0, 1, None)
    assert outcome.note.startswith("out of memory; 64x256:swiglu with")


def test_who_needs_a_copy():
    """The package's kernels share one if they must; a user's kernel has two, the referee's process one."""
    kernels = choices(["eager,packed", "mine=mine.py:mlp"])
    assert holders(kernels, 7, False) == 5
    assert holders(kernels, 1, False) == 2
    assert holders(kernels[:2], 1, True) == 1
