"""What transformers repeats when it loads a GGUF file, done once: most of the time that a small model takes.

It parses the whole file for the config, for the tokenizer and for the weights (a vocabulary of 49,152 takes two to four
seconds each time), makes gguf's table of names once for each submodule, and dequantizes layers that the model lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

_BLOCK = re.compile(r"\bblk\.(\d+)\.")


class SharedReaders:
    """The readers of one run by path; `tensors_of` limits them to the layers that a model has."""

    def __init__(self, kind: type) -> None:
        self._kind = _fast(kind)
        self._readers: dict[Path, Any] = {}

    def __call__(self, path: Any, mode: str = "r") -> Any:
        """The reader of a file, called as gguf's class is."""
        file = Path(path).resolve()
        if file not in self._readers:
            self._readers[file] = reader = self._kind(file, mode)
            reader.all_tensors = reader.tensors
        return self._readers[file]

    def tensors_of(self, module: nn.Module) -> None:
        """Leave out the layers after a shortened model's last: transformers dequantizes every tensor of a reader."""
        last = max((int(part) for name in module.state_dict() for part in name.split(".") if part.isdigit()), default=0)
        for reader in self._readers.values():
            reader.tensors = [tensor for tensor in reader.all_tensors if _block(tensor.name) <= last]


@contextmanager
def shared_reader() -> Iterator[SharedReaders]:
    """In it, gguf's `GGUFReader(path)` is made once for a file, its `get_tensor_name_map` once for an architecture."""
    import gguf

    library: Any = gguf
    if isinstance(library.GGUFReader, SharedReaders):
        yield library.GGUFReader
        return
    kind, names = library.GGUFReader, library.get_tensor_name_map
    library.GGUFReader = shared = SharedReaders(kind)
    library.get_tensor_name_map = cache(names)
    try:
        yield shared
    finally:
        library.GGUFReader, library.get_tensor_name_map = kind, names


def _fast(kind: type) -> type:
    class Reader(kind):  # type: ignore[misc]
        """Slices a plain array: each slice of a memmap runs Python code, and a vocabulary has a million."""

        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, mapped: Any) -> None:
            self._array = np.asarray(mapped)

    return Reader


def _block(name: str) -> int:
    number = _BLOCK.search(name)
    return int(number[1]) if number else 0
