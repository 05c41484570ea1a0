"""The answer of `ffn compare` about two checkpoints: findings with their evidence, and the rows they rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffncli.frames import Tabular
from ffncli.system.notebook import record_table

if TYPE_CHECKING:
    from ffncli.run.checkpoints.activations import ActivationComparison

FINDINGS: Mapping[str, str] = {
    "same": "all values of the FFNs are equal",
    "rounding": "one side is the other, rounded to a format",
    "dropped": "layers of BASE that NEW does not have",
    "copied": "layers that are copies of other layers of BASE",
    "shifted": "layers at other positions, all moved by as much",
    "swapped": "gate and up exchanged",
    "interleaved": "rows of gate and up in turn, read as halves, or the reverse",
    "transposed": "square matrices transposed",
    "norm_plus_one": "weights of norms larger or smaller by 1",
    "permuted": "hidden units, experts or layers in another order",
    "scaled": "parameters multiplied by a factor",
    "merged": "a linear or spherical merge of BASE and C",
    "pruned": "values, units or experts that are 0 or missing",
    "lora": "changes of low rank",
    "finetuned": "small changes of full rank",
    "none": "none of these: large changes without a known pattern",
}
CONVENTIONS = {
    "relative_change": "the norm of new - base divided by the norm of base; of several experts, over all of them",
    "changed_share": "the share of values that are not equal",
    "max_change": "new - base where its magnitude is largest, at the index max_at",
    "energy": "the shares of the squared norm of new - base in its first 1, 2, 4, 8, ..., 128 singular values; of "
    "several experts, of each expert's own",
    "rank_90": "the number of singular values that hold 90 % of it; of several experts, the largest",
    "effective_rank": "the exponential of the entropy of these shares; of several experts, the largest",
    "cosine": "the cosine of the angle between base and new, all values of a parameter as one vector",
    "findings": "the likeliest first; each changed parameter counts for one of them: "
    + "; ".join(f"{name}: {text}" for name, text in FINDINGS.items()),
    "inherited": "the norm of the change of the layer's output if its own weights were BASE's, divided by the norm of "
    "BASE's output",
    "added": "the same with NEW's weights, minus inherited",
}


@dataclass(frozen=True)
class CheckpointFinding:
    """Something that was done to the checkpoint: its name in FINDINGS, a sentence, and the numbers behind it."""

    finding: str
    detail: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class ParameterRow:
    """How one parameter of a layer differs; `max_at` has the expert's number first if each expert has its own. Spectra
    are those of matrices that differ. `layer` is NEW's, `base_layer` the layer of BASE that it is compared with."""

    layer: int
    matrix: str
    relative_change: float
    changed_share: float
    max_change: float
    max_at: tuple[int, ...] | None
    rank_90: int | None
    energy: tuple[float, ...]
    cosine: float | None
    effective_rank: float | None
    base_norm: float
    weights: int
    stack: str
    base_layer: int


@dataclass(frozen=True)
class ChangedPart:
    """A hidden unit, or a whole expert (`unit` None), that changed: over its rows of W1 and W3 and columns of W2."""

    stack: str
    layer: int
    expert: int | None
    unit: int | None
    shared: bool
    relative_change: float


@dataclass(frozen=True)
class OutsideGroup:
    """The tensors outside the FFNs of one kind: how many there are in both, what their headers say, and the share of
    sampled values that differ, with their relative change (None: not sampled, since their names differ)."""

    group: str
    base: int
    new: int
    sampled: int
    changed_share: float | None
    relative_change: float | None
    detail: str


@dataclass(frozen=True)
class CheckpointComparison(Tabular):
    """Two checkpoints compared. `findings` has the likeliest first, and `rows` has a record for each parameter of each
    layer. `within` says whether every parameter's relative change is at most `tolerance`, and `expected` whether the
    first finding is the one that was expected (None: none was)."""

    base: str
    new: str
    model: str
    findings: tuple[CheckpointFinding, ...]
    rows: tuple[ParameterRow, ...]
    units: tuple[ChangedPart, ...]
    experts: tuple[ChangedPart, ...]
    outside: tuple[OutsideGroup, ...]
    notes: tuple[str, ...]
    tolerance: float
    within: bool
    expected: bool | None = None
    activations: ActivationComparison | None = None

    @property
    def first(self) -> CheckpointFinding:
        """The likeliest finding."""
        return self.findings[0]

    @property
    def passed(self) -> bool:
        """Whether the check succeeds: what was expected was found, or else all changes are within the tolerance."""
        return self.within if self.expected is None else self.expected

    def __repr__(self) -> str:
        lines = [f"<CheckpointComparison of {len(self.rows)} parameters: {self.first.finding}"]
        return "\n".join([*lines, *(f"  {one.detail}" for one in self.findings)]) + ">"

    def _repr_html_(self) -> str:
        names = ("layer", "matrix", "relative_change", "changed_share", "max_change", "rank_90", "cosine")
        rows = [[getattr(row, name) for name in names] for row in self.rows]
        return record_table("; ".join(one.detail for one in self.findings), names, rows)
