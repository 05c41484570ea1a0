"""Every text architecture of the installed transformers, found in the source of its classes instead of a list.

A text architecture is a model_type with a model class whose `forward` takes token ids: a parameter `input_ids`, or one
whose name ends in `_input_ids` (`decoder_input_ids`). This includes decoders of speech-to-text models, text encoders
next to an image encoder, models of audio codes, and composites, which pass the ids on to one of these. The source is
read because importing every module takes half a minute, and some modules import packages that are not installed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import transformers

_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.M)
_TYPE = re.compile(r"^    model_type(?:: [\w\[\]]+)? = [\"']([^\"']+)", re.M)
_CONFIG = re.compile(r"^    config(?:_class)?(?:: | = )\"?(\w+)", re.M)
_FORWARD = re.compile(r"^    def forward\((.*?)\)(?: ->|:)", re.M | re.S)
_IDS = re.compile(r"\b(?:\w+_)?input_ids\b")


@dataclass(frozen=True)
class _Class:
    """What the source of a class says; None if the class inherits it."""

    path: str
    bases: tuple[str, ...]
    config: str | None
    takes_ids: bool | None


@cache
def walk() -> Mapping[str, tuple[str, ...]]:
    """Return a mapping from each model_type to its model classes that take token ids, as paths below `transformers`."""
    folder = Path(transformers.__file__).parent / "models"
    types = {}
    for file in sorted(folder.glob("*/configuration_*.py")):
        for name, bases, body in _classes(file):
            found = _TYPE.search(body)
            types[name] = (found[1] if found else None, bases)
    classes = {}
    for file in sorted(folder.glob("*/modeling_*.py")):
        for name, bases, body in _classes(file):
            config, forward = _CONFIG.search(body), _FORWARD.search(body)
            path = f"models.{file.parent.name}.{file.stem}.{name}"
            takes_ids = bool(_IDS.search(forward[1])) if forward else None
            classes[name] = _Class(path, bases, config[1] if config else None, takes_ids)
    found_types: dict[str, list[str]] = {}
    for name, found_class in classes.items():
        lineage = [classes[base] for base in _lineage(name, classes)]
        if "PreTrainedModel" in {base for one in lineage for base in one.bases}:
            takes_ids = next((one.takes_ids for one in lineage if one.takes_ids is not None), False)
            model_type = _model_type(next((one.config for one in lineage if one.config), ""), types)
            if takes_ids and model_type:
                found_types.setdefault(model_type, []).append(found_class.path)
    return {name: tuple(paths) for name, paths in sorted(found_types.items())}


def _classes(file: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the name, bases and body of each class in a file."""
    text = file.read_text(encoding="utf-8")
    found = list(_CLASS.finditer(text))
    for one, after in zip(found, [*found[1:], None], strict=True):
        bases = tuple(base.strip().rpartition(".")[2] for base in (one[2] or "").split(",") if base.strip())
        yield one[1], bases, text[one.end() : after.start() if after else len(text)]


def _lineage(name: str, classes: Mapping[str, _Class]) -> list[str]:
    """Return the class and the classes that it inherits from, the nearest first."""
    names = [name]
    for one in names:  # the list grows in the loop
        names += [base for base in classes[one].bases if base in classes and base not in names]
    return names


def _model_type(config: str, types: Mapping[str, tuple[str | None, tuple[str, ...]]]) -> str | None:
    """Return the model_type of a config class, its own or an inherited one."""
    while config in types:
        model_type, bases = types[config]
        if model_type or not bases:
            return model_type
        config = bases[0]
    return None
