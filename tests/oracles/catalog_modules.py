"""The FFN parameters of a catalog row, counted in the model that transformers builds from its fields.

The model is on the meta device, so nothing is allocated; it takes 0.1 to 4 s. `make catalog` builds all models in
`counts.RECENT` and prints those whose counts differ; this takes 40 s, so the tests build only a few.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.models import catalog
from tests.oracles.counts import RECENT

# The modules of a layer that make its FFN; in Nemotron-H, layers of all kinds have the same name.
_FFN = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:(?:mlps?|feed_forward|block_sparse_moe|shared_mlp|moe|share_expert)\."
    r"|mixer\.(?:up_proj|down_proj|gate|experts|shared_experts|fc[12]_latent_proj)\.)"
)
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
# Counted by hand, see RECENT: transformers gives weights to experts that have none, or has no class for the text model.
UNLIKE = frozenset({"kimi-k3", "longcat-flash", "step-3.5-flash", "step-3.7-flash"})


def ffn_parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the FFN parameters, all and active per token, of the model with these fields."""
    values = {name: value for name, value in config.items() if name != "model_type"}
    if config["model_type"] == "lfm2_moe":  # its config has no default for the layers with attention
        values["layer_types"] = ["conv"] * config["num_hidden_layers"]
    built = CONFIG_MAPPING[config["model_type"]](**values)
    with torch.device("meta"):
        known = type(built) in AutoModelForCausalLM._model_mapping
        model = (AutoModelForCausalLM if known else AutoModel).from_config(built)
    tensors = [*model.named_parameters(), *(item for item in model.named_buffers() if item[0].endswith("bias"))]
    ffn = {name: tensor for name, tensor in tensors if _FFN.search(name) and "norm" not in name}  # counted separately
    total = sum(tensor.numel() for tensor in ffn.values())
    top_k = next((getattr(built, name) for name in _TOP_K if getattr(built, name, None)), 0)
    routed = [
        t
        for name, t in ffn.items()
        if t.dim() == 3 or name.endswith(("experts.gate_up_proj_bias", "experts.down_proj_bias"))
    ]
    idle = sum(tensor.numel() // tensor.shape[0] * (tensor.shape[0] - top_k) for tensor in routed)
    return total, total - idle


def main() -> int:
    """Build every model; return 1 if any count differs."""
    wrong = 0
    for name in sorted(RECENT.keys() - UNLIKE):
        built = ffn_parameters(catalog.config(name))
        if built != RECENT[name][:2]:
            wrong += 1
            print(f"{name}: transformers {built}, the table {RECENT[name][:2]}")
    print(f"{len(RECENT) - len(UNLIKE) - wrong} of {len(RECENT) - len(UNLIKE)} agree")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
