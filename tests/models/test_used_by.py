"""Who uses which activation: `used_by` of the tables against the catalog and against transformers' configs."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from ffncli.block.activations import CANONICAL, TABLE
from ffncli.block.analysis.gated import UNITS
from ffncli.block.recipe import unit_ops
from ffncli.models import catalog

# A family's name in the table → its model_type in transformers and the field of the config that says the activation.
CONFIGURED = {
    "BERT": "bert", "RoBERTa": "roberta", "BART": "bart", "ViT": "vit", "wav2vec 2.0": "wav2vec2",
    "Whisper": "whisper", "Falcon": "falcon", "Pythia": "gpt_neox", "ModernBERT": "modernbert", "Zamba": "zamba",
    "OPT": "opt", "Switch Transformers": "switch_transformers", "M2M-100": "m2m_100", "NLLB-MoE": "nllb-moe",
    "DETR": "detr", "DAB-DETR": "dab-detr", "T5 v1.0": "t5",
    "Nemotron": "nemotron", "nanochat": "nanochat", "Persimmon": "persimmon", "AFM": "arcee", "Jais-2": "jais2",
    "BitNet": "bitnet",
    "GPT-2": "gpt2", "GPT-J": "gptj", "Phi-2": "phi", "StarCoder": "gpt_bigcode", "SigLIP": "siglip_text_model",
    "Gemma": "gemma", "mT5": "mt5",
    "CLIP": "clip_text_model", "OWL-ViT": "owlvit_text_model", "ImageGPT": "imagegpt",
    "Llama": "llama", "Mistral": "mistral", "Mixtral": "mixtral", "Qwen": "qwen2", "DeepSeek": "deepseek_v3",
    "OLMo": "olmo2", "Phi-3": "phi3", "Phi-4": "phi3", "Granite": "granite", "Falcon3": "llama", "Apertus": "apertus",
    "MobileNet": "mobilenet_v2", "DeepSeek-V4's router": "deepseek_v4",
    "DeepSeek-V4": "deepseek_v4", "GLM-5.3-Flash": "glm5_next_text", "Hy4": "hy_v4", "Step-3.5": "step3p5",
    "Step-3.7": "step3p5", "Inkling-2": "inkling2_text",
}  # fmt: skip
FIELDS = ("scoring_func", "dense_act_fn", "hidden_activation", "hidden_act", "activation_function", "activation")
# What no config of transformers says: older than it, a part of a model, or decided by the model's code or its version.
ELSEWHERE = {
    "Transformer (2017)", "Primer", "GPT-3", "PaLM", "GPT-NeoX-20B", "BLOOM", "T5 v1.1", "gpt-oss",
    "Privacy Filter", "MiniMax-M3",
    "Kimi-K3",
    "bilinear GLU", "GLU", "MoE routers", "MEGA", "YOLOv4", "EnCodec", "MobileNetV3",
}  # fmt: skip


def families(used_by: str) -> list[str]:
    """`T5 v1.1, Gemma (gated)` → T5 v1.1 and Gemma; a year in brackets belongs to the name."""
    return [part.strip() for part in re.split("[,;]", re.sub(r" \((?!\d)[^)]*\)", "", used_by)) if part.strip()]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"\(\d+\)", "", name).lower())


def _named_by(model: str, table: Mapping[str, str]) -> set[str]:
    """The rows of the catalog's model's family, the one with the longest name that the model's name begins with."""
    rows: dict[str, set[str]] = {}
    for row, used_by in table.items():
        for family in families(used_by):
            if _plain(model).startswith(_plain(family)):
                rows.setdefault(_plain(family), set()).add(row)
    return rows[max(rows, key=len)] if rows else set()


@pytest.mark.parametrize("name", catalog.names())
def test_every_known_model_stands_at_its_activation_and_nowhere_else(name):
    """Of SwiGLU the tables name a few of the many families, of every other unit all."""
    model = catalog.find(name)
    assert model is not None
    functions = {group.spec.activation for group in model.model.groups}
    named = _named_by(name, {row.name: row.used_by for row in TABLE.values()})
    units = {
        unit
        for unit, row in UNITS.items()
        for spec in (group.spec for group in model.model.groups)
        if spec.gated and unit_ops(spec.activation, spec.limits) == (row.gate, row.up)
    }
    in_units = _named_by(name, {unit.name: unit.used_by for unit in UNITS.values()})
    assert named == functions or (functions == {"silu"} and not named)
    assert in_units in (units, units - {"swiglu"})
    assert bool(units) == any(group.spec.gated for group in model.model.groups)


def test_every_family_is_held_by_something():
    said = {f for row in (*TABLE.values(), *UNITS.values()) for f in families(row.used_by)}
    assert said == CONFIGURED.keys() | ELSEWHERE


@pytest.mark.parametrize("family", CONFIGURED)
def test_families_have_the_activation_that_their_config_says(family):
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[CONFIGURED[family]]()
    said = next((value for field in FIELDS if isinstance(value := getattr(config, field, None), str)), "")
    if family in ("DeepSeek", "DeepSeek-V4", "Inkling-2"):  # its scoring_func is the router's
        said = config.hidden_act
    rows = [row.name for row in TABLE.values() if family in families(row.used_by)]
    gates = [unit.gate.function for unit in UNITS.values() if family in families(unit.used_by)]
    assert set(rows + gates) == {CANONICAL[said.lower()]}
