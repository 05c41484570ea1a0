"""Cases of JSON answers that are read again: certificates, and what `ffn report` makes a page of."""

import contextlib
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import changes, results
from tests.oracles.prompted import made
from tests.run.verify.stored import certificate as made_up


def certificate(draw: Random, folder: Path) -> list[str]:
    """A certificate of which some fields, or some of its rows, are changed; now and then only its verdict."""
    whole = made_up(kernel="packed", attribute=None, file=None, sha256=None)
    if draw.random() < 0.2:
        draw.choice(whole["rows"])["passed"] = draw.choice((False, None, 0, "false"))
    elif draw.random() < 0.5:
        part = draw.choice((whole["certificate"], whole["block"], draw.choice(whole["rows"]), whole))
        part[draw.choice(sorted(part))] = changes.value(draw)
    return _page(_written(whole, draw, folder / "c.json"), draw, folder)


def document(draw: Random, folder: Path) -> list[str]:
    """An answer of `ffn verify`, `ffn compare`, `ffn trace --layer all` or `ffn experts`, changed."""
    return ["report", _written(draw.choice(_answers()), draw, folder / "a.json"), "-o", str(folder / "page.html")]


def _written(whole: Any, draw: Random, path: Path) -> str:
    path.write_bytes(changes.of_json(whole, draw, draw.choice((0, 1, 1, 2))).encode("utf-8", "surrogatepass"))
    return str(path)


def _page(name: str, draw: Random, folder: Path) -> list[str]:
    if draw.random() < 0.5:
        return ["report", name, "-o", str(folder / "page.html")]
    words = ["bench", "512x2048:swiglu", "-n", "32", "--kernel", "packed", "--certificate", name, "--processes", "1"]
    return [*words, "--save", str(folder / "r.csv")]


@cache
def _answers() -> tuple[dict[str, Any], ...]:
    """One answer of each kind."""
    from ffncli.cli.main import main

    model, out = str(made("mixtral").path), []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        results.write_compared()
        Path("texts.jsonl").write_text('{"text": "Hello the cat"}\n{"text": "sat on"}\n')
        commands = (
            ["verify", "4x8:swiglu", "--check", "module,nonlinearity"],
            ["trace", model, "--layer", "all"],
            ["experts", model, "--prompt", "Hello the cat"],
            ["trace", model, "--prompts", "texts.jsonl"],
            ["compare", "a.csv", "b.csv"],
        )
        for words in commands:
            text = io.StringIO()
            silent = contextlib.redirect_stderr(io.StringIO())
            with contextlib.redirect_stdout(text), silent, contextlib.suppress(SystemExit):
                main([*words, "--json"])
            out.append(json.loads(text.getvalue()))
    return tuple(out)
