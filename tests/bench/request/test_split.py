"""What a benchmark over ranks may ask."""

import pytest

from ffncli.bench.records import Method
from ffncli.bench.request.build import build_request
from ffncli.bench.request.grid import BenchRequest, Grid, from_json, threads_of_rank, to_json
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError

DENSE = "8x24:swiglu"


def asked(source=DENSE, kernels=None, ranks=None, method=None, **grid) -> BenchRequest:
    whole = Grid(source, **{"device": "cpu", **grid}, ranks=ranks or Ranks(2))
    return build_request(whole, kernels, None, method or Method())[0]


MIXTURE = {"experts": 4, "top_k": 2}


def test_every_case_is_split_and_the_request_is_read_back():
    request = asked(tokens=(4, 8))
    assert [case.ranks for case in request.cases] == [Ranks(2)] * 2
    assert [choice.label for choice in request.kernels] == ["eager", "dtensor"]
    assert request.baseline == "eager"
    assert request.cases[0].key.endswith(", tp2")
    assert from_json(to_json(request)) == request


def test_experts_on_other_ranks_are_for_dtensor_alone():
    request = asked(ranks=Ranks(1, 2), tokens=(8,), **MIXTURE)
    assert [choice.label for choice in request.kernels] == ["dtensor"]
    assert request.baseline == "dtensor"
    assert request.cases[0].of_rank.tokens == 4


def test_a_case_of_one_rank_is_as_before():
    request = asked(ranks=Ranks())
    assert request.cases[0].of_rank is request.cases[0]
    assert "tp" not in request.cases[0].key


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"ranks": Ranks(5)}, "d_ff = 24 does not divide over 5 ranks"),
        ({"ranks": Ranks(1, 2)}, "no experts"),
        ({"ranks": Ranks(1, 3), "tokens": (9,), **MIXTURE}, "does not divide over 3 ranks"),
        ({"ranks": Ranks(1, 2), "tokens": (8, 9), **MIXTURE}, "9 tokens do not divide over 2 ranks"),
        ({"method": Method(by_step=True)}, "tp contradicts by_step"),
        ({"method": Method(sustained=True)}, "tp contradicts sustained"),
        ({"method": Method(launch="graphs")}, "tp contradicts launch='graphs'"),
        ({"passes": ("forward+backward",)}, "tp contradicts passes='forward+backward'"),
        ({"device": ("cuda:1",)}, "a GPU of its own"),
        ({"device": ("cpu", "cuda")}, "a GPU of its own"),
        ({"ranks": Ranks(), "kernels": ["dtensor"]}, "dtensor computes blocks that are split over ranks"),
    ],
)
def test_what_cannot_be_measured_over_ranks_is_refused_before_it_begins(more, says):
    with pytest.raises(FFNError, match="(?s)" + says.replace("(", r"\(").replace("+", r"\+")):
        asked(**more)


def test_the_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("ffncli.system.host.default_threads", lambda: 12)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [threads_of_rank(Ranks(tp)) for tp in (1, 2, 4, 16)] == [12, 6, 3, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of 8 ranks, 2 are here
    assert threads_of_rank(Ranks(4, 2)) == 6
