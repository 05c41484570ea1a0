"""Rows of a user's file as x: drawn again for every call, each a little larger or smaller than it is in the file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ffncli.bench.records import Case
from ffncli.bench.request.case_data import SCALED, digest, input_rows
from ffncli.errors import FFNError, shown_path


class InputFile:
    """The rows of the file of --input."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @classmethod
    def of(cls, case: Case) -> InputFile:
        """The file of a case. Raises FFNError if it has changed since the run began."""
        rows = input_rows(case.input, case.spec.d_model)
        if digest("--input", case.input) != case.input_sha256:
            raise FFNError(f"{shown_path(Path(case.input))} has changed since the run began", "start again")
        return cls(rows)

    def drawn(self, tokens: int, generator: torch.Generator) -> Tensor:
        """[tokens, d_model] in float32 or wider: rows drawn with replacement, each times 1 ± 0.02 at most."""
        places = torch.randint(len(self._rows), (tokens,), generator=generator)
        rows = self._rows[places]
        scale = 1 + SCALED * (2 * torch.rand(tokens, 1, generator=generator, dtype=torch.float64) - 1)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(wide) * scale.to(wide)
