"""What a case over ranks sends, against numbers worked out by hand, and the columns of its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.bench.judge.environment_match import match
from ffncli.bench.judge.roofline import communication_bytes, sent_by_rank
from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import COLLECTIVES, COMPUTE, Case
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from tests.bench.units import CASE, RUN, units_of

LLAMA = Case("l", "l", FFNSpec(4096, 11008, "swiglu"), tokens=3, dtype="bf16")
MIXTURE = Case("m", "m", FFNSpec(64, 128, "swiglu", moe=MoE(8, 2)), tokens=16)


def over(case: Case, **ranks: int) -> Case:
    return replace(case, ranks=Ranks(**ranks))


def test_one_all_reduce_of_the_output_over_a_ring():
    four = over(LLAMA, tp=4)
    assert sent_by_rank(four).all_reduced == (3 * 4096,)
    assert sent_by_rank(four).exchanged == ()
    assert communication_bytes(four) == 2 * 3 / 4 * 3 * 4096 * 2


def test_two_all_to_alls_of_a_row_for_every_choice():
    four = over(MIXTURE, ep=4)  # every rank has 4 of the 16 tokens
    assert sent_by_rank(four).exchanged == (4 * 2 * 64,) * 2
    assert sent_by_rank(four).all_reduced == ()
    assert communication_bytes(four) == 2 * (4 * 2 * 64 * 4) * 3 / 4


def test_both_splits_send_both():
    both = over(MIXTURE, tp=2, ep=2)
    assert sent_by_rank(both).all_reduced == (8 * 64,) or sum(sent_by_rank(both).all_reduced) == 8 * 2 * 64
    reduced = sum(sent_by_rank(both).all_reduced) * 4
    assert communication_bytes(both) == 2 * (1 / 2) * reduced + 2 * (8 * 2 * 64 * 4) / 2


def test_few_tokens_still_exchange_something():
    assert sent_by_rank(over(replace(MIXTURE, tokens=4), ep=4)).exchanged == (128, 128)


def rows(times: dict[str, float], **ranks: int):
    case = over(CASE, **ranks)
    units = [
        replace(u, case=case.key, blocks=tuple(replace(b, case=case.key) for b in u.blocks)) for u in units_of(times)
    ]
    units = [replace(u, outcomes=tuple(o for o in u.outcomes if not o.kernel.endswith(COMPUTE))) for u in units]
    return {row.kernel: row for row in summarise(case, units, units_of.__defaults__[1], RUN)}


APART = {"eager": 1.0e-3, "mine": 1.3e-3, "eager" + COMPUTE: 0.8e-3, "mine" + COMPUTE: 0.7e-3, COLLECTIVES: 0.5e-3}


def test_a_row_shows_computing_and_communicating_apart():
    found = rows(APART, tp=2)
    assert set(found) == {"eager", "mine"}
    eager, mine = found["eager"], found["mine"]
    assert (eager.world_size, eager.layout, eager.communication_bytes) == (2, "tp2", 32 * 512 * 4)
    assert eager.compute_s == pytest.approx(0.8e-3, rel=0.01)
    assert eager.communication_s == mine.communication_s == pytest.approx(0.5e-3, rel=0.01)
    assert eager.overlap == pytest.approx(0.6, abs=0.05)  # 0.3 of the 0.5 ms are hidden
    assert mine.overlap == pytest.approx(-0.2, abs=0.05)  # 0.1 ms more than one after the other
    assert ", tp2" in eager.case


def test_without_a_call_of_its_own_computing_is_not_known():
    found = rows({"eager": 1e-3, COLLECTIVES: 5e-4}, tp=2)
    assert (found["eager"].compute_s, found["eager"].overlap) == (None, None)
    assert found["eager"].communication_s == pytest.approx(5e-4, rel=0.01)


def test_a_row_of_one_rank_has_none_of_these():
    row = rows({"eager": 1e-3})["eager"]
    assert (row.world_size, row.layout, row.compute_s, row.communication_s, row.communication_bytes, row.overlap) == (
        None, "", None, None, None, None
    )  # fmt: skip
    assert row.case == CASE.key


def test_rows_of_different_layouts_are_not_compared():
    base, new = rows(APART, tp=2).values(), rows(APART, tp=4).values()
    with pytest.raises(FFNError, match="layout: tp2 in BASE, tp4 in NEW") as error:
        match(list(base), list(new))
    assert "no case and kernel in common" in error.value.message
