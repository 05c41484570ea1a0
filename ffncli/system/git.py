"""One file as a git commit has it. git itself is asked; the working tree is not touched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ffncli.dataclass import dataclass
from ffncli.errors import ExitCode, FFNError, clean, did_you_mean, shown, shown_path

_PATIENCE = 30.0  # s, for a repository on a slow disk


@dataclass(frozen=True)
class FileAtCommit:
    """The full hash of the commit, and the file's bytes there."""

    commit: str
    data: bytes


def file_at(ref: str, path: Path, option: str) -> FileAtCommit:
    """The file at `ref` (a branch, a tag, a commit, `HEAD~2`), from the repository that the path lies in.

    The file, and folders on its way, need not exist in the working tree. Raises FFNError, naming the `option`, for a
    ref or a file that is not there and for a path outside of any repository; exit 3 where git cannot be run.
    """
    folder = next(parent for parent in path.parents if parent.is_dir())
    answer = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if answer.returncode == 1:
        raise FFNError(f"{option}: git has no commit {shown(ref)}", did_you_mean(ref, _refs(folder), "see git log"))
    if answer.returncode:
        raise FFNError(f"{option}: {shown_path(path)} at {shown(ref)}: {_reason(answer)}")
    commit = answer.stdout.decode("ascii", "replace").strip()
    blob = _git(folder, "cat-file", "blob", f"{commit}:./{path.relative_to(folder).as_posix()}")
    if blob.returncode:
        raise FFNError(f"{option}: {shown_path(path)} is not a file at {shown(ref)} (commit {commit[:12]})")
    return FileAtCommit(commit, blob.stdout)


def _refs(folder: Path) -> list[str]:
    """Branches and tags, by the names that one types."""
    return _git(folder, "for-each-ref", "--format=%(refname:short)").stdout.decode("utf-8", "replace").split()


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """git's answer in this folder, in English. Raises FFNError (exit 3) if git cannot be run."""
    environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "it is not installed" if isinstance(error, FileNotFoundError) else clean(str(error))
        raise FFNError(f"cannot run git: {why}", "a file at a commit needs it", ExitCode.ENVIRONMENT) from None
    except ValueError:
        raise FFNError("no name in git has a NUL character") from None


def _reason(failed: subprocess.CompletedProcess[bytes]) -> str:
    """The first line of what git printed, without its `fatal:`."""
    lines = failed.stderr.decode("utf-8", "replace").strip().splitlines()
    return clean(lines[0].removeprefix("fatal: ")) if lines else f"git ended with exit code {failed.returncode}"
