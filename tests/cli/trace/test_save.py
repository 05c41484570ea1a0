"""`ffn trace --save` as a user asks it."""

import json

import pytest
from safetensors import safe_open

import ffncli
from ffncli.run.saved import saved
from tests.oracles.checkpoints import expect_refusal


def names(path) -> list[str]:
    with safe_open(path, "pt") as file:
        return sorted(file.keys())


def test_it_says_what_it_wrote_and_prints_the_trace(call, tmp_path):
    path = tmp_path / "t.safetensors"
    code, out, err = call("trace", "--save", str(path))
    assert (code, out) == (0, call("trace")[1])
    assert err == f"note: saved 4 tensors to {path}\n"
    assert names(path) == sorted(
        ["x", "up", "act", "down", *(f"weights/{s}.{p}" for s in ("up", "down") for p in ("weight", "bias"))]
    )


def test_experts_are_saved_where_they_are_asked_for(call, tmp_path):
    block = ("8x16:swiglu", "--experts", "4", "--top-k", "4")
    for n, options in enumerate([(), ("--expert", "2"), ("--expert", "all"), ("--explain", "experts.3.up[0,0]")]):
        assert call("trace", *block, *options, "--save", str(tmp_path / f"{n}.safetensors"))[0] == 0
    found = [[n for n in names(tmp_path / f"{n}.safetensors") if n.startswith("experts.")] for n in range(4)]
    assert [len(inner) for inner in found] == [0, 5, 20, 0]
    assert all(name.startswith("experts.2.") for name in found[1])


def test_weights_are_saved_where_they_are_small_or_asked_for(call, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "SMALL_WEIGHTS", 4 * 8 * 16 * 3 - 1)
    texts = []
    for n, options in enumerate([(), ("--save-weights",), ("--no-save-weights",)]):
        texts.append(call("trace", "8x16:swiglu", *options, "--save", str(tmp_path / f"{n}.safetensors"))[2])
    kept = [sum("/" in n for n in names(tmp_path / f"{n}.safetensors")) for n in range(3)]
    assert kept == [0, 3, 0]
    assert "without weights (0 MB; --save-weights adds them)" in texts[0]
    assert ["without" in text for text in texts] == [True, False, True]
    for option in ("--save-weights", "--no-save-weights"):
        expect_refusal(call("trace", option), f"{option} needs --save")


def test_what_was_run_is_recorded(call, tmp_path):
    path = tmp_path / "t.json"
    call("trace", "8x16:swiglu", "--dtype", "bf16", "--seed", "7", "--save", str(path))
    record = json.loads(path.read_text())["ffn_trace"]
    block = record["block"]
    assert (block["source"], block["dtype"], block["seed"], block["mode"]) == ("8x16:swiglu", "bfloat16", 7, "eval")
    assert (record["ffn_input"], record["ffn_output"]) == ("x", "down")


def test_an_existing_file_is_kept_unless_forced(call, tmp_path):
    path = tmp_path / "t.npz"
    path.write_text("mine")
    expect_refusal(call("trace", "--save", str(path)), f"{path} exists already; choose another --save FILE")
    assert path.read_text() == "mine"
    assert call("trace", "--save", str(path), "--force")[0] == 0
    assert path.read_bytes()[:2] == b"PK"


def test_places_that_cannot_be_written(call, tmp_path):
    expect_refusal(call("trace", "--save", str(tmp_path / "no" / "t.npz")), "there is no directory", code=3)
    (tmp_path / "full.npz").symlink_to("/dev/full")
    expect_refusal(call("trace", "--save", str(tmp_path / "full.npz")), "No space left on device", code=3)
    same = str(tmp_path / "t.json")
    expect_refusal(call("trace", "--json", "-o", same, "--save", same), "--save and --output name the same file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full.npz"]


def test_home_is_found(call, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call("trace", "--save", "~/t.npz")[0] == 0
    assert (tmp_path / "t.npz").exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_values_as_a_table(call, tmp_path, suffix):
    """A row for each value of each step."""
    import pandas

    path = tmp_path / f"values{suffix}"
    code, _, err = call("trace", "4x8:relu", "--tokens", "3", "--save", str(path))
    assert (code, "values of 4 steps" in err) == (0, True)
    table = pandas.read_csv(path) if suffix == ".csv" else pandas.read_parquet(path)
    assert [*table.columns] == ["step", "layer", "token", "unit", "value"]
    session = ffncli.trace("4x8:relu", tokens=3)
    assert table.step.drop_duplicates().tolist() == [record.name for record in session.steps]
    for record in session.steps:
        ours, theirs = table[table.step == record.name].drop(columns="step"), session.frame(record.name)
        assert ours.value.to_numpy().astype("float32").tolist() == theirs.value.tolist()
        assert (
            ours[["layer", "token", "unit"]].to_numpy().tolist()
            == theirs[["layer", "token", "unit"]].to_numpy().tolist()
        )
    assert call("trace", "4x8:relu", "--save", str(path))[0] == 2
    code, _, err = call("trace", "4x8:relu", "--save", str(path), "--force", "--save-weights")
    assert (code, "has no weights" in err) == (2, True)
