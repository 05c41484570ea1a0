"""ffn-1 is what it was: its bytes, its cases against today's catalog, and what a run of it asks."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files

import pytest
import torch

from ffncli.bench.judge.memory_need import memory_need
from ffncli.bench.records import Method
from ffncli.bench.referee.prescribed_routing import _draw_of
from ffncli.bench.request.grid import from_json, load_block, to_json
from ffncli.bench.request.suite import public_suite, suite_request, track_of
from ffncli.block.steps import Axis, Route
from ffncli.errors import FFNError
from ffncli.models.dimensions import Dimensions

SUITE = public_suite("ffn-1")
CASES = {track: SUITE.cases(track) for track in SUITE.tracks}
# Of the file, and of the text that its routing `text` goes by. They are never edited: a change is another suite.
FFN_1 = "8178253b0d356f2ae602ee5059fe209fd5a16ed060147a4a493954b5597e3410"
TEXT = "aa3d1d9053edee97f04adb889b3c81fa0fe34868b6be59dce2753518e4319745"


def digest(package: str, name: str) -> str:
    return sha256(files(package).joinpath(name).read_bytes()).hexdigest()


def test_the_definition_is_never_edited():
    assert digest("ffncli.bench.public", "ffn-1.json") == FFN_1 == SUITE.digest
    assert digest("ffncli.bench.referee", "gettysburg.txt") == TEXT
    assert SUITE.tag == f"ffn-1@{FFN_1}"


@pytest.mark.parametrize("name", SUITE.blocks)
def test_every_block_is_the_catalogs(name):
    """Of a mixture that is too large for one device, one rank's share of the experts."""
    model, _, experts = name.partition("+experts=")
    spec = load_block(model, Dimensions()).model.main.spec
    if experts:
        assert spec.moe is not None
        assert spec.moe.experts == 8 * int(experts)
        spec = replace(spec, moe=replace(spec.moe, experts=int(experts)))
    assert SUITE.blocks[name] == spec


def test_the_tracks_are_small_enough_and_wide_enough():
    assert {track: len(cases) for track, cases in CASES.items()} == {"cpu": 6, "cuda": 12}
    assert {case.tokens for case in CASES["cpu"]} == {1, 32, 512}
    assert {case.tokens for case in CASES["cuda"]} == {1, 32, 512, 4096}
    for cases in CASES.values():
        assert len({case.key for case in cases}) == len(cases)
        assert all((case.spec.moe is not None) == bool(case.routing) for case in cases)
        assert {case.block for track in SUITE.tracks.values() for case in track.cases} == {*SUITE.blocks}
    assert {case.routing for case in CASES["cuda"]} == {"", "uniform", "zipf:1.2", "text"}
    # A user's kernel, what its prepare was given, the drawn weights and the referee's.
    assert max(memory_need(case, 4).total for case in CASES["cpu"]) < 4e9
    assert max(memory_need(case, 3).total for case in CASES["cuda"]) < 60e9


@pytest.mark.parametrize(
    ("experts", "top_k", "routes"),
    [(128, 4, "414b9ea3be0300d9"), (256, 6, "2c1bcc09bb3e7c58"), (112, 16, "ae61606bcb0d71b0")],
)
def test_the_routes_of_the_text_are_never_changed(experts, top_k, routes):
    case = next(case for case in CASES["cuda"] if case.routing == "text")
    draw = _draw_of(case, Route(Axis("experts", experts), top_k))
    rows = draw(272, torch.Generator()).to(torch.uint8).numpy().tobytes()
    assert sha256(rows).hexdigest()[:16] == routes


def test_a_request_has_the_suites_cases_and_its_mark_also_when_it_is_read_back():
    request, notes = suite_request(SUITE, "cpu", ["packed"], SUITE.method("cpu"))
    assert (request.cases, request.suite) == (CASES["cpu"], SUITE.tag)
    assert (request.baseline, request.names) == ("eager", ("eager", "packed"))
    assert (request.method.seed, request.method.processes, request.method.max_time) == (1, 5, 30.0)
    assert notes == ()
    assert from_json(json.loads(json.dumps(to_json(request)))) == request
    _, notes = suite_request(SUITE, "cpu", ["packed"], Method(processes=3))
    assert notes == ("a trial: results of ffn-1 have 5 processes or more, this run 3",)


def test_what_is_no_suite_and_no_track_is_refused():
    with pytest.raises(FFNError) as caught:
        public_suite("ffn-2")
    assert (caught.value.message, caught.value.hint) == ("--suite: there is no suite 'ffn-2'", "did you mean 'ffn-1'?")
    assert [track_of(()), track_of(("cpu",)), track_of(("cuda",))] == ["cpu", "cpu", "cuda"]
    for devices in (("cuda:1",), ("cpu", "cuda"), ("mps",)):
        with pytest.raises(FFNError, match="has the tracks cpu and cuda"):
            track_of(devices)
