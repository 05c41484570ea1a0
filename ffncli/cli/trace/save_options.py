"""--save of `ffn trace`: every intermediate in one file, for `ffn compare` and for other programs."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

from ffncli.cli.common.option import OUTPUT, option
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError

_save = partial(option, OUTPUT)


@dataclass(frozen=True)
class SaveOptions:
    """--save and --save-weights."""

    save: Annotated[
        str | None,
        _save("--save", metavar="FILE", daily=True, help="Save every tensor to FILE.safetensors, .npz or .json."),
    ] = None
    save_weights: Annotated[
        bool | None,
        _save("--save-weights/--no-save-weights", help="Save the weights too. [default: if 64 MB or less]"),
    ] = None

    def check(self, out: str | None) -> None:
        """Raises FFNError if -o names the same file."""
        path, other = (os.path.realpath(os.path.expanduser(name or "")) for name in (self.save, out))
        if None not in (self.save, out) and path == other:
            raise FFNError("--save and -o name the same file", "give two names")
