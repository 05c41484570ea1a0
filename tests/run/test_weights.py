"""Random weights as torch initialises its own modules, and the memory that is demanded before any is taken."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.errors import FFNError
from ffncli.models.source import load
from ffncli.run import prepare as prepare_module
from ffncli.run import weights
from ffncli.run.prepare import Request, prepare
from ffncli.run.weights import demand_memory, random_weights
from tests.oracles.checkpoints import LLAMA, folder, tensors


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
    monkeypatch.setattr(weights, "_available", lambda: need)
    random_weights(block, torch.Generator(), dtype)
    monkeypatch.setattr(weights, "_available", lambda: need - 1)
    with pytest.raises(FFNError) as refused:
        random_weights(block, torch.Generator(), dtype)
    assert refused.value.code == 3
    assert ("bf16" in refused.value.hint) == (size == 4)


def test_stored_weights_must_fit_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    model = load(folder(tmp_path, LLAMA, tensors("llama")))
    monkeypatch.setattr(weights, "_available", lambda: 4 * 3 * 4 * 6 - 1)
    with pytest.raises(FFNError, match="weights would need"):
        prepare(model, Request())


def test_intermediates_must_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "_available", lambda: 1_000_000)
    prepare(load("4x8"), Request(leading=(10,)))
    with pytest.raises(FFNError, match=r"intermediates would need .*, and 0\.0 GB"):
        prepare(load("4x8"), Request(leading=(50_000,)))  # 50,000 × (2 × 8 + 3 × 4) values of 4 bytes


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("1000", "300", 750), ("max", "300", 5000), ("9000", "300", 5000)]
)
def test_free_memory_is_the_machines_or_the_containers(limit, used, expected, monkeypatch: pytest.MonkeyPatch):
    texts = {"memory.max": limit, "memory.current": used, "memory.stat": "active_file 9\ninactive_file 50\nanon 7"}
    monkeypatch.setattr(Path, "read_text", lambda self, *_: texts[self.name] + "\n")
    monkeypatch.setattr(weights, "_meminfo", lambda: 5000)
    assert weights._available() == expected


def test_free_memory_is_what_linux_says(monkeypatch: pytest.MonkeyPatch):
    text = "MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:  5 kB\n"
    monkeypatch.setattr(weights, "open", lambda *_, **__: io.StringIO(text), raising=False)
    assert weights._meminfo() == 5 * 1024


def test_the_refusal_says_how_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "_available", lambda: 2 * 10**9)
    with pytest.raises(FFNError, match=r"it would need 3\.0 GB, and 2\.0 GB of memory are free"):
        demand_memory(3 * 10**9, "it")
    monkeypatch.setattr(weights, "_available", lambda: 0)
    with pytest.raises(FFNError, match="of memory are free"):
        demand_memory(1)


def test_a_file_of_more_tokens_than_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.csv").write_text("1,2,3,4\n" * 50)
    asked: list[int] = []
    monkeypatch.setattr(prepare_module, "demand_memory", lambda size, *_: asked.append(size))
    prepare(load("4x8:relu"), Request(input=str(tmp_path / "x.csv")))
    assert asked[-1] == 50 * (2 * 8 + 3 * 4) * 4
