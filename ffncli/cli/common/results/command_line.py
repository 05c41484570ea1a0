"""The command of a run, from the options that it stores."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def command_line(asked: Mapping[str, str]) -> str:
    """`ffn bench 512x2048:swiglu --tokens 1,32`: options and values as they are typed, the source first."""
    source = asked.get("--source")
    words = [
        *([source] if source else []),
        *(w for pair in asked.items() if pair[0] != "--source" for w in _words(*pair)),
    ]
    return f"ffn bench {shlex.join(words)}".rstrip()


def _words(name: str, value: str) -> list[str]:
    """An option as it is typed; a flag has no value."""
    if value == "false":
        return ["--plain" if name == "--gated" else f"--no-{name.removeprefix('--')}"]
    return [name] if value == "true" else [name, value]
