"""Arguments of `ffncli.trace` and `ffncli.survey`: what is accepted, and that everything else is said."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ffncli
from ffncli.errors import FFNError
from ffncli.models.dimensions import Dimensions
from ffncli.options.opt import as_typed
from ffncli.run.trace import call as trace_call
from ffncli.run.trace import question
from tests.oracles.own_modules import MODULES
from tests.oracles.prompted import PROMPT, made

WRONG: list[tuple[str, Any, str]] = [
    ("layer", 1.5, "a whole number or text such as 'decoder.3'"),
    ("layer", True, "a whole number or text"),
    ("prompt", 3, "prompt must be text, got 3"),
    ("prompt", b"a", "prompt must be text"),
    ("input_ids", [], "token numbers such as"),
    ("input_ids", [1.5], "token numbers such as"),
    ("input_ids", [-1], "token numbers such as"),
    ("input_ids", "a,b", "token numbers such as"),
    ("position", 1.5, "position must be"),
    ("tokens", 0, "tokens must be a whole number from 1, got 0"),
    ("tokens", (2, 3), "a whole number from 1"),
    ("batch", 2.0, "a whole number from 1"),
    ("input", 4, "arange, randn, zeros, ones"),
    ("dtype", torch.float32, "fp32, fp64, bf16 or fp16"),
    ("device", torch.device("cpu"), "cpu, cuda or cuda:1"),
    ("seed", -1, "a whole number from 0"),
    ("threads", 5000, "from 1 to 4096"),
    ("train", 1, "True or False"),
    ("show", 0, "a whole number from 1, or all"),
    ("show", "some", "a whole number from 1, or all"),
    ("expert", 0.5, "expert must be"),
    ("top_units", 1001, "from 0 to 1000"),
    ("explain", 3, r"places such as \['up\[0,3\]'\]"),
    ("explain", [("up", 0, 3)], "places such as"),
    ("terms", 0, "a whole number from 1"),
    ("depth", 100, "1 to 99"),
    ("unembed", "yes", "True or False"),
    ("sample_top_p", 1.5, "above 0 and at most 1"),
    ("sample_top_p", float("nan"), "above 0 and at most 1"),
    ("example", 3, "example must be text"),
    ("keep", 3, "names of steps, or True for all"),
    ("save", 3, "save must be a path"),
    ("d_model", 4.0, "a whole number or text"),
    ("gated", "yes", "True or False"),
    ("dropout", 1, "below 1"),
    ("experts", 0, "a whole number from 1"),
    ("activation", 3, "activation must be text"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_type_is_said_with_what_is_accepted(name: str, value: Any, words: str):
    with pytest.raises(FFNError, match=words) as error:
        ffncli.trace("4x8:relu", **{name: value})
    assert error.value.code == 2


@pytest.mark.parametrize("source", [3, torch.ones(2), ["4x8"], b"4x8", torch.nn.Linear])
def test_a_source_of_a_wrong_type(source: Any):
    with pytest.raises(FFNError, match=r"source must be text such as '512x2048:gelu', a path, a model from ffncli"):
        ffncli.trace(source)


def test_a_source_that_is_none():
    with pytest.raises(FFNError, match="x"):
        ffncli.trace("x")


def test_an_argument_that_there_is_not():
    with pytest.raises(FFNError, match=r"no argument 'token'; did you mean 'tokens'"):
        ffncli.trace("4x8:relu", token=3)  # type: ignore[call-arg]
    with pytest.raises(FFNError, match="no argument 'layer'"):
        ffncli.survey("llama-2-7b", layer=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 3, "batch": 2}, "tokens contradicts batch and seq_len"),
        ({"position": 1}, "position needs prompt"),
        ({"neuron": 1}, "neuron needs unembed"),
        ({"prompt": "a"}, "is not a directory with weights"),
        ({"prompt": "a", "tokens": 3}, "tokens contradicts prompt"),
        ({"terms": 3}, "terms needs explain"),
        ({"explain": "up"}, "is not a place in a tensor"),
        ({"explain": "nope[0,1]"}, "explain: no step 'nope'"),
        ({"keep": "nope"}, "keep: no step 'nope'"),
        ({"expert": 0}, "this layer of 4x8:relu has no experts"),
        ({"save": "a.txt"}, "the name must end in one of"),
        ({"layer": 3}, "layer 3 is out of range"),
    ],
)
def test_what_the_command_line_refuses_is_refused(call, options: dict[str, Any], words: str):
    with pytest.raises(FFNError) as error:
        ffncli.trace("4x8:relu", **options)
    assert words in str(error.value)
    if "keep" in options:
        return  # a flag there
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert call("trace", "4x8:relu", *typed)[2].rstrip().endswith(f"error: {error.value.in_words(as_typed)}")


@pytest.mark.parametrize("ask", [ffncli.trace, ffncli.survey, ffncli.verify])
def test_a_module_that_is_loaded_is_computed_as_it_is(ask: Any, tmp_path: Path):
    """Its activation stands in its code: no option may put another block in its place."""
    path = tmp_path / "mine.py"
    path.write_text(MODULES)
    model = ffncli.load(f"{path}:FeedForwardBlock", Dimensions(d_model="8", d_ff="16", dropout=0.1))
    for options in ({"activation": "gelu"}, {"d_ff": 32}, {"norm": "layernorm"}):
        with pytest.raises(FFNError, match="the dimension options cannot change a module that is already built"):
            ask(model, **options)
    assert ffncli.trace(model)["act"].shape == (4, 16)


def test_a_survey_shows_positions_of_a_prompt_alone():
    with pytest.raises(FFNError, match="position needs prompt or input_ids"):
        ffncli.survey("gpt2", d_model=4, d_ff=8, position=-1)


def test_pictures_keep_every_tensor(call):
    assert call("trace", "8x16:gelu", "--heatmap", "--tokens", "2")[2] == "note: kept 4 tensors, 0.0 MB\n"


def test_numbers_may_be_numpys_and_lists_anything_that_counts():
    path = made("llama").path
    plain = ffncli.trace(path, layer=1, prompt=PROMPT, position="0,2", show=4)
    same = ffncli.trace(path, layer=numpy.int64(1), prompt=PROMPT, position=numpy.array([0, 2]), show=numpy.int32(4))
    assert plain.steps == same.steps
    assert plain.model_run == same.model_run
    ids = [token.id for token in ffncli.trace(path, prompt=PROMPT).tokens]
    by_ids = [ffncli.trace(path, input_ids=these).steps for these in (ids, torch.tensor(ids), ",".join(map(str, ids)))]
    assert by_ids[0] == by_ids[1] == by_ids[2]
    assert ffncli.trace("4x8:relu", show="all").steps == ffncli.trace("4x8:relu", show=None).steps
    assert ffncli.trace("4x8:relu", device=None, keep=None, explain=None).steps == ffncli.trace("4x8:relu").steps


def test_the_examples_in_the_help_hold():
    found = doctest.testmod(question)
    assert (found.attempted >= 6, found.failed) == (True, 0)


def test_remarks_come_when_they_arise():
    """Those of the model before its layer runs: whoever waits for a long run, or sees it fail, has read them."""
    from ffncli.run.trace.question import Question

    notes: list[str] = []
    with pytest.raises(FFNError, match="no step 'nope'"):
        trace_call.session_for(Question(d_model="4", explain=("nope[0,1]",)), notes.append)
    assert notes == ["assuming d_ff = 4x, activation relu, biases"]
