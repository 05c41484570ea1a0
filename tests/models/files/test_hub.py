"""`hf://org/name`: which ids there are, what is asked of the Hub and of its cache, and what is not; a Hub that refuses,
fails, lies or is not there: one line, a fitting code, a bounded number of requests."""

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
from tests.oracles.checkpoints import INDEX, harmful, raw_safetensors
from tests.oracles.hub_server import (
    COMMIT,
    CONFIG,
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
    hand_made,
    serving,
)

pytestmark = pytest.mark.hub

# --- the local cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files", [SINGLE, {k: v for k, v in SHARDED.items() if k not in NAMES[1:]}], ids=["single", "one shard of 40"]
)
def test_a_cached_model_needs_no_connection(opened: Opened, nowhere: str, tmp_path: Path, files: dict[str, bytes]):
    folder = hand_made(tmp_path / "home" / "hub", REPO, files)
    got = opened(nowhere)
    assert (got["folder"], got["revision"], got["connects"]) == (str(folder), COMMIT, 0)
    assert got["config"] == str(folder / "config.json")
    assert (got["shards"], got["note"]) == ([], "")


def test_the_cache_may_lie_elsewhere_and_know_a_revision(opened: Opened, nowhere: str, tmp_path: Path):
    folder = hand_made(tmp_path / "other", "gpt2", SINGLE, revision="v1.0")
    for text in ("hf://gpt2@v1.0", f"hf://gpt2@{COMMIT}"):
        got = opened(nowhere, text, HF_HUB_CACHE=str(tmp_path / "other"))
        assert (got["folder"], got["connects"]) == (str(folder), 0)
    got = opened(nowhere, "hf://gpt2", HF_HUB_CACHE=str(tmp_path / "other"))
    assert (got["code"], got["connects"]) == (3, 1)  # main is not there, and no other revision stands in for it


def test_a_config_alone_in_the_cache_is_completed_at_its_commit(opened: Opened, tmp_path: Path):
    folder = hand_made(tmp_path / "home" / "hub", REPO, {"config.json": CONFIG})
    with serving(REPO, SINGLE) as server:
        got = opened(server)
    assert (got["folder"], got["config"]) == (None, str(folder / "config.json"))
    assert got["shards"] == [["model.safetensors", HEADER.decode(), len(WEIGHTS)]]
    assert server.methods("config.json") == []
    assert all(f"/resolve/{COMMIT}/" in a.path for a in server.asked)


@pytest.mark.parametrize("files", [{"config.json": CONFIG}, {"config.json": CONFIG, INDEX: SHARDED[INDEX]}])
def test_without_a_network_the_cached_config_is_enough(opened: Opened, nowhere: str, tmp_path: Path, files):
    folder = hand_made(tmp_path / "home" / "hub", REPO, files)
    got = opened(nowhere)
    assert (got["code"], got["folder"], got["shards"]) == (0, str(folder), [])
    assert "refused" in got["note"]
    got = opened(nowhere, HF_HUB_OFFLINE="1")
    assert (got["folder"], got["connects"]) == (str(folder), 0)
    assert "HF_HUB_OFFLINE" in got["note"]


def test_a_link_that_leads_nowhere_is_no_file(opened: Opened, nowhere: str, tmp_path: Path):
    folder = hand_made(tmp_path / "home" / "hub", REPO, SINGLE)
    (folder / "model.safetensors").resolve().unlink()
    assert "refused" in opened(nowhere)["note"]
    (folder / "config.json").resolve().unlink()
    assert opened(nowhere)["code"] == 3


def test_cached_finds_a_snapshot_and_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = hand_made(tmp_path, REPO, {"config.json": CONFIG})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hub.cached(REPO) == folder
    assert [hub.cached(name) for name in ("some-org/other", "../x", "a b", "")] == [None] * 4
    (tmp_path / "models--some-org--a.model" / "refs" / "main").write_bytes(b"\xff\xfe")
    assert hub.cached(REPO) is None
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    assert hub.cached(REPO) is None


# --- the network ------------------------------------------------------------------------------------------------------


def test_one_file_is_read_up_to_the_end_of_its_header(opened: Opened):
    with serving(REPO, SINGLE) as server:
        got = opened(server)
    assert got["shards"] == [["model.safetensors", HEADER.decode(), len(WEIGHTS)]]
    assert (got["folder"], got["revision"], got["note"]) == (None, COMMIT, "")
    assert Path(got["config"]).read_bytes() == CONFIG
    assert Path(got["config"]).parent.name == COMMIT
    assert server.ranges("model.safetensors") == EXACT
    assert sum(a.sent for a in server.asked if a.file == "model.safetensors") == 8 + len(HEADER)
    assert {a.encoding for a in server.asked if a.range} == {"identity"}  # a compressed file has no ranges


def test_every_shard_is_read_up_to_the_end_of_its_header(opened: Opened):
    with serving(REPO, SHARDED) as server:
        got = opened(server)
    assert got["shards"] == [[name, HEADER.decode(), len(WEIGHTS)] for name in NAMES]
    assert [server.ranges(name) for name in NAMES] == [EXACT] * 40
    assert sum(a.sent for a in server.asked if a.file in NAMES) == 40 * (8 + len(HEADER))
    assert server.ranges("model.safetensors") == []


def test_shards_are_asked_for_several_at_a_time(opened: Opened):
    faults = dict.fromkeys(NAMES, Fault(wait=0.25, times=1))
    with serving(REPO, SHARDED, **faults) as server:
        began = time.monotonic()
        assert len(opened(server)["shards"]) == 40
    assert time.monotonic() - began < 40 * 0.25


def test_what_was_fetched_is_not_fetched_again(opened: Opened, nowhere: str):
    with serving(REPO, SHARDED) as server:
        first = opened(server)
        server.asked.clear()
        assert opened(server)["shards"] == first["shards"]
        assert {a.file for a in server.asked} == set(NAMES)
    assert opened(nowhere)["config"] == first["config"]


def test_a_revision_is_asked_for_and_then_its_commit(opened: Opened):
    with serving(REPO, SINGLE) as server:
        assert opened(server, f"hf://{REPO}@{COMMIT}")["revision"] == COMMIT
        expect_error(opened(server, f"hf://{REPO}@v9/x"), 2, "'v9/x'", "404")
    assert server.asked[-1].path == f"/{REPO}/resolve/v9%2Fx/config.json"


@pytest.mark.parametrize("code", ["EntryNotFound", ""], ids=["the Hub's code", "a mirror that has none"])
def test_a_model_without_safetensors_has_its_config(opened: Opened, code: str):
    absent = Fault(404, code)
    with serving(REPO, {"config.json": CONFIG}, **{INDEX: absent, "model.safetensors": absent}) as server:
        got = opened(server)
    assert (got["code"], got["shards"], got["folder"]) == (0, [], None)
    assert {a.file for a in server.asked} == {"config.json", INDEX, "model.safetensors"}


def test_the_token_is_sent_and_never_shown(opened: Opened):
    with serving(REPO, SINGLE, model_safetensors=Fault(401)) as server:
        got = opened(server, HF_TOKEN="hf_secret")
    assert {a.authorization for a in server.asked} == {"Bearer hf_secret"}
    assert "hf_secret" not in json.dumps(got)


@pytest.mark.parametrize("token", ["hf_\x0bsecret", "hf_sécret"])
def test_a_token_that_cannot_be_sent_is_not_quoted(opened: Opened, token: str):
    with serving(REPO, SINGLE) as server:
        got = opened(server, HF_TOKEN=token)
    expect_error(got, 3, "127.0.0.1", "HF_TOKEN")
    assert "cret" not in json.dumps(got)


def test_a_password_in_the_endpoint_is_not_quoted(opened: Opened, nowhere: str):
    got = opened(nowhere.replace("//", "//user:password@"))
    expect_error(got, 3, "cannot reach 127.0.0.1")
    assert "password" not in json.dumps(got)


def test_headers_come_from_where_the_hub_stores_files_without_the_token(opened: Opened):
    with serving(REPO, SINGLE) as storage, serving(REPO, SINGLE, model_safetensors=Fault(to=storage)) as server:
        assert len(opened(server, HF_TOKEN="hf_secret")["shards"]) == 1
    assert storage.ranges("model.safetensors") == EXACT
    assert [{a.authorization for a in hub.asked} for hub in (server, storage)] == [{"Bearer hf_secret"}, {""}]


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("hf://gpt2", ("gpt2", "main")), ("hf://org/na.me-1_0", ("org/na.me-1_0", "main")),
     ("hf://org/name@v1.0", ("org/name", "v1.0")), ("hf://org/name@refs/pr/3", ("org/name", "refs/pr/3")),
     (f"hf://org/name@{COMMIT}", ("org/name", COMMIT))],
)  # fmt: skip
def test_ids(text: str, expected: tuple[str, str]):
    assert hub.parse(text) == expected


@pytest.mark.parametrize(
    "repo",
    ["", "/", "..", "../..", "org/..", "../name", "org/a..b", "/etc/passwd", "a/b/c", "org/", "/name", "org name",
     "org/na\nme", "org/name\n", "org/na\x1b[31mme", "org/na\0me", "org\\name", "org/näme", "a" * 97, "org--name",
     "org/name.git", "\u202eorg/name", "org/name?x", "%2e%2e/name"],
)  # fmt: skip
def test_what_is_no_id(repo: str):
    with pytest.raises(FFNError, match="is not the name of a model on the Hub") as refused:
        hub.open_hub(f"hf://{repo}")
    assert refused.value.code == 2
    assert harmful(str(refused.value)) == []


@pytest.mark.parametrize(
    "revision",
    ["", "..", "../main", "a/../b", "/etc/passwd", "a//b", "a b", "a\nb", "\x1b[0m", "-x", "a.", "a/", "a" * 251],
)
def test_what_is_no_revision(revision: str):
    with pytest.raises(FFNError, match="is not a revision") as refused:
        hub.open_hub(f"hf://org/name@{revision}")
    assert harmful(str(refused.value)) == []


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


def test_the_ffns_of_a_checkpoint_on_the_hub_are_compared_by_ranges(tmp_path: Path):
    """Few bytes besides those of the FFNs are asked for, and the answer is that of the same files on disk."""
    from tests.oracles import edited

    base = edited.tensors("gated") | {"lm_head.weight": edited.torch.randn(4000, edited.D_MODEL)}
    folder = edited.write(tmp_path / "base", "gated", base)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    code = "import ffncli, sys; print(ffncli.compare(*sys.argv[1:]).first.finding)"
    with serving("acme/tiny", files) as server:
        words = [sys.executable, "-c", code, str(folder), "hf://acme/tiny"]
        env = environment(tmp_path / "home", server.url)
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == "same\n", done.stderr
        sent = sum(asked.sent for asked in server.asked if asked.file == "model.safetensors")
    ffns = sum(4 * t.numel() for name, t in base.items() if ".mlp." in name or "norm" in name)
    assert ffns <= sent <= 1.1 * ffns + 20_000  # and the header
