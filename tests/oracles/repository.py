"""A git repository for a test, with a branch main; nothing of the user's configuration is read."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_ALONE = {
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
}  # fmt: skip


class Repository:
    """Made at `path`, empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        """What git prints."""
        environment = {**os.environ, **_ALONE}
        done = subprocess.run(
            ["git", "-c", "core.autocrlf=false", *arguments], cwd=self.path, env=environment, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(self, files: Mapping[str, bytes], tag: str = "") -> str:
        """The hash of a commit with these files written anew."""
        for name, data in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "files")
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")
