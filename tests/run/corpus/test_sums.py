"""Figures that are added up piece by piece are those of all values at once, whatever the pieces."""

import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.run.corpus import sums
from ffncli.run.corpus.sums import Exceeding, Massive, UnitSums, in_many_layers
from ffncli.run.corpus.texts import opened

TOKENS, UNITS = 50, 7


def places(tokens: int) -> Tensor:
    """Texts of three tokens."""
    at = torch.arange(tokens)
    return torch.stack([at // 3, at % 3], 1)


def values(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, UNITS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pieces", [[50], [1] * 50, [3, 40, 7]])
@pytest.mark.parametrize("chunk", [1, 20, 1 << 20])
def test_units(monkeypatch: pytest.MonkeyPatch, pieces: list[int], chunk: int) -> None:
    monkeypatch.setattr(sums, "chunk_size", lambda tensor: chunk)
    x, active, figures = values(), values(1), UnitSums(UNITS, top=4)
    for part, act, at in zip(x.split(pieces), active.split(pieces), places(TOKENS).split(pieces), strict=True):
        figures.add(part, at, act)
    assert figures.tokens.tolist() == [TOKENS]
    assert torch.equal(figures.active, (active > 0).double().sum(0))
    assert torch.allclose(figures.total, x.double().sum(0), atol=1e-5)
    assert torch.equal(figures.high, x.double().amax(0))
    assert torch.equal(figures.low, x.double().amin(0))
    assert torch.equal(figures.high_at, places(TOKENS)[x.argmax(0)])
    assert torch.equal(figures.low_at, places(TOKENS)[x.argmin(0)])
    largest = x.double().topk(4, 0)
    assert torch.equal(figures.largest, largest.values.t())
    assert torch.equal(figures.largest_at, places(TOKENS)[largest.indices.t()])


def test_groups_are_apart_and_state_comes_back() -> None:
    figures = UnitSums(UNITS, groups=3, top=2)
    for group in (0, 2):
        figures.add(values(group), places(TOKENS), group=group)
    assert figures.tokens.tolist() == [TOKENS, 0, TOKENS]
    assert torch.equal(figures.high[2 * UNITS :], values(2).double().amax(0))
    assert figures.high[UNITS : 2 * UNITS].isinf().all()
    again = UnitSums(UNITS, groups=3, top=2)
    again.restore(figures.state())
    assert all(torch.equal(tensor, again.state()[name]) for name, tensor in figures.state().items())
    with pytest.raises(RuntimeError):
        UnitSums(UNITS + 1, groups=3, top=2).restore(figures.state())


def test_values_that_are_not_finite_are_counted() -> None:
    x, figures = values(), UnitSums(UNITS, top=2)
    x[3, 1], x[4, 1], x[5, 2] = torch.nan, torch.inf, -torch.inf
    figures.add(x, places(TOKENS))
    clean = x.nan_to_num(0.0, 0.0, 0.0)
    assert figures.not_finite.tolist() == [3]
    assert torch.equal(figures.high, clean.double().amax(0))
    assert torch.allclose(figures.total, clean.double().sum(0), atol=1e-5)


def test_fewer_tokens_than_top() -> None:
    figures = UnitSums(UNITS, top=5)
    figures.add(values()[:2], places(2))
    assert (figures.largest > -torch.inf).sum(1).tolist() == [2] * UNITS


@pytest.mark.parametrize("pieces", [[50], [1] * 50, [3, 40, 7]])
def test_outlier_dimensions(pieces: list[int]) -> None:
    x, figures = 3 * values(), Exceeding(UNITS, 6.0)
    x[7, 2] = torch.nan
    for part, at in zip(x.split(pieces), places(TOKENS).split(pieces), strict=True):
        figures.add(part, at)
    size = x.abs().nan_to_num(0.0)
    assert torch.equal(figures.count, (size >= 6).sum(0))
    assert torch.equal(figures.largest.abs(), size.double().amax(0))
    assert torch.equal(figures.largest_at, places(TOKENS)[size.argmax(0)])
    assert figures.outliers == [d for d in range(UNITS) if int((size[:, d] >= 6).sum()) >= 3]


def test_dimensions_of_a_quarter_of_the_layers() -> None:
    layers = []
    for dimension in (0, 0, 1, 2, 3, 4, 5, 6):
        x = torch.zeros(TOKENS, UNITS)
        x[:, dimension] = 10
        layers.append(Exceeding(UNITS, 6.0))
        layers[-1].add(x, places(TOKENS))
    assert in_many_layers(layers) == (0,)


@pytest.mark.parametrize("seed", range(5))
def test_of_equal_values_the_first_by_text_counts_whatever_the_batches(seed: int) -> None:
    """Few different values; texts arrive in any order, in pieces of any size."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (60, UNITS), generator=draw).float().relu()
    at = torch.cartesian_prod(torch.arange(12), torch.arange(5))
    order = torch.cat([5 * text + torch.arange(5) for text in torch.randperm(12, generator=draw)])
    figures = UnitSums(UNITS, top=4)
    for piece in order.split(int(torch.randint(1, 17, (), generator=draw))):
        figures.add(x[piece], at[piece])
    for unit in range(UNITS):
        column = x[:, unit].tolist()
        assert figures.high_at[unit].tolist() == at[column.index(max(column))].tolist()
        assert figures.low_at[unit].tolist() == at[column.index(min(column))].tolist()
        largest = sorted(range(60), key=lambda row: (-column[row], row))[:4]
        assert figures.largest_at[unit].tolist() == at[largest].tolist()


def test_massive_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_MOST_KEPT", 2)
    figures, at = Massive(), torch.arange(4)
    figures.add(0, torch.full((4, 4), 90.0), at)
    assert figures.count == 0
    x = torch.full((4, 4), 0.1)
    x[1, 2], x[3, 0], x[0, 0], x[2, 2] = 200.0, -300.0, 99.0, 150.0
    figures.add(1, x, at)
    figures.add(2, 10 * x, at)  # 1000 times the median of 1 is 1000
    assert figures.count == 3 + 3
    assert [(one.text, one.token, one.dimension, one.value) for one in figures.kept] == [
        (2, 3, 0, -3000.0),
        (2, 1, 2, 2000.0),
    ]
    assert figures.kept[0].median == pytest.approx(1.0)
    assert figures.kept[0].ratio == pytest.approx(3000.0)
    figures.add(4, -10 * x, at)
    figures.add(0, 10 * x, at)  # the texts are read in any order
    assert [(one.text, one.value) for one in figures.kept] == [(0, -3000.0), (2, -3000.0)]


def test_the_median_of_an_even_number_of_values_is_between_the_middle_two() -> None:
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    x[1, 4] = 5000.0
    figures = Massive()
    figures.add(0, x, torch.arange(3))
    (one,) = figures.kept
    assert one.median == pytest.approx(statistics.median(x.abs().flatten().tolist()), rel=1e-12)
    assert one.median != float(x.abs().median())


def texts(source: Any) -> list[tuple[int, str]]:
    with opened(source) as corpus:
        first, again = ([(one.number, one.text) for one in corpus] for _ in range(2))
        assert first == again
        ends = [one.end for one in corpus]
        assert ends == sorted(ends)
        assert not ends or ends[-1] <= corpus.size
        numbers = [number for number, _ in first[::2]]
        assert corpus.texts(numbers) == dict(first[::2])
        return first


def test_a_line_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes("eins\n\n  \nzwei  \r\n日本\nlast".encode())
    assert texts(str(path)) == [(0, "eins"), (1, "zwei  "), (2, "日本"), (3, "last")]
    assert texts(path) == texts(str(path))


def test_jsonl_has_strings_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = ["one\nline", {"text": "two", "id": 3}, {"prompt": "three"}, {"content": "four"}, {"text": ""}]
    path.write_text("\n\n".join(map(json.dumps, lines)), "utf-8")
    assert [text for _, text in texts(path)] == ["one\nline", "two", "three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'"fine"\n{"id": 1}\n', ":2: no text"),
        ("a.jsonl", b'"fine"\n\n{oops\n', ":3: not JSON"),
        ("a.jsonl", b"[1]", ":1: no text"),
        ("a.jsonl", b"[" * 100_000, ":1: not JSON"),
        ("a.txt", b"a\n\xff\n", ":2: not UTF-8"),
    ],
)
def test_the_line_that_is_no_text_is_named(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FFNError, match=name + line):
        texts(path)


def test_a_long_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"short\n" + b"x" * 10_000_001)
    with pytest.raises(FFNError, match=r"corpus.txt:2: the text is longer than 10,000,000 bytes"):
        texts(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "nothing", "/dev/zero"):
        with pytest.raises(FFNError, match="prompts: cannot read"):
            texts(name)


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert texts("-") == [(0, "a"), (1, "b")]
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(FFNError, match="standard input: it is closed"):
        texts("-")


def test_given_texts_may_have_lines() -> None:
    assert texts(["a\nb", " ", "c"]) == [(0, "a\nb"), (1, "c")]
