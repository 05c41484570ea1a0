"""`ffn trace --prompts` as a user asks it: every way to give texts, every format, what is refused, what is resumed."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import ffncli
from tests.oracles.checkpoints import expect_refusal
from tests.oracles.prompted import WORDS, made

pytestmark = pytest.mark.models

TEXTS = ["Hello the cat sat", "the mat", "", "\x1b[31mred naïve 日本", "cat cat cat"]


@pytest.fixture
def llama() -> str:
    return str(made("llama").path)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), "utf-8")
    return str(path)


def test_the_answer_is_that_of_the_library(call, llama, texts):
    found = json.loads(call("trace", llama, "--prompts", texts, "--json", "--top-contexts", "2", "--top-units", "1")[1])
    survey = ffncli.corpus(llama, texts, top_contexts=2, top_units=1)
    corpus = found["corpus"]
    assert [corpus[name] for name in ("where", "texts", "tokens", "cut", "limit")] == [texts, 4, 12, 0, 6.0]
    assert corpus["outlier_dimensions"] == list(survey.outlier_dimensions)
    assert len(corpus["layers"]) == len(survey.rows) == 2
    for layer, row in zip(corpus["layers"], survey.rows, strict=True):
        assert (layer["layer"], layer["units"], layer["dead_units"]) == (row.layer, row.units, row.dead_units)
        assert layer["max"] == row.max
        (unit,) = layer["top_units"]
        assert [one["value"] for one in unit["top"]] == [one.value for one in row.top_units[0].top]
        assert unit["max_at"]["token_text"] in WORDS


def test_every_way_to_give_texts(json_of, llama, texts, tmp_path, monkeypatch):
    lines = tmp_path / "texts.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), "utf-8")

    def layers(*arguments: str) -> list[dict]:
        return json_of("trace", llama, *arguments)["corpus"]["layers"]

    first = layers("--prompts", texts)
    assert layers("--prompts", str(lines)) == first
    several = [word for text in TEXTS if text for word in ("--prompt", text)]
    assert layers(*several) == first
    reading, writing = os.pipe()
    os.write(writing, "\n".join(TEXTS).encode())
    os.close(writing)
    with open(reading, encoding="utf-8") as piped:  # no process of its own, which would import transformers again
        monkeypatch.setattr(sys, "stdin", piped)
        assert layers("--prompts", "-") == first
    assert [row["layer"] for row in layers("--prompts", texts, "--layer", "1")] == [1]


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
def test_every_format(stdout_of, llama, texts, style):
    out = stdout_of("trace", llama, "--prompts", texts, "--top-contexts", "3", "--format", style)
    assert "\x1b" not in out


def test_every_answer_about_texts_is_a_page(call, llama, texts, tmp_path):
    """A page holds the whole answer, not a block that can be changed."""
    page, one = tmp_path / "page.html", ("trace", llama, "--layer", "1")
    for words, found in (
        (("trace", llama, "--prompts", texts), "kurtosis"),
        ((*one, "--prompts", texts, "--neuron", "3"), "Fires on"),
        ((*one, "--prompt", TEXTS[0], "--patch-from", "world the mat sat"), "One unit of all tokens"),
        (("trace", llama, "--layer", "all", "--prompt", TEXTS[0]), "most active"),
    ):
        code, out, err = call(*words, "-o", str(page), "--force")
        assert (code, out) == (0, ""), err
        assert found in page.read_text("utf-8")


def test_csv_has_a_row_for_each_layer(csv_of, llama, texts):
    rows = csv_of("trace", llama, "--prompts", texts)
    survey = ffncli.corpus(llama, texts)
    assert [float(row["max"]) for row in rows] == [row.max for row in survey.rows]
    assert [int(row["max_text"]) for row in rows] == [row.max_at.text for row in survey.rows]


def test_units_are_saved_and_a_finished_run_is_read(call, llama, texts, tmp_path):
    state, units = str(tmp_path / "state.safetensors"), str(tmp_path / "units.csv")
    first = json.loads(call("trace", llama, "--prompts", texts, "--resume", state, "--save", units, "--json")[1])[
        "corpus"
    ]
    assert len(Path(units).read_text().splitlines()) == 1 + sum(layer["units"] for layer in first["layers"])
    code, out, err = call("trace", llama, "--prompts", texts, "--resume", state, "--json")
    assert json.loads(out)["corpus"]["layers"] == first["layers"]
    assert (code, err) == (0, "note: resuming after 4 texts\n")
    expect_refusal(call("trace", llama, "--prompts", texts, "--resume", units), units)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "3"], "--prompts contradicts --tokens"),
        (["--explain", "up[0,0]"], "--prompts contradicts --explain"),
        (["--unembed"], "--prompts contradicts --unembed"),
        (["--d-ff", "3"], "--prompts contradicts --d-ff"),
        (["--ablate", "gate"], "--prompts contradicts --ablate"),
        (["--seed", "1"], "--prompts contradicts --seed"),
        (["--save", "x.npz"], "ends in .csv or .parquet"),
        (["--prompt", "x"], "--prompt contradicts --prompts"),
        (["--resume", "."], "it is a directory"),
        (["--batch-size", "0"], "--batch-size must be"),
        (["--outliers", "-1"], "--outliers must be"),
    ],
)
def test_what_contradicts_is_refused(call, llama, texts, arguments, words):
    code, out, err = call("trace", llama, "--prompts", texts, *arguments)
    assert (code in (2, 3), out) == (True, "")
    assert words in err
    assert err.count("\n") == 1


def test_options_of_a_corpus_need_one(call, llama):
    for option in (["--top-contexts", "2"], ["--resume", "x"], ["--batch-size", "4"]):
        expect_refusal(call("trace", llama, *option), f"{option[0]} needs --prompts or --prompt")


def test_one_prompt_with_an_option_of_a_corpus_is_one(call, llama):
    code, out, _ = call("trace", llama, "--prompt", "Hello cat", "--outliers", "0.5", "--json")
    answer = json.loads(out)["corpus"]
    assert (code, answer["texts"], answer["tokens"]) == (0, 1, 2)
    assert any(layer["outliers"] for layer in answer["layers"])


def test_nan_is_counted_and_can_fail(call, tmp_path, texts):
    folder = shutil.copytree(made("llama").path, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][3] = float("nan")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    code, out, err = call("trace", str(folder), "--prompts", texts, "--json", "--fail-on-nonfinite")
    assert code == 1
    assert [layer["not_finite"] for layer in json.loads(out)["corpus"]["layers"]] == [0, 12]
    assert "decoder layer 1: 12 values of units" in err


def test_what_if_in_every_format(call, stdout_of, llama):
    for style in ("table", "json", "csv", "md"):
        out = stdout_of("trace", llama, "--prompt", "Hello \x1b[31mred", "--ablate", "unit:3", "--format", style)
        assert "\x1b" not in out
    assert "what if  unit:3" in call("trace", llama, "--prompt", "the cat", "--ablate", "unit:3")[1]
    found = json.loads(call("trace", "4x8:relu", "--set", "W1[0,3]=5,b1[0]=1", "--json")[1])
    assert [one["name"] for one in found["changes"]] == ["up", "act", "down"]
    assert "prediction" not in found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["4x8:relu", "--set", "W1[0,9]=1"], "out of range"),
        (["4x8:relu", "--ablate", "gate"], "has no gate"),
        (["4x8:relu", "--set", "W1[0,0]=1", "--layer", "all"], "--set contradicts --layer all"),
        (
            ["gpt2", "--d-model", "4", "--d-ff", "8", "--layer", "all", "--ablate", "unit:1"],
            "--ablate contradicts --layer all",
        ),
        (["4x8:relu", "--top-tokens", "3", "--ablate", "unit:1"], "--top-tokens needs"),
    ],
)
def test_what_if_refuses(call, arguments, words):
    expect_refusal(call("trace", *arguments), words)
