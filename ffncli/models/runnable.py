"""Whether a source says enough to run its blocks, and whether transformers can run it: a directory with a config and
safetensors, or a GGUF file."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.errors import FFNError, option, shown, shown_path
from ffncli.models.files.checkpoint import PICKLED
from ffncli.models.model import Resolved

if TYPE_CHECKING:
    from ffncli.models.files.checkpoint import Checkpoint

_HINT = "give a directory with config.json and safetensors, or a GGUF file"


def require_runnable(resolved: Resolved) -> None:
    """Raises FFNError if the source does not fully describe the model's blocks; an option may add what is missing."""
    if resolved.model.refused:
        raise FFNError(f"{shown(resolved.source)} cannot be run: {resolved.model.refused}", "`ffn params` counts it")
    options = {"activation": option("activation", "silu"), "top_k": option("top_k", 2)}
    if lacking := [name for name in options if name in resolved.model.unknown]:
        flags = " ".join(options[name] for name in lacking)
        raise FFNError(
            f"{shown(resolved.source)} does not say its {' and '.join(lacking)}, so it cannot be run",
            f"pass {flags}, for example",
        )


def is_runnable(resolved: Resolved) -> bool:
    """Whether transformers can load it, so that it can run a prompt."""
    try:
        folder_of(resolved, option("prompt"))
    except FFNError:
        return False
    return True


def folder_of(resolved: Resolved, reader: str) -> Path:
    """The directory, or the GGUF file, that transformers can load, for the option `reader`.

    Raises FFNError if the source is not one: a known model's dimensions, pickled weights, headers only.
    """
    name, checkpoint, path = shown(resolved.source), resolved.checkpoint, Path(resolved.source)
    if checkpoint is None:
        if resolved.weights is not None:
            what = f"{reader}: {resolved.model.name} is a module in memory, without a tokenizer"
            raise FFNError(what, "give the directory it was loaded from; input=x [tokens, d_model] needs none")
        if resolved.location and any(any(resolved.location.glob(f"*{end}")) for end in (".bin", ".pt", ".pth")):
            where = shown_path(resolved.location)
            raise FFNError(f"{reader}: {where} has only pickled weights, which are never loaded", "use safetensors")
        if resolved.location:
            raise FFNError(f"{reader}: {shown_path(resolved.location)} has no safetensors", _HINT)
        if resolved.source and path.is_dir():  # a known model's name goes before a directory of that name
            raise FFNError(f"{reader}: {name} is the known model, which has no weights", f"the directory is ./{path}")
        raise FFNError(f"{reader}: {name if resolved.source else 'the block'} is not a directory with weights", _HINT)
    if checkpoint.remote:
        raise FFNError(f"{reader}: only the headers of {name} are fetched", "download the model and give its path")
    if checkpoint.gguf:
        files = sorted({*checkpoint.files.values()})
        if len(files) > 1:
            hint = f"join them: llama-gguf-split --merge {shown_path(checkpoint.folder / files[0])} joined.gguf"
            raise FFNError(f"{reader}: {name} is {len(files)} GGUF files, and transformers loads a single one", hint)
        return checkpoint.folder / files[0]
    if any(file.endswith(PICKLED) for file in {*checkpoint.files.values()}):
        raise FFNError(f"{reader}: {name} is pickled, and transformers is given safetensors alone", _HINT)
    if not (checkpoint.folder / "config.json").is_file():
        raise FFNError(f"{reader}: {shown_path(checkpoint.folder / 'config.json')} is missing", _HINT)
    return checkpoint.folder


def is_gguf(path: Path) -> bool:
    """Whether what transformers loads is a GGUF file, not a directory."""
    return path.suffix == ".gguf" and not path.is_dir()


def loaded_parameters(checkpoint: Checkpoint, last_layer: int) -> int:
    """How many parameters of a GGUF file are loaded to run its layers up to the last one: no later layer, no head."""
    total = 0
    for name in checkpoint.files:
        layer = re.match(r"blk\.(\d+)\.", name)
        if (layer and int(layer[1]) > last_layer) or name == "output.weight":
            continue
        total += prod(checkpoint.info(name).shape)
    return total
