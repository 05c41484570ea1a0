"""What a question about precision returns: a row for each layer and format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ffncli.frames import Tabular
from ffncli.models.model import Resolved
from ffncli.run.engine.prepare import Token
from ffncli.run.precision.diagnosis import Diagnosis
from ffncli.run.precision.explain import RoundedValue


@dataclass(frozen=True)
class SumError:
    """The errors of the output, as in a row, if the matrices also add up their products in a dtype: one by one, from
    channel 0 upwards, each sum rounded. A row's own errors have sums in float64."""

    dtype: str
    error_rel: float | None
    error_max: float | None


@dataclass(frozen=True)
class PrecisionRow:
    """A layer in one format: `what` is rounded, weights, inputs or both.

    The errors of the FFN's output compare with the same FFN in float64: `error_rel` is ‖a−b‖ / ‖b‖ and `error_max` is
    max|a−b| / max|b|. `by_tensor`, `by_pair` and `rest` are shares of ‖a−b‖² that add up to 1 (`Attribution`).
    `headroom`, `underflow`, `saturated` and `zero_scales` are the worst headroom, the largest share, and the sums over
    the rounded `tensors`, which have the same figures for each tensor (`Diagnosis`).

    `inherited` is the error of the output if the input comes from rounded layers below and this layer is exact;
    `added` is what rounding this layer adds to it. `kl` and `output_error` are as in `WholeModel`, if this layer alone
    is rounded. These four are None without `in_model`.
    """

    stack: str
    layer: int
    format: str
    what: str
    error_rel: float | None
    error_max: float | None
    by_tensor: Mapping[str, float | None]
    by_pair: Mapping[str, float | None]
    rest: float | None
    headroom: float | None
    underflow: float | None
    saturated: int
    zero_scales: int
    tensors: tuple[Diagnosis, ...]
    sums: tuple[SumError, ...] = ()
    added: float | None = None
    inherited: float | None = None
    kl: float | None = None
    output_error: float | None = None

    @property
    def shares(self) -> tuple[float, ...]:
        """All shares of the squared error, which add up to 1; () if the output is exact."""
        every = (*self.by_tensor.values(), *self.by_pair.values(), self.rest)
        return tuple(share for share in every if share is not None)

    def flat(self) -> dict[str, Any]:
        """Return the row for a table: a column for each tensor and each pair, without `tensors`."""
        out: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                out |= {f"share_{key.replace(',', '_')}": share for key, share in value.items()}
            elif name == "sums":
                out |= {f"error_rel_{one.dtype}_sums": one.error_rel for one in self.sums}
            elif name != "tensors":
                out[name] = value
        return out


@dataclass(frozen=True)
class WholeModel:
    """A model with all layers in a format, over the tokens of the prompt or of the texts: `kl` is the mean
    Kullback-Leibler divergence, in nats, of the next token's distribution from the unrounded model's, None for a model
    without a head; `output_error` is ‖a−b‖ / ‖b‖ of the logits, or of its last hidden state."""

    format: str
    kl: float | None
    output_error: float | None


Score = Literal["kl", "output_error", "error_rel"]


@dataclass(frozen=True)
class MixedFormat:
    """The `format` of one matrix (in a mixture: of all experts), its stored `bits` per weight with scales, its number
    of `weights`, and the `error` if it alone is rounded, in the measure of the budget's `score`."""

    stack: str
    layer: int
    tensor: str
    format: str
    bits: float
    weights: int
    error: float


@dataclass(frozen=True)
class ComparedMix:
    """A choice to compare with: its `bits` per weight, its predicted and its measured error. `format` is the format of
    all matrices, None if formats were drawn at random."""

    format: str | None
    bits: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Budget:
    """A format for each matrix, with the least predicted error within `limit` bits per weight; `what` is rounded.

    `score` names the measure: `kl` is that of `WholeModel`, and predicted values add up. `output_error` is that of
    `WholeModel`, for a model without a head, and `error_rel` that of a row (over several layers the root of the mean
    square); their squares add up. No choice within `limit - slack` bits has a
    smaller predicted error; `slack` is 0 for all but very large models. `uniform` are choices of one format, of which
    the last may exceed the limit; `random` are random choices within it.
    """

    limit: float
    score: Score
    what: str
    bits: float
    predicted: float
    measured: float
    slack: float
    choices: tuple[MixedFormat, ...]
    uniform: tuple[ComparedMix, ...]
    random: tuple[ComparedMix, ...]


@dataclass(frozen=True)
class Precision(Tabular):
    """The errors of layers in formats: `rows` has a row for each layer and format. For several layers, the rows of a
    format begin with the largest KL divergence, or else with the largest error: of the model's output, or without
    `in_model` of the layer's.

    `tokens` are those that the model read, and `input` describes the layers' input if no model ran. `explain` has
    a record for each requested value in each format; with `in_model`, `whole` has a record for each format. With a
    `budget` there are no rows.
    """

    model: Resolved
    rows: tuple[PrecisionRow, ...]
    tokens: Mapping[str, Sequence[Token]]
    notes: tuple[str, ...]
    weights: str
    input: str | None = None
    prompt: str | None = None
    explain: tuple[RoundedValue, ...] = ()
    whole: tuple[WholeModel, ...] = ()
    budget: Budget | None = None

    def table(self) -> list[dict[str, Any]]:
        """Return the rows, with columns such as `share_W1` and `share_x_W1`, or the formats chosen within a budget."""
        return [asdict(one) for one in self.budget.choices] if self.budget else [row.flat() for row in self.rows]

    def __repr__(self) -> str:
        if self.budget:
            one = self.budget
            text = f"{one.score} {one.measured:.3g} at {one.bits:.4g} bits per weight"
            return f"<Precision of {self.model.model.name}: {text}>"
        lines = [f"<Precision of {self.model.model.name}: {len(self.rows)} rows"]
        for row in self.rows[:7]:
            error = "" if row.error_rel is None else f", error {row.error_rel:.3g}"
            lines.append(f"  {row.stack} {row.layer}, {row.format}{error}")
        return "\n".join(lines) + ("\n  …>" if len(self.rows) > 7 else ">")
