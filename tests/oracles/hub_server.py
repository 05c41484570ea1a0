"""A Hub on 127.0.0.1 with the files of one model, which can answer wrongly in many ways; and a hand-made cache."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tests.oracles.checkpoints import INDEX, LLAMA, entry, harmful, raw_safetensors

COMMIT = "c0ffee" + "0" * 34
REPO = "some-org/a.model"
CONFIG = json.dumps(LLAMA).encode()
HEADER = json.dumps({"a": entry(), "b": entry(offsets=(8, 16))}).encode()
WEIGHTS = raw_safetensors(HEADER, 16)
SINGLE = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
NAMES = [f"model-{i:05}-of-00040.safetensors" for i in range(1, 41)]
MAP = {"weight_map": {f"t{i}": name for i, name in enumerate(NAMES)}}
SHARDED = {"config.json": CONFIG, INDEX: json.dumps(MAP).encode(), **dict.fromkeys(NAMES, WEIGHTS)}
EXACT = ["bytes=0-7", f"bytes=8-{7 + len(HEADER)}"]

DRIVER = """
import json, sys
connects = []
sys.addaudithook(lambda event, args: connects.append(args[1]) if event == "socket.connect" else None)
from ffncli.errors import FFNError
from ffncli.models.files import hub
hub.PATIENCE, hub._PAUSE = float(sys.argv[2]), 0.02
try:
    model = hub.open_hub(sys.argv[1])
    out = {"revision": model.revision, "folder": model.folder and str(model.folder), "config": str(model.config),
           "shards": [[s.name, s.raw.decode(), s.size] for s in model.shards], "note": model.note, "code": 0}
except FFNError as error:
    out = {"line": str(error), "hint": error.hint, "code": int(error.code)}
print(json.dumps(out | {"connects": len(connects)}))
"""
Opened = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """A fault in the answers for a file: by default for GET and HEAD, every time."""

    status: int = 0
    code: str = ""  # the Hub's X-Error-Code
    wait: float = 0  # seconds before the answer
    cut: int | None = None  # bytes of the body after which the connection is closed
    drip: float = 0  # seconds between two bytes of the body
    whole: bool = False  # ranges are ignored
    says: str = ""  # the Content-Range that is sent for every request
    close: bool = False  # no answer at all
    silent: bool = False  # the Hub's own headers are missing
    to: "HubServer | None" = None  # redirects to the same file on this server
    methods: str = "GET HEAD"
    times: int = 1_000_000


@dataclass(frozen=True)
class Asked:
    """One request: its Range header, and the number of bytes sent in the answer's body."""

    method: str
    path: str
    range: str
    sent: int
    authorization: str
    encoding: str

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass
class HubServer:
    repo: str
    files: Mapping[str, bytes]
    faults: dict[str, Fault] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    stopping: Event = field(default_factory=Event)

    def ranges(self, name: str) -> list[str]:
        """Return the requested ranges of a file, in the order of the answers."""
        return [a.range for a in self.asked if a.file == name and a.method == "GET"]

    def methods(self, name: str) -> list[str]:
        return [a.method for a in self.asked if a.file == name]


@contextmanager
def serving(repo: str, files: Mapping[str, bytes], **faults: Fault) -> Iterator[HubServer]:
    """Run a server; the keyword of a fault is a file name, with `_` for `.` and `-`, or `every`."""
    hub = HubServer(repo, files, {_plain(name): fault for name, fault in faults.items()})
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    server.handle_error = lambda *_: None  # a client that disconnects is not an error
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _plain(name: str) -> str:
    return re.sub(r"[.\-]", "_", name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(None)

    def do_GET(self) -> None:
        self._answer(self.headers.get("Range", ""))

    def _answer(self, asked: str | None) -> None:
        match = re.fullmatch(rf"/{re.escape(self.hub.repo)}/resolve/([^/]+)/([^/]+)", self.path)
        fault = self._fault(match[2] if match else "")
        self.hub.stopping.wait(fault.wait)
        if fault.close:
            self._done(0)
            self.close_connection = True
            return
        if fault.to:
            self._refuse(302, "", fault.to.url + self.path)
        elif fault.status or not match:
            self._refuse(fault.status or 404, fault.code or ("" if match else "RepoNotFound"))
        elif match[1] not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif match[2] not in self.hub.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._file(self.hub.files[match[2]], asked, fault)

    def _fault(self, name: str) -> Fault:
        faults = self.hub.faults
        fault = faults.get(_plain(name)) or faults.get("every") or Fault()
        seen = sum(a.file == name and a.method in fault.methods for a in self.hub.asked)
        return fault if self.command in fault.methods.split() and seen < fault.times else Fault()

    def _refuse(self, status: int, code: str, location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self._done(0)

    def _file(self, content: bytes, asked: str | None, fault: Fault) -> None:
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "")
        start, end = (
            (int(part[1]), min(int(part[2]) + 1, len(content))) if part and not fault.whole else (0, len(content))
        )
        partial = bool(part) and not fault.whole
        if partial and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            end = start
        else:
            self.send_response(206 if partial else 200)
            if partial:
                self.send_header("Content-Range", fault.says or f"bytes {start}-{end - 1}/{len(content)}")
        if not fault.silent:
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self._done(0 if asked is None else self._send(content[start:end], fault))

    def _send(self, body: bytes, fault: Fault) -> int:
        body = body if fault.cut is None else body[: fault.cut]
        try:
            for i in range(0, len(body), 1 if fault.drip else 65536):
                if self.hub.stopping.wait(fault.drip):
                    break
                self.wfile.write(body[i : i + (1 if fault.drip else 65536)])
        except OSError:
            self.close_connection = True
        if fault.cut is not None:
            self.close_connection = True
        return len(body)

    def _done(self, sent: int) -> None:
        said = [self.headers.get(name, "") for name in ("Authorization", "Accept-Encoding")]
        asked = Asked(self.command, self.path, self.headers.get("Range", ""), sent, *said)
        self.hub.asked.append(asked)


def hand_made(cache: Path, repo: str, files: Mapping[str, bytes], revision: str = "main") -> Path:
    """Write a snapshot in the layout of the Hub's library, with links into `blobs`; return its folder."""
    home = cache / f"models--{repo.replace('/', '--')}"
    folder = home / "snapshots" / COMMIT
    for part in (folder, home / "blobs", home / "refs"):
        part.mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text(COMMIT)
    for name, content in files.items():
        blob = sha1(content).hexdigest()
        (home / "blobs" / blob).write_bytes(content)
        (folder / name).symlink_to(f"../../blobs/{blob}")
    return folder


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    return kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DOWNLOAD_TIMEOUT": "30"} | more


def expect_error(got: dict[str, Any], code: int, *parts: str) -> None:
    assert got["code"] == code, got
    assert [p for p in parts if p not in got["line"]] == [], got
    assert got["hint"] or code == 2, got
    assert len(got["line"].splitlines()) == 1, got
    assert harmful(got["line"]) == []
