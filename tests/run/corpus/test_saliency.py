"""REAP's saliency, on families of mixtures, against the block's output with and without each expert."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffncli
from tests.oracles.prompted import built
from tests.run.corpus.test_corpus import TEXTS, ids_of

# mixtures of transformers whose experts are one tensor `down_proj` [experts, ...] and whose block runs by itself
FAMILIES = (
    "afmoe", "cohere2_moe", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "lfm2_moe", "llama4_text", "minimax",
    "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip


def block_of(model: Any, layer: int) -> Any:
    """Return the module of a layer that has router and experts."""
    return next(
        module for name, module in model.named_modules()
        if f".{layer}." in f"{name}." and getattr(getattr(module, "experts", None), "down_proj", None) is not None
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_saliency_is_that_of_the_removed_expert(name: str, tmp_path: Path) -> None:
    model: Any = built(name, tmp_path)
    model.set_experts_implementation("eager")
    checked = 0
    for layer in ffncli.experts(tmp_path, TEXTS[:6], ablate_texts=0).layers:
        block, calls = block_of(model, layer.layer), list[tuple[Any, Any]]()
        hook = block.register_forward_pre_hook(
            lambda m, args, kwargs, calls=calls: calls.append((args, kwargs)), with_kwargs=True
        )
        for text in TEXTS[:6]:
            model(input_ids=ids_of(text))
        hook.remove()

        def outputs(block: Any = block, calls: Any = calls) -> Tensor:
            every = [block(*args, **kwargs) for args, kwargs in calls]
            return torch.cat([(x[0] if isinstance(x, tuple) else x).flatten(0, -2) for x in every]).double()

        whole = outputs()
        parameters = [block.experts.down_proj, *filter(None.__ne__, [getattr(block.experts, "down_proj_bias", None)])]
        for one in layer.experts:
            before = [parameter[one.expert].clone() for parameter in parameters]
            for parameter in parameters:
                parameter[one.expert] = 0
            sizes = (whole - outputs()).norm(dim=-1)
            for parameter, value in zip(parameters, before, strict=True):
                parameter[one.expert] = value
            if one.tokens:
                assert one.saliency == pytest.approx(float(sizes.sum()) / one.tokens, rel=1e-5)
                checked += 1
            else:
                assert one.saliency is None
    assert checked
