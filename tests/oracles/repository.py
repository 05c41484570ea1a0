"""A git repository for a test, with a branch main; the user's git configuration is not read."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_ALONE = {
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
}  # fmt: skip


class Repository:
    """An empty repository, created at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        """Run git, and return what it prints."""
        environment = {**os.environ, **_ALONE}
        done = subprocess.run(
            ["git", "-c", "core.autocrlf=false", *arguments], cwd=self.path, env=environment, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(self, files: Mapping[str, bytes], tag: str = "") -> str:
        """Write these files and commit them; return the commit's hash."""
        for name, data in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "files")
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")
