"""Whether transformers can run a source: it can run a directory with a config and safetensors."""

from __future__ import annotations

from pathlib import Path

from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.model import Resolved

_HINT = "give a directory with config.json and safetensors"


def is_runnable(resolved: Resolved) -> bool:
    """Whether transformers can load it, so that it can run a prompt."""
    try:
        folder_of(resolved, "--prompt")
    except FFNError:
        return False
    return True


def folder_of(resolved: Resolved, option: str) -> Path:
    """The directory that transformers can load, for an `option` that needs one.

    Raises FFNError if the source is not one: a known model's dimensions, pickled weights, a GGUF file, headers only.
    """
    name, checkpoint, path = shown(resolved.source), resolved.checkpoint, Path(resolved.source)
    if path.suffix == ".gguf" or (checkpoint is not None and checkpoint.gguf):
        raise FFNError(f"{option}: {name} is a GGUF file, which this option does not support yet", _HINT)
    if checkpoint is None:
        if resolved.location and any(any(resolved.location.glob(f"*{end}")) for end in (".bin", ".pt", ".pth")):
            where = shown_path(resolved.location)
            raise FFNError(f"{option}: {where} has only pickled weights, which are never loaded", "use safetensors")
        if resolved.location:
            raise FFNError(f"{option}: {shown_path(resolved.location)} has no safetensors", _HINT)
        if resolved.source and path.is_dir():  # a known model's name goes before a directory of that name
            raise FFNError(f"{option}: {name} is the known model, which has no weights", f"the directory is ./{path}")
        raise FFNError(f"{option}: {name if resolved.source else 'the block'} is not a directory with weights", _HINT)
    if checkpoint.remote:
        raise FFNError(f"{option}: only the headers of {name} are fetched", "download the model and give its path")
    if not (checkpoint.folder / "config.json").is_file():
        raise FFNError(f"{option}: {shown_path(checkpoint.folder / 'config.json')} is missing", _HINT)
    return checkpoint.folder
