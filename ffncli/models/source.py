"""One string from the user → the Model it means."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models import catalog
from ffncli.models.config import read_config
from ffncli.models.dimensions import Dimensions, from_dimensions, merged, with_dimensions
from ffncli.models.evidence import with_evidence
from ffncli.models.model import Model
from ffncli.models.strict_json import shown_path

_INLINE = re.compile(r"(?P<d_model>[^x:/\\]+)x(?P<d_ff>[\d.]+x?|-?\w+?)(?::(?P<activation>[^:/\\]*))?")
_UNREAD = {
    ".gguf": "GGUF files", ".bin": "pickled weights", ".pt": "pickled weights", ".pth": "pickled weights",
    ".py": "modules from Python files",
}  # fmt: skip
_SUFFIXES = (".json", ".safetensors", *_UNREAD)


def load(source: str | None = None, dimensions: Dimensions | None = None) -> Model:
    """The Model for a SOURCE and dimension options: resolved, corrected by its tensor names, then overridden.

    Without a source the options alone make a block. Raises FFNError for whatever cannot be a block.
    """
    said = dimensions or Dimensions()
    if source is None:
        return from_dimensions(said)
    if inline := _inline(source):
        return from_dimensions(merged(inline, said), source)
    return with_dimensions(with_evidence(resolve(source)), said)


def resolve(text: str) -> Model:
    """The Model that SOURCE means, if it is no inline block: a path, a catalog name, a directory of that name.

    Raises FFNError with the nearest known names where it means nothing.
    """
    if text.startswith("hf://"):
        raise FFNError(f"{shown(text)}: this version does not read from the Hub", "give a local directory of the model")
    if "\0" in text:
        raise FFNError(f"source {shown(text)} holds a NUL character")
    path = Path(os.path.expanduser(text))
    looks_like_path = "/" in text or os.sep in text or text[:1] in (".", "~") or path.suffix in _SUFFIXES
    if not looks_like_path and (model := catalog.find(text)):
        return model.noted(f"{text} is the known model; the directory is ./{text}") if os.path.isdir(text) else model
    try:
        exists = path.exists()
    except OSError as error:  # a name too long for any file system
        raise FFNError(f"source {shown(text)}: {error.strerror}") from None
    if text and exists:
        return _from_path(path, text)
    if looks_like_path and text:
        raise FFNError(f"{shown_path(path)} does not exist", _path_hint(text))
    hint = did_you_mean(
        text, catalog.spellings(), "`ffn models` lists the known ones; a path or 512x2048:gelu works too"
    )
    raise FFNError(f"unknown model {shown(text)}", hint)


def _path_hint(text: str) -> str:
    name = text.rpartition("/")[2]
    if catalog.find(name):
        return f"the catalog has '{name}'"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith("."):
        hub = "this version does not read from the Hub: give a local directory"
        near = did_you_mean(name, catalog.spellings(), "")
        return f"{hub}; for counts alone, {near}" if near else hub
    return "give a model directory, a config.json or a .safetensors file"


def _from_path(path: Path, text: str) -> Model:
    """A directory or file on disk: its config, and what the tensor names say of the first layer of each group."""
    if path.suffix in _UNREAD and path.is_file():
        raise FFNError(f"{shown_path(path)}: {_UNREAD[path.suffix]} are not read by this version", "use safetensors")
    folder = path if path.is_dir() else path.parent
    config = (
        path if path.suffix == ".json" and not path.name.endswith(".safetensors.index.json") else folder / "config.json"
    )
    if path.is_file() and path.suffix not in _SUFFIXES:
        raise FFNError(f"{shown_path(path)} is no model", "give a directory, a config.json or a .safetensors file")
    if not config.exists():
        raise FFNError(f"{shown_path(config)} is missing", "give a directory that has one: it holds the widths")
    model = read_config(config, text)
    location = path if path.is_dir() or config != path else (folder if config.name == "config.json" else None)
    return replace(model, location=location) if location else model


def _inline(text: str) -> Dimensions | None:
    """What `512x2048:gelu` says: a number before the x, so that no model name is taken for one."""
    match = _INLINE.fullmatch(text)
    if not match or not re.fullmatch(r"[-+]?[0-9][0-9.e^]*", match["d_model"]):
        return None
    return Dimensions(d_model=match["d_model"], d_ff=match["d_ff"], activation=match["activation"])
