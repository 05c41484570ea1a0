"""How many tokens each expert of a mixture gets, and how many experts get any: by the skew of the router's choices.

`uniform`: every expert is equally likely. `zipf:S`: a token's top_k experts are drawn one after the other, without
replacement, with chances in proportion to r^-S for the expert of popularity rank r, as `ffn bench --routing zipf:S`
draws them. Tokens choose independently of each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import erfc, exp, expm1, log, log1p, prod, sqrt

from ffncli.errors import FFNError, did_you_mean, shown

UNIFORM = "uniform"
MOST_EXPONENT = 20.0
_ZIPF = re.compile(r"zipf:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_EXACT_TOKENS = 512  # of more, a number of tokens is close to normally distributed
_POINTS = 400  # of an integral over such a number


def zipf_exponent(text: str) -> float | None:
    """The S of `zipf:S`; None for another text."""
    match = _ZIPF.fullmatch(text)
    return float(match[1]) if match and float(match[1]) <= MOST_EXPONENT else None


def skew_text(option: str, text: str) -> str:
    """`uniform` or `zipf:S`, S as short as possible. Raises FFNError for anything else."""
    if text == UNIFORM:
        return text
    if (exponent := zipf_exponent(text)) is not None:
        return f"zipf:{exponent:g}"
    if text.partition(":")[0] == "zipf":
        most = f"a number from 0 to {MOST_EXPONENT:g}"
        raise FFNError(f"{option}: {shown(text)} needs an exponent, {most}", "as in zipf:1.2")
    raise FFNError(f"{option}: unknown value {shown(text)}", did_you_mean(text, [UNIFORM], "use uniform or zipf:1.2"))


@dataclass(frozen=True)
class ExpertSpread:
    """The routed experts of one layer on `tokens` tokens.

    `per_expert` is the mean of tokens per expert, `busiest` the expected tokens of the expert that gets most. `touched`
    are the experts expected to get any. Of `ranks` ranks that have `experts / ranks` each, the busiest one's tokens are
    expected to be `imbalance` times the mean, and the most that one has of touched experts `touched_rank`; where the
    experts differ in popularity, the most popular ones are on one rank.
    """

    per_expert: float
    busiest: float
    touched: float
    imbalance: float
    touched_rank: float


@cache
def expert_load(experts: int, top_k: int, tokens: int, ranks: int = 1, skew: str = UNIFORM) -> ExpertSpread:
    """The load by the skew `uniform` or `zipf:S`; `ranks` divides `experts`."""
    chances = _chances(experts, top_k, zipf_exponent(skew) or 0.0)
    reached = [_reached(p, tokens) for p in chances]
    each, mean = experts // ranks, tokens * top_k / experts
    imbalance, touched = 1.0, sum(reached)
    if ranks > 1:
        busiest = _largest(_by_rank(chances, each, tokens), tokens * min(top_k, each), each * mean)
        imbalance = busiest / (each * mean)
        touched = _largest(_by_rank(reached, each), each, touched / ranks)
    return ExpertSpread(mean, _largest(_by_rank(chances, 1, tokens), tokens, mean), sum(reached), imbalance, touched)


def _by_rank(chances: Sequence[float], each: int, times: int = 1) -> list[tuple[float, float]]:
    """(mean, variance) of how often something with these chances happens, for every `each` of them together."""
    parts = [chances[at : at + each] for at in range(0, len(chances), each)]
    return [(times * sum(part), times * sum(p * (1 - p) for p in part)) for part in parts]


def _chances(experts: int, top_k: int, exponent: float) -> list[float]:
    """The chance of each expert, most popular first, to be among the top_k of a token; their sum is top_k.

    A draw without replacement is a race of exponential clocks with the experts' weights as rates (Efraimidis and
    Spirakis 2006): the first top_k to ring. For one expert that is its share of the weights; for more, each clock's
    chance to ring until the time at which top_k have rung on average (accurate to a few percent with 8 experts, better
    with more).
    """
    if exponent == 0 or top_k == experts:
        return [top_k / experts] * experts
    weights = [exp(-exponent * log(rank)) for rank in range(1, experts + 1)]
    if top_k == 1:
        return [weight / sum(weights) for weight in weights]
    low, high = 0.0, 1.0
    while -sum(expm1(-weight * high) for weight in weights) < top_k:
        high *= 2
    for _ in range(100):  # bisection to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if -sum(expm1(-w * middle) for w in weights) < top_k else (low, middle)
    return [-expm1(-weight * high) for weight in weights]


def _reached(chance: float, tokens: int) -> float:
    """The chance that any of the tokens chooses an expert which each does with this chance."""
    return 1.0 if chance >= 1 else -expm1(tokens * log1p(-chance))


def _largest(counts: Sequence[tuple[float, float]], most: int, least: float) -> float:
    """The expected largest of some counts from 0 to `most`, by their (mean, variance); at least `least`.

    They are taken as independent; the mean of a count is the sum of its chances to be above m, for all m from 0: for
    the largest, 1 - Π P(count ≤ m).
    """
    if max(variance for _, variance in counts) < 1e-9:
        return max(least, *(mean for mean, _ in counts))
    times = Counter(counts)
    if most <= _EXACT_TOKENS:
        tables = [(_binomial_below(mean, most), n) for (mean, _), n in times.items()]
        expected = sum(1 - prod(below[m] ** n for below, n in tables) for m in range(most))
        return max(least, min(1.0, sum(mean for mean, _ in counts)), expected)
    return max(least, min(_largest_normal(times), float(most)))


def _binomial_below(mean: float, most: int) -> list[float]:
    """P(count ≤ m) for m from 0 to most - 1, of a binomial count of at most `most` with this mean."""
    chance = min(mean / most, 1.0)
    if chance in (0.0, 1.0):
        return [1.0 - chance] * most
    below, total = [], 0.0
    logarithm, odds = most * log1p(-chance), log(chance) - log1p(-chance)
    for m in range(most):
        total += exp(logarithm)
        below.append(min(total, 1.0))
        logarithm += odds + log(most - m) - log(m + 1)
    return below


def _largest_normal(counts: Mapping[tuple[float, float], int]) -> float:
    """The same of normally distributed counts → how many of them: an integral where the product is not 0 or 1."""
    known = {(mean, sqrt(variance)): n for (mean, variance), n in counts.items()}
    low = max(0.0, *(mean - 8 * deviation for mean, deviation in known))
    high = max(mean + 8 * deviation for mean, deviation in known)
    step, total = (high - low) / _POINTS, 0.0
    for x in (low + (at + 0.5) * step for at in range(_POINTS)):
        total += 1 - prod(_normal_below(x, *one) ** n for one, n in known.items())
    return low + total * step


def _normal_below(x: float, mean: float, deviation: float) -> float:
    return 0.5 * erfc((mean - x) / (deviation * sqrt(2))) if deviation else float(x >= mean)
