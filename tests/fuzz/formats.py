"""The formats by name: each makes the files of a case, from a seed, and the command line that reads them."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from tests.fuzz import calls, changes, configs, documents, models, results, routes, tensors
from tests.fuzz.answers import FuzzAnswer, answer

FORMATS: Mapping[str, Callable[[Random, Path], list[str]]] = {
    "config": models.config, "safetensors": models.safetensors, "index": models.index, "gguf": models.gguf,
    "checkpoint": models.checkpoint,
    "packed": models.packed,
    "results": results.results, "rounds": results.rounds, "journal": results.journal, "grid": results.grid,
    "saved": tensors.saved, "input": tensors.inputs, "routes": routes.routes,
    "certificate": documents.certificate, "document": documents.document,
    "options": changes.options, "assertion": changes.assertion, "sweep": changes.sweep,
    "long": changes.long, "block": changes.block,
}  # fmt: skip

WITHOUT_A_COMMAND: Mapping[str, Callable[[Random], tuple[list[str], FuzzAnswer]]] = {
    "families": configs.changed_case,  # changed configs of every family, held to the tensors of transformers' model
    "calls": calls.drawn_call,  # of the library, in Python
}


def run_case(name: str, number: int, seed: int = 0) -> tuple[list[str], FuzzAnswer]:
    """(the command line, its answer) of one case: the same for the same three, in any order and process."""
    if name in WITHOUT_A_COMMAND:
        return WITHOUT_A_COMMAND[name](Random(f"{seed}/{name}/{number}"))
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="ffn-fuzz-") as folder, results.no_workers():
        draw = Random(f"{seed}/{name}/{number}")
        command = FORMATS[name](draw, Path(folder))
        if draw.random() < 0.04:
            _no_file(Path(folder), draw, pipe=name != "assertion")  # --assert-file takes a pipe, and waits for it
        os.chdir(folder)
        try:
            return command, answer(command, "1,2,3,4")
        finally:
            os.chdir(before)


def _no_file(folder: Path, draw: Random, pipe: bool) -> None:
    """Something else in the place of one of the files."""
    for path in draw.sample(files, 1) if (files := sorted(folder.iterdir())) else ():
        path.unlink()
        match draw.randrange(4):
            case 0 if pipe and hasattr(os, "mkfifo"):
                os.mkfifo(path)
            case 1:
                path.symlink_to(path.name)
            case 2:
                path.mkdir()
            case _:
                path.symlink_to("/dev/zero")
