"""open_hub as a user meets it: in a process of its own, because huggingface_hub reads the environment when imported."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.hub_server import DRIVER, REPO, HubServer, Opened, environment


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """open_hub in a new process: its fields or its error, the connections it tried, and nothing on stderr."""

    def run(server: HubServer | str, text: str = f"hf://{REPO}", patience: float = 12, **more: str) -> dict[str, Any]:
        endpoint = server if isinstance(server, str) else server.url
        command = [sys.executable, "-c", DRIVER, text, str(patience)]
        env = environment(tmp_path / "home", endpoint, **more)
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def nowhere() -> str:
    """The address of a port that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"
