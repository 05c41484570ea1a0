"""`hf://org/name`: which ids there are, what is asked of the Hub and of its cache, and what is not."""

import json
import sys
import time
from pathlib import Path

import pytest

from ffncli.errors import FFNError
from ffncli.models.files import hub
from tests.oracles.checkpoints import INDEX, harmful
from tests.oracles.hub_server import (
    COMMIT,
    CONFIG,
    EXACT,
    HEADER,
    NAMES,
    REPO,
    SHARDED,
    SINGLE,
    WEIGHTS,
    Fault,
    Opened,
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
