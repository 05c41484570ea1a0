"""Which tensors have NaN or Inf, and how many."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.run.measure.statistics import not_finite


@dataclass(frozen=True)
class NotFinite:
    """A tensor with NaN or Inf. `kind` is input, weight or step; only the first such step is listed."""

    kind: str
    name: str
    nan: int
    inf: int

    def __str__(self) -> str:
        """`weight up.weight has 3 NaN and 1 Inf`."""
        counts = in_words(self.nan, self.inf)
        if self.kind == "step":
            return f"'{self.name}' is the first step that is not finite, with {counts}"
        return f"{self.kind} {self.name} has {counts}"


def in_words(nan: int, inf: int) -> str:
    """`3 NaN`, `1 NaN and 2 Inf`; empty if there is neither."""
    return " and ".join(f"{n:,} {what}" for n, what in ((nan, "NaN"), (inf, "Inf")) if n)


def where_not_finite(kind: str, tensors: Mapping[str, Tensor]) -> list[NotFinite]:
    """The tensors that have NaN or Inf, in order."""
    counts = [(name, *not_finite(tensor)) for name, tensor in tensors.items()]
    return [NotFinite(kind, name, nan, inf) for name, nan, inf in counts if nan + inf]
