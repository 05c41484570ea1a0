"""Moves the files of an older branch into the rooms, and rewrites every import, dotted name and path that names them.

    python tools/move.py            # on the branch's own commit, before it is merged or rebased
    git add -A && git commit && git merge main

`moves.csv` beside it says old path, new path. A file that is not there any more is passed over; one that was merged
into another stays where it is and is named, for its changes must be carried over by hand.
"""

from __future__ import annotations

import ast
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
TEXTS = (".py", ".md", ".toml", ".json", ".svg", "Makefile")
LEFT_ALONE = ("CHANGELOG.md", "facts.json", "tools/", "benchmarks/results/", "benchmarks/mutations.json")
_DOTTED = re.compile(r"\b(?:ffncli|tests)(?:\.\w+)+")
_PATH = re.compile(r"(?<![\w/.-])[\w-]+(?:/[\w-]+)+\.(?:py|toml|json)\b")
_IN_A_STRING = re.compile(r"\bfrom (ffncli(?:\.\w+)+) import (\w+(?:, \w+)*)")
_PARENTS = re.compile(r"Path\(__file__\)\.(?:parents\[(\d)\]|parent((?:\.parent)*))")


def main() -> None:
    """Move, then rewrite."""
    rows = planned_moves()
    moves = {row["old"]: row["new"] for row in rows}
    present = {row["old"]: row["new"] for row in rows if not row["merged"] and (ROOT / row["old"]).is_file()}
    if not present:
        sys.exit("nothing to move: this tree has the rooms already")
    for old, new in present.items():
        move(old, new)
    leave_no_empty_folders(present)
    modules = {dotted(old): dotted(new) for old, new in moves.items() if old.endswith(".py")}
    origin = {new: old for old, new in present.items()}
    for path in tracked():
        text = (ROOT / path).read_text("utf-8")
        new_text = rewritten(text, path, origin.get(path, path), modules, moves)
        if new_text != text:
            (ROOT / path).write_text(new_text, "utf-8")
    for row in rows:
        if row["merged"] and (ROOT / row["old"]).is_file():
            print(f"{row['old']} was merged into {row['new']}: carry over what you changed, then remove it")
    print(f"{len(present)} files moved; now: ruff check --fix --select I . && ruff format .")


def planned_moves() -> list[dict[str, str]]:
    """The rows of `moves.csv`."""
    with (Path(__file__).parent / "moves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def dotted(path: str) -> str:
    """`ffncli/run/trace.py` → `ffncli.run.trace`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def move(old: str, new: str) -> None:
    """`git mv` through a name of its own, since `run/trace.py` becomes a file in the folder `run/trace`."""
    target = ROOT / new
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)
    for folder in target.parents:
        if folder in (ROOT, ROOT / "ffncli", ROOT / "tests"):
            break
        if new.endswith(".py") and not (folder / "__init__.py").exists():
            (folder / "__init__.py").touch()
            subprocess.run(["git", "add", "-N", str(folder / "__init__.py")], cwd=ROOT, check=True)


def leave_no_empty_folders(olds: Iterable[str]) -> None:
    """Folders that nothing is left in but bytecode would still be packages to import."""
    for folder in sorted({(ROOT / old).parent for old in olds}, reverse=True):
        if folder.exists() and all(entry.name == "__pycache__" for entry in folder.iterdir()):
            shutil.rmtree(folder)


def tracked() -> list[str]:
    """Text files that git tracks and that may name a moved one."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [n for n in names if n.endswith(TEXTS) and not n.startswith(LEFT_ALONE) and (ROOT / n).is_file()]


def rewritten(text: str, path: str, old_path: str, modules: Mapping[str, str], moves: Mapping[str, str]) -> str:
    """A file's text with the new names. `old_path` is where it lay."""
    kept: list[str] = []
    if path.endswith(".py"):
        text = module_imports(text, modules, kept)
        deeper = path.count("/") - old_path.count("/")
        text = _PARENTS.sub(lambda match: parents(match, deeper), text)
    text = _DOTTED.sub(lambda match: new_dotted(match[0], modules), text)
    text = _PATH.sub(lambda match: new_path(match[0], moves), text)
    return re.sub("\x00(\\d+)\x00", lambda match: kept[int(match[1])], text)


def module_imports(text: str, modules: Mapping[str, str], kept: list[str]) -> str:
    """`from ffncli.run import capture` is `from ffncli.run.pretrained import capture` where that module has moved."""
    lines = text.split("\n")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and not node.level]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        assert node.module is not None
        moved = [alias for alias in node.names if f"{node.module}.{alias.name}" in modules]
        if not moved:
            continue
        out = []
        for alias in moved:
            package, _, name = modules[f"{node.module}.{alias.name}"].rpartition(".")
            local = alias.asname or alias.name
            out.append(f"from {package} import {name}" + (f" as {local}" if local != name else ""))
        rest = [alias for alias in node.names if alias not in moved]
        if rest:
            names = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in rest)
            out.append(f"from {modules.get(node.module, node.module)} import {names}")
        indent = " " * node.col_offset
        tail = lines[node.end_lineno - 1][node.end_col_offset :] if node.end_lineno and node.end_col_offset else ""
        kept.append(("\n" + indent).join(out) + tail)
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}\x00{len(kept) - 1}\x00"]
    return _IN_A_STRING.sub(lambda match: string_import(match, modules, kept), "\n".join(lines))


def string_import(match: re.Match[str], modules: Mapping[str, str], kept: list[str]) -> str:
    """The same in a program that a test keeps as a string, where all its names have moved to one room."""
    targets = [modules.get(f"{match[1]}.{name.strip()}", "") for name in match[2].split(",")]
    rooms = {target.rpartition(".")[0] for target in targets}
    if len(rooms) != 1 or "" in rooms:
        return match[0]
    kept.append(f"from {rooms.pop()} import {match[2]}")
    return f"\x00{len(kept) - 1}\x00"


def parents(match: re.Match[str], deeper: int) -> str:
    """`Path(__file__).parents[2]` of a file that lies deeper now."""
    if not deeper:
        return match[0]
    up = int(match[1]) if match[1] else len(match[2]) // len(".parent")
    return f"Path(__file__).parents[{up + deeper}]"


def new_dotted(name: str, modules: Mapping[str, str]) -> str:
    """The longest beginning that is a moved module, replaced."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if (new := modules.get(".".join(parts[:end]))) is not None:
            return ".".join([new, *parts[end:]])
    return name


def new_path(name: str, moves: Mapping[str, str]) -> str:
    """The path as it was written, from the root or from the package, replaced."""
    for prefix in ("", "ffncli/", "tests/"):
        if (new := moves.get(prefix + name)) is not None:
            return new.removeprefix(prefix)
    return name


if __name__ == "__main__":
    main()
