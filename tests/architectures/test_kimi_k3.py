"""Kimi-K3, which transformers 5.23 does not have: counted by hand, traced against a module of this test.

Its config, its tensors' names and its forward pass as public threads quote them (inference-sim#1638 and #1690,
tt-metal#51335 and #52453, mlxcel#1334, llama.cpp#26185): experts in a narrower space, a norm on their sum before it is
widened, shared experts at full width.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.source import load
from ffncli.run.engine.execute import run
from ffncli.run.engine.prepare import prepare
from tests.oracles.modules import relative_error

TEXT: dict[str, Any] = {
    "model_type": "kimi_linear", "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93,
    "moe_intermediate_size": 3072, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
    "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "first_k_dense_replace": 1, "vocab_size": 163840,
    "hidden_act": "situ", "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
}  # fmt: skip
K3 = {"model_type": "kimi_k3", "text_config": TEXT}
EXPERT = 3 * 3584 * 3072
PER_TOKEN = 2 * 7168 * 3584 + 896 * 7168 + 896 + 3 * 7168 * 2 * 3072  # to the latent width and back, router, shared
DENSE = 3 * 7168 * 33792
SMALL = {
    **TEXT, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "moe_intermediate_size": 12,
    "num_experts": 8, "num_experts_per_token": 3, "routed_expert_hidden_size": 10, "vocab_size": 64,
}  # fmt: skip


def test_the_ffn_is_counted_in_its_narrower_space() -> None:
    c = count(from_config(K3, "k3", "config.json"))
    assert c.ffn_params_total == 92 * (896 * EXPERT + PER_TOKEN) + DENSE == 2_740_940_521_984
    assert c.ffn_params_active == 92 * (16 * EXPERT + PER_TOKEN) + DENSE
    assert (c.latent, c.norm_params_per_layer) == (3584, 7168 + 3584)
    # 69 layers of linear attention have five matrices of 7168 × 96 · 128; with the embeddings that makes the published
    # 2.8 T and, of a token, 104 B, as far as two digits go (24 layers of latent attention are a few billion more).
    rest = 69 * 5 * 7168 * 96 * 128 + 2 * 7168 * 163840
    assert round((c.ffn_params_total + rest) / 1e12, 1) == 2.8
    assert 0.95 < (c.ffn_params_active + rest) / 104e9 < 1.0


def test_the_width_that_is_ignored_elsewhere_changes_the_count() -> None:
    full = {
        name: value for name, value in TEXT.items() if name not in ("routed_expert_hidden_size", "latent_moe_use_norm")
    }
    without = count(from_config({**K3, "text_config": full}, "k3", "config.json"))
    assert without.ffn_params_total > 5.4e12
    with pytest.raises(FFNError, match="latent_moe_use_norm = true without routed_expert_hidden_size"):
        from_config({**full, "latent_moe_use_norm": True}, "k3", "config.json")
    with pytest.raises(FFNError, match="moe_latent_size = 3584: unknown"):
        from_config({**full, "moe_latent_size": 3584}, "k3", "config.json")


class Mixture(nn.Module):
    """One layer's mixture, under the names of its checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, inner, width = (config[n] for n in ("hidden_size", "routed_expert_hidden_size", "moe_intermediate_size"))
        self.top_k, self.factor, self.eps = config["num_experts_per_token"], config["routed_scaling_factor"], 1e-5
        self.gate = nn.Linear(d, config["num_experts"], bias=False)
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(config["num_experts"]))
        self.routed_expert_down_proj, self.routed_expert_up_proj = (
            nn.Linear(d, inner, False),
            nn.Linear(inner, d, False),
        )
        self.routed_expert_norm = nn.RMSNorm(inner, self.eps)
        self.experts = nn.ModuleList(Gated(inner, width, ("w1", "w3", "w2")) for _ in range(config["num_experts"]))
        shared = width * config["num_shared_experts"]
        self.shared_experts = Gated(d, shared, ("gate_proj", "up_proj", "down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden_size] → the same."""
        scores = torch.sigmoid(self.gate(x))
        chosen = torch.topk(scores + self.gate.e_score_correction_bias, self.top_k).indices
        narrow = self.routed_expert_down_proj(x)
        rows = []
        for token, experts in enumerate(chosen.tolist()):
            weights = scores[token, experts] / scores[token, experts].sum() * self.factor
            made = [w * self.experts[e](narrow[token]) for e, w in zip(experts, weights, strict=True)]
            rows.append(torch.stack(made).sum(0))
        wide = self.routed_expert_up_proj(self.routed_expert_norm(torch.stack(rows)))
        return wide + self.shared_experts(x)


class Gated(nn.Module):
    """down(4 tanh(g / 4) · sigmoid(g) · 25 tanh(u / 25)), its three layers under these names."""

    def __init__(self, d: int, width: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, (into, out) in zip(names, ((d, width), (d, width), (width, d)), strict=True):
            self.add_module(name, nn.Linear(into, out, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] → the same."""
        gate, up, down = (self.get_submodule(name) for name in self.names)
        g, u = gate(x), up(x)
        return down(4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25))


@pytest.fixture
def layer(tmp_path: Path) -> tuple[Path, Mixture]:
    """A model of one dense layer and one mixture on disk, and the mixture in memory; every parameter random."""
    torch.manual_seed(0)
    mixture, dense = Mixture(SMALL).double(), Gated(16, 40, ("gate_proj", "up_proj", "down_proj")).double()
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.5)
    at, norm = "language_model.model.layers", torch.ones(16, dtype=torch.float64)
    tensors = {f"{at}.0.mlp.{n}": t for n, t in dense.state_dict().items()}
    tensors |= {f"{at}.1.block_sparse_moe.{n}": t for n, t in mixture.state_dict().items()}
    tensors |= {f"{at}.{i}.post_attention_layernorm.weight": norm.clone() for i in (0, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": SMALL}))
    return tmp_path, mixture


def test_the_trace_is_the_modules(layer: tuple[Path, Mixture]) -> None:
    folder, mixture = layer
    model = load(str(folder))
    held = sum(p.numel() for n, p in mixture.named_parameters() if "norm" not in n)
    assert (model.differences, model.stored and model.stored.params) == ((), held + 3 * 16 * 40)
    ready = prepare(model, layer="1", dtype="fp64")
    x = torch.randn(9, 16, dtype=torch.float64)
    inside = [step for step in ready.steps if step.output not in ("norm", "out")]
    with torch.no_grad():
        theirs = mixture(x)
    ours = run(inside, ready.weights, {"norm": x})
    assert relative_error(ours, theirs) < 1e-6  # the route is float32
    assert ready.notes == ()


def test_without_a_config_the_norm_is_found_by_its_name(layer: tuple[Path, Mixture]) -> None:
    folder, _ = layer
    (folder / "config.json").unlink()
    moe = load(str(folder)).model.groups[-1].spec.moe
    assert moe is not None
    assert (moe.latent, moe.mixed_norm, moe.latent_norm, moe.expert_norm) == (10, True, False, False)


def test_a_config_that_leaves_out_the_norm_is_contradicted(layer: tuple[Path, Mixture]) -> None:
    folder, _ = layer
    text = {**SMALL, "latent_moe_use_norm": False}
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))
    (found,) = load(str(folder)).differences
    assert (found.name, found.config, found.tensors) == ("mixed_norm", "False", "True")


def test_its_limits_may_differ() -> None:
    text = {**TEXT, "activation_situ_beta": 2.0, "activation_situ_linear_beta": 9.0}
    limits = from_config({**K3, "text_config": text}, "k3", "config.json").model.groups[-1].spec.limits
    assert (limits.gate_cap, limits.up_cap) == (2.0, 9.0)
    published = from_config(K3, "k3", "config.json").model.groups[-1].spec.limits
    assert (published.gate_cap, published.up_cap) == (4.0, 25.0)


def test_norms_of_a_narrower_space_need_one() -> None:
    moe = from_config(K3, "k3", "config.json").model.groups[-1].spec.moe
    assert moe is not None
    with pytest.raises(FFNError, match="need a latent width"):
        FFNSpec(16, 40, "swiglu", moe=replace(moe, latent=None))
