"""`ffn experts` as a user asks it."""

import numpy
import pytest
import torch

import ffncli
from ffncli.cli.experts import worth_text
from ffncli.run.corpus.placement import PlacementWorth
from tests.oracles.checkpoints import expect_refusal
from tests.oracles.prompted import made

TEXTS = ["Hello the cat sat", "the mat \x1b[31mred", "cat cat cat"]
SEVERAL = [word for text in TEXTS for word in ("-p", text)]


@pytest.fixture
def mixtral() -> str:
    return str(made("mixtral").path)


def test_the_answer_is_that_of_the_library(json_of, mixtral):
    found, survey = json_of("experts", mixtral, *SEVERAL), ffncli.experts(mixtral, TEXTS)
    assert (found["command"], found["corpus"]["texts"], found["corpus"]["ablated_texts"]) == ("experts", 3, 3)
    for layer, record in zip(found["layers"], survey.layers, strict=True):
        assert layer["hit_rates"] == list(record.hit_rates)
        assert [one["divergence"] for one in layer["experts"]] == [one.divergence for one in record.experts]


@pytest.mark.parametrize("style", ["table", "json", "csv", "md"])
def test_every_format(stdout_of, mixtral, style):
    out = stdout_of("experts", mixtral, *SEVERAL, "--format", style)
    assert "\x1b" not in out


def test_the_trend_is_a_table_and_charts(call, stdout_of, mixtral, tmp_path):
    texts, page = tmp_path / "texts.txt", tmp_path / "page.html"
    texts.write_text("\n".join(["Hello the cat sat", "on the mat"] * 10), "utf-8")
    asked = ("experts", mixtral, "--prompts", str(texts), "--ablate-texts", "0")
    assert "Change of the balance from the first text to the last" in stdout_of(*asked)
    assert call(*asked, "-o", str(page))[0] == 0
    assert "z-loss in each tenth of the texts" in page.read_text("utf-8")
    texts.write_text("Hello the cat sat\n" * 9, "utf-8")
    assert "Change of the balance" not in stdout_of(*asked)


def test_the_trend_leaves_out_a_layer_with_few_tokens(stdout_of, tmp_path):
    path = tmp_path / "routes.csv"
    rows = [f"{at},1,{at % 3},{at % 3 + 1}" for at in range(20)]
    path.write_text("\n".join(["pos,layer,e0,e1", "0,0,0,1", *rows]), "utf-8")
    table = stdout_of("experts", str(path), notes=True).partition("Change of the balance")[2].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["layer", "1"]


def test_a_cache_for_more_experts_than_a_layer_has_is_noted(call, mixtral, tmp_path):
    path = tmp_path / "routes.npy"
    numpy.save(path, numpy.array([[[0, 1]], [[1, 2]]]))
    words = "has at most 3 experts, and all of them fit"
    found = ffncli.experts(str(path), slots=[2, 9])
    assert found.notes[1] == f"slots 9: a layer {words}"
    hits = {(one.policy, one.slots): one.hit_rate for one in found.layers[0].caches}
    assert hits["lru", 9] == 0.25  # one of four choices is a second one
    assert f"--slots 9,12: a layer {words}" in call("experts", str(path), "--slots", "2,9,12")[2]
    assert "--slots 40: " in call("experts", mixtral, *SEVERAL, "--slots", "40", "--ablate-texts", "0")[2]


def test_counts_have_no_caches(call, tmp_path):
    path = tmp_path / "counts.pt"
    torch.save({"logical_count": torch.tensor([[[4, 2, 1]], [[3, 5, 2]]])}, path)
    code, out, err = call("experts", str(path), "--cache", "lru", "--slots", "2")
    assert (code, "Hits %, with caches" in out) == (0, False)
    assert "counts.pt: choices that were only counted, not recorded token by token" in out
    assert "without their order no cache can be replayed" in err


def test_a_repeated_option_is_named_as_it_was_typed(call):
    assert call("experts", "--ep", "1", "--ep=2")[2] == "error: --ep takes one value, got 2\n"
    assert call("experts", "-l", "1", "-l", "2")[2] == "error: --layer takes one value, got 2\n"


def test_csv_has_a_row_for_each_expert(csv_of, mixtral):
    rows = csv_of("experts", mixtral, *SEVERAL, "--ablate-texts", "0")
    survey = ffncli.experts(mixtral, TEXTS, ablate_texts=0)
    assert [int(row["tokens"]) for row in rows] == [one.tokens for layer in survey.layers for one in layer.experts]
    assert all(row["divergence"] == "" for row in rows)


def test_a_file_of_texts_and_routes(call, mixtral, tmp_path):
    path, routes = tmp_path / "texts.txt", tmp_path / "routes.safetensors"
    path.write_text("\n".join(TEXTS), "utf-8")
    code, out, err = call("experts", mixtral, "--prompts", str(path), "-l", "0", "--save-routes", str(routes))
    assert code == 0
    assert "Layer 0: the experts that change the prediction most" in out
    assert f"saved the routes of 10 tokens to {routes}" in err
    assert routes.exists()


def test_where_experts_live(json_of, stdout_of, mixtral):
    asked = ("experts", mixtral, *SEVERAL, "--ep", "2", "--cache", "lru,best", "--slots", "2", "--ablate-texts", "0")
    found, survey = json_of(*asked), ffncli.experts(mixtral, TEXTS, ep=2, cache="lru,best", slots=2, ablate_texts=0)
    assert found["worth"] == vars(survey.worth)
    assert found["layers"][0]["placement"]["ranks"] == [list(rank) for rank in survey.layers[0].placement.ranks]
    assert worth_text(survey.worth) in stdout_of(*asked)


@pytest.mark.parametrize(
    ("worth", "words"),
    [
        (PlacementWorth(8, 32, 1, 1, 0.12, 0.09), "with 32 copies is worth 12 % of the MoE time at 8 ranks; the "
         "placement of the first half of the texts keeps 9 of it on the second"),
        (PlacementWorth(8, 0, 1, 1, 0.12, -0.03), "costs 3 % more time on the second"),
        (PlacementWorth(8, 0, 1, 1, 0.12, None), "give several texts"),
    ],
)  # fmt: skip
def test_what_a_placement_is_worth(worth, words):
    assert words in worth_text(worth)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "ffn experts needs texts"),
        (["-p", "cat", "--prompts", "x"], "--prompt contradicts --prompts"),
        (["-p", "cat", "-l", "9"], "layer"),
        (["-p", "cat", "--experts", "4"], "--experts is for recorded routes"),
        (["--prompts", "/nonexistent"], "cannot read"),
    ],
)
def test_what_cannot_be_is_one_line(call, mixtral, arguments, words):
    expect_refusal(call("experts", mixtral, *arguments), words)


def test_a_dense_model_has_none(call):
    expect_refusal(call("experts", str(made("llama").path), "-p", "cat"), "has no experts")
