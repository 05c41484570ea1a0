"""Choices stored from one run to the next, one file each, in the user's cache folder. Nothing here needs torch.

A choice is valid for one processor or GPU, one set of versions and one case, which together are its key.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ffncli import kernels
from ffncli.bench.records import Case
from ffncli.bench.results.row import columns
from ffncli.block.recipe import steps
from ffncli.errors import ExitCode, FFNError, clean, shown_path
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.files.json_records import record_of
from ffncli.system import host
from ffncli.system.files import cache_folder, read_whole, written_whole

_MOST_BYTES = 100_000  # maximum size of a file
# A choice is valid wherever times are comparable: on any machine or card of the same model.
_DEPENDS_ON = ("ffncli", *columns("environment", compared=True, individual=False, per_case=False))


@dataclass(frozen=True)
class AutoChoice:
    """The chosen kernel, and a note that says by how much it won."""

    kernel: str
    note: str


def folder() -> Path:
    """Return the folder of the stored choices: `auto` in the user's cache folder."""
    return cache_folder() / "auto"


def key_of(case: Case, environment: Mapping[str, str], candidates: tuple[str, ...]) -> dict[str, str]:
    """Return everything that a choice depends on, as strings; the block is represented by a digest of its steps."""
    block = hashlib.sha256(repr(kernel_steps(steps(case.spec))).encode()).hexdigest()
    return {
        **{name: environment.get(name, "") for name in _DEPENDS_ON},
        "cores": str(host.default_threads()),
        "llc": str(host.cpu_llc()[0]),
        "kernels": _digest_of_code(),
        "block": block,
        "tokens": str(case.tokens),
        "dtype": case.dtype,
        "pass": case.passes,
        "cache": case.cache,
        "device": case.device.partition(":")[0],
        "threads": str(case.threads),
        "routing": case.routing_sha256 or case.routing,
        "candidates": " ".join(candidates),
    }


@cache
def _digest_of_code() -> str:
    """Return a digest of the code of the package's kernels and of the race, which changes between releases without a
    new version."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(kernels.__file__).parent.rglob("*.py")), *sorted(Path(__file__).parent.glob("auto*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read(key: Mapping[str, str]) -> AutoChoice | None:
    """Read the choice stored for this key; None if there is no readable choice."""
    try:
        stored = json.loads(read_whole(_path(key), _MOST_BYTES))
        return None if stored.get("key") != dict(key) else record_of(AutoChoice, stored.get("choice"), "choice")
    except (OSError, ValueError, AttributeError, RecursionError, FFNError):
        return None


def keep(key: Mapping[str, str], choice: AutoChoice, case: str = "") -> None:
    """Store a choice for a case, replacing an earlier one. Raises FFNError (exit 3) if it cannot be written."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            file.write(json.dumps({"case": case, "key": dict(key), "choice": asdict(choice)}, indent=1).encode())
    except OSError as error:
        why = f"the choice cannot be stored in {shown_path(path.parent)}: {error.strerror}"
        raise FFNError(why, "set XDG_CACHE_HOME to a writable folder", ExitCode.ENVIRONMENT) from None


def choices() -> list[tuple[str, AutoChoice]]:
    """Return a pair (case, choice) for each stored choice, sorted by case."""
    every = []
    for path in _files():
        try:
            stored = json.loads(read_whole(path, _MOST_BYTES))
            every.append((clean(str(stored["case"])), record_of(AutoChoice, stored.get("choice"), "choice")))
        except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError, FFNError):
            continue
    return sorted(every, key=lambda pair: pair[0])


def clear() -> int:
    """Remove all choices; return how many there were. Raises FFNError (exit 3) if one cannot be removed."""
    files = _files()
    try:
        for path in files:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FFNError(f"cannot remove {shown_path(path)}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
    return len(files)


def _files() -> list[Path]:
    return sorted(folder().glob("*.json"))


def _path(key: Mapping[str, str]) -> Path:
    text = json.dumps(dict(key), sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
