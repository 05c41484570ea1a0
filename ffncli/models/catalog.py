"""The catalog: known models by their usual names, each with its source."""

import json
import re
import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from ffncli.block.recipe import FFNSpec
from ffncli.models.config.non_ffn import non_ffn
from ffncli.models.config.read import from_config
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import Group, Model, Resolved

_WORD = re.compile(r"[a-z]+")
_HEADER = re.compile(r'^\[models\.(?:"(?P<quoted>[^"\n]+)"|(?P<bare>[^"\]\n]+))\]\n', re.MULTILINE)
_ALIASES = re.compile(r"^aliases = (\[.*\])$", re.MULTILINE)
_NOT_RELEASED = "dtype: fp32, since no released weights are known"


@cache
def _sections() -> tuple[str, dict[str, str]]:
    """Return the part of the file before the first model, and a mapping from each model's name to its part."""
    # rows are parsed only when needed: parsing them all takes 40 ms, a quarter of `ffn params gpt2`
    text = files("ffncli.models").joinpath("catalog.toml").read_text("utf-8")
    headers = list(_HEADER.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    rows = {h["quoted"] or h["bare"]: text[h.end() : end] for h, end in zip(headers, ends, strict=True)}
    return text[: headers[0].start()], rows


@cache
def _row(name: str) -> dict[str, Any]:
    return tomllib.loads(_sections()[1][name])


@cache
def _sources() -> dict[str, str]:
    sources: dict[str, str] = tomllib.loads(_sections()[0])["sources"]
    return sources


@cache
def _aliases() -> dict[str, str]:
    """Return a mapping from every spelling of every model's name to the canonical name."""
    # a TOML list of plain names is also JSON, which Python parses faster
    lines = {name: _ALIASES.search(text) for name, text in _sections()[1].items()}
    also = {name: json.loads(line[1]) if line else [] for name, line in lines.items()}
    return {spelling: name for name, others in also.items() for spelling in (name, *others)}


@cache
def _canonical() -> dict[str, str]:
    return {_spelling(alias): name for alias, name in _aliases().items()}


def _spelling(name: str) -> str:
    """Normalise a name: `GPT_2-XL` → `gpt2-xl`. Hyphens between digits stay, since 2-7b and 27b are different."""
    return re.sub(r"(?<=[a-z])-(?=\d)", "", name.strip().lower().replace("_", "-"))


def names() -> list[str]:
    """List the canonical names in catalog order."""
    return list(_sections()[1])


def spellings() -> list[str]:
    """List every name that `find` accepts."""
    return list(_aliases())


def search(text: str) -> list[str]:
    """Return models by part of the name (hyphens and dots ignored), by year, or by the start of the maker's name."""
    word = _letters(text)
    spelled = {name for alias, name in _aliases().items() if word in _letters(alias)}

    def is_from(name: str) -> bool:
        return word == str(year(name)) or (bool(word) and _letters(organisation(name)).startswith(word))

    return [name for name in names() if name in spelled or is_from(name)]


def starting_with(text: str) -> list[str]:
    """Return the models whose name, in any spelling, starts with `text`."""
    word = _letters(text)
    matches = (name for alias, name in _aliases().items() if word and _letters(alias).startswith(word))
    return list(dict.fromkeys(matches))


def nearest(text: str) -> list[str]:
    """Return the canonical names that `text` may mean, best first: names that start with `text`; else, if the catalog
    has the family of `text`, names that share the longest prefix with `text` (an unknown generation); else names of a
    family with a similar spelling.

    Newer generations come first. The family is the leading letters of a name.
    """
    from difflib import get_close_matches  # needed only for error messages

    if near := starting_with(text):
        return _newest_first(near)
    word = _WORD.match(text.strip().lower())
    families = {match[0] for name in names() if (match := _WORD.match(name))}
    if word and word[0] in families:
        starts = (_letters(text)[:length] for length in range(min(len(_letters(text)), 80), 0, -1))
        return _newest_first(next(near for start in starts if (near := starting_with(start))))
    for family in get_close_matches(word[0], sorted(families), n=2, cutoff=0.75) if word else ():
        if near := starting_with(family + text.strip()[len(word[0]) :] if word else family):
            return _newest_first(near)
    close = get_close_matches(text.strip().lower()[:80], spellings(), n=3)
    return list(dict.fromkeys(_aliases()[spelling] for spelling in close))


def _newest_first(near: list[str]) -> list[str]:
    """Sort by generation, newest first: 3.1 for `llama-3.1-8b`, 2 for `gpt2-xl`, 0 for a name with only a size."""
    numbers = {name: re.search(r"(?<![\d.])(\d+(?:\.\d+)?)(?![\d.]*[bmx])", name) for name in near}
    generations = {name: float(match[1]) if match else 0.0 for name, match in numbers.items()}
    # sorted() is stable, so models of one generation stay in catalog order
    return sorted(near, key=generations.__getitem__, reverse=True)


def aliases(name: str) -> list[str]:
    """List a model's alternative names."""
    return list(_row(name).get("aliases", ()))


def config(name: str) -> dict[str, Any]:
    """Return the config.json fields of a model; empty if the model has no config.json."""
    return dict(_row(name).get("config", {}))


def organisation(name: str) -> str:
    """Return the organisation that made a model."""
    return str(_row(name)["organisation"])


def year(name: str) -> int:
    """Return the year of a model's first release."""
    return int(_row(name)["year"])


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def find(name: str) -> Resolved | None:
    """Return the model with this name, or None; case, _ instead of -, and a hyphen before digits make no difference."""
    canonical = _canonical().get(_spelling(name))
    if canonical is None:
        return None
    row, sources = _row(canonical), _sources()
    released = row.get("released")
    cited = dict.fromkeys([*row["source"], *filter(None, [released and released.get("source")])])
    citation = "; ".join(f"[{key}] {sources[key]}" for key in cited)
    dtype = released["dtype"] if released else None
    stored = (_stored(dtype, released.get("source")) if released else _NOT_RELEASED,)
    if "config" in row:
        read = from_config(row["config"], name, f"catalog.toml: {canonical}", canonical)
        evidence = ("catalog row in config.json fields", *read.evidence, *stored)
        # a quantization_config describes the stored tensors; its model's dtype is that of the tensors it leaves out
        model = read.model if read.quantization else replace(read.model, dtype=dtype)
        return replace(read, model=model, citation=citation, evidence=evidence, published_as=_published(row))
    spec = FFNSpec(**row["spec"])
    groups = tuple(Group(stack, tuple(range(count)), spec) for stack, count in row["stacks"].items())
    like: dict[str, Any] | None = row.get("beside")  # the config fields of a family with the same architecture
    outside = non_ffn(Fields(like, f"catalog.toml: {canonical}"), like["model_type"], groups) if like else None
    evidence = ("catalog row (the model has no config.json)", *stored)
    model = Model(canonical, groups, dtype=dtype, non_ffn=outside)
    return Resolved(model, name, citation, evidence, published_as=_published(row))


def _published(row: dict[str, Any]) -> str | None:
    """Return the publisher's numbers with the page that has them, if the name alone does not; None without numbers."""
    text = row.get("published")
    return f"{text} ({row['published_in']})" if "published_in" in row else text


_TUNED = re.compile(r"(?:-(?:instruct|it|pt|chat|hf|thinking)(?:-?\d{4})?)+(?=$|-v\d)")


def find_tuned(name: str) -> Resolved | None:
    """Return the model of which a release with this name was tuned, or None: llama-3.1-8b for
    Meta-Llama-3.1-8B-Instruct, which has the same widths."""
    spelled = _spelling(name)
    base = _TUNED.sub("", spelled.removeprefix("meta-"))
    model = None if base == spelled else find(base)
    return model and replace(model, source=name).noted(f"{name} is read as {model.model.name}: the same widths")


def _stored(dtype: str | None, source: str | None) -> str:
    """Return the evidence line for the weights' dtype and its source."""
    return f"dtype: {dtype}, " + (
        f"as released [{source}]" if source else "assumed: its source does not specify the dtype"
    )
