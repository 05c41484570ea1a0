"""Which tests reach which line of the package: joined from what all processes of a run of the tests have left."""

from __future__ import annotations

import functools
import gzip
import json
import pickle
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

_LINES = """
select path, context, numbits
from line_bits join file on file.id = file_id join context on context.id = context_id
"""


@dataclass(frozen=True)
class Reached:
    """Tests with their seconds; for each file and line of the package those that reach it: bit n is the n-th test.

    What only importing or collecting reaches is left out. `failed`: tests that did not pass.
    """

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, int]]
    failed: frozenset[str]

    def tests(self, file: str, line: int) -> list[str]:
        """Those that reach the line and passed, the fast ones first."""
        bits = self.lines.get(file, {}).get(line, 0)
        tests = set(compress(self.seconds, map(int, reversed(f"{bits:b}")))) - self.failed
        return sorted(tests, key=lambda name: (self.seconds[name], name))

    def of_floor(self, file: str) -> list[str]:
        """The tests of the file's floor, fast ones first: for a line that ran while tests were collected."""
        folder = f"tests/{Path(file).parts[1]}/"
        return sorted(
            {name for name in self.seconds if name.startswith(folder)} - self.failed, key=self.seconds.__getitem__
        )

    def save(self, path: Path) -> None:
        """Each set of tests once, compressed."""
        sets = sorted({bits for of in self.lines.values() for bits in of.values()})
        number = {bits: n for n, bits in enumerate(sets)}
        data = {
            "seconds": {name: round(s, 3) for name, s in self.seconds.items()},
            "failed": sorted(self.failed),
            "sets": [f"{bits:x}" for bits in sets],
            "lines": {f: {n: number[bits] for n, bits in of.items()} for f, of in self.lines.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))

    @classmethod
    def read(cls, path: Path) -> Reached:
        """What `save` wrote."""
        data = json.loads(gzip.decompress(path.read_bytes()))
        sets = [int(bits, 16) for bits in data["sets"]]
        lines = {f: {int(line): sets[n] for line, n in of.items()} for f, of in data["lines"].items()}
        return cls(data["seconds"], lines, frozenset(data["failed"]))


class Labels:
    """What ran a line: labels of tests, fixtures and caches, each a bit, for there are millions of pairs."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.lines: dict[str, dict[bytes, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, file: str, label: str, numbers: bytes) -> None:
        """That label ran these lines of the file, packed as coverage packs them."""
        self.lines[file][numbers] |= 1 << self.number.setdefault(label, len(self.number))

    def of(self, file: str) -> dict[int, int]:
        """Each line of the file with the labels that ran it."""
        found: dict[int, int] = defaultdict(int)
        for numbers, labels in self.lines[file].items():
            for line in (8 * n + bit for n, byte in enumerate(numbers) for bit in range(8) if byte >> bit & 1):
                found[line] |= labels
        return dict(sorted(found.items()))

    def names(self, bits: int) -> list[str]:
        """The labels that these bits stand for."""
        return list(compress(self.number, map(int, reversed(f"{bits:b}"))))


def gather(folder: Path, root: Path) -> Reached:
    """All that the processes of a run left in the folder, joined; files are named from `root`."""
    seconds: dict[str, float] = {}
    users: dict[str, set[str]] = defaultdict(set)
    failed: set[str] = set()
    labels = Labels()
    for path in sorted(folder.glob("tests-*.pickle")):
        left = pickle.loads(path.read_bytes())
        seconds |= left["seconds"]
        failed |= left["failed"]
        for name, of in left["users"].items():
            users[name] |= of
        for entry in left["lines"]:
            labels.add(*entry)
    for path in folder.glob("coverage.*"):
        for entry in _measured(path):
            labels.add(*entry)
    seconds = dict(sorted(seconds.items()))
    number = {name: n for n, name in enumerate(seconds)}

    @functools.cache
    def tests(bits: int) -> int:
        digits = bytearray(b"0" * len(number))
        for name in _tests(labels.names(bits), users) & number.keys():
            digits[-1 - number[name]] = ord("1")
        return int(digits, 2)

    lines = {
        str(Path(file).relative_to(root)): {line: tests(bits) for line, bits in labels.of(file).items() if tests(bits)}
        for file in sorted(labels.lines)
    }
    return Reached(seconds, lines, frozenset(failed))


def _measured(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """File, label and lines of each entry of a data file of coverage's."""
    connection = sqlite3.connect(path)
    try:
        yield from connection.execute(_LINES)
    finally:
        connection.close()


def _tests(labels: Iterable[str], users: Mapping[str, set[str]]) -> set[str]:
    """The tests among the labels, and those that use what is shared, directly or through another that is shared."""
    tests: set[str] = set()
    left, past = list(labels), set()
    while left:
        label = left.pop()
        if label in past:
            continue
        past.add(label)
        if label in users:
            left += users[label]
        else:
            tests.add(label)
    return tests
