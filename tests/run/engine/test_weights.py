"""Random weights as torch initialises its own modules, and the memory that is required before any is taken."""

from pathlib import Path

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.models.source import load
from ffncli.run.engine import inputs as inputs_module
from ffncli.run.engine import weights
from ffncli.run.engine.execute import halves_by_turns, turns_as_halves
from ffncli.run.engine.prepare import prepare
from ffncli.run.engine.weights import random_weights, require_memory
from tests.oracles.checkpoints import LLAMA, folder, tensors
from tests.system.test_host import put


def test_norms_and_learned_activations_begin_as_in_torch():
    def first(**choices) -> dict[str, list[float]]:
        drawn = random_weights(steps(FFNSpec(2, 3, **choices)), torch.Generator())
        return {name: tensor.tolist() for name, tensor in drawn.items()}

    assert first(norm="layernorm")["norm.weight"] == [1.0, 1.0]
    assert first(norm="layernorm")["norm.bias"] == [0.0, 0.0]
    assert first(norm="rmsnorm", norm_weight="one_plus")["norm.weight"] == [0.0, 0.0]
    assert first(activation="prelu")["act.weight"] == torch.nn.PReLU().weight.tolist()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_all_experts_must_fit(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch):
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 1)))
    need = size * (4 * 3 * 8 * 16 + 4 * 8)
    monkeypatch.setattr(weights, "available_memory", lambda _: need)
    random_weights(block, torch.Generator(), dtype)
    monkeypatch.setattr(weights, "available_memory", lambda _: need - 1)
    with pytest.raises(FFNError) as refused:
        random_weights(block, torch.Generator(), dtype)
    assert refused.value.code == 3
    assert ("bf16" in refused.value.hint) == (size == 4)


def test_stored_weights_must_fit_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    model = load(folder(tmp_path, LLAMA, tensors("llama")))
    monkeypatch.setattr(weights, "available_memory", lambda _: 4 * 3 * 4 * 6 - 1)
    with pytest.raises(FFNError, match="weights would need"):
        prepare(model)


def test_intermediates_must_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "available_memory", lambda _: 1_000_000)
    prepare(load("4x8"), leading=(10,))
    with pytest.raises(FFNError, match=r"intermediates would need .*, but only 0\.0 GB"):
        prepare(load("4x8"), leading=(50_000,))  # 50,000 × (2 × 8 + 3 × 4) values of 4 bytes


# The limits of a group, as the kernel writes them: in a container, in the slice of a service, of version 1.
CONTAINER = {"proc/self/cgroup": "0::/", "memory.max": "9000000000", "memory.current": "7500000000"}
SLICE = {
    "proc/self/cgroup": "0::/user.slice/run.scope",
    "user.slice/run.scope/memory.max": "max", "user.slice/run.scope/memory.current": "100000000",
    "user.slice/memory.max": "4000000000", "user.slice/memory.current": "3000000000",
    "user.slice/memory.stat": "anon 5\ninactive_file 500000000\nactive_file 7",
}  # fmt: skip
V1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/docker/abc",
    "memory/memory.limit_in_bytes": "2000000000", "memory/memory.usage_in_bytes": "500000000",
}  # fmt: skip
UNLIMITED = {"proc/self/cgroup": "0::/user.slice"}


@pytest.mark.parametrize(
    ("group", "free"),
    [(CONTAINER, 1.5), (SLICE, 1.5), (V1, 1.5), (UNLIMITED, 8.0)],
    ids=["root", "slice", "v1", "none"],
)
def test_what_may_be_taken_is_what_the_machine_and_every_group_leave(group, free, tmp_path: Path):
    """A trace sees the limits that ffn bench sees, whatever the version and however deep the group."""
    put(tmp_path, "proc/meminfo", "MemTotal:  9000000 kB\nMemFree:  1 kB\nMemAvailable:  7812500 kB")  # 8 GB
    for name, content in group.items():
        put(tmp_path, name if name.startswith("proc") else f"sys/fs/cgroup/{name}", content)
    require_memory(int(free * 1e9), root=tmp_path)
    with pytest.raises(FFNError, match=rf"would need .*, but only {free} GB of memory is free") as refused:
        require_memory(int(free * 1e9) + 1, root=tmp_path)
    assert refused.value.code == 3


def test_the_refusal_says_how_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "available_memory", lambda _: 2 * 10**9)
    with pytest.raises(FFNError, match=r"it would need 3\.0 GB, but only 2\.0 GB of memory is free"):
        require_memory(3 * 10**9, "it")
    monkeypatch.setattr(weights, "available_memory", lambda _: 0)
    with pytest.raises(FFNError, match="of memory is free"):
        require_memory(1)


def test_a_file_of_more_tokens_than_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.csv").write_text("1,2,3,4\n" * 50)
    asked: list[int] = []
    monkeypatch.setattr(inputs_module, "require_memory", lambda size, *_: asked.append(size))
    prepare(load("4x8:relu"), input=str(tmp_path / "x.csv"))
    assert asked[-1] == 50 * (2 * 8 + 3 * 4) * 4


FIRST, SECOND = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])


def test_rows_written_out() -> None:
    assert [t.tolist() for t in halves_by_turns(FIRST, SECOND)] == [[0, 2, 4], [1, 3, 5]]
    assert [t.tolist() for t in turns_as_halves(FIRST, SECOND)] == [[0, 3, 1], [4, 2, 5]]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_undoes_the_other_along_any_axis(axis: int) -> None:
    pair = tuple(torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    made = turns_as_halves(*pair, axis)
    assert made[0].shape == pair[0].shape
    assert not torch.equal(made[0], pair[0])
    for found, was in zip(halves_by_turns(*made, axis), pair, strict=True):
        assert torch.equal(found, was)
