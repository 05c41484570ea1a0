"""One string from the user → the model it means, modules in the user's Python files included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ffncli.errors import FFNError, shown_path
from ffncli.models import source as model_source
from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.model import Resolved

if TYPE_CHECKING:
    from ffncli.run.user.options import Source


def load(source: Source | None = None, dimensions: Dimensions | None = None, seed: int = 0) -> Resolved:
    """The model for a SOURCE and dimension options; `my.py:Name` is executed, its weights drawn under `seed`.

    A loaded model is changed by the options; a module has its own dimensions and weights. Everything else is left to
    `models.source.load`, without torch. Raises FFNError if the source does not describe an FFN block.
    """
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if isinstance(source, Resolved):
        return with_dimensions(source, dimensions or Dimensions())
    if source is not None and not isinstance(source, str):
        from ffncli.run.user.module import copied, in_memory, model_of

        if (resolved := in_memory(source)) is not None:
            return with_dimensions(resolved, dimensions or Dimensions())
        with copied(source, dimensions or Dimensions()) as module:
            return model_of(module, dimensions or Dimensions())
    if source is None or not model_source.is_user_module(source):
        return model_source.load(source, dimensions)
    path = Path(os.path.expanduser(source.rpartition(":")[0] if ":" in source else source))
    if not path.exists():  # before torch is imported
        raise FFNError(f"{shown_path(path)} does not exist", "give my.py:ClassName")
    from ffncli.run.user.module import built, model_of

    with built(source, dimensions or Dimensions(), seed) as module:
        return model_of(module, dimensions or Dimensions())
