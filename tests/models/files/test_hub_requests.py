"""A Hub that refuses, fails, lies or is not there: one line, a fitting code, a bounded number of requests."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffncli.errors import FFNError
from ffncli.models.files import hub
from ffncli.models.files.hub import Requests
from tests.oracles.checkpoints import INDEX, raw_safetensors
from tests.oracles.hub_server import (
    COMMIT,
    DRIVER,
    EXACT,
    HEADER,
    NAMES,
    REPO,
    SHARDED,
    SINGLE,
    WEIGHTS,
    Fault,
    Opened,
    environment,
    expect_error,
    serving,
)

pytestmark = pytest.mark.hub

# --- what the Hub refuses, and what is wrong in itself ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "hf auth login"), (403, "accept the terms"), (404, "check the spelling")]
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_refusals_say_what_to_do(opened: Opened, status: int, hint: str, name: str):
    code = "RepoNotFound" if status == 404 else "GatedRepo"
    with serving(REPO, SINGLE, **{name: Fault(status, code)}) as server:
        expect_error(opened(server), 2, REPO, str(status), hint)
    assert len(server.methods(name)) == 1


def test_a_model_without_a_config(opened: Opened):
    with serving(REPO, {"model.gguf": b"GGUF"}) as server:
        expect_error(opened(server), 2, "has no config.json")


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"", "0 bytes"), (WEIGHTS[:5], "5 bytes"), (raw_safetensors(HEADER, 16, length=10**6), "header of 1000000"),
     (raw_safetensors(HEADER, 16, length=2**64 - 1), f"header of {2**64 - 1}")],
)  # fmt: skip
def test_a_file_that_cannot_be_safetensors(opened: Opened, content: bytes, part: str):
    with serving(REPO, {**SINGLE, "model.safetensors": content}) as server:
        expect_error(opened(server), 2, "model.safetensors", "truncated", part)
    assert server.ranges("model.safetensors") == EXACT[:1]


def test_a_header_beyond_the_limit_is_never_asked_for(opened: Opened):
    says = f"bytes 0-7/{10**12}"
    huge = (10**8 + 1).to_bytes(8, "little") + b"{}"
    with serving(REPO, {**SINGLE, "model.safetensors": huge}, model_safetensors=Fault(says=says)) as server:
        expect_error(opened(server), 2, "100,000,001 bytes")
    assert server.ranges("model.safetensors") == EXACT[:1]
    large = {**SHARDED, **dict.fromkeys(NAMES, (10**8).to_bytes(8, "little"))}
    with serving(REPO, large, every=Fault(says=says)) as server:
        expect_error(opened(server), 2, "4,000,000,000 bytes")
    assert {r for name in NAMES for r in server.ranges(name)} == set(EXACT[:1])


@pytest.mark.parametrize(
    ("index", "part"),
    [({"t": "../../etc/passwd"}, "plain file name"), ({"t": "absent.safetensors"}, "'absent.safetensors'"),
     ({f"t{i}": f"{i}.safetensors" for i in range(2001)}, "2,001 files"), ({}, "weight_map is missing")],
)  # fmt: skip
def test_an_index_that_cannot_be_followed(opened: Opened, index: dict[str, str], part: str):
    with serving(REPO, {**SINGLE, INDEX: json.dumps({"weight_map": index}).encode()}) as server:
        expect_error(opened(server), 2, part)
    assert {a.file for a in server.asked} <= {"config.json", INDEX, "absent.safetensors"}


def test_a_config_that_is_too_large_is_not_fetched(opened: Opened):
    with serving(REPO, {"config.json": b" " * 10_000_001}) as server:
        expect_error(opened(server), 2, "10,000,001 bytes")
    assert server.methods("config.json") == ["HEAD"]


# --- a Hub that cannot be used ----------------------------------------------------------------------------------------


def test_no_hub_there_is_said_at_once(opened: Opened, nowhere: str):
    began = time.monotonic()
    got = opened(nowhere)
    assert time.monotonic() - began < 10  # the library alone takes 23 s
    expect_error(got, 3, "cannot reach 127.0.0.1", "refused")
    assert got["connects"] == 1


def test_offline_and_not_cached(opened: Opened):
    with serving(REPO, SINGLE) as server:
        got = opened(server, HF_HUB_OFFLINE="1")
    expect_error(got, 3, "HF_HUB_OFFLINE", REPO)
    assert (server.asked, got["connects"]) == ([], 0)


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_server_that_fails_is_asked_twice(opened: Opened, status: int, name: str):
    with serving(REPO, SINGLE, **{name: Fault(status)}) as server:
        expect_error(opened(server), 3, str(status))
    assert len(server.methods(name)) == 2


@pytest.mark.parametrize("fault", [Fault(500, times=1), Fault(close=True, times=1), Fault(cut=4, times=1)])
def test_a_failure_that_passes_is_not_seen(opened: Opened, fault: Fault):
    with serving(REPO, SINGLE, config_json=fault, model_safetensors=fault) as server:
        assert len(opened(server)["shards"]) == 1


def test_too_many_requests_is_not_answered_with_more(opened: Opened):
    with serving(REPO, SINGLE, model_safetensors=Fault(429)) as server:
        expect_error(opened(server), 3, "429", "wait")
    assert len(server.methods("model.safetensors")) == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("method", ["HEAD GET", "GET"])
def test_a_slow_hub_is_given_up(opened: Opened, name: str, method: str):
    began = time.monotonic()
    with serving(REPO, SINGLE, **{name: Fault(wait=60, methods=method)}) as server:
        got = opened(server, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert time.monotonic() - began < 20
    own = (name, method) != ("config.json", "GET")  # that one is the library's, which tries again
    expect_error(got, 3, "does not answer within 1 s" if own else "127.0.0.1")
    assert len(server.methods(name)) <= (1 if own else 4)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_hub_that_trickles_is_given_up(opened: Opened, name: str):
    began = time.monotonic()
    with serving(REPO, SINGLE, **{name: Fault(drip=0.5)}) as server:
        expect_error(opened(server, patience=1.5, HF_HUB_DOWNLOAD_TIMEOUT="1"), 3, "took more than 1.5 s")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("fault", "part"),
    [(Fault(cut=4), "broke off"), (Fault(close=True), "broke off"), (Fault(says="bytes 1-8/1000"), "bytes, expected"),
     (Fault(says="nonsense"), "which bytes"), (Fault(whole=True), "whole files")],
)  # fmt: skip
def test_an_answer_that_is_not_the_one_asked_for(opened: Opened, fault: Fault, part: str):
    with serving(REPO, SINGLE, model_safetensors=fault) as server:
        expect_error(opened(server), 3, part)
    assert len(server.methods("model.safetensors")) <= 2


@pytest.mark.parametrize("fault", [Fault(cut=4), Fault(close=True, methods="GET")])
def test_a_config_that_breaks_off_is_asked_for_twice_at_most(opened: Opened, fault: Fault, tmp_path: Path):
    with serving(REPO, SINGLE, config_json=fault) as server:
        expect_error(opened(server), 3, "broke off")
    assert 1 <= server.methods("config.json").count("GET") <= 2
    assert list(tmp_path.rglob("config.json")) == []


def test_something_else_answers_in_the_hubs_place(opened: Opened):
    with serving(REPO, SINGLE, config_json=Fault(silent=True)) as server:
        expect_error(opened(server), 3, "does not respond like a Hub", "HF_ENDPOINT")
    for endpoint in ("nothing", "http://[", "ftp://127.0.0.1"):
        assert opened(endpoint)["code"] in (2, 3)


def test_a_cache_that_cannot_be_written(opened: Opened, tmp_path: Path):
    (tmp_path / "file").touch()
    with serving(REPO, SINGLE) as server:
        expect_error(opened(server, HF_HUB_CACHE=str(tmp_path / "file" / "hub")), 3, "config.json", "Not a directory")


def test_settings_that_the_library_cannot_use(opened: Opened, nowhere: str):
    expect_error(opened(nowhere, HF_HUB_DOWNLOAD_TIMEOUT="soon"), 2, "'soon'", "HF_HUB_DOWNLOAD_TIMEOUT")


@pytest.mark.parametrize(
    ("address", "code", "parts"),
    [("http://127.0.0.1:99999", 2, ("'http://127.0.0.1:99999'", "Port out of range")),
     ("http://user:secret@127.0.0.1:99999", 2, ("'http://127.0.0.1:99999'",)), ("http://[::1", 2, ("IPv6",)),
     ("", 3, ("HF_ENDPOINT is ''",)), ("hub.example", 3, ("'hub.example'",)), ("ftp://hub.example", 3, ("'ftp:",))],
)  # fmt: skip
def test_an_endpoint_that_is_no_address(opened: Opened, address: str, code: int, parts: tuple[str, ...]):
    got = opened(address)
    expect_error(got, code, "HF_ENDPOINT", *parts)
    assert "secret" not in got["line"]
    assert got["connects"] == 0


def test_the_library_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    with pytest.raises(
        FFNError, match="needs huggingface_hub; in a clone of ffn: pip install -e '\\.\\[models\\]'"
    ) as refused:
        hub.open_hub(f"hf://{REPO}")
    assert refused.value.code == 3


def test_interrupting_ends_it(tmp_path: Path):
    with serving(REPO, SHARDED, **dict.fromkeys(NAMES, Fault(wait=60))) as server:
        command = [sys.executable, "-c", DRIVER, f"hf://{REPO}", "12"]
        env = environment(tmp_path, server.url)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's child would ignore it
        )  # fmt: skip
        while "GET" not in server.methods("config.json"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert errors.splitlines()[-1] == b"KeyboardInterrupt"
    assert errors.count(b"Traceback") == 1


def test_after_an_error_nothing_more_is_asked():
    requests = Requests(REPO)
    with pytest.raises(ZeroDivisionError):
        requests.together(lambda number: 1 // number, [0])
    with pytest.raises(FFNError, match="took more than"):
        requests.ask("GET", "model.safetensors", COMMIT, (0, 8))
