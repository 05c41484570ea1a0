"""Compute, for a given skew of the router, how many tokens each expert gets, and how many experts get at least one
token.

`uniform`: every expert is equally likely. `zipf:S`: a token's top_k experts are drawn one after another without
replacement, with probabilities proportional to r^-S for popularity rank r, as in `ffn bench --routing zipf:S`. Tokens
choose independently. Between the experts of one layer, the loads sum to a constant; for `uniform`, the busiest load
takes this into account.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, erfc, exp, expm1, log, log1p, prod, sqrt

from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models.counting.even_load import balanced, counted

UNIFORM = "uniform"
MOST_EXPONENT = 20.0
_ZIPF = re.compile(r"zipf:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_COUNTED_CHOICES = 64  # of all tokens, up to which the busiest of equally likely experts is counted
_MOST_TRIALS = 512  # above this, binomial probabilities are approximated
_POINTS = 400  # points of the integral over approximated probabilities


def zipf_exponent(text: str) -> float | None:
    """Return S from `zipf:S`; None for any other string."""
    match = _ZIPF.fullmatch(text)
    return float(match[1]) if match and float(match[1]) <= MOST_EXPONENT else None


def skew_text(option: str, text: str) -> str:
    """Normalise a skew to `uniform` or `zipf:S`, with S as short as possible."""
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
    """The expected loads of one layer's routed experts.

    `per_expert` is the mean number of tokens per expert, and `busiest` is the expected maximum. `touched` is the number
    of experts that get at least one token. With `experts / ranks` experts on each rank, the busiest rank gets
    `imbalance` times the mean load, and `touched_rank` is the maximum number of touched experts on one rank. The most
    popular experts are assumed to be on the same rank.
    """

    per_expert: float
    busiest: float
    touched: float
    imbalance: float
    touched_rank: float


@cache
def expert_load(experts: int, top_k: int, tokens: int, ranks: int = 1, skew: str = UNIFORM) -> ExpertSpread:
    """Compute the load for the skew `uniform` or `zipf:S`; `ranks` must divide `experts`."""
    chances = _chances(experts, top_k, zipf_exponent(skew) or 0.0)
    reached = [_reached(p, tokens) for p in chances]
    each, mean = experts // ranks, tokens * top_k / experts
    imbalance, touched = 1.0, sum(reached)
    if ranks > 1:
        imbalance = _busiest(chances, top_k, tokens, each) / (each * mean)
        touched = _largest(_by_rank(reached, each), each, touched / ranks)
    return ExpertSpread(mean, _busiest(chances, top_k, tokens, 1), sum(reached), imbalance, touched)


@cache
def expert_rows(
    experts: int, top_k: int, tokens: int, ranks: int = 1, skew: str = UNIFORM, even: bool = False
) -> tuple[tuple[float, float], ...]:
    """Return (rows, number of experts with so many rows) of the busiest rank, for experts that get at least one token.

    Each expert has its expected rows if it has any. `even` is the mean rank. They sum up to `imbalance` and
    `touched_rank` of `expert_load`.
    """
    chances, spread = (
        _chances(experts, top_k, zipf_exponent(skew) or 0.0),
        expert_load(experts, top_k, tokens, ranks, skew),
    )
    mean, whole = tokens * top_k / ranks, even or ranks == 1
    local = chances if whole else chances[: experts // ranks]
    counts = Counter((p, _reached(p, tokens)) for p in local)
    touched = sum(reached * n for (_, reached), n in counts.items())
    wanted = spread.touched / ranks if whole else spread.touched_rank
    total = tokens * sum(p * n for (p, _), n in counts.items())
    rows = (mean if whole else spread.imbalance * mean) / total * touched / wanted
    return tuple((tokens * p / reached * rows, reached * n * wanted / touched) for (p, reached), n in counts.items())


def ranks_reached(experts: int, top_k: int, ranks: int, groups: int = 1, top_groups: int = 1) -> float:
    """Return the expected number of ranks that hold at least one of a token's experts, all equally likely; the experts
    are in `top_groups` of `groups` groups (DeepSeek-V3)."""
    each, size = experts // ranks, experts // groups
    among = top_groups * size
    if ranks >= groups:  # a rank holds a part of one group
        hit = top_groups / groups * (1 - comb(among - each, top_k) / comb(among, top_k))
        return ranks * hit
    groups_each, missed = groups // ranks, 0.0
    for n in range(min(groups_each, top_groups) + 1):
        chance = comb(groups_each, n) * comb(groups - groups_each, top_groups - n) / comb(groups, top_groups)
        missed += chance * comb(among - n * size, top_k) / comb(among, top_k)
    return ranks * (1 - missed)


def _busiest(chances: Sequence[float], top_k: int, tokens: int, each: int) -> float:
    """Return the expected load of the busiest group of `each` adjacent experts.

    Equal loads that sum to a constant differ more than independent ones do: of E experts, any two have the covariance
    -variance / (E - 1), so that the maximum exceeds the mean by √(E / (E - 1)) times as much.
    """
    experts, mean = len(chances), tokens * top_k * each / len(chances)
    even = chances[0] == chances[-1]
    if even and tokens * top_k <= _COUNTED_CHOICES:
        exact = counted(experts, top_k, tokens) if each == 1 else None
        return balanced(experts, top_k, tokens, experts // each) if exact is None else exact
    most = tokens * min(top_k, each)
    largest = _largest(_by_rank(chances, each, tokens), most, mean)
    return min(mean + sqrt(experts / (experts - 1)) * (largest - mean), most) if even and experts > 1 else largest


def _by_rank(chances: Sequence[float], each: int, times: int = 1) -> list[tuple[float, float]]:
    """Return the (mean, variance) of each group's count of events, which have these probabilities in each of `times`
    trials; a group consists of `each` adjacent events."""
    parts = [chances[at : at + each] for at in range(0, len(chances), each)]
    return [(times * sum(part), times * sum(p * (1 - p) for p in part)) for part in parts]


def _chances(experts: int, top_k: int, exponent: float) -> list[float]:
    """Return each expert's probability of being among a token's top_k, most popular first; they sum to top_k."""
    if exponent == 0 or top_k == experts:
        return [top_k / experts] * experts
    weights = [exp(-exponent * log(rank)) for rank in range(1, experts + 1)]
    if top_k == 1:
        return [weight / sum(weights) for weight in weights]
    # Drawing without replacement is equivalent to a race of exponential clocks whose rates are the experts' weights:
    # the first top_k clocks to ring are drawn (Efraimidis and Spirakis 2006). We approximate an expert's probability by
    # the probability that its clock rings before the time at which top_k clocks have rung on average. This is accurate
    # to a few percent with 8 experts, and more accurate with more experts.
    low, high = 0.0, 1.0
    while -sum(expm1(-weight * high) for weight in weights) < top_k:
        high *= 2
    for _ in range(100):  # bisect to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if -sum(expm1(-w * middle) for w in weights) < top_k else (low, middle)
    return [-expm1(-weight * high) for weight in weights]


def _reached(chance: float, tokens: int) -> float:
    """Return the probability that at least one token chooses an expert, if each token does so with probability
    `chance`."""
    return 1.0 if chance >= 1 else -expm1(tokens * log1p(-chance))


def _largest(counts: Sequence[tuple[float, float]], most: int, least: float) -> float:
    """Return the expected maximum of independent counts between 0 and `most` with these (mean, variance); at least
    `least`. A count is binomial, with the trials that give its mean and variance."""
    if max(variance for _, variance in counts) < 1e-9:
        return max(least, *(mean for mean, _ in counts))
    trials = Counter((round(mean**2 / (mean - variance)), mean) for mean, variance in counts)
    expected = _largest_exact(trials) if max(n for n, _ in trials) <= _MOST_TRIALS else _largest_integrated(trials)
    return max(least, min(1.0, sum(mean for mean, _ in counts)), min(expected, float(most)))


def _largest_exact(counts: Mapping[tuple[int, float], int]) -> float:
    """Return the expected maximum of binomial counts ((trials, mean) → number of such counts): a count's mean is the
    sum of P(count > m) over m, and for the maximum of independent counts, P is 1 - Π P(count ≤ m)."""
    most = max(n for n, _ in counts)
    tables = [(_binomial_below(mean, n) + [1.0] * (most - n), times) for (n, mean), times in counts.items()]
    return sum(1 - prod(below[m] ** times for below, times in tables) for m in range(most))


def _binomial_below(mean: float, most: int) -> list[float]:
    """Return P(count ≤ m) for m from 0 to most - 1, for a binomial count with at most `most` and this mean."""
    chance = min(mean / most, 1.0)
    if chance in (0.0, 1.0):
        return [1.0 - chance] * most
    below, total = [], 0.0
    # logarithms of P(count = m) and of the odds: P(0) itself underflows if `most` is large
    logarithm, odds = most * log1p(-chance), log(chance) - log1p(-chance)
    for m in range(most):
        total += exp(logarithm)
        below.append(min(total, 1.0))
        logarithm += odds + log(most - m) - log(m + 1)
    return below


def _largest_integrated(counts: Mapping[tuple[int, float], int]) -> float:
    """Return the expected maximum of binomial counts ((trials, mean) → number of such counts), with the sum over m
    taken as an integral over the range in which the product of their probabilities is neither 0 nor 1."""
    deviations = [(mean, sqrt(mean * max(0.0, 1 - mean / n))) for n, mean in counts]
    low = max(-0.5, *(mean - 8 * deviation for mean, deviation in deviations))
    high = max(mean + 12 * deviation for mean, deviation in deviations)
    step, total = (high - low) / _POINTS, 0.0
    for m in (low + (at + 0.5) * step for at in range(_POINTS)):
        total += 1 - prod(_about_below(m, *one) ** times for one, times in counts.items())
    return low + 0.5 + total * step


def _about_below(m: float, trials: int, mean: float) -> float:
    """Return P(count ≤ m) of a binomial count, to about 0.001 (Peizer and Pratt 1968)."""
    hits, misses = m + 0.5, trials - m - 0.5
    if hits <= 0 or misses <= 0 or mean >= trials:
        return float(misses <= 0 or hits > mean)
    over = hits - mean
    entropy = hits * log1p(over / mean) + misses * log1p(-over / (trials - mean))
    root = (
        sqrt(2 * max(entropy, 0.0) / (1 + 1 / (6 * trials))) / abs(over)
        if over
        else 1 / sqrt(mean * (1 - mean / trials))
    )
    return 0.5 * erfc(-(over + 1 / 6 - mean / (3 * trials)) * root / sqrt(2))
