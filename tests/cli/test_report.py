"""`ffn report`, and `-o page.html` of `ffn trace`."""

import json
from pathlib import Path

import pytest

from tests.pages.test_report import RESULTS


def test_it_says_what_it_wrote(call, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = call("report", str(RESULTS), "-o", str(page))
    assert (code, err) == (0, "")
    assert out.startswith(f"  {page}: ") or str(page) in out
    assert page.stat().st_size > 10_000
    code, out, err = call("report", str(RESULTS), "-o", str(page))
    assert code == 2
    assert "exists already" in err
    code, out, _ = call("report", str(RESULTS), "-o", str(page), "--force", "--json", "--title", "T")
    answer = json.loads(out)
    assert (code, answer["command"], answer["bytes"]) == (0, "report", page.stat().st_size)
    assert "<title>T</title>" in page.read_text("utf-8")


def test_a_name_by_default(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("report", str(RESULTS))[0] == 0
    assert (tmp_path / "report.html").exists()


def test_a_small_block_is_a_page_of_its_own(call, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = call("trace", "4x8:relu", "-o", str(page))
    assert (code, out) == (0, "")
    assert "change a number there" in err
    assert "Change a number" in page.read_text("utf-8")
    assert call("trace", "4x8:relu", "-o", str(page))[0] == 2  # it exists


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["512x2048"], "then ffn report t.safetensors"),
        (["4x8:relu", "--tokens", "2000"], "values"),
        (["--example", "notebook"], "add --eval"),
        (["4x8:relu", "--ablate", "unit:1"], "--ablate contradicts --output .html"),
        (["4x8:relu", "--set", "W1[0,3]=5"], "--set contradicts --output .html"),
        (["4x8:swiglu", "--experts", "4", "--ep", "2"], "--ep contradicts --output .html"),
        (["4x8:relu", "--explain", "up[0,1]"], "--explain contradicts --output .html"),
        (["4x8:relu", "--json"], "--json contradicts --output .html"),
    ],
)
def test_a_block_that_is_no_page(call, tmp_path: Path, arguments: list[str], words: str) -> None:
    code, _, err = call("trace", *arguments, "-o", str(tmp_path / "page.html"))
    assert code == 2
    assert words in err
    assert not (tmp_path / "page.html").exists()
