"""Composites that pass token ids on to a tower with a row of its own: their cases follow from that tower's.

transformers says which tower it is (`get_text_config`), which kinds the other towers are of, and where in the module
the tower stands. What the FFN's parameters are called there is what the tower's own case says of it.
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

# What transformers needs to build some of them, beyond their towers' kinds.
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 16, "intermediate_size": 4}},
    "granite_docling": {"vision_config": {"out_hidden_size": 16}},
    "inkling2": {"vision_config": {"text_hidden_size": 16}},
    "muse_spark": {"audio_config": {"out_hidden_size": 16}, "vision_config": {"out_hidden_size": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
}
# Whose other towers need packages that are not installed here (timm, torchvision), or have no small size: the text
# tower is built alone, from the whole's config.
ALONE = {
    "align", "bridgetower", "fast_vlm", "florence2", "glm5_next", "granite4_vision", "grounding-dino", "inkling2",
    "inkling_mm_model", "janus", "mm-grounding-dino", "muse_glimmer", "muse_spark", "omdet-turbo", "pe_audio_video",
    "pe_video", "perception_lm", "sam3", "vibevoice",
}  # fmt: skip
_OUTER = re.compile(r"^(?:\(\?:\.\*\\\.\)\?|\.\*\\\.|(?:model|transformer|backbone)\\\.)")  # what a pattern begins with
_ROOT = r"(?:.*\.)?"


@cache
def composites() -> tuple[str, ...]:
    """What takes token ids, is in none of transformers' text tables and has no case as a tower."""
    return tuple(name for name in walk() if name not in text_architectures() and name not in towers())


@cache
def architectures() -> Mapping[str, Architecture]:
    """Everything that takes token ids, and the names that transformers gives to another's classes, in order."""
    found = {**{name: composite(name) for name in composites()}, **towers(), **cases()}
    return dict(sorted(found.items()))


def default_config(name: str) -> PretrainedConfig:
    """What transformers makes of a model_type alone."""
    kind: Any = CONFIG_MAPPING[name]
    config: PretrainedConfig = kind()
    return config


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the tower that a composite's token ids go to; itself where transformers names none."""
    text: PretrainedConfig = config.get_text_config()
    inner = getattr(config, "vlm_config", None)
    return text_config(inner) if text is config and inner is not None else text


@cache
def kind_of(name: str) -> str:
    """The model_type of a composite's text tower."""
    config = default_config(name)
    if text_config(config) is config:
        raise LookupError(f"{name} takes token ids: it is no composite, and no case says what its FFN is")
    return str(text_config(config).model_type)


def uncounted(name: str) -> str:
    """Why a composite is not counted; empty where it is."""
    kind = kind_of(name)
    return tower(kind).reason


def tower(name: str) -> Architecture:
    """The case of a tower; of an alias that transformers has no classes for, Llama's."""
    return {**cases(), **towers()}[name]


def composite(name: str) -> Architecture:
    """The case of a composite: small towers of transformers' default kinds, and the tower's own case inside."""
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
    at = min(of_its_kind, key=lambda path: inner[path] is not text)  # the first, unless another has this very config
    inside = tower(kind)
    names = {"ffn": inside.ffn, "norm": inside.norm, "second": inside.second}
    return replace(case, **{part: _within(at, pattern) for part, pattern in names.items()})


def _within(at: str, pattern: str) -> str:
    """What the tower's pattern is for names of the whole, where the tower is `at`."""
    return pattern if pattern == r"(?!)" else re.escape(at) + r"\." + _ROOT + _OUTER.sub("", pattern)


def _alone(config: PretrainedConfig, kind: str, values: Mapping[str, Any]) -> Architecture:
    """The text tower by itself, under the whole's config."""
    inside = tower(kind)
    at = next(name for name in type(config).sub_configs if getattr(config, name).model_type == kind)
    return replace(inside, values=values, model=inside.model or text_architectures()[kind], at=at)


def _kinds(config: PretrainedConfig, text: str) -> dict[str, Any]:
    """For every nested config its kind, so that it is made small; for the text's what its own case adds."""
    values: dict[str, Any] = {}
    for name in type(config).sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig) and inner.model_type in CONFIG_MAPPING:
            own: Mapping[str, Any] = tower(text).values if inner.model_type == text else _kinds(inner, text)
            values[name] = {"model_type": inner.model_type, **own}
    return values


def _holds(config: PretrainedConfig, text: str) -> bool:
    return isinstance(config, PretrainedConfig) and text in (config.model_type, text_config(config).model_type)
