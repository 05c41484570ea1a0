"""`hf://org/name[@revision]` → config.json and safetensors headers: from the local Hub cache, or over the network.

A cached snapshot with weights needs no request. A snapshot without weights (only a config, fetched by another program)
is completed from the network at the same commit, or used as it is without a network: the answer must not depend on what
happens to be cached. Weights are never fetched.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.models.files.checkpoint import INDEX, open_checkpoint
from ffncli.models.files.headers import MOST_HEADER_BYTES, check_length
from ffncli.models.files.hub_requests import Requests, library, quiet
from ffncli.models.files.strict_json import MOST_CONFIG_BYTES

PREFIX = "hf://"
CONFIG = "config.json"
MOST_SHARDS = 2_000  # the longest known list is below 300
MOST_BYTES = 4 * MOST_HEADER_BYTES  # all headers of a model together; 90,000 tensors need 11 MB
_SINGLE = "model.safetensors"
# Names that git allows for a branch or tag, which are also safe inside the cache's folder.
_REVISION = re.compile(r"(?![-/.])(?!.*(\.\.|//|/\.|@\{))[^ ~^:?*\[\\]{1,250}(?<![/.])")


@dataclass(frozen=True)
class RemoteHeader:
    """A safetensors file on the Hub: `raw` is its JSON header, unchecked, `size` the whole file's in bytes."""

    name: str
    raw: bytes
    size: int


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub. `revision` is the commit if known.

    `folder`: a cached snapshot, to be read like any other directory. Otherwise: `config` on disk, and the headers of
    `shards` (none if the model has no safetensors). `note` tells the user the origin.
    """

    repo: str
    revision: str
    folder: Path | None
    config: Path
    shards: tuple[RemoteHeader, ...] = ()
    note: str = ""


def open_hub(text: str) -> HubModel:
    """The model at `hf://org/name[@revision]`.

    Raises FFNError: code 2 for an invalid id, for what the Hub refuses (401, 403, 404) and for a file that is not
    what it claims; 3 for a missing library, and for a Hub that is offline, unreachable, slow, or fails (5xx).
    """
    repo, revision = parse(text)
    folder = _snapshot(repo, revision)
    kept = HubModel(repo, folder.name, folder, folder / CONFIG) if folder else None
    if kept and _has_weights(kept.config.parent):
        return kept
    try:
        if library().constants.HF_HUB_OFFLINE:
            missing = "safetensors" if kept else "copy"
            what = f"HF_HUB_OFFLINE is set, and the local Hub cache has no {missing} of {shown(text)}"
            raise FFNError(what, "unset it, or give a local directory", ExitCode.ENVIRONMENT)
        with quiet():
            return _fetched(Requests(repo), revision, kept)
    except FFNError as error:
        if kept is None or error.code is not ExitCode.ENVIRONMENT:
            raise
        return replace(kept, note=f"{error.message}: taken from the cached config alone")


def cached(repo: str) -> Path | None:
    """The snapshot folder of `org/name[@revision]` in the local Hub cache, if it has a config; no request, no error."""
    try:
        return _snapshot(*parse(PREFIX + repo))
    except FFNError:
        return None


def parse(text: str) -> tuple[str, str]:
    """(`org/name`, revision) of `hf://org/name[@revision]`; the revision is `main` by default.

    Raises FFNError for names that the Hub does not allow.
    """
    utils = library().utils
    repo, at, revision = text.removeprefix(PREFIX).partition("@")
    try:
        utils.validate_repo_id(repo)
        good = repo.isascii() and repo.isprintable()  # its first versions accept `é` and a final newline
    except utils.HFValidationError:
        good = False
    if not good:
        hint = "write hf://org/name or hf://org/name@revision, in letters, digits, '-', '_' and '.'"
        raise FFNError(f"{shown(text)} is not the name of a model on the Hub", hint)
    if at and not (revision.isprintable() and _REVISION.fullmatch(revision)):
        raise FFNError(
            f"{shown(text)}: {shown(revision)} is not a revision", "give a branch, tag or commit after the @"
        )
    return repo, revision or "main"


# --- the local cache --------------------------------------------------------------------------------------------------


def _snapshot(repo: str, revision: str) -> Path | None:
    config = _cached_file(repo, CONFIG, revision)
    return config.parent if config else None


def _cached_file(repo: str, name: str, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(repo, name, revision=revision)
    except (OSError, ValueError):  # a cache that cannot be read holds nothing
        return None
    return Path(path) if isinstance(path, str) else None


def _has_weights(folder: Path) -> bool:
    """Whether there is a file to read tensors from.

    Files of a snapshot are links into `blobs`, and a link may be broken.
    """
    return any(path.exists() for path in folder.glob("*.safetensors"))


# --- the network ------------------------------------------------------------------------------------------------------


def _fetched(hub: Requests, revision: str, kept: HubModel | None) -> HubModel:
    """Config, index and headers, all of one commit: the cached config's, or the one that `revision` means now."""
    config = kept.config if kept else hub.download(CONFIG, revision, MOST_CONFIG_BYTES)
    if config is None:
        raise FFNError(f"{hub.label()} has no {CONFIG} (404)", "give a model in transformers' format")
    commit = config.parent.name
    index = _cached_file(hub.repo, INDEX, commit) or hub.download(INDEX, commit, MOST_HEADER_BYTES)
    names = _shards(index, hub) if index else [_SINGLE]
    sizes = hub.together(lambda name: _sizes(hub, name, commit), names)
    if index is None and sizes == [None]:
        return HubModel(hub.repo, commit, None, config)
    headers = [(name, *size) for name, size in zip(names, sizes, strict=True) if size]
    if missing := next((name for name, size in zip(names, sizes, strict=True) if not size), None):
        raise FFNError(f"{hub.label(INDEX)} names {shown(missing)}, which the model does not have (404)")
    total = sum(length for _, length, _ in headers)
    if total > MOST_BYTES:
        raise FFNError(f"{hub.label()}: headers of {total:,} bytes, which no model needs to have")
    return HubModel(hub.repo, commit, None, config, tuple(hub.together(lambda s: _header(hub, commit, *s), headers)))


def _shards(index: Path, hub: Requests) -> list[str]:
    checkpoint = open_checkpoint(index)
    names = sorted(set(checkpoint.files.values())) if checkpoint else []
    if len(names) > MOST_SHARDS:
        raise FFNError(f"{hub.label(INDEX)} names {len(names):,} files, which no model needs to have")
    return names


def _sizes(hub: Requests, name: str, commit: str) -> tuple[int, int] | None:
    """(bytes of the header, bytes of the file), from the first 8 bytes; None for a missing file."""
    answer = hub.ask("GET", name, commit, (0, 8))
    if answer.status == 404:
        return None
    size, length = answer.size or 0, int.from_bytes(answer.body, "little")
    check_length(length, size, hub.label(name))
    return length, size


def _header(hub: Requests, commit: str, name: str, length: int, size: int) -> RemoteHeader:
    raw = hub.ask("GET", name, commit, (8, 8 + length)).body if length else b""
    return RemoteHeader(name, raw, size)
