"""python -m benchmarks.mutations map | draw | run: breaks the code at drawn places and says which the tests notice.

`map` runs the tests once under coverage (no dependency of ours: `pip install coverage`, or `--target DIR` and DIR on
PYTHONPATH) and writes which tests reach which line. `draw` chooses the places, once for all: they stay in places.json.
`run` breaks one after the other in a copy of the tree and runs the tests that reach it, the fast ones first, until one
fails. The places outlive a refactoring: they are found again by their lines, see places.py.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.benched import ROOT
from benchmarks.common import machine
from benchmarks.kept import Kept
from benchmarks.mutations.measure import measure
from benchmarks.mutations.notice import COLUMNS, noticed
from benchmarks.mutations.places import PLACES, Drawn, Place, Spot, draw, find
from benchmarks.mutations.reached import Reached
from benchmarks.mutations.scratch import tree

MAP = ROOT / "benchmarks/scratch/reached.json.gz"


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 where a place is not found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    for ask in (_ask_map, _ask_draw, _ask_run):
        ask(commands)
    asked = parser.parse_args(words)
    code: int = asked.do(asked)
    return code


# --- map --------------------------------------------------------------------------------------------------------------


def _ask_map(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("map", help="run the tests under coverage: which reach which line")
    parser.add_argument("--map", type=Path, default=MAP)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("words", nargs="*", metavar="WORD", help="for pytest, after --: paths and options")
    parser.set_defaults(do=_map)


def _map(asked: argparse.Namespace) -> int:
    reached = measure(asked.jobs, asked.words)
    reached.save(asked.map)
    lines = sum(map(len, reached.lines.values()))
    print(f"{len(reached.seconds)} tests reach {lines} lines of {len(reached.lines)} files: {asked.map}")
    return 0


# --- draw -------------------------------------------------------------------------------------------------------------


def _ask_draw(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("draw", help="choose the places from the map, anew")
    parser.add_argument("--map", type=Path, default=MAP)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--each", type=int, default=10, help="places of each floor")
    parser.set_defaults(do=_draw)


def _draw(asked: argparse.Namespace) -> int:
    left_out = Drawn.read().left_out if PLACES.exists() else {}
    places = draw(Reached.read(asked.map), ROOT, asked.seed, asked.each, left_out)
    Drawn(asked.seed, places, left_out, {}).save()
    for place in places:
        print(f"{place.id}  {place.file} {place.function} ({place.kind})\n    {place.before}\n    {place.after}")
    return 0


# --- run --------------------------------------------------------------------------------------------------------------


def _ask_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("run", help="break each place and run the tests that reach it")
    parser.add_argument("--map", type=Path, default=MAP)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these places")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="of wall time for each")
    parser.add_argument("--renames", type=Path, help="JSON: old path to new path, where a line alone does not say")
    parser.add_argument("--base", type=Path, help="the older tree that the map is of; tools/moves.csv says what moved")
    parser.add_argument("--save", metavar="CSV", help="rows as they come; a later run goes on where one ended")
    parser.add_argument("--find", action="store_true", help="only say where each place is")
    parser.set_defaults(do=_run)


def _run(asked: argparse.Namespace) -> int:
    drawn = Drawn.read()
    renames = json.loads(asked.renames.read_text("utf-8")) if asked.renames else {}
    places = [place for place in drawn.places if not asked.only or place.id in asked.only]
    spots = {place.id: find(place, ROOT, drawn.now.get(place.id, {}), renames) for place in places}
    for name, spot in spots.items():
        print(f"{name}  not found, {spot}" if isinstance(spot, str) else f"{name}  {spot.file}:{spot.line}")
    if any(isinstance(spot, str) for spot in spots.values()):
        print(f'say where these are now in {PLACES.name}, under "now"; the others are run')
    if asked.find:
        return int(any(isinstance(spot, str) for spot in spots.values()))
    reached = Reached.read(asked.map)
    if asked.base:
        reached = carried_over(reached, places, spots, asked.base.resolve())
    kept = Kept(asked.save, COLUMNS, machine("torch", "pytest"))
    with tree() as copy:
        for place in places:
            spot = spots[place.id]
            if isinstance(spot, str) or kept.has(id=place.id):
                continue
            row = noticed(copy, place, spot, reached, asked.limit)
            kept.add(row)
            print("{id}  {result}  {by}  ({tests} tests, {seconds:.0f} s)".format(**row), flush=True)
    survived = [row["id"] for row in kept.rows if row["result"] != "noticed"]
    print(f"{len(kept.rows) - len(survived)} of {len(kept.rows)} noticed; not: {', '.join(survived) or 'none'}")
    return int(any(isinstance(spot, str) for spot in spots.values()))


def carried_over(reached: Reached, places: Sequence[Place], spots: Mapping[str, Spot | str], base: Path) -> Reached:
    """An older tree's map at the places of this one: its tests by the files that they are in now."""
    with (ROOT / "tools/moves.csv").open(newline="") as file:
        moves = {row["old"]: row["new"] for row in csv.DictReader(file)}
    moves |= {name: moves.get(name, name) for name in {test.partition("::")[0] for test in reached.seconds}}
    new_names = {test: "::".join([moves[test.partition("::")[0]], test.partition("::")[2]]) for test in reached.seconds}
    seconds = {new_names[test]: taken for test, taken in reached.seconds.items()}
    number = {name: n for n, name in enumerate(seconds)}
    lines: dict[str, dict[int, int]] = {}
    for place in places:
        before, after = find(place, base, {}, {}), spots[place.id]
        if isinstance(before, Spot) and isinstance(after, Spot):
            tests = [new_names[test] for test in reached.tests(before.file, before.line)]
            lines.setdefault(after.file, {})[after.line] = sum(1 << number[test] for test in tests)
    return Reached(seconds, lines, frozenset(new_names[test] for test in reached.failed))


if __name__ == "__main__":
    raise SystemExit(main())
