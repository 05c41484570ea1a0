"""How far a run over a corpus has come, and the file that an interrupted run goes on from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ffncli.errors import FFNError, option, shown_path
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.json_records import Count, record_of
from ffncli.models.model import Layer
from ffncli.run.corpus.layer import LayerSums
from ffncli.run.corpus.outliers import MassiveFigures
from ffncli.run.corpus.question import CorpusQuestion, ReadingModel
from ffncli.run.corpus.texts import Corpus
from ffncli.run.saved.containers import open_container, write
from ffncli.system.files import open_to_read, written_whole

_PIECE = 1 << 20


@dataclass
class Progress:
    """What has been read: texts of the corpus (`done`; `texts` had tokens), tokens, texts that were `cut`, bytes, and
    the seconds that the model ran."""

    done: Count = 0
    texts: Count = 0
    tokens: Count = 0
    cut: Count = 0
    end: Count = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _SavedRun:
    """What a file says of a run: what its figures depend on, how far it came, and each layer's massive activations."""

    run: Mapping[str, Any]
    progress: Progress
    layers: Mapping[str, MassiveFigures]


def identity(question: CorpusQuestion, reading: ReadingModel, corpus: Corpus) -> dict[str, Any]:
    """What the figures of a run depend on: those of another are not gone on from."""
    checkpoint = reading.model.checkpoint
    return {
        "model": _fingerprint(checkpoint) if checkpoint else "",
        "corpus": corpus.sha256,
        "layers": [f"{layer.stack}.{layer.index}" for layer in reading.layers],
        "dtype": question.dtype or "fp32",
        "max_tokens": question.max_tokens,
        "top_contexts": question.top_contexts or 0,
        "outliers": question.limit,
    }


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of a model's files: their sizes, and the bytes at their ends, where a fine-tuned model differs too."""
    digest = hashlib.sha256()
    for name in sorted({*checkpoint.files.values()}):
        path = checkpoint.folder / name
        with open_to_read(path) as file:
            size = file.seek(0, 2)
            for start in (0, max(0, size - _PIECE)):
                file.seek(start)
                digest.update(file.read(_PIECE))
        digest.update(f"{name} {size}".encode())
    return digest.hexdigest()


def save_progress(path: Path, about: Mapping[str, Any], progress: Progress, layers: Mapping[Layer, LayerSums]) -> None:
    """Write everything that a run needs to go on, whole or not at all. Raises FFNError (exit 3) if that fails."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for layer, sums in layers.items():
        name = f"{layer.stack}.{layer.index}"
        figures, rest[name] = sums.state()
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in figures.items()}
    record = {"run": dict(about), "progress": asdict(progress), "layers": rest}
    with written_whole(path) as file:
        write(file, ".safetensors", tensors, record)


def _difference(name: str, before: Any) -> str:
    """What an earlier run had, in words: another model, other layers or another limit of outliers."""
    if name in ("model", "corpus"):
        return f"another {name}"
    if name == "layers":
        return f"other layers ({', '.join(map(str, before))})" if isinstance(before, list) else "other layers"
    return option(name, before) if before else f"no {option(name)}"


def read_progress(path: Path, about: Mapping[str, Any], layers: Mapping[Layer, LayerSums], device: str) -> Progress:
    """Where an interrupted run stopped, its figures restored; the beginning if there is no file.

    Raises FFNError for a file of another model, corpus or options, naming what differs, and for any other file.
    """
    if not path.exists():
        return Progress()
    hint = "give the name of a new file, or remove this one"
    container = open_container(path, ".safetensors")
    record: _SavedRun = record_of(_SavedRun, container.record, f"{option('resume')}: {shown_path(path)}", hint)
    for name, value in about.items():
        if (before := record.run.get(name)) != value:
            raise FFNError(f"{option('resume')}: {shown_path(path)} was made with {_difference(name, before)}", hint)
    try:
        tensors = {name: container.tensor(name) for name in container.shapes}
        for layer, sums in layers.items():
            name = f"{layer.stack}.{layer.index}"
            figures = {key.partition("/")[2]: t for key, t in tensors.items() if key.startswith(f"{name}/")}
            sums.restore(figures, record.layers[name], device)
        return record.progress
    except (KeyError, ValueError, RuntimeError) as error:
        raise FFNError(f"{option('resume')}: {shown_path(path)} is damaged: {error}", hint) from None
