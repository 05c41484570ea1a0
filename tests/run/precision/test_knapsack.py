"""The least error within a sum of bits, against all choices."""

from itertools import product
from random import Random

import pytest

from ffncli.run.precision import knapsack
from ffncli.run.precision.knapsack import Price, least_error


def drawn(seed: int, whole: bool) -> tuple[list[list[Price]], int]:
    """Return up to 10 items with 1 to 4 options, and a limit; with `whole` errors, many choices tie."""
    draw = Random(seed)
    items = [
        [
            Price(draw.randint(1, 40), float(draw.randint(0, 9)) if whole else 10 ** draw.uniform(-9, 1))
            for _ in range(draw.randint(1, 4 if count <= 7 else 2))
        ]
        for count in [draw.randint(1, 10)]
        for _ in range(count)
    ]
    return items, draw.randint(1, 40 * len(items))


def best(items: list[list[Price]], limit: int) -> float | None:
    """Return the least error of all choices within the limit."""
    sums = (sum(one.error for one in choice) for choice in product(*items) if sum(one.bits for one in choice) <= limit)
    return min(sums, default=None)


@pytest.mark.parametrize("whole", [False, True])
def test_it_is_the_best_of_all_choices(whole: bool) -> None:
    infeasible = 0
    for seed in range(300):
        items, limit = drawn(seed, whole)
        found, least = least_error(items, limit), best(items, limit)
        if found is None:
            assert least is None
            infeasible += 1
            continue
        chosen = [options[at] for options, at in zip(items, found.chosen, strict=True)]
        assert found.slack == 0
        assert sum(one.bits for one in chosen) <= limit
        assert sum(one.error for one in chosen) == least
    assert 0 < infeasible < 150


def test_merged_sums_keep_within_the_limit_and_the_stated_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "_MOST_SUMS", 5)
    merged = 0
    for seed in range(300):
        items, limit = drawn(seed, False)
        found = least_error(items, limit)
        if found is None:
            continue
        chosen = [options[at] for options, at in zip(items, found.chosen, strict=True)]
        assert sum(one.bits for one in chosen) <= limit
        bound = best(items, limit - found.slack)
        assert bound is None or sum(one.error for one in chosen) <= bound
        merged += found.slack > 0
    assert merged > 20


def test_many_items_of_one_size_are_exact() -> None:
    """With one size, the best choice upgrades the items that gain most."""
    draw = Random(0)
    gains = [draw.random() for _ in range(240)]
    found = least_error([[Price(4, gain), Price(8, 0.0)] for gain in gains], 4 * 240 + 4 * 100)
    assert found is not None
    upgraded = {at for at, option in enumerate(found.chosen) if option}
    assert upgraded == set(sorted(range(240), key=lambda at: -gains[at])[:100])
