"""Mixtures over real ranks against the modules of transformers, which know nothing of steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracles.modules import relative_error
from tests.ranks.records import Answer, RankCase
from tests.ranks.test_parallel import CASES, of_ranks, together

KEYS = [key for key in CASES if key.split(":")[1].startswith(("mixtral/", "deepseek/")) and key.endswith("/32")]


def mixtral(case: RankCase) -> nn.Module:
    code = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    d_model, d_ff = case.weights["down.weight"].shape[1:]
    config = code.MixtralConfig(hidden_size=d_model, intermediate_size=d_ff, num_local_experts=8, num_experts_per_tok=2)
    module = code.MixtralSparseMoeBlock(config)
    module.load_state_dict(experts_of(case) | {"gate.weight": case.weights["router.weight"]})
    return module


def deepseek(case: RankCase) -> nn.Module:
    code = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    d_model, d_ff = case.weights["down.weight"].shape[1:]
    config = code.DeepseekV3Config(
        hidden_size=d_model, moe_intermediate_size=d_ff, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    module = code.DeepseekV3MoE(config)
    shared = {f"shared_experts.{n}_proj.weight": case.weights[f"shared.{n}.weight"] for n in ("gate", "up", "down")}
    router = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "route.correction"}
    module.load_state_dict(experts_of(case) | shared | {name: case.weights[ours] for name, ours in router.items()})
    return module


def experts_of(case: RankCase) -> dict[str, torch.Tensor]:
    gate_up = torch.cat([case.weights["gate.weight"], case.weights["up.weight"]], 1)
    return {"experts.gate_up_proj": gate_up, "experts.down_proj": case.weights["down.weight"]}


@pytest.mark.parametrize("key", KEYS)
def test_the_ranks_compute_transformers_module(answers: dict[int, list[dict[str, Answer]]], key: str):
    case, ranks = of_ranks(answers, key)
    module = (mixtral if "mixtral" in key else deepseek)(case).eval()
    x = case.inputs["x"].clone().requires_grad_()
    output = module(x[None])[0]
    output.backward(case.upstream)
    assert x.grad is not None
    assert relative_error(together(case, ranks, "output"), output) <= 1e-6
    assert relative_error(together(case, ranks, "input_gradient"), x.grad) <= 4e-6


def test_the_keys():
    assert len(KEYS) == 2 * 5  # tp2, ep2, tp4, ep4, tp2-ep2
