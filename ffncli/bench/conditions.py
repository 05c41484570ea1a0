"""The conditions of a run: machine and versions, which must not change between its workers, or until it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ffncli.errors import ExitCode, FFNError, shown
from ffncli.system.files import sha256_of
from ffncli.version import __version__


def software() -> dict[str, str]:
    """The machine and the versions, as far as they are known without torch."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from ffncli.system.host import cpu_name

    versions = {"ffncli": __version__, "python": platform.python_version(), "host": platform.node(), "cpu": cpu_name()}
    for name in ("torch", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


def sha256(path: Path) -> str:
    """The file's SHA-256; empty if it cannot be read."""
    try:
        return sha256_of(path)
    except (OSError, ValueError):
        return ""


def require_same(when: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises FFNError if the machine or a version has changed; one run has one environment."""
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise changed(f"{name} is {shown(now[name])}, {when} {shown(before[name])}")


def changed(text: str) -> FFNError:
    """The error where they have changed."""
    return FFNError(f"cannot continue: {text}", "start again: ffn bench --save FILE.csv", ExitCode.ENVIRONMENT)
