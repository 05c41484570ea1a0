"""--save of `ffn trace`: every intermediate in one file, for `ffn compare` and for other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffncli.errors import FFNError, shown
from ffncli.system.files import TENSOR_SUFFIXES, check_writable

if TYPE_CHECKING:
    from ffncli.cli.traced import Traced
    from ffncli.run.prepare import Prepared
    from ffncli.show.output import Output

_save = partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True)
class SaveOptions:
    """--save and --save-weights."""

    save: Annotated[
        str | None, _save("--save", metavar="FILE", help="All tensors into FILE.safetensors, .npz or .json.")
    ] = None
    save_weights: Annotated[
        bool | None,
        _save("--save-weights/--no-save-weights", help="The weights too; default: up to 64 MB of them."),
    ] = None

    @property
    def path(self) -> str:
        """The file to save to; empty where nothing is saved."""
        return os.path.expanduser(self.save or "")

    def check(self, out: str | None, force: bool) -> None:
        """Say what is wrong before anything runs: an unknown suffix, a file that exists, the same file as -o."""
        if self.save is None:
            if self.save_weights is not None:
                option = "--save-weights" if self.save_weights else "--no-save-weights"
                raise FFNError(f"{option} says nothing without --save FILE")
            return
        if Path(self.save).suffix not in TENSOR_SUFFIXES:
            raise FFNError(f"--save {shown(self.save)}: the name must end in one of {', '.join(TENSOR_SUFFIXES)}")
        check_writable(self.path, force, "--save")
        if out is not None and os.path.realpath(os.path.expanduser(out)) == os.path.realpath(self.path):
            raise FFNError("--save and -o name the same file", "give two names")

    def keep(self, ready: Prepared, inside: frozenset[int] | None) -> frozenset[str]:
        """The tensors that the trace must keep for it."""
        if self.save is None:
            return frozenset()
        from ffncli.run.saved import kept_for_saving

        return kept_for_saving(ready.steps, ready.inputs, inside)

    def write(self, block: Mapping[str, Any], traced: Traced, output: Output) -> None:
        """Save the trace with what its answer says of the `block`, and note where.

        Raises FFNError (exit 3) where that is not possible.
        """
        if self.save is None:
            return
        from ffncli.run.saved import SMALL_WEIGHTS, save

        ready, result = traced.ready, traced.result
        size = sum(tensor.numel() * tensor.element_size() for tensor in ready.weights.values())
        wanted = size <= SMALL_WEIGHTS if self.save_weights is None else self.save_weights
        weights = ready.weights if wanted else {}
        seed = ready.mode.generator.initial_seed() if ready.mode.generator else None
        about = {**block, "seed": seed, "dtype": result.steps[0].dtype}
        save(Path(self.path), ready.steps, result, about, weights)
        left = "" if wanted else ", without weights"
        if not wanted and self.save_weights is None:
            left += f" ({size / 1e6:,.0f} MB; --save-weights adds them)"
        output.note(f"saved {len(result.steps)} tensors to {self.save}{left}")
