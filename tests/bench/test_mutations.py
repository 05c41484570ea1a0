"""Breaking code on purpose: what a break is, how a place is found again, and what reaches it, on made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutations.breaks import breaks
from benchmarks.mutations.places import Place, draw, find
from benchmarks.mutations.reached import Labels, Reached


def broken(*lines: str, returns: str = "None") -> set[tuple[str, str]]:
    """(kind, the line once broken) of every break of a function of these lines."""
    source = "\n".join([f"def f(a: int = 1, b=2) -> {returns}:", *(f"    {line}" for line in lines), ""])
    return {(one.kind, one.after) for one in breaks(source)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", {("comparison", "x = a <= b")}),
        ("x = (a) not in (b)", {("comparison", "x = (a) in (b)")}),
        ("x = a is not b", {("comparison", "x = a is b")}),
        ("x = a + b", {("operator", "x = a - b")}),
        ("x = '×' and a * b", {("and, or", "x = '×' or a * b"), ("operator", "x = '×' and a / b")}),
        ("x = not a", {("condition", "x = a")}),
        ("x = a if b else a", {("condition", "x = a if not (b) else a")}),
        ("x = [y for y in a if y]", {("condition", "x = [y for y in a if not (y)]")}),
        ("x = a[1:]", {("constant", "x = a[2:]")}),
        ("x = 0.5", {("constant", "x = 1.5")}),
        ("x = dict(y=True)", {("flag", "x = dict(y=False)")}),
        ("x = max(a, b)", {("extreme", "x = min(a, b)")}),
        ("x = g(a,  b, 3)", {("arguments", "x = g(b,  a, 3)"), ("constant", "x = g(a,  b, 4)")}),
        ("a.append(b)", {("dropped", "pass")}),
        ("a += b", {("dropped", "pass")}),
    ],
)
def test_one_edit_of_one_line(line, expected):
    assert broken(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "'''a text: 1 < 2'''",
        "x: tuple[int, 3] = a",
        "raise FFNError('no', hint=a + 1)",
        "x = f'{a + 1} of {b < 2}'",
        "x = 'a' + b",
        "x = isinstance(a, b)",
        "assert a < 1",
    ],
)
def test_what_no_test_has_to_hold_is_left_alone(line):
    assert broken(line) == set()


def test_a_loop_is_not_made_endless_and_a_branch_is_dropped_or_turned():
    assert broken("while a < b:", "    pass") == set()
    assert broken("if a:", "    a = b") == {("branch", "if False and (a):"), ("condition", "if not (a):")}


@pytest.mark.parametrize(
    ("returns", "after"),
    [("int", "return (b) + 1"), ("bool", "return not (b)"), ("list[int]", "return (b)[1:]")],
)
def test_what_is_returned_changes_by_its_type(returns, after):
    assert broken("return b", returns=returns) == {("return", after)}
    assert broken("return []", returns="list[int]") == set()


def test_a_line_that_stands_twice_in_its_function_could_not_be_found_again():
    assert broken("x = a < b", "x = a < b") == set()


# --- places -----------------------------------------------------------------------------------------------------------


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / "ffncli" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


OLD = Place("block-01", "ffncli/block/old.py", "Seat.least", "comparison", "if a < b:", "if a <= b:")
LEAST = "class {0}:\n    def {1}(self):\n        {2}\n            return 1\n"


def test_a_place_is_found_where_its_file_moved_and_its_class_was_renamed(tmp_path):
    write(tmp_path, room__new=LEAST.format("PlacedKernel", "least", "if a < b:"), other="def f():\n    return 2\n")
    spot = find(OLD, tmp_path, {}, {})
    assert (spot.file, spot.line) == ("ffncli/room/new.py", 3)
    assert spot.text == LEAST.format("PlacedKernel", "least", "if a <= b:")


def test_of_two_lines_alike_that_of_the_same_function_is_meant(tmp_path):
    write(tmp_path, one=LEAST.format("A", "most", "if a < b:"), two=LEAST.format("B", "least", "if a < b:"))
    assert find(OLD, tmp_path, {}, {}).file == "ffncli/two.py"


def test_what_is_ambiguous_is_said_and_settled_by_the_names_of_files_or_by_hand(tmp_path):
    text = LEAST.format("A", "least", "if a < b:")
    write(tmp_path, one=text, two=text)
    assert find(OLD, tmp_path, {}, {}) == "2 lines: ffncli/one.py:3, ffncli/two.py:3"
    assert find(OLD, tmp_path, {"file": "ffncli/two.py", "function": "A.least"}, {}).file == "ffncli/two.py"
    moved = find(Place("x", OLD.file, "A.least", "", OLD.before, OLD.after), tmp_path, {}, {OLD.file: "ffncli/one.py"})
    assert moved.file == "ffncli/one.py"


def test_a_line_that_was_rewritten_is_said_and_given_anew_by_hand(tmp_path):
    write(tmp_path, one=LEAST.format("A", "least", "if left < right:"))
    assert find(OLD, tmp_path, {}, {}) == "0 lines: rewritten or gone"
    now = {"before": "if left < right:", "after": "if left <= right:"}
    assert "if left <= right:" in find(OLD, tmp_path, now, {}).text


def test_places_are_drawn_from_lines_that_tests_reach_each_function_once(tmp_path):
    functions = "".join(f"def f{n}(a, b):\n    x = a < {n}\n    return x\n" for n in range(4))
    for floor in ("block", "models", "run", "bench"):
        write(tmp_path, **{f"{floor}__one": functions, f"{floor}__two": functions, f"{floor}__never": functions})
    floors = [f"ffncli/{floor}/{name}.py" for floor in ("block", "models", "run", "bench") for name in ("one", "two")]
    reached = Reached({"tests/t.py::t": 0.1}, {f: {2: 1, 5: 1, 8: 1} for f in floors}, frozenset())
    places = draw(reached, tmp_path, 13, 3, {})
    assert [p.id for p in places[:4]] == ["block-01", "block-02", "block-03", "models-01"]
    assert len({(p.file, p.function) for p in places}) == len(places) == 12
    assert {p.function for p in places} <= {"f0", "f1", "f2"}
    assert not any("never" in p.file for p in places)
    assert draw(reached, tmp_path, 13, 3, {}) == places
    first = places[0]
    again = draw(reached, tmp_path, 13, 3, {f"{first.file}: {first.before} -> {first.after}": "nothing changes"})
    assert first.before + first.after not in [p.before + p.after for p in again if p.file == first.file]


# --- what reaches a line ----------------------------------------------------------------------------------------------


def test_tests_that_reach_a_line_come_fast_first_and_without_those_that_fail(tmp_path):
    reached = Reached({"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.5}, {"f.py": {7: 0b1111, 9: 0b1}}, frozenset({"b"}))
    assert reached.tests("f.py", 7) == ["d", "c", "a"]
    assert reached.tests("f.py", 9) == ["a"]
    assert reached.tests("f.py", 8) == reached.tests("g.py", 7) == []
    reached.save(tmp_path / "map")
    assert Reached.read(tmp_path / "map") == reached


def test_labels_of_a_line_are_those_that_ran_it():
    labels = Labels()
    labels.add("f.py", "a", bytes([0b0000_0110]))  # lines 1 and 2, as coverage packs them
    labels.add("f.py", "b", bytes([0b0000_0100, 0b1]))  # lines 2 and 8
    labels.add("f.py", "c", bytes([0b0000_0110]))
    assert {line: labels.names(bits) for line, bits in labels.of("f.py").items()} == {
        1: ["a", "c"], 2: ["a", "b", "c"], 8: ["b"],
    }  # fmt: skip
