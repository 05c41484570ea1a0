"""The code's structure: no import cycle, no room (folder) with too many files, one meaning per class name.

import-linter checks the floors (the layers of top-level folders)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ffncli"
MOST_FILES = 16
INNER_FLOORS = {"ffncli.models": 7, "ffncli.run": 5, "ffncli.bench": 6, "ffncli.cli": 2}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]


def first_circle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, the first at both ends; none if there is no cycle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_among_files():
    """Imports inside functions and under TYPE_CHECKING also count."""
    graph = grimp.build_graph("ffncli", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 300
    assert first_circle(imports) == []


def test_a_circle_is_seen():
    assert first_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_crowded_room():
    rooms = {folder: len(list(folder.glob("[!_]*.py"))) for folder in PACKAGE.rglob("*") if folder.is_dir()}
    assert {str(room.relative_to(ROOT)): n for room, n in rooms.items() if n > MOST_FILES} == {}


WORN = {"found", "said", "told", "own", "held", "beside"}


def worn_names() -> Iterator[str]:
    """Yield every place that binds a name such as `found`, which does not say what the thing is."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.alias):
                name = node.asname or ""
            if WORN & set(name.lower().split("_")):
                yield f"{path.relative_to(PACKAGE)}: {name}"


def test_names_say_what_a_thing_is():
    """The remaining places are JSON keys, and the references that `ffn bench` adds."""
    places = list(worn_names())
    assert len(places) <= 6, places


STUMBLES = {  # a pattern that makes a native reader stop → the plain words in its place
    r"\bbeside\b": "next to, besides, as well as",
    r"\basked for\b": "requested",
    r"\bkin\b": "relatives, related options",
    r"\banew\b": "again",
    r"\bcame about\b": "was computed",
    r"(?<![Tt]here )\b(?:is|are) no (?!longer\b)": "is not a, are not",
    r"\b(?:FFNError|[Rr]aises \w+)(?: \(exit \d\))? where\b": "if",
    r"\bwhere there (?:is|are)\b": "if there is",
    r"\bevery how manieth\b": "the stride",
}


def sentences(source: str) -> Iterator[str]:
    """Yield the comments, docstrings and messages of a file, without backticked parts; a key or name has no space."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield re.sub(r"`[^`]*`|\s+", " ", node.value)


_ANY_STUMBLE = re.compile("|".join(STUMBLES))


def stumbles(source: str) -> Iterator[str]:
    for text in filter(_ANY_STUMBLE.search, sentences(source)):  # few match, so one search is faster
        for pattern, plain in STUMBLES.items():
            if match := re.search(pattern, text):
                yield f"write {plain!r} for {match[0]!r}: {text[max(0, match.start() - 40) : match.end() + 20]}"


def test_sentences_are_plain():
    """Docstrings, comments and messages contain none of these patterns."""
    places = [
        f"{path.relative_to(ROOT)}: {one}" for path in PACKAGE.rglob("*.py") for one in stumbles(path.read_text())
    ]
    assert places == []


@pytest.mark.parametrize(
    "text",
    [
        '"""The rows that were asked for."""',
        'x = f"{name} is no number"',
        "y = 1  # one beside the other",
        '"""The value.\n\nRaises FFNError (exit 3) where\nit cannot be read.\n"""',
    ],
)
def test_a_stumble_is_seen(text: str):
    assert len(list(stumbles(text))) == 1


def test_plain_sentences_and_keys_pass():
    assert list(stumbles('"""There is no bound; `beside` is a key."""\nx = {"beside": "no longer there"}')) == []


def test_every_path_that_contributing_names_is_there():
    """A path in backticks exists in the checkout or in the package."""
    names = re.findall(
        r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|toml|yml))`", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    )
    places = [name for name in names if "NAME" not in name]
    assert len(places) > 80
    assert [name for name in places if not ((ROOT / name).exists() or (PACKAGE / name).exists())] == []


def classes() -> Iterator[tuple[str, str]]:
    """Yield the name (without leading underscores) and the file of every class at the top of a module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                yield node.name.lstrip("_"), str(path.relative_to(PACKAGE))


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for name, path in classes():
        places[name].append(path)
    assert len(places) > 200
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(("container", "most"), INNER_FLOORS.items())
def test_inner_floors(container: str, most: int):
    """The contract of each container has the type `layers`, lists every room, and has at most `most` layers."""
    (contract,) = [c for c in CONTRACTS if c.get("containers") == [container]]
    assert contract["type"] == "layers"
    assert contract["exhaustive"] is True
    assert not contract.get("exclude_type_checking_imports", False)
    assert "ignore_imports" not in contract
    assert len(contract["layers"]) <= most
