"""The catalog: known models by their usual names, each row with its source."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from ffncli.block.recipe import FFNSpec
from ffncli.models.config.non_ffn import non_ffn
from ffncli.models.config.read import from_config
from ffncli.models.files.fields import Fields
from ffncli.models.model import Group, Model, Resolved

_NOT_RELEASED = "dtype: fp32, since no released weights are known"


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


def search(text: str) -> list[str]:
    """Canonical names of models with `text` in one of their spellings, ignoring hyphens and points."""
    return list(dict.fromkeys(name for alias, name in _aliases().items() if _letters(text) in _letters(alias)))


def starting_with(text: str) -> list[str]:
    """The same for models with a spelling that starts with `text`."""
    word = _letters(text)
    matches = (name for alias, name in _aliases().items() if word and _letters(alias).startswith(word))
    return list(dict.fromkeys(matches))


def aliases(name: str) -> list[str]:
    """The other names of a model."""
    return list(_file()["models"][name].get("aliases", ()))


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def find(name: str) -> Resolved | None:
    """The model of that name (any case), or None."""
    canonical = _aliases().get(name.strip().lower())
    if canonical is None:
        return None
    row, sources = _file()["models"][canonical], _file()["sources"]
    released = row.get("released")
    cited = dict.fromkeys([*row["source"], *([released["source"]] if released else [])])
    citation = "; ".join(f"[{key}] {sources[key]}" for key in cited)
    dtype, rest = (released["dtype"], released.get("non_ffn")) if released else (None, None)
    stored = (f"dtype: {dtype}, as released [{released['source']}]" if released else _NOT_RELEASED,)
    if "config" in row:
        read = from_config(row["config"], name, f"catalog.toml: {canonical}", canonical)
        evidence = ("catalog row in config.json fields", *read.evidence, *stored)
        return replace(
            read, model=replace(read.model, dtype=dtype, non_ffn_dtype=rest), citation=citation, evidence=evidence
        )
    spec = FFNSpec(**row["spec"])
    groups = tuple(Group(stack, tuple(range(count)), spec) for stack, count in row["stacks"].items())
    like: dict[str, Any] | None = row.get("beside")  # the fields of a family that is built alike
    outside = non_ffn(Fields(like, f"catalog.toml: {canonical}"), like["model_type"], groups) if like else None
    evidence = ("catalog row (the model has no config.json)", *stored)
    return Resolved(Model(canonical, groups, dtype=dtype, non_ffn=outside), name, citation, evidence)
