"""A process's place among ranks, the split over them, and the exit code of a run of several."""

import pytest

from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.run.ranks.environment import Place, RanksNeeded, device_of, split_asked_for, split_over, torchrun
from ffncli.run.ranks.process import common_exit_code

SET = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_torchruns_variables_are_a_place():
    assert torchrun(SET) == Place(5, 1, 8, 4, "node0", 29500)
    agents = {**SET, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert torchrun(agents) == Place(5, 1, 8, 4, "node0", 29500, has_agent=True, attempt="2")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_container_in_which_only_some_are_set_is_no_rank(name):
    assert torchrun({**SET, name: ""}) is None
    assert torchrun({key: value for key, value in SET.items() if key != name}) is None


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "8"), ("RANK", "-1"), ("RANK", "²"), ("LOCAL_RANK", "4"), ("MASTER_PORT", "70000")]
)
def test_variables_that_contradict_each_other_are_refused(name, value):
    with pytest.raises(FFNError, match=name) as caught:
        torchrun({**SET, name: value})
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("tp", "ep", "size", "ranks"),
    [
        (None, None, 4, Ranks(4)), (4, None, 4, Ranks(4)), (None, 2, 8, Ranks(4, 2)), (2, 4, 8, Ranks(2, 4)),
        (None, 4, 4, Ranks(1, 4)), (None, None, 1, Ranks()),
    ],
)  # fmt: skip
def test_the_split_is_over_the_whole_world(tp, ep, size, ranks):
    assert split_over(tp, ep, size) == ranks


@pytest.mark.parametrize(("tp", "ep", "size"), [(3, None, 4), (2, None, 4), (None, 3, 4), (2, 2, 8), (None, 8, 4)])
def test_another_product_than_the_world_size_is_refused(tp, ep, size):
    with pytest.raises(FFNError, match=f"but there are {size} ranks") as caught:
        split_over(tp, ep, size)
    assert caught.value.code == 2


def test_without_torchrun_there_is_a_split_where_one_is_asked_for(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert split_asked_for(None, None) is None
    assert split_asked_for(1, 1) is None
    assert split_asked_for(2, None) == Ranks(2)
    with monkeypatch.context() as under:
        for name, value in SET.items():
            under.setenv(name, value)
        assert split_asked_for(None, None) == Ranks(8)


def test_a_rank_uses_the_gpu_of_its_number():
    place = torchrun(SET)
    assert (device_of(place, "cpu"), device_of(place, "cuda"), device_of(place, "cuda:1")) == (
        "cpu",
        "cuda:1",
        "cuda:1",
    )
    with pytest.raises(FFNError, match="every rank uses the GPU with its own number, here cuda:1"):
        device_of(place, "cuda:0")


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({0: 1}, 1), ({0: 143, 1: 2}, 2), ({0: 3, 1: -9}, 3), ({0: 3, 1: 70}, 70), ({0: -15, 1: 3}, 3),
        ({0: 143, 1: 143}, 143), ({0: -15}, 143),
    ],
)  # fmt: skip
def test_the_exit_code_of_a_run_is_that_of_its_cause(codes, code):
    assert common_exit_code(codes) == code


def test_a_run_whose_ranks_could_say_nothing_names_the_one_that_was_killed():
    with pytest.raises(FFNError, match=r"rank 1 was killed \(signal 9\)") as caught:
        common_exit_code({0: 143, 1: -9, 2: -15})
    assert caught.value.code == 3


def test_the_library_says_how_to_get_ranks(monkeypatch):
    import ffncli

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(
        RanksNeeded, match="2 ranks are needed, but this is one process; start it with torchrun"
    ) as caught:
        ffncli.verify("64x256:gelu", tp=2)
    assert caught.value.ranks == Ranks(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 3}, "d_ff = 256 does not divide over 3 ranks; nearest: 2 and 4"),
        ({"ep": 2}, "no experts to split over 2 ranks"),
        ({"ep": 4, "experts": 6}, "experts = 6 does not divide over 4 ranks; nearest: 3 and 6"),
        ({"tp": 2, "check": "module"}, "runs nothing over several ranks"),
        ({"check": "ranks"}, "check=.ranks. needs several processes"),
        ({"rank_timeout": 3}, "rank_timeout needs several processes"),
        ({"tp": 2, "input": "-"}, "several ranks cannot read one standard input"),
        ({"tp": 2, "referee": True, "kernel": "eager"}, "referee judges a kernel in one process"),
    ],
)
def test_verify_refuses_at_once(monkeypatch, arguments, message):
    import ffncli

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(FFNError, match=message) as caught:
        ffncli.verify("64x256:gelu", **arguments)
    assert caught.value.code == 2
