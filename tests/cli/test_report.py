"""`ffn report`, and `-o page.html` of `ffn trace`."""

import json
import re
from pathlib import Path

import pytest

from tests.oracles.checkpoints import expect_refusal
from tests.pages.test_report import RESULTS


def test_it_says_what_it_wrote(call, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = call("report", str(RESULTS), "-o", str(page))
    assert (code, err) == (0, f"note: wrote {page}\n")
    assert re.fullmatch(r"  [1-9]\d* sections?, [\d,]+ kB\n", out)
    assert page.stat().st_size > 10_000
    expect_refusal(call("report", str(RESULTS), "-o", str(page)), "exists already")
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
    assert "The block, number by number" in page.read_text("utf-8")
    assert call("trace", "4x8:relu", "-o", str(page))[0] == 2  # it exists
