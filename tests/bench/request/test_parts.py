"""Parts of a grid: each case in exactly one, the same on every machine."""

import hashlib
from dataclasses import replace

import pytest

from ffncli.bench.request.grid import Grid, cases
from ffncli.bench.request.machines import GridPart, dealt, grid_part, part_of
from ffncli.bench.request.options import KernelOptions
from ffncli.errors import FFNError


def grid(tokens: tuple[int, ...], dtypes: tuple[str, ...] = ("fp32",)):
    return cases(Grid("8x16:swiglu", tokens=tokens, dtype=dtypes, device=("cpu",), threads=(1,)))


GRID = grid(tuple(range(1, 21)), ("fp32", "bf16", "fp16"))  # 60 cases


@pytest.mark.parametrize("count", [1, 2, 7, 8, 60, 61, 10_000])
def test_every_case_is_in_one_part_and_parts_differ_by_one_case(count):
    parts = [part_of(GRID, index, count) for index in range(1, min(count, 70) + 1)]
    assert sorted(case.key for part in parts for case in part) == sorted(case.key for case in GRID)
    assert {len(part) for part in parts} <= {60 // count, 60 // count + 1}


def test_a_part_is_in_the_order_of_the_grid():
    part = part_of(GRID, 3, 8)
    assert [case for case in GRID if case in part] == list(part)


def test_parts_do_not_depend_on_the_order_of_options():
    other = grid(tuple(range(20, 0, -1)), ("fp16", "fp32", "bf16"))
    assert other != GRID
    for index in range(1, 9):
        assert {case.key for case in part_of(other, index, 8)} == {case.key for case in part_of(GRID, index, 8)}


def test_part_3_of_8_is_parts_3_and_11_of_16():
    halves = {case.key for index in (3, 11) for case in part_of(GRID, index, 16)}
    assert halves == {case.key for case in part_of(GRID, 3, 8)}


def test_cases_are_dealt_by_their_sha256_on_every_machine():
    """Digests by sha256sum: a machine with another Python, or another seed of its hashes, agrees."""
    key = "8x16:swiglu, {} tokens, fp32, forward, cold-weights, cpu, 1 thread"
    digests = {1: "fd85", 2: "0874", 3: "7d25", 4: "4cc2"}  # so the order is 2, 4, 3, 1
    for tokens, digest in digests.items():
        assert hashlib.sha256(key.format(tokens).encode()).hexdigest().startswith(digest)
    parts = dealt(grid((1, 2, 3, 4)), 3)
    assert {tokens: parts[key.format(tokens)] for tokens in digests} == {2: 1, 4: 2, 3: 3, 1: 1}


def test_neighbours_in_a_grid_are_spread():
    """Cases of many tokens take the longest: no part has all of them."""
    long = [index for index in range(1, 9) for case in part_of(GRID, index, 8) if case.tokens > 15]
    assert max(long.count(index) for index in range(1, 9)) <= 5  # of 15


def test_a_text_names_a_part():
    assert grid_part("3/8") == GridPart(3, 8)
    assert str(grid_part(" 03/8 ")) == "3/8"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0/8", "shard: 0/8: the first number must be from 1 to 8"),
        ("9/8", "shard: 9/8: the first number must be from 1 to 8"),
        ("1/0", "shard: 1/0: a grid has from 1 to 10,000 parts"),
        ("1/10001", "shard: 1/10001: a grid has from 1 to 10,000 parts"),
        ("3", "shard must be a part of the grid, as in 3/8, got '3'"),
        ("-1/8", "as in 3/8, got '-1/8'"),
        ("3/8/2", "as in 3/8"),
        ("٣/8", "as in 3/8"),
        ("", "as in 3/8, got ''"),
    ],
)
def test_anything_else_is_refused(text, words):
    with pytest.raises(FFNError) as error:
        KernelOptions(shard=text)
    assert words in str(error.value)


def test_a_case_with_other_data_is_another_case():
    one = replace(GRID[0], routing="uniform")
    assert set(dealt([GRID[0], one], 2).values()) == {1, 2}
