"""`ffn params hf://org/name` from end to end: a Hub on this machine, a cache made by hand, and neither."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.checkpoints import INDEX, LLAMA, MIXTRAL, expect_refusal, folder, tensors
from tests.oracles.hub_server import REPO, Fault, HubServer, environment, hand_made, serving

pytestmark = pytest.mark.hub

TEXT = f"hf://{REPO}"
CLOSED = "http://127.0.0.1:9"  # nobody listens there


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    """ffn in a process of its own, with this Hub and a Hub cache of its own."""

    def run(server: HubServer | str, *arguments: str, **more: str) -> tuple[int, str, str]:
        env = environment(tmp_path / "home", server if isinstance(server, str) else server.url, **more)
        command = [sys.executable, "-m", "ffncli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
        return done.returncode, done.stdout, done.stderr

    return run


def files_of(path: Path) -> dict[str, bytes]:
    """A directory's files by name."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


def check_same_row(remote: str, local: str) -> None:
    """Both answers count the same, whatever they call it."""
    (ours,), (theirs,) = (json.loads(text)["rows"] for text in (remote, local))
    said = ("name", "source", "evidence", "costs")
    assert {k: v for k, v in ours.items() if k not in said} == {k: v for k, v in theirs.items() if k not in said}
    assert ours["ffn_params_stored"] == ours["ffn_params_total"] > 0


@pytest.mark.parametrize(("config", "family"), [(LLAMA, "llama"), (MIXTRAL, "mixtral")])
def test_from_the_network_it_counts_what_the_directory_does(config: Any, family: str, ask, call, tmp_path: Path):
    local = folder(tmp_path / "local", config, tensors(family))
    files = files_of(Path(local))
    header = 8 + int.from_bytes(files["model.safetensors"][:8], "little")
    with serving(REPO, files) as server:
        code, out, err = ask(server, "params", TEXT, "--json")
        fetched = server.ranges("model.safetensors")
    assert (code, err) == (0, "")
    check_same_row(out, call("params", local, "--json")[1])
    ends = [int(asked.rpartition("-")[2]) for asked in fetched]
    assert ends
    assert max(ends) < header  # not one byte of a weight


def test_a_disagreement_on_the_hub_is_one_too(ask, tmp_path: Path):
    files = files_of(Path(folder(tmp_path / "local", {**LLAMA, "intermediate_size": 5}, tensors("llama"))))
    with serving(REPO, files) as server:
        code, out, err = ask(server, "params", TEXT)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "intermediate_size: the config says 5, the tensors 6" in err
    assert "parameters per layer" in out


def test_from_the_cache_without_any_network(ask, call, tmp_path: Path):
    local = folder(tmp_path / "local", LLAMA, tensors("llama"))
    hand_made(tmp_path / "home" / "hub", REPO, files_of(Path(local)))
    for source in (TEXT, REPO):  # a bare org/name means the cache alone
        code, out, err = ask(CLOSED, "params", source, "--json", "-q")
        assert (code, err) == (0, "")
        check_same_row(out, call("params", local, "--json")[1])


def test_weights_are_not_fetched_for_a_trace(ask, tmp_path: Path):
    files = files_of(Path(folder(tmp_path / "local", LLAMA, tensors("llama"))))
    with serving(REPO, files) as server:
        expect_refusal(ask(server, "trace", TEXT), "not weights")


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (Fault(401, "GatedRepo"), 2, "401"), (Fault(404, "RepoNotFound"), 2, "404"), (Fault(500), 3, "500"),
        (Fault(wait=30), 3, ""), (Fault(close=True), 3, ""),
    ],
)  # fmt: skip
def test_a_hub_that_answers_badly(fault: Fault, code: int, says: str, ask, tmp_path: Path):
    files = files_of(Path(folder(tmp_path / "local", LLAMA, tensors("llama"))))
    with serving(REPO, files, **{"config.json": fault}) as server:
        expect_refusal(
            ask(server, "params", TEXT, HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1"), says, code=code
        )


def test_a_header_that_is_cut_or_wrong(ask, tmp_path: Path):
    files = files_of(Path(folder(tmp_path / "local", LLAMA, tensors("llama"))))
    whole = files["model.safetensors"]
    for bad in (whole[:20], whole.replace(b'"F32"', b'"F99"'), whole[:-4]):
        with serving(REPO, {**files, "model.safetensors": bad}) as server:
            expect_refusal(ask(server, "params", TEXT), "model.safetensors")


def test_an_index_that_names_a_shard_outside(ask, tmp_path: Path):
    files = files_of(Path(folder(tmp_path / "local", LLAMA, tensors("llama"))))
    index = json.dumps({"weight_map": {"a": "../outside.safetensors"}}).encode()
    with serving(REPO, {"config.json": files["config.json"], INDEX: index}) as server:
        expect_refusal(ask(server, "params", TEXT), "../outside.safetensors")
