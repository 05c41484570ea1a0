"""Compute the expected load of the busiest of several equal groups of experts, for few tokens that each choose top_k
distinct experts, all equally likely.

The loads depend on one another: a token chooses an expert once, and the loads sum to tokens × top_k. `counted` follows
every way of choosing. Where these are too many, `balanced` keeps that sum and each load's own distribution; its error
is below 0.02 % there.
"""

from collections.abc import Iterator, Sequence
from math import comb

_MOST_STATES = 1000  # of the loads of all experts, above which `counted` gives up: a tenth of a second
_ROUNDS, _NEAR = 200, 1e-9


def counted(experts: int, top_k: int, tokens: int) -> float | None:
    """Return the expected number of tokens of the busiest expert, exactly; None if there are too many ways to count."""
    chances: dict[tuple[int, ...], float] = {(experts,): 1.0}  # a state: how many experts have 0, 1, 2 ... tokens
    for _ in range(tokens):
        after: dict[tuple[int, ...], float] = {}
        for state, chance in chances.items():
            for chosen, ways in _choices(state, top_k):
                stayed = [have - gone for have, gone in zip(state, chosen, strict=True)] + [0]
                moved = tuple(at + come for at, come in zip(stayed, (0, *chosen), strict=True))
                new = moved if moved[-1] else moved[:-1]
                after[new] = after.get(new, 0.0) + chance * ways / comb(experts, top_k)
            if len(after) > _MOST_STATES:
                return None
        chances = after
    return sum((len(state) - 1) * chance for state, chance in chances.items())


def _choices(state: Sequence[int], top_k: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield every way to choose top_k experts: how many of each load, and the number of ways to choose these."""
    first, rest = state[0], state[1:]
    if not rest:
        yield (top_k,), comb(first, top_k)
        return
    for at in range(max(0, top_k - sum(rest)), min(first, top_k) + 1):
        for others, ways in _choices(rest, top_k - at):
            yield (at, *others), comb(first, at) * ways


def balanced(experts: int, top_k: int, tokens: int, groups: int) -> float:
    """Return the expected load of the busiest of `groups` groups of `experts / groups` experts.

    The chance of a set of loads is taken as the product of weights w(load), for loads that sum to tokens × top_k. This
    is the limit of the number of 0-1 matrices with given sums of rows and columns (Canfield, Greenhill and McKay 2008).
    w is fitted so that one load has its true distribution: that of a sum of `tokens` hypergeometric numbers.
    """
    each, total = experts // groups, tokens * top_k
    ways = [comb(each, at) * comb(experts - each, top_k - at) for at in range(min(each, top_k) + 1)]
    true = _power([one / comb(experts, top_k) for one in ways], tokens, total)
    weights = true
    for _ in range(_ROUNDS):
        others = _power(weights, groups - 1, total)
        loads = [weight * _at(others, total - load) for load, weight in enumerate(weights)]
        loads = [one / sum(loads) for one in loads]
        if max(abs(one - chance) for one, chance in zip(loads, true, strict=True)) < _NEAR:
            break
        # a correction reaches a load twice, by its own weight and by the others', which share it
        shift = [(chance / one) ** (1 - 1 / groups) if one else 0.0 for chance, one in zip(true, loads, strict=True)]
        weights = [weight * factor for weight, factor in zip(weights, shift, strict=True)]
        weights = [weight / sum(weights) for weight in weights]
    within = [_at(_power(weights[: most + 1], groups, total), total) for most in range(len(weights))]
    return sum(1 - chance / within[-1] for chance in within)  # the mean is the sum of the chances to exceed each load


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if index < len(values) else 0.0


def _power(polynomial: Sequence[float], exponent: int, degree: int) -> list[float]:
    """Return the coefficients of a polynomial's power, up to this degree."""
    if exponent == 0:
        return [1.0]
    half = _power(polynomial, exponent // 2, degree)
    square = _product(half, half, degree)
    return _product(square, polynomial, degree) if exponent % 2 else square


def _product(a: Sequence[float], b: Sequence[float], degree: int) -> list[float]:
    out = [0.0] * min(degree + 1, len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: len(out) - i]):
            out[i + j] += x * y
    return out
