"""Read config.json and safetensors headers of `hf://org/name[@revision]`, from the local Hub cache or the network.

A cached snapshot with weights needs no request. A snapshot without weights (only a config, fetched by another program)
is completed from the network at the same commit, or used as it is if there is no network, since the result must not
depend on what happens to be cached. Weights are never fetched. Endpoint, token, session and cache are those of
huggingface_hub. Every response is limited in bytes and in time, a request is repeated at most once, and all errors are
one line.
"""

import logging
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ffncli.errors import UNSAFE, ExitCode, FFNError, shown
from ffncli.models.files.checkpoint import INDEX, open_checkpoint
from ffncli.models.files.headers import MOST_HEADER_BYTES, check_length
from ffncli.models.files.rows import FetchedFile
from ffncli.models.files.strict_json import MOST_CONFIG_BYTES
from ffncli.system.packages import extra_command

PREFIX = "hf://"
CONFIG = "config.json"
MOST_SHARDS = 2_000  # the longest known list has fewer than 300
MOST_BYTES = 4 * MOST_HEADER_BYTES  # all headers of a model together; 90,000 tensors need 11 MB
_SINGLE = "model.safetensors"
# Names that git allows for a branch or tag, and that are safe inside the cache's folder.
_REVISION = re.compile(r"(?![-/.])(?!.*(\.\.|//|/\.|@\{))[^ ~^:?*\[\\]{1,250}(?<![/.])")


@dataclass(frozen=True)
class RemoteHeader:
    """A safetensors file on the Hub: `raw` is its unchecked JSON header, `size` is the file's size in bytes."""

    name: str
    raw: bytes
    size: int


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub. `revision` is the commit if known.

    Either `folder` is a cached snapshot, which is read like any directory, or `config` is on disk and `shards` holds
    the headers (empty if there are no safetensors). `note` is a message to the user about the model's origin.
    """

    repo: str
    revision: str
    folder: Path | None
    config: Path
    shards: tuple[RemoteHeader, ...] = ()
    note: str = ""


def open_hub(text: str) -> HubModel:
    """Open the model at `hf://org/name[@revision]`.

    Errors have exit code 2 for an invalid id, a refusal by the Hub (401, 403, 404) and an invalid file; exit code 3 for
    a missing library, and for a Hub that is offline, unreachable, slow, or failing (5xx).
    """
    repo, revision = parse(text)
    folder = _snapshot(repo, revision)
    kept = HubModel(repo, folder.name, folder, folder / CONFIG) if folder else None
    if kept and _has_weights(kept.config.parent):
        return kept
    try:
        if library().constants.HF_HUB_OFFLINE:
            missing = "safetensors" if kept else "copy"
            what = f"HF_HUB_OFFLINE is set, and the local Hub cache has no {missing} of {shown(text)}"
            raise FFNError(what, "unset it, or give a local directory", ExitCode.ENVIRONMENT)
        with quiet():
            return _fetched(Requests(repo), revision, kept)
    except FFNError as error:
        if kept is None or error.code is not ExitCode.ENVIRONMENT:
            raise
        return replace(kept, note=f"{error.message}: the model is read from the cached config alone")


def files_of(text: str, commit: str) -> Callable[[str], Path]:
    """Return a function from a name to that file of a model at a commit; its bytes are fetched when they are read."""
    hub = Requests(parse(text)[0])

    def fetch(name: str, start: int, stop: int) -> bytes:
        hub.deadline = time.monotonic() + PATIENCE * hub.timeout  # for this request, since there may be thousands
        with quiet():
            body = hub.ask("GET", name, commit, (start, stop)).body
        if len(body) != stop - start:
            raise FFNError(f"{hub.label(name)} is truncated: it ends before byte {stop:,}")
        return body

    def file(name: str) -> Path:
        path = FetchedFile(f"{hub.label()}/{name}")
        path.fetch = partial(fetch, name)
        return path

    return file


def cached(repo: str) -> Path | None:
    """Find the snapshot of `org/name[@revision]` in the local Hub cache; None if it has no config there. Sends no
    request and raises no error."""
    try:
        return _snapshot(*parse(PREFIX + repo))
    except FFNError:
        return None


def parse(text: str) -> tuple[str, str]:
    """Split `hf://org/name[@revision]` into (`org/name`, revision); the default revision is `main`."""
    utils = library().utils
    repo, at, revision = text.removeprefix(PREFIX).partition("@")
    try:
        utils.validate_repo_id(repo)
        good = repo.isascii() and repo.isprintable()  # early versions of the library accept `é` and a final newline
    except utils.HFValidationError:
        good = False
    if not good:
        hint = "write hf://org/name or hf://org/name@revision, in letters, digits, '-', '_' and '.'"
        raise FFNError(f"{shown(text)} is not the name of a model on the Hub", hint)
    if at and not (revision.isprintable() and _REVISION.fullmatch(revision)):
        raise FFNError(
            f"{shown(text)}: {shown(revision)} is not a revision", "give a branch, tag or commit after the @"
        )
    return repo, revision or "main"


# --- the local cache --------------------------------------------------------------------------------------------------


def _snapshot(repo: str, revision: str) -> Path | None:
    config = _cached_file(repo, CONFIG, revision)
    return config.parent if config else None


def _cached_file(repo: str, name: str, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(repo, name, revision=revision)
    except (OSError, ValueError):  # an unreadable cache counts as empty
        return None
    return Path(path) if isinstance(path, str) else None


def _has_weights(folder: Path) -> bool:
    # a snapshot's files are links into `blobs`, and a link may be broken
    return any(path.exists() for path in folder.glob("*.safetensors"))


# --- the network ------------------------------------------------------------------------------------------------------


def _fetched(hub: "Requests", revision: str, kept: HubModel | None) -> HubModel:
    """Fetch config, index and headers at one commit: the commit of the cached config or, without one, of `revision`."""
    config = kept.config if kept else hub.download(CONFIG, revision, MOST_CONFIG_BYTES)
    if config is None:
        raise FFNError(f"{hub.label()} has no {CONFIG} (404)", "give a model in transformers' format")
    commit = config.parent.name
    index = _cached_file(hub.repo, INDEX, commit) or hub.download(INDEX, commit, MOST_HEADER_BYTES)
    names = _shards(index, hub) if index else [_SINGLE]
    sizes = hub.together(lambda name: _sizes(hub, name, commit), names)
    if index is None and sizes == [None]:
        return HubModel(hub.repo, commit, None, config)
    headers = [(name, *size) for name, size in zip(names, sizes, strict=True) if size]
    if missing := next((name for name, size in zip(names, sizes, strict=True) if not size), None):
        raise FFNError(f"{hub.label(INDEX)} names {shown(missing)}, which the model does not have (404)")
    total = sum(length for _, length, _ in headers)
    if total > MOST_BYTES:
        raise FFNError(f"{hub.label()}: headers of {total:,} bytes, more than any model needs")
    return HubModel(hub.repo, commit, None, config, tuple(hub.together(lambda s: _header(hub, commit, *s), headers)))


def _shards(index: Path, hub: "Requests") -> list[str]:
    checkpoint = open_checkpoint(index)
    names = sorted(set(checkpoint.files.values())) if checkpoint else []
    if len(names) > MOST_SHARDS:
        raise FFNError(f"{hub.label(INDEX)} names {len(names):,} files, more than any model needs")
    return names


def _sizes(hub: "Requests", name: str, commit: str) -> tuple[int, int] | None:
    """Return the bytes of the header and of the file, from the first 8 bytes; None if the file is missing."""
    answer = hub.ask("GET", name, commit, (0, 8))
    if answer.status == 404:
        return None
    size, length = answer.size or 0, int.from_bytes(answer.body, "little")
    check_length(length, size, hub.label(name))
    return length, size


def _header(hub: "Requests", commit: str, name: str, length: int, size: int) -> RemoteHeader:
    raw = hub.ask("GET", name, commit, (8, 8 + length)).body if length else b""
    return RemoteHeader(name, raw, size)


AT_ONCE = 16  # simultaneous requests
PATIENCE = 12  # time limit for all requests together, in multiples of the limit for one request: two minutes by default
_PAUSE = 0.5  # seconds before a request is repeated
_ATTEMPTS = {"HEAD": 1, "GET": 2}  # the library's attempts for one address
_RANGE = re.compile(r"bytes (?:(?P<start>[0-9]{1,19})-[0-9]{1,19}|\*)/(?P<size>[0-9]{1,19})")
_UNSET = "unset it, or give it an address like https://huggingface.co"
_LOGIN = "`hf auth login`, or HF_TOKEN"
_REFUSALS = {
    401: ("not found, or you need to log in (401)", f"check the spelling; a gated or private model needs {_LOGIN}"),
    403: ("the Hub refuses access (403)", f"accept the terms on the model's page, then {_LOGIN}"),
    404: ("not on the Hub (404)", f"check the spelling; a private model needs {_LOGIN}"),
}
_T = TypeVar("_T")
_R = TypeVar("_R")


def library() -> Any:
    """Import huggingface_hub. Raises FFNError if it is not installed or cannot use its environment variables."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ImportError:
        hint = extra_command("models")
        raise FFNError("reading from the Hub needs huggingface_hub", hint, ExitCode.ENVIRONMENT) from None
    except ValueError as error:
        hint = "check HF_ENDPOINT, HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT"
        raise FFNError(f"huggingface_hub rejects its settings: {one_line(error)}", hint) from None
    endpoint = huggingface_hub.constants.ENDPOINT
    try:
        _ = urlsplit(endpoint).port
    except ValueError as error:  # the library would fail later, in one of its imports
        raise FFNError(f"HF_ENDPOINT is {_address(endpoint)}: {one_line(error)}", _UNSET) from None
    return huggingface_hub


def _address(endpoint: str) -> str:
    """Return HF_ENDPOINT for error messages, without user and password."""
    scheme, slashes, rest = endpoint.rpartition("//")
    return shown(scheme + slashes + rest.rpartition("@")[2])


def one_line(error: object) -> str:
    """Shorten a library's message to its first line, without terminal control characters."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return UNSAFE.sub("?", line)[:120]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence huggingface_hub: no progress bars, warnings, retry messages or telemetry requests."""
    constants, utils, logger = library().constants, library().utils, logging.getLogger("huggingface_hub")
    level, telemetry, no_bars = logger.level, constants.HF_HUB_DISABLE_TELEMETRY, utils.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        constants.HF_HUB_DISABLE_TELEMETRY = True
        utils.disable_progress_bars()
        try:
            yield
        finally:
            logger.setLevel(level)
            constants.HF_HUB_DISABLE_TELEMETRY = telemetry
            if not no_bars:
                utils.enable_progress_bars()


@dataclass(frozen=True)
class HubResponse:
    """A response: the requested bytes (`body`), the file's `size` if known, the Hub's error code (`refusal`)."""

    status: int
    body: bytes = b""
    size: int | None = None
    refusal: str = ""


class _BrokenResponse(Exception):
    """A response that ended early or does not match the request: worth one more attempt."""


class Requests:
    """The requests for one model. Errors have exit code 2 if the Hub refuses a request, 3 if the Hub cannot be used."""

    def __init__(self, repo: str) -> None:
        hub = library()
        self.repo = repo
        endpoint = urlsplit(hub.constants.ENDPOINT)
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
            what = f"HF_ENDPOINT is {_address(hub.constants.ENDPOINT)}, which is not the address of a Hub"
            raise FFNError(what, _UNSET, ExitCode.ENVIRONMENT)
        self.host = one_line(hub.constants.ENDPOINT.rpartition("//")[2].rpartition("@")[2])  # without user and password
        self.timeout = float(hub.constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self.deadline = time.monotonic() + PATIENCE * self.timeout
        try:
            self.session = hub.get_session()
            self.headers = hub.utils.build_hf_headers(library_name="ffncli") | {"Accept-Encoding": "identity"}
        except (OSError, ValueError, ImportError) as error:  # certificates, proxy address, or proxy package
            hint = "check the proxy and certificate settings"
            raise FFNError(f"cannot open a connection: {one_line(error)}", hint, ExitCode.ENVIRONMENT) from None
        self.http = sys.modules[type(self.session).__module__.partition(".")[0]]  # httpx, or its successor
        self.broken = (_BrokenResponse, self.http.ReadError, self.http.WriteError, self.http.RemoteProtocolError)

    def label(self, name: str = "") -> str:
        """Return the name of the model, or of one of its files, for error messages."""
        return f"hf://{self.repo}" + (f"/{name}" if name else "")

    # --- files --------------------------------------------------------------------------------------------------------

    def download(self, name: str, revision: str, most: int) -> Path | None:
        """Download a small file of the model into the local cache; None if the model has no such file."""
        return self.together(lambda file: self._to_cache(file, revision, most), [name])[0]

    def _to_cache(self, name: str, revision: str, most: int) -> Path | None:
        from huggingface_hub import hf_hub_download

        head = self.ask("HEAD", name, revision)  # first, since without permission the library retries for 23 seconds
        if head.status == 404:
            return None
        if (head.size or 0) > most:
            raise FFNError(f"{self.label(name)} has {head.size:,} bytes, far more than such a file needs")

        try:
            with self._few_attempts(name):
                return Path(hf_hub_download(self.repo, name, revision=revision, library_name="ffncli"))
        except self.broken as error:
            raise self._broken_off(name, one_line(error)) from None
        except self.http.RequestError as error:
            raise self._unreachable(error) from None
        except OSError as error:
            hint = "HF_HOME sets the location of the cache" if error.strerror else "try again"
            reason = one_line(error.strerror or error)
            raise FFNError(f"cannot fetch {self.label(name)}: {reason}", hint, ExitCode.ENVIRONMENT) from None

    @contextmanager
    def _few_attempts(self, name: str) -> Iterator[None]:
        """Limit the library's attempts for each address; without a limit, it repeats a failed request for a minute."""
        counts: Counter[tuple[str, str]] = Counter()

        def count(request: Any) -> None:
            counts[request.method, str(request.url)] += 1
            if counts[request.method, str(request.url)] > _ATTEMPTS.get(request.method, 1):
                raise self._broken_off(name, "the response was not complete")

        before = self.session.event_hooks
        self.session.event_hooks = {**before, "request": [*before["request"], count]}
        try:
            yield
        finally:
            self.session.event_hooks = before

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, method: str, name: str, revision: str, span: tuple[int, int] = (0, 0)) -> HubResponse:
        """Request the size of a file (HEAD), or its bytes from `span[0]` up to but not including `span[1]` (GET).

        Responses for a missing file (404) and for a range past the end (416) are returned. A request is repeated once
        if the server fails or closes the connection early.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo, name, revision=revision)
        for last in (False, True):
            if time.monotonic() > self.deadline:
                raise self._too_slow()
            try:
                answer = self._size(url) if method == "HEAD" else self._range(url, span)
                if answer.status < 500 or last:
                    break
            except self.broken as error:
                if last:
                    raise self._broken_off(name, one_line(error)) from None
            except (self.http.HTTPError, self.http.InvalidURL, ValueError, OSError) as error:
                raise self._unreachable(error) from None
            time.sleep(_PAUSE)
        absent = answer.status == 404 and answer.refusal in ("", "EntryNotFound")
        if absent or answer.status in ((200,) if method == "HEAD" else (206, 416)):
            return answer
        raise self._refused(answer, name, revision)

    def _size(self, url: str) -> HubResponse:
        from huggingface_hub import get_hf_file_metadata
        from huggingface_hub.errors import HfHubHTTPError

        try:
            metadata = get_hf_file_metadata(url, timeout=self.timeout, library_name="ffncli")
        except HfHubHTTPError as error:
            return HubResponse(error.response.status_code, refusal=error.response.headers.get("X-Error-Code", ""))
        if metadata.commit_hash is None:
            hint = "check HF_ENDPOINT, and whether another server answers instead of the Hub"
            raise FFNError(f"{self.host} does not respond like a Hub", hint, ExitCode.ENVIRONMENT)
        return HubResponse(200, size=metadata.size)

    def _range(self, url: str, span: tuple[int, int]) -> HubResponse:
        """Request some bytes of a file, and the size of the whole file; the body of any other response is not read.

        We do not use `get_safetensors_metadata`: it always reads the first 100 kB, reads the whole response of a server
        that ignores ranges, fails for headers above 25 MB, and does not keep the raw header, so that duplicate keys
        could not be refused.
        """
        headers = self.headers | {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        with self.session.stream("GET", url, headers=headers, timeout=self.timeout, follow_redirects=True) as response:
            status = response.status_code
            if status not in (206, 416):
                return HubResponse(status, refusal=response.headers.get("X-Error-Code", ""))
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not match:
                raise _BrokenResponse("the response does not specify which bytes it contains")
            if status == 416:
                return HubResponse(status, size=int(match["size"]))
            body = self._body(response, span)
        end = min(span[1], int(match["size"]))
        if match["start"] != str(span[0]) or len(body) != end - span[0]:
            raise _BrokenResponse(f"received {len(body)} bytes, expected {end - span[0]}")
        return HubResponse(status, body, int(match["size"]))

    def _body(self, response: Any, span: tuple[int, int]) -> bytes:
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > span[1] - span[0]:
                raise _BrokenResponse("received more bytes than requested")
        return bytes(body)

    def together(self, task: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """Run `task` on every item, several at a time, until the first error, the time limit or Ctrl-C."""
        todo: SimpleQueue[tuple[int, _T]] = SimpleQueue()
        done: SimpleQueue[tuple[int, _R | None, BaseException | None]] = SimpleQueue()
        for pair in enumerate(items):
            todo.put(pair)

        def work() -> None:
            while not todo.empty():
                try:
                    at, item = todo.get_nowait()
                except Empty:
                    return
                try:
                    done.put((at, task(item), None))
                except BaseException as error:
                    done.put((at, None, error))

        for _ in range(min(AT_ONCE, len(items))):
            Thread(target=work, daemon=True).start()  # a thread pool would delay the end of the program
        results: dict[int, Any] = {}
        try:
            for _ in items:
                at, results[at], error = done.get(timeout=max(0.0, self.deadline - time.monotonic()))
                if error:
                    raise error
        except BaseException as error:
            self.deadline = 0.0  # the other threads stop at their next request
            raise (self._too_slow() if isinstance(error, Empty) else error) from None
        return [results[at] for at in range(len(items))]

    # --- errors -------------------------------------------------------------------------------------------------------

    def _refused(self, answer: HubResponse, name: str, revision: str) -> FFNError:
        """Build the error for a status other than success. Only 429 and 5xx are temporary."""
        status = answer.status
        if status == 404 and answer.refusal == "RevisionNotFound":
            return FFNError(f"{self.label()} has no revision {shown(revision)} (404)", "give a branch, tag or commit")
        if status in _REFUSALS:
            what, hint = _REFUSALS[status]
            return FFNError(f"{self.label()}: {what}", hint)
        if status == 200:
            what = f"{self.host} sends whole files instead of the requested part, and ffn never loads the weights"
            return FFNError(what, "check HF_ENDPOINT", ExitCode.ENVIRONMENT)
        hint = "too many requests: wait a moment" if status == 429 else "try again later"
        return FFNError(f"{self.host} answers {status} for {self.label(name)}", hint, ExitCode.ENVIRONMENT)

    def _unreachable(self, error: Exception) -> FFNError:
        """Build the error for a request without a response. An error in sending the request may contain the access
        token, so it is not quoted."""
        code = ExitCode.ENVIRONMENT
        if isinstance(error, self.http.TimeoutException):
            hint = "HF_HUB_DOWNLOAD_TIMEOUT sets how many seconds to wait"
            return FFNError(f"{self.host} does not answer within {self.timeout:g} s", hint, code)
        if isinstance(error, self.http.HTTPError) and not isinstance(error, self.http.LocalProtocolError):
            return FFNError(
                f"cannot reach {self.host}: {one_line(error)}", "check the connection and HF_ENDPOINT", code
            )
        return FFNError(f"cannot send the request to {self.host}", "check HF_ENDPOINT and HF_TOKEN", code)

    def _broken_off(self, name: str, reason: str) -> FFNError:
        what = f"{self.host} broke off while sending {name}: {reason}"
        return FFNError(what, "try again", ExitCode.ENVIRONMENT)

    def _too_slow(self) -> FFNError:
        what = f"{self.label()} took more than {PATIENCE * self.timeout:g} s to read from {self.host}"
        return FFNError(what, "try again, or raise HF_HUB_DOWNLOAD_TIMEOUT", ExitCode.ENVIRONMENT)
