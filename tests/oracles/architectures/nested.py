"""Composites that pass token ids on to a tower which has its own case: their cases follow from the tower's case.

transformers gives the text tower (`get_text_config`), the kinds of the other towers, and the tower's place in the
module. The names of the FFN's parameters within the tower come from the tower's own case.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.oracles.architectures import Architecture, cases, fresh, text_architectures, towers
from tests.oracles.architectures.walk import walk

# Values that transformers needs to build some composites, in addition to the kinds of their towers.
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 16, "intermediate_size": 4}},
    "granite_docling": {"vision_config": {"out_hidden_size": 16}},
    "inkling2": {"vision_config": {"text_hidden_size": 16}},
    "muse_spark": {"audio_config": {"out_hidden_size": 16}, "vision_config": {"out_hidden_size": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
}
# Composites whose other towers need packages that are not installed (timm, torchvision), or cannot be small: only the
# text tower is built, from the whole config.
ALONE = {
    "align", "bridgetower", "fast_vlm", "florence2", "glm5_next", "granite4_vision", "grounding-dino", "inkling2",
    "inkling_mm_model", "janus", "mm-grounding-dino", "muse_glimmer", "muse_spark", "omdet-turbo", "pe_audio_video",
    "pe_video", "perception_lm", "sam3", "vibevoice",
}  # fmt: skip
_OUTER = re.compile(r"^(?:\(\?:\.\*\\\.\)\?|\.\*\\\.|(?:model|transformer|backbone)\\\.)")  # the start of a pattern
_ROOT = r"(?:.*\.)?"


@cache
def composites() -> tuple[str, ...]:
    """Return the models that take token ids, are in none of transformers' text tables and have no case as a tower."""
    return tuple(name for name in walk() if name not in text_architectures() and name not in towers())


@cache
def architectures() -> Mapping[str, Architecture]:
    """Return the cases of all models that take token ids, including aliases of other models, in order."""
    found = {**{name: composite(name) for name in composites()}, **towers(), **cases()}
    return dict(sorted(found.items()))


def default_config(name: str) -> PretrainedConfig:
    """Return the config that transformers creates from a model_type alone."""
    kind: Any = CONFIG_MAPPING[name]
    config: PretrainedConfig = kind()
    return config


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the tower that receives a composite's token ids, or `config` if transformers gives none."""
    text: PretrainedConfig = config.get_text_config()
    inner = getattr(config, "vlm_config", None)
    return text_config(inner) if text is config and inner is not None else text


@cache
def kind_of(name: str) -> str:
    """Return the model_type of a composite's text tower."""
    config = default_config(name)
    if text_config(config) is config:
        raise LookupError(f"{name} takes token ids: it is no composite, and no case says what its FFN is")
    return str(text_config(config).model_type)


def uncounted(name: str) -> str:
    """Return why a composite is not counted, or an empty string if it is counted."""
    kind = kind_of(name)
    return tower(kind).reason


def tower(name: str) -> Architecture:
    """Return the case of a tower; for an alias without classes in transformers, Llama's case."""
    return {**cases(), **towers()}[name]


def composite(name: str) -> Architecture:
    """Return the case of a composite: small towers of transformers' default kinds, with the text tower's own case."""
    if why := uncounted(name):
        return Architecture(reason=why)
    config, kind = default_config(name), kind_of(name)
    values = _kinds(config, kind)
    for part, more in _VALUES.get(name, {}).items():
        values[part] = {**values.get(part, {}), **more}
    if name in ALONE:
        return _alone(config, kind, values)
    paths = walk()[name]
    case = Architecture(
        values=values, model=next((path for path in paths if "ForConditionalGeneration" in path), paths[0]),
        apart=tuple(sub for sub in type(config).sub_configs if not _holds(getattr(config, sub), kind)),
    )  # fmt: skip
    with torch.device("meta"):
        module: Any = fresh(name, case)
    inner = {path: one.config for path, one in module.named_modules() if path and isinstance(one, PreTrainedModel)}
    text = text_config(module.config)
    of_its_kind = [path for path, said in inner.items() if said.model_type == kind]
    at = min(of_its_kind, key=lambda path: inner[path] is not text)  # the first, unless another has exactly this config
    inside = tower(kind)
    names = {"ffn": inside.ffn, "norm": inside.norm, "second": inside.second}
    return replace(case, **{part: _within(at, pattern) for part, pattern in names.items()})


def _within(at: str, pattern: str) -> str:
    """Return the tower's pattern for the names in the whole model, in which the tower is at `at`."""
    return pattern if pattern == r"(?!)" else re.escape(at) + r"\." + _ROOT + _OUTER.sub("", pattern)


def _alone(config: PretrainedConfig, kind: str, values: Mapping[str, Any]) -> Architecture:
    """Return the case of the text tower, built separately from the whole config."""
    inside = tower(kind)
    at = next(name for name in type(config).sub_configs if getattr(config, name).model_type == kind)
    return replace(inside, values=values, model=inside.model or text_architectures()[kind], at=at)


def _kinds(config: PretrainedConfig, text: str) -> dict[str, Any]:
    """Return the kind of every nested config, so that it is made small, and the values of the text tower's case."""
    values: dict[str, Any] = {}
    for name in type(config).sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig) and inner.model_type in CONFIG_MAPPING:
            own: Mapping[str, Any] = tower(text).values if inner.model_type == text else _kinds(inner, text)
            values[name] = {"model_type": inner.model_type, **own}
    return values


def _holds(config: PretrainedConfig, text: str) -> bool:
    return isinstance(config, PretrainedConfig) and text in (config.model_type, text_config(config).model_type)
