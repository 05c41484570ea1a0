"""The catalog: known models by their usual names, each row with its source."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from ffncli.block.recipe import FFNSpec
from ffncli.models.config import from_config
from ffncli.models.fields import Fields
from ffncli.models.model import Group, Model
from ffncli.models.whole import Whole, whole


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files("ffncli.models").joinpath("catalog.toml").read_text("utf-8"))


@cache
def _aliases() -> dict[str, str]:
    rows = _file()["models"]
    return {alias: name for name, row in rows.items() for alias in (name, *row.get("aliases", ()))}


def names() -> list[str]:
    """Canonical names, in the catalog's order."""
    return list(_file()["models"])


def spellings() -> list[str]:
    """Every name that `find` accepts."""
    return list(_aliases())


def find(name: str) -> Model | None:
    """The model of that name (any case), or None."""
    canonical = _aliases().get(name.strip().lower())
    if canonical is None:
        return None
    row, sources = _file()["models"][canonical], _file()["sources"]
    citation = "; ".join(f"[{key}] {sources[key]}" for key in row["source"])
    if "config" in row:
        model = from_config(row["config"], name, f"catalog.toml: {canonical}", canonical)
        return replace(model, citation=citation, evidence=("catalog row in config.json fields", *model.evidence))
    spec = FFNSpec(**row["spec"])
    groups = tuple(Group(stack, tuple(range(count)), spec) for stack, count in row["stacks"].items())
    return Model(canonical, name, groups, citation, evidence=("catalog row (the model has no config.json)",))


def beside(name: str) -> Whole | None:
    """What the model of that name has beside its FFN, or None where the row does not say."""
    canonical = _aliases().get(name.strip().lower())
    row = _file()["models"].get(canonical, {})
    values = row.get("config") or row.get("beside")
    return whole(Fields(values, f"catalog.toml: {canonical}"), values["model_type"]) if values else None
