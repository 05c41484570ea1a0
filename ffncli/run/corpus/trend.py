"""How evenly a router uses its experts in each tenth of a corpus, and whether that changes over the corpus."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from ffncli.run.engine.router_losses import RouterSums, load_figures

TENTHS = 10


@dataclass(frozen=True)
class Tenth:
    """One `tenth` of the texts (0 to 9): its `tokens`, the load of the experts over them, and the router's `losses` by
    name. `busiest_share` and `entropy_bits` are as in Routing; the entropy of few tokens is too low."""

    tenth: int
    tokens: int
    busiest_share: float
    entropy_bits: float
    losses: Mapping[str, float]


@dataclass(frozen=True)
class Trend:
    """The change of a figure from the start of the corpus to its end, by a straight line through its tenths (ordinary
    least squares), and the standard error of this `change`."""

    figure: str
    change: float
    error: float


def tenths_of(chosen: Tensor, tokens: Tensor, sums: Sequence[RouterSums]) -> tuple[Tenth, ...]:
    """Return the tenths that have choices, from the choices [10, experts] and the tokens [10] of each."""
    out = []
    for at, (load, count) in enumerate(zip(chosen.tolist(), tokens.tolist(), strict=True)):
        figures = load_figures(load)
        if figures["choices"]:
            losses = {one.name: one.value for one in sums[at].losses(load)} if sums else {}
            out.append(Tenth(at, count, figures["busiest_share"], figures["entropy_bits"], losses))
    return tuple(out)


def trends_of(tenths: Sequence[Tenth]) -> tuple[Trend, ...]:
    """Return the trend of the entropy and of each loss; none of fewer than three tenths."""
    count = len(tenths)
    if count < 3:
        return ()
    x = [one.tenth / TENTHS for one in tenths]
    centred = [one - sum(x) / count for one in x]
    spread = sum(one * one for one in centred)
    figures = {"entropy_bits": [one.entropy_bits for one in tenths]}
    figures |= {name: [one.losses[name] for one in tenths] for name in tenths[0].losses}
    out = []
    for name, y in figures.items():
        mean = sum(y) / count
        change = sum(a * b for a, b in zip(centred, y, strict=True)) / spread
        rest = sum((b - mean - change * a) ** 2 for a, b in zip(centred, y, strict=True))
        out.append(Trend(name, change, sqrt(rest / (count - 2) / spread)))
    return tuple(out)
