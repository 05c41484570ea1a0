"""What a corpus says of a mixture's experts: records, and a table of all of them as a pandas DataFrame."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ffncli.dataclass import dataclass
from ffncli.models.model import Resolved
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


@dataclass(frozen=True)
class ExpertFigures:
    """One expert of a layer over the corpus.

    It was chosen for `tokens` tokens, which is `share` of all choices and `times_even` as many as with an even spread.
    `mean_weight` is its router's weight where it was chosen. Without it, the FFN's output for these tokens would change
    by `output_change` of its norm in the mean. `divergence` is the mean Kullback-Leibler divergence of the next token's
    distribution without the expert from that with it, in nats, over the texts that were read again, and
    `argmax_changed` the share of their tokens for which another token becomes the likeliest; None where it was not
    measured.
    """

    stack: str
    layer: int
    expert: int
    tokens: int
    share: float
    times_even: float
    mean_weight: float | None
    output_change: float | None
    divergence: float | None = None
    argmax_changed: float | None = None


@dataclass(frozen=True)
class ExpertPair:
    """Two experts that are chosen together for `tokens` tokens: `lift` times as often as if they were independent."""

    first: int
    second: int
    tokens: int
    lift: float


@dataclass(frozen=True)
class Coverage:
    """After `tokens` tokens so many `experts` had been chosen at least once."""

    tokens: int
    experts: int


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer: the load of all (as `routing` of a trace has it), each one, the pairs most often chosen
    together, and how soon an expert is used again.

    `hit_rates[n - 1]` is the share of choices that a cache of n experts would serve, if it drops the expert chosen
    longest ago; the first choice of an expert never hits.
    """

    stack: str
    layer: int
    tokens: int
    choices: int
    even_load: float
    idle_experts: tuple[int, ...]
    busiest_expert: int | None
    busiest_share: float | None
    entropy_bits: float | None
    max_entropy_bits: float
    identity_choices: int
    experts: tuple[ExpertFigures, ...]
    pairs: tuple[ExpertPair, ...]
    coverage: tuple[Coverage, ...]
    hit_rates: tuple[float, ...]


@dataclass(frozen=True)
class ExpertsSurvey:
    """The experts of every layer of a mixture over a corpus: `layers`; `frame()` has a row for each expert.

    `texts` and `tokens` were read; `ablated_texts` of them also without each expert, `ablated_tokens` in all.
    """

    model: Resolved
    where: str
    texts: int
    tokens: int
    cut: int
    ablated_texts: int
    ablated_tokens: int
    seconds: float
    layers: tuple[LayerExperts, ...]
    notes: tuple[str, ...]

    @package_errors()
    def frame(self) -> DataFrame:
        """A row for each expert of each layer, as a pandas DataFrame with the fields of `ExpertFigures`.

        Raises FFNError (exit 3) without pandas.
        """
        import pandas

        return pandas.DataFrame([asdict(expert) for layer in self.layers for expert in layer.experts])
