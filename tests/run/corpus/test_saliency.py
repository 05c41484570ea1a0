"""REAP's saliency, on families of mixtures, against the block's output with and without each expert."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffncli
from ffncli.run.corpus import run
from tests.oracles.architectures.tiny import RUNNING
from tests.oracles.prompted import built
from tests.run.corpus.test_corpus import TEXTS, ids_of

FAMILIES = (
    "afmoe", "bailing_hybrid", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "jamba", "jetmoe", "lfm2_moe",
    "llama4_text", "longcat_flash", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "zaya",
)  # fmt: skip
VALUES: dict[str, dict[str, Any]] = {
    **{name: dict(values) for name, values in RUNNING.items()},
    "longcat_flash": {"num_key_value_heads": 4, "zero_expert_num": 3},  # experts that return their input
}
# names in the block of what its experts write with: [experts, ...], or for DBRX all experts' rows one after the other
WRITES = ("experts.down_proj", "experts.down_proj_bias", "experts.mlp.w2", "output_linear.weight")


def block_of(model: Any, layer: int, experts: int) -> tuple[Any, list[Tensor]]:
    """Return a layer's module with router and experts, and the weights [experts, ...] that its experts write with."""
    for name, module in model.named_modules():
        weights = [p.data for at, p in module.named_parameters() if at in WRITES]
        if f".{layer}." in f"{name}." and weights and "attention" not in name:
            # of identity experts only some models have rows, which nothing reads
            return module, [w if len(w) < 2 * experts else w.view(experts, -1, w.shape[-1]) for w in weights]
    raise AssertionError(f"layer {layer} has no experts")


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_saliency_is_that_of_the_removed_expert(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = built(name, tmp_path, **VALUES.get(name, {}))
    if name == "qwen3_5_moe_text":  # its own class of tokenizer splits words into bytes, which the tests' does not know
        from transformers import PreTrainedTokenizerFast

        monkeypatch.setattr(run, "tokenizer_of", lambda _, path: PreTrainedTokenizerFast.from_pretrained(path))
    model.set_experts_implementation("eager")
    checked = identity = 0
    for layer in ffncli.experts(tmp_path, TEXTS[:6], ablate_texts=0, batch_size=1).layers:
        block, parameters = block_of(model, layer.layer, len(layer.experts))
        calls = list[tuple[Any, Any]]()
        hook = block.register_forward_pre_hook(
            lambda m, args, kwargs, calls=calls: calls.append((args, kwargs)), with_kwargs=True
        )
        for text in TEXTS[:6]:
            model(input_ids=ids_of(text), use_cache=False)
        hook.remove()

        def outputs(block: Any = block, calls: Any = calls) -> Tensor:
            every = [block(*args, **kwargs) for args, kwargs in calls]
            return torch.cat([(x[0] if isinstance(x, tuple) else x).flatten(0, -2) for x in every]).double()

        whole = outputs()
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
        identity += layer.identity_choices
    assert checked
    assert bool(identity) == (name == "longcat_flash")
