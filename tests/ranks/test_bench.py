"""`ffn bench` over two real ranks: under torchrun and started by itself; a rank that dies, one that hangs."""

import csv
import json
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ranks.started import Ended, Started, agent

_KERNELS = """
import os, signal, time
from torch.nn.functional import linear, silu

RANK = os.environ["RANK"]

def right(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)

def wrong(x, gate, up, down):
    return right(x, gate, up, down) * (2 if RANK == "1" else 1)

def raises(x, gate, up, down, calls=[]):
    calls.append(x)
    if RANK == "1" and len(calls) > 12:
        raise ValueError("out of luck")
    return right(x, gate, up, down)

def dies(x, gate, up, down):
    if RANK == "1" and len(x) == 6 and not os.path.exists("mended"):
        os.kill(os.getpid(), signal.SIGKILL)
    return right(x, gate, up, down)

def hangs(x, gate, up, down, calls=[]):
    calls.append(x)
    if RANK == "1" and len(calls) > 12:
        time.sleep(600)
    return right(x, gate, up, down)
"""
_FFN = (sys.executable, "-m", "ffncli", "bench")
_TORCHRUN = (*agent(2), "bench")
_SHORT = ("32x64:swiglu", "--device", "cpu", "--threads", "1", "--processes", "1", "--max-time", "200ms")


def ran(folder: Path, *command: str, ranks: int = 2, **more: str) -> Ended:
    """A run in that folder. Its ranks are forked, their workers are not."""
    (folder / "k.py").write_text(_KERNELS)
    env = {"FFN_TEST_MARK": str(folder), "COLUMNS": "80", **more}
    return Started(command, env, ranks, folder=folder).ended()


def left_over(folder: Path) -> list[str]:
    """The processes of that run which are still there, a moment later: with its mark, or forked and in its folder."""
    mark, found = f"FFN_TEST_MARK={folder}".encode(), ["?"]
    until = time.monotonic() + 15
    while found and time.monotonic() < until:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                marked = mark in (process / "environ").read_bytes().split(b"\0")
                if marked or (process / "cwd").readlink() == folder:
                    found.append(process.name)
    return found


def rows_in(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert max(Counter((row["case"], row["kernel"]) for row in rows).values()) == 1
    return {(row["tokens"], row["kernel"]): row for row in rows}


def test_under_torchrun_rank_0_prints_one_page_whose_rows_show_both_parts(tmp_path):
    kernels = "eager,dtensor,wrong=k.py:wrong,raises=k.py:raises"
    run = ran(tmp_path, *_TORCHRUN, *_SHORT, "-n", "8", "-k", kernels, "--save", "a.csv", "--json")
    assert run.code == 1, run.err
    rows = {row["kernel"]: row for row in json.loads(run.out)["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "eager": "ok", "dtensor": "ok", "wrong": "wrong", "raises": "failed"
    }  # fmt: skip
    for name in ("eager", "dtensor"):
        row = rows[name]
        assert (row["world_size"], row["layout"]) == (2, "tp2")
        assert row["communication_bytes"] == 2 * (1 / 2) * 8 * 32 * 4
        assert row["error_rel"] < 1e-6
        apart = row["compute_s"] + row["communication_s"]
        assert row["compute_s"] > 0
        assert row["overlap"] == pytest.approx((apart - row["time_s"]) / row["communication_s"], rel=1e-6)
    assert "out of luck" in rows["raises"]["note"]
    assert "rank 1" in rows["raises"]["note"]
    assert run.err.count("wrong results: wrong") == 1
    assert left_over(tmp_path) == []


def test_a_rank_that_dies_ends_the_run_whose_finished_rows_are_kept_and_can_be_resumed(tmp_path):
    run = ran(tmp_path, *_FFN, *_SHORT, "--tp", "2", "-n", "4,6", "-k", "eager,dies=k.py:dies", "--save", "a.csv")
    assert run.code == 3, run.err
    (line,) = [line for line in run.err.splitlines() if line.startswith("error")]
    assert "rank 1" in line
    assert "killed (signal 9)" in line
    assert "1 of 2 units kept in a.csv; resume with" in line
    assert left_over(tmp_path) == []
    assert set(rows_in(tmp_path / "a.csv")) == {("4", "eager"), ("4", "dies")}
    before = rows_in(tmp_path / "a.csv")
    (tmp_path / "mended").touch()
    again = ran(tmp_path, *_FFN, "--resume", "a.csv")
    assert again.code == 0, again.err
    after = rows_in(tmp_path / "a.csv")
    assert set(after) == {(tokens, kernel) for tokens in ("4", "6") for kernel in ("eager", "dies")}
    assert all(after[key] == row for key, row in before.items())
    assert {(row["layout"], row["status"]) for row in after.values()} == {("tp2", "ok")}


def test_a_rank_that_hangs_ends_the_run_within_the_time_of_a_call(tmp_path):
    kernels = ("-k", "eager,hangs=k.py:hangs", "--call-time", "5s")
    run = ran(tmp_path, *_FFN, *_SHORT, "--tp", "2", "-n", "4", *kernels, "--save", "a.csv")
    assert run.code == 3, run.err
    (line,) = [line for line in run.err.splitlines() if line.startswith("error")]
    assert "did not answer within" in line or "a call took more than 5 s" in line
    assert left_over(tmp_path) == []


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run = ran(tmp_path, *_FFN, *_SHORT, "-n", "4", "--save", "a.csv", ranks=0, **place)
    wrong = ran(tmp_path, *_FFN, *_SHORT, "-n", "4", "--tp", "3", "--save", "a.csv", ranks=0, **place)
    assert run.code == 3, run.err
    assert f"error: port {port} is in use" in run.err
    assert wrong.code == 2
    assert "3 ranks, but there are 2" in wrong.err
    assert not (tmp_path / "a.csv").exists()
