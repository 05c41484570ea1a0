"""The drawn places: where the code is broken, in words that survive files being moved and lines being shifted."""

from __future__ import annotations

import ast
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

from benchmarks.mutations.breaks import Break, breaks, functions
from benchmarks.mutations.reached import Reached

PACKAGE = "ffncli"
FLOORS = ("block", "models", "run", "bench")
PLACES = Path(__file__).with_name("places.json")


@dataclass(frozen=True)
class Place:
    """One line of one function, as it is and as it is broken, both without their indentation."""

    id: str
    file: str
    function: str
    kind: str
    before: str
    after: str


@dataclass(frozen=True)
class Drawn:
    """The file of places. `left_out`: what was drawn and changes nothing that anybody could notice, with the reason.

    `now`: by the place's id, fields of it as they are in this tree where `find` needs help (a line that was rewritten).
    """

    seed: int
    places: tuple[Place, ...]
    left_out: Mapping[str, str]
    now: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, path: Path = PLACES) -> Drawn:
        data = json.loads(path.read_text("utf-8"))
        return cls(data["seed"], tuple(Place(**p) for p in data["places"]), data["left_out"], data["now"])

    def save(self, path: Path = PLACES) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", "utf-8")


@dataclass(frozen=True)
class Spot:
    """A place in the tree as it is now: the file, the number of the line, and the whole text once it is broken."""

    file: str
    line: int
    text: str


_Found = tuple[str, Break]  # a file and a break of it


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(reached: Reached, root: Path, seed: int, each: int, left_out: Mapping[str, str]) -> tuple[Place, ...]:
    """So many places of each floor, on lines that tests reach: kinds alike often, each function once, each file twice
    at most."""
    return tuple(
        Place(f"{floor}-{n:02}", file, one.function, one.kind, one.before, one.after)
        for floor in FLOORS
        for n, (file, one) in enumerate(islice(_drawn(reached, root, floor, seed, left_out), each), 1)
    )


def _drawn(reached: Reached, root: Path, floor: str, seed: int, left_out: Mapping[str, str]) -> Iterator[_Found]:
    kinds: dict[str, list[_Found]] = defaultdict(list)
    for path in sorted((root / PACKAGE / floor).rglob("*.py")):
        for one in breaks(path.read_text("utf-8")):
            kinds[one.kind].append((str(path.relative_to(root)), one))
    chance = random.Random(f"{seed} {floor}")
    taken: list[_Found] = []
    while True:
        file, one = chance.choice(kinds[chance.choice(sorted(kinds))])
        full = [other for other, _ in taken].count(file) == 2
        again = any((other, another.function) == (file, one.function) for other, another in taken)
        left = f"{file}: {one.before} -> {one.after}" in left_out
        if not (full or again or left) and reached.tests(file, one.line):
            taken.append((file, one))
            yield file, one


# --- finding ----------------------------------------------------------------------------------------------------------


def find(place: Place, root: Path, now: Mapping[str, str], renames: Mapping[str, str]) -> Spot | str:
    """The place in this tree, or why it is not found: by its line, and where that is not the only one by the file
    (`renames`: old path to new), the function, the function's own name."""
    place = replace(place, file=renames.get(place.file, place.file))
    place = replace(place, **now)
    lines = [line for line in _lines(root) if line.text == place.before]
    own = place.function.rpartition(".")[2]
    narrower = (
        [line for line in lines if (line.file, line.function) == (place.file, place.function)],
        [line for line in lines if line.function == place.function],
        [line for line in lines if line.function.rpartition(".")[2] == own],
        [line for line in lines if line.file == place.file],
        lines,
    )
    same = next(filter(None, narrower), [])
    if len(same) != 1:
        return f"{len(same)} lines: {', '.join(f'{line.file}:{line.number}' for line in same) or 'rewritten or gone'}"
    file, number = same[0].file, same[0].number
    text = (root / file).read_text("utf-8").split("\n")
    text[number - 1] = text[number - 1].replace(place.before, place.after)
    broken = "\n".join(text)
    ast.parse(broken)
    return Spot(file, number, broken)


@dataclass(frozen=True)
class _Line:
    file: str
    function: str
    number: int
    text: str


@cache
def _lines(root: Path) -> Sequence[_Line]:
    """Every line of every function of the package."""
    found: list[_Line] = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        source = path.read_text("utf-8")
        text = source.split("\n")
        file = str(path.relative_to(root))
        for name, function in functions(ast.parse(source)):
            numbers = range(function.lineno, (function.end_lineno or 0) + 1)
            found += (_Line(file, name, number, text[number - 1].strip()) for number in numbers)
    return found
