"""Commands over real ranks: who prints, and what is seen where a rank dies, hangs, fails or never comes."""

import json
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

import pytest

import ffncli
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.run.ranks.join import joined
from tests.ranks.started import FFN, Ended, Meeting, Started, agent, all_end, by_hand, free_port, node

TRACE = ("trace", "16x64:swiglu", "--norm", "rmsnorm", "--residual", "--json")
TRACES = {
    Ranks(2): ("--tokens", "3"),
    Ranks(1, 2): ("--tokens", "5", "--experts", "4", "--top-k", "2", "--shared-experts", "1"),
    Ranks(2, 2): ("--tokens", "3", "--experts", "4", "--top-k", "2"),
}
VERIFY = ("verify", "64x256:swiglu", "--norm", "rmsnorm", "--residual", "--check", "ranks")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How every run of this file ended, by name; a list of names is of the ranks or nodes of one run."""
    folder = tmp_path_factory.mktemp("ranks")
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    (folder / "config0.json").write_text(json.dumps({**config, "num_attention_heads": 2, "vocab_size": 8}))
    file = str(folder / "config${local_rank}.json")
    meet, fail, hang, wrong, quiet = (free_port() for _ in range(5))
    size, params, same = (
        (*VERIFY, "--tp", "3"),
        ("params", "gpt2", "--csv"),
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    )
    runs: list[dict[str, Callable[[], Started]]] = [
        {"hangs 0": lambda: Meeting(folder, "waits", by_hand(0, 2, hang)),
         "hangs 1": lambda: Meeting(folder, "waits", by_hand(1, 2, hang))},
        {"local": lambda: Started((*FFN, *VERIFY, "--tp", "2", "--json"), ranks=2)},
        {f"node {n}": lambda: node(meet, *VERIFY, "--tp", "2", "--json") for n in (0, 1)},
        *({f"trace {split}": partial(trace, split)} for split in TRACES),
        {"dies": lambda: Meeting(folder, "launch-dies", new=True)},
        {"fails 0": lambda: Meeting(folder, "fails", by_hand(0, 2, fail)),
         "fails 1": lambda: Meeting(folder, "fails", by_hand(1, 2, fail))},
        {"file": lambda: Started((*agent(2), "verify", file, "--check", "ranks"), ranks=2)},
        {"size 0": lambda: Started((*FFN, *size), by_hand(0, 2, wrong)),
         "size 1": lambda: Started((*FFN, *size), by_hand(1, 2, wrong, **same))},
        {"params 0": lambda: Started((*FFN, *params), by_hand(0, 2, quiet)),
         "params 1": lambda: Started((*FFN, *params), by_hand(1, 2, quiet))},
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        return {name: end for ends in pool.map(together, runs) for name, end in ends.items()}


def trace(split: Ranks) -> Started:
    return Started((*agent(split.world_size), *TRACE, *TRACES[split], "--ep", str(split.ep)), ranks=split.world_size)


def together(run: dict[str, Callable[[], Started]]) -> dict[str, Ended]:
    """Start the processes of a run, and wait for all but a rank that hangs, which is killed."""
    started = {name: start() for name, start in run.items()}
    try:
        return {name: one.ended() for name, one in started.items() if name != "hangs 1"}
    finally:
        for one in started.values():
            one.process.kill()
            one.process.wait()


@pytest.mark.parametrize("name", ["local", "node 0"])
def test_the_sum_over_two_processes_is_the_whole(ended, name):
    run = ended[name] if ended[name].out else ended["node 1"]  # the rendezvous chooses which node has rank 0
    said = [line for line in run.err.splitlines() if "failed to shutdown the rendezvous" not in line]
    assert (run.code, said) == (0, [])  # torchrun says that where the node that holds the rendezvous ended first
    output, gradient, collectives = json.loads(run.out)["rows"]
    assert output["relative_error"] <= 1e-6
    assert gradient["relative_error"] <= 1e-6
    assert collectives["note"] == "1 all-reduce of [16, 64] float32, 4.096 KB"
    assert all(row["passed"] for row in (output, gradient, collectives))
    assert output["note"] == "a rank has 24,640 of 49,216 parameters"  # half of 3 × 64 × 256, and the norm's 64


def test_of_two_nodes_one_prints(ended):
    assert sorted(bool(ended[f"node {n}"].out) for n in (0, 1)) == [False, True]
    assert [ended[f"node {n}"].code for n in (0, 1)] == [0, 0]


@pytest.mark.parametrize("split", TRACES, ids=str)
def test_a_trace_over_processes_has_the_record_of_one(ended, split):
    run = ended[f"trace {split}"]
    assert (run.code, run.err) == (0, "")
    over = json.loads(run.out)["over_ranks"]
    options = {name: int(value) for name, value in zip(TRACES[split][::2], TRACES[split][1::2], strict=True)}
    given = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
    one = ffncli.trace("16x64:swiglu", norm="rmsnorm", residual=True, tp=split.tp, ep=split.ep, **given).over_ranks
    assert [c["kind"] for c in over["collectives"]] == ["all-to-all"] * (split.ep > 1) + ["all-reduce"] * (split.tp > 1)
    same(over, json.loads(json.dumps(asdict(one))))


def same(there: object, here: object, at: str = "") -> None:
    """Raises AssertionError where two records in JSON differ; numbers by more than the order of a sum explains."""
    if isinstance(here, dict) and isinstance(there, dict):
        assert there.keys() == here.keys(), at
        for key, value in here.items():
            same(there[key], value, f"{at}.{key}")
    elif isinstance(here, list) and isinstance(there, list):
        for number, pair in enumerate(zip(there, here, strict=True)):
            same(*pair, f"{at}[{number}]")
    else:
        assert there == (pytest.approx(here, rel=1e-5, abs=1e-6) if isinstance(here, float) else here), at


@pytest.mark.parametrize(
    ("how", "line"), [("dies", "rank 1 ended before the others"), ("hangs 0", "rank 1 did not answer within 15 s")]
)
def test_a_rank_that_dies_or_hangs_is_named(ended, how: str, line: str):
    assert ended[how] == Ended(3, "", f"error: {line}\n")


def test_an_error_of_one_rank_is_its_own_line_and_exit_code(ended):
    run = ended["fails 1"]
    assert (run.code, ended["fails 0"]) == (70, Ended(3, "", ""))
    assert len(run.err.splitlines()) == 1
    assert run.err.startswith("error: rank 1: a bug in ffn: ValueError: on one rank")


def test_a_rank_without_the_file_says_so(ended):
    (line,) = [line for line in ended["file"].err.splitlines() if line.startswith("error:")]
    assert line.startswith("error: rank 1: ")
    assert "config1.json" in line
    assert ended["file"].code == 1  # the agent's own


def test_a_wrong_world_size_is_refused_on_every_rank_and_printed_once(ended):
    assert [ended[f"size {n}"].code for n in (0, 1)] == [2, 2]
    assert [len(ended[f"size {n}"].err.splitlines()) for n in (0, 1)] == [1, 0]
    assert ended["size 0"].err.startswith("error: --tp 3 × --ep 1 = 3 ranks, but there are 2 ranks;")


def refusal(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> FFNError:
    for name, value in by_hand(rank, 2, port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FFNError) as caught, joined(Ranks(2), "cpu", 0.5):
        pass
    assert caught.value.code == 3
    return caught.value


def test_a_port_in_use_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(refusal(monkeypatch, 0, port)) == f"port {port} is in use; choose another MASTER_PORT"


def test_a_rank_that_never_comes_is_named(monkeypatch):
    assert str(refusal(monkeypatch, 0, free_port())) == "rank 1 did not join within 0.5 s"


def test_a_rank_without_rank_0_says_where_it_looked(monkeypatch):
    port = free_port()
    assert refusal(monkeypatch, 1, port).message == f"no answer within 0.5 s from rank 0 at 127.0.0.1:{port}"


def test_a_command_that_is_not_split_prints_once(ended):
    assert ended["params 0"].out.startswith("name,")
    assert ended["params 1"] == Ended(0, "", "")


@pytest.mark.parametrize(
    ("number", "end"),
    [(signal.SIGINT, Ended(130, "", "interrupted\n")), (signal.SIGTERM, Ended(143, "", "")), (signal.SIGKILL, None)],
)
def test_no_rank_outlives_its_launcher(tmp_path, number, end):
    """Neither by Ctrl-C or SIGTERM, nor when it is killed."""
    run = Meeting(tmp_path, "launch-waits")
    ranks = run.ranks_that_met()
    os.kill(run.process.pid, number)
    assert end is None or run.ended() == end
    assert all_end(ranks)
