"""Resolve a SOURCE string to the model that it names."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.errors import FFNError, clean, shown, shown_path
from ffncli.models import catalog
from ffncli.models.config.families import REFUSED, family_of
from ffncli.models.config.packed_model import unknown_packing
from ffncli.models.config.read import from_config, quantization_of, read_config, text_tower
from ffncli.models.config.unread import UnknownField
from ffncli.models.dimensions import Dimensions, from_dimensions, merged, with_dimensions
from ffncli.models.files.strict_json import MOST_CONFIG_BYTES, Fields, read_object
from ffncli.models.model import Resolved

# Modules that read files are imported inside functions: a catalog name does not need them, which saves 10 of 180 ms.
if TYPE_CHECKING:
    from ffncli.models.files.checkpoint import Checkpoint

_INLINE = re.compile(r"(?P<d_model>[^x:/\\]+)x(?P<d_ff>[\d.]+x?|-?\w+?)(?::(?P<activation>[^:/\\]*))?")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?!(?:datasets|spaces|docs|papers|collections|models|organizations|tasks|blog|chat|learn|posts|pricing|join|login"
    r"|settings|new|inference|enterprise|api)(?:[/?#]|$))"
    r"(?P<name>[\w-][\w.-]*(?:/(?!(?:tree|blob|raw|resolve|discussions|commits)(?:[/?#]|$))[\w-][\w.-]*)?)(?:/(?:tree|blob|raw|resolve)/(?P<revision>[\w.-]+)(?:/[^?#]*)?)?/?(?:[?#].*)?",
    re.IGNORECASE,
)
# Older writers' own files, which lie next to a config.json without quantization_config, and their methods.
_QUANTIZED = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_SUFFIXES = (".json", ".safetensors", ".gguf", ".pt", ".pth", ".bin", ".ckpt")


def load(source: str | None = None, dimensions: Dimensions | None = None) -> Resolved:
    """Load the model for a SOURCE: resolve it, correct it according to its tensors, then apply the dimension options.

    Without a SOURCE, the options alone describe a block.
    """
    options = dimensions or Dimensions()
    if source is None:
        return from_dimensions(options)
    if inline := _inline(source):
        return from_dimensions(merged(inline, options), source)
    resolved = resolve(source)
    if not resolved.from_tensors and (resolved.checkpoint or resolved.location):
        from ffncli.models.evidence.agreement import with_evidence

        resolved = with_evidence(resolved)
    if unknown := unknown_packing(resolved):
        resolved = resolved.noted(unknown)
    return with_dimensions(resolved, options)


def is_user_module(source: str) -> bool:
    """Return whether SOURCE names a module in a file: `my.py`, `dir/my.py:FeedForward`; `run.user` loads it."""
    return re.fullmatch(r".*\.py(:[^:/\\]*)?", source, re.DOTALL) is not None and "\0" not in source


def resolve(text: str) -> Resolved:
    """Find the model that a SOURCE names, unless it is an inline block: on the Hub, in the catalog, or at a path."""
    if text[:5].lower() == "hf://":
        return _from_hub("hf://" + text[5:])
    if re.match(r"https?:", text, re.IGNORECASE):
        return _from_hub(_hub_address(text))
    if "\0" in text:
        raise FFNError(f"source {shown(text)} contains a NUL character")
    path = Path(os.path.expanduser(text))
    looks_like_path = "/" in text or os.sep in text or text[:1] in (".", "~") or path.suffix in _SUFFIXES
    if not looks_like_path and (model := catalog.find(text)):
        return model.noted(f"{text} is the known model; the directory is ./{text}") if os.path.isdir(text) else model
    try:
        exists = path.exists()
    except OSError as error:  # the name is too long for the file system
        raise FFNError(f"source {shown(text)}: {error.strerror}") from None
    if text and exists:
        return _from_path(path, text)
    if _HUB_NAME.fullmatch(text):
        from ffncli.models.files.hub import cached

        if folder := cached(text):
            return _from_path(folder, text).noted(f"{text} is the model in the local Hub cache")
    if not looks_like_path and (model := catalog.find_tuned(text)):
        return model
    if looks_like_path and text:
        raise FFNError(f"{shown_path(path)} does not exist", _path_hint(text))
    raise FFNError(f"unknown model {shown(text)}", _name_hint(text))


def _name_hint(text: str) -> str:
    """Return a hint with the known names that `text` most likely means."""
    near = catalog.nearest(text)
    if not near:
        return "`ffn models` lists the known models; a path or 512x2048:gelu also works"
    listed = len(catalog.search(text))
    more = f" `ffn models {clean(text)}` lists {listed}" if listed > 3 else ""
    return "did you mean " + " or ".join(f"'{name}'" for name in near[:3]) + f"?{more}"


def _hub_address(text: str) -> str:
    """Convert the address of a model's page on the Hub to `hf://org/name@revision`; the first models have no org."""
    match = _HUB_PAGE.fullmatch(text)
    if match is None:
        raise FFNError(f"{shown(text)} is not a model's page on the Hub", "write it as hf://org/name")
    return f"hf://{match['name']}" + (f"@{match['revision']}" if match["revision"] else "")


def _path_hint(text: str) -> str:
    name = text.rpartition("/")[2]
    on_hub = _HUB_NAME.fullmatch(text)
    if catalog.find(name):
        return f"the catalog has '{name}'" + (f"; hf://{text} reads it from the Hub" if on_hub else "")
    if on_hub:
        return f"for the model on the Hub: hf://{text}"
    return "give a model directory, a config.json, or a .safetensors, .gguf or .pt file"


def _from_hub(text: str) -> Resolved:
    """Read a model from the Hub: its cached snapshot, else its config and the headers of its files."""
    from ffncli.models.files.checkpoint import remote_checkpoint
    from ffncli.models.files.headers import parse_header
    from ffncli.models.files.hub import open_hub

    hub = open_hub(text)
    if hub.folder:
        model = _from_path(hub.folder, text)
        return model.noted(hub.note) if hub.note else model
    where = f"hf://{hub.repo}"
    columns = {
        shard.name: parse_header(shard.raw, shard.size - 8 - len(shard.raw), f"{where}/{shard.name}")
        for shard in hub.shards
    }
    if not columns:
        return read_config(hub.config, text).noted(
            f"no safetensors in {where}: the model is read from the config alone"
        )
    return _described(hub.config, remote_checkpoint(where, columns, hub.revision), text)


def _from_path(path: Path, text: str) -> Resolved:
    """Read a model from a directory or file: its config, and the names of its tensors."""
    if not path.is_file() and not path.is_dir():
        raise FFNError(
            f"{shown_path(path)} is neither a file nor a directory", "a model is not read from a pipe or a device"
        )
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, text)
    if path.is_file() and path.suffix not in _SUFFIXES:
        raise FFNError(f"{shown_path(path)} is not a model", "give a directory, a config.json or a .safetensors file")
    is_config = path.suffix == ".json" and not path.name.endswith((".safetensors.index.json", ".bin.index.json"))
    is_config = is_config and (path.is_file() or path.name == "config.json")
    folder = path if path.is_dir() and not is_config else path.parent
    config = path if is_config else folder / "config.json"
    if path.is_dir() and not config.exists() and (files := sorted(path.glob("*.gguf"))):
        model = _from_gguf(files[0], text)
        others = [file for file in files if not re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name)]
        return model.noted(f"using {shown_path(files[0])}, one of {len(files)}") if len(others) > 1 else model
    from ffncli.models.files.checkpoint import PICKLED, open_checkpoint

    if path.is_dir() and not config.exists() and not any(path.glob("*.safetensors")):
        pickled = sorted(file for file in path.iterdir() if file.suffix in PICKLED)
        if len(pickled) == 1:
            return _described(config, open_checkpoint(pickled[0]), text, pickled[0])
    location = folder if is_config and path.name == "config.json" else None if is_config else path
    return _described(config, open_checkpoint(location) if location else None, text, location)


def _from_gguf(path: Path, text: str) -> Resolved:
    from ffncli.models.evidence.from_tensors import from_gguf
    from ffncli.models.files.gguf import read_gguf

    return from_gguf(read_gguf(path), text)


def _from_tensors(checkpoint: Checkpoint, tower: Fields | None, text: str, unknown: str = "") -> Resolved:
    from ffncli.models.evidence.from_tensors import from_tensors

    return from_tensors(checkpoint, tower, text, Path(text).absolute().name or text, unknown)


def _described(config: Path, checkpoint: Checkpoint | None, text: str, location: Path | None = None) -> Resolved:
    """Build the model from a config and the tensors next to it, or from the tensors alone if the config is missing or
    its model type is unknown."""
    if not config.exists():
        if checkpoint is None:
            raise FFNError(
                f"{shown_path(config)} is missing", "it contains the widths; alternatively, give a file with tensors"
            )
        return _from_tensors(checkpoint, None, text)
    values = read_object(config, MOST_CONFIG_BYTES, constants=True)
    tower, _ = text_tower(Fields(values, shown_path(config)))
    kind = tower.values.get("model_type")
    if checkpoint is not None and family_of(kind) is None and not (isinstance(kind, str) and kind in REFUSED):
        return _from_tensors(checkpoint, tower, text)
    file = next((name for name in _QUANTIZED if (config.parent / name).is_file()), None)
    if checkpoint is None and file and quantization_of(Fields(values, "")) is None:
        described = read_object(config.parent / file, MOST_CONFIG_BYTES)
        values = {**values, "quantization_config": {"quant_method": _QUANTIZED[file], **described}}
    try:
        model = from_config(values, text, shown_path(config))
    except UnknownField as error:
        if checkpoint is None:
            raise
        return _from_tensors(checkpoint, tower, text, error.fields)
    return replace(model, location=location, checkpoint=checkpoint)


def _inline(text: str) -> Dimensions | None:
    """Parse `512x2048:gelu`; a number must precede the x, so that no model's name is taken for dimensions."""
    match = _INLINE.fullmatch(text)
    if not match or not re.fullmatch(r"[-+]?[0-9][0-9.e^]*", match["d_model"]):
        return None
    return Dimensions(d_model=match["d_model"], d_ff=match["d_ff"], activation=match["activation"])
