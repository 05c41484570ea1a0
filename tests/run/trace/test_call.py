"""Arguments of `ffncli.trace` and `ffncli.survey`: what is accepted, and that everything else is said."""

import doctest
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import ffncli
from ffncli.errors import FFNError
from ffncli.models.dimensions import Dimensions
from ffncli.options.opt import as_typed
from ffncli.run.trace import call as trace_call
from ffncli.run.trace import question
from tests.oracles.own_modules import MODULES
from tests.oracles.prompted import PROMPT, made

WRONG: list[tuple[str, Any, str]] = [
    ("layer", 1.5, "a whole number or a string such as 'decoder.3'"),
    ("layer", True, "a whole number or a string"),
    ("prompt", 3, "prompt must be a string, got 3"),
    ("prompt", b"a", "prompt must be a string"),
    ("input_ids", [], "token ids such as"),
    ("input_ids", [1.5], "token ids such as"),
    ("input_ids", [-1], "token ids such as"),
    ("input_ids", "a,b", "token ids such as"),
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
    ("explain", 3, r"elements such as \['up\[0,3\]'\]"),
    ("explain", [("up", 0, 3)], "elements such as"),
    ("terms", 0, "a whole number from 1"),
    ("depth", 100, "1 to 99"),
    ("unembed", "yes", "True or False"),
    ("sample_top_p", 1.5, "above 0 and at most 1"),
    ("sample_top_p", float("nan"), "above 0 and at most 1"),
    ("example", 3, "example must be a string"),
    ("keep", 3, "names of steps, or True for all"),
    ("save", 3, "save must be a path"),
    ("d_model", 4.0, "a whole number or a string"),
    ("gated", "yes", "True or False"),
    ("dropout", 1, "below 1"),
    ("experts", 0, "a whole number from 1"),
    ("activation", 3, "activation must be a string"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_type_is_said_with_what_is_accepted(name: str, value: Any, words: str):
    with pytest.raises(FFNError, match=words) as error:
        ffncli.trace("4x8:relu", **{name: value})
    assert error.value.code == 2


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(4, 12, bias=False), nn.Linear(4, 12, bias=False)
        self.w2, self.dropout = nn.Linear(12, 4, bias=False), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.dropout(nn.functional.silu(self.w1(x)) * self.w3(x)))


NO_SOURCE = r"source must be a string such as '512x2048:gelu', a path, a model from ffncli.load, or an nn.Module"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        *((source, NO_SOURCE) for source in (3, torch.ones(2), ["4x8"], b"4x8", nn.Linear, SwiGLU)),
        ("x", "x"),
        (nn.Linear(2, 3), "Linear returns"),
        (nn.ReLU(), "the module: ReLU has no weight matrix"),
    ],
)
def test_a_source_that_is_no_block(source: Any, words: str):
    with pytest.raises(FFNError, match=words):
        ffncli.trace(source)


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
        ({"explain": "up"}, "is not an element of a tensor"),
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
    code, out, err = call("trace", "8x16:gelu", "--heatmap", "--tokens", "2")
    assert (code, out.count("a cell: one value"), err) == (0, 4, "")


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


X = [[1.0, -2.0, 3.0, 0.5], [0.0, 4.0, -1.0, 2.0], [8.0, 1.0, 0.25, -3.0]]


@pytest.mark.parametrize(
    "values",
    [
        X,
        [tuple(row) for row in X],
        numpy.array(X),
        numpy.array(X, numpy.float16),
        numpy.array(X, order="F"),
        torch.tensor(X, requires_grad=True),
        torch.tensor(X, dtype=torch.bfloat16),
        torch.tensor(X).to_sparse(),
    ],
)
def test_arrays_of_any_kind_are_one_input(values: Any):
    session = ffncli.trace("4x8:relu", values)
    assert torch.equal(session["x"], torch.tensor(X))
    assert session.steps == ffncli.trace("4x8:relu", input=";".join(",".join(map(str, row)) for row in X)
                                         .replace(";", "\n")).steps  # fmt: skip


def test_one_token_a_batch_and_whole_numbers():
    assert torch.equal(ffncli.trace("4x8:relu", X[0])["x"], torch.tensor(X[:1]))
    assert torch.equal(ffncli.trace("4x8:relu", numpy.arange(24).reshape(2, 3, 4))["x"].flatten(), torch.arange(24.0))
    double = torch.tensor(X).double() / 3
    assert torch.equal(ffncli.trace("4x8:relu", double, dtype="fp64")["x"], double)
    assert ffncli.survey("gpt2", d_model=4, d_ff=8, input=X).input == "an array, 3 tokens, the same for every layer"
    assert not ffncli.verify("4x8:relu", input=X, check="module").failed


def test_the_input_is_a_copy():
    for values in (numpy.array(X, numpy.float32), torch.tensor(X)):
        session = ffncli.trace("4x8:relu", values)
        values[0, 0] = 99
        assert session["x"][0, 0] == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[1, 2], [3]], "input is not a regular array of numbers"),
        (["a", "b", "c", "d"], "not real numbers"),
        ([1j, 2, 3, 4], "not real numbers"),
        (torch.zeros(4, dtype=torch.complex64), "complex numbers, not real numbers"),
        ([[1, 2, 3]], "its last axis must be d_model = 4"),
        ([], "has 0 values"),
        (numpy.float64(3), "has 1 values, which is not a multiple of d_model = 4"),
        (5, r"input must be values \[tokens, d_model\] \(a list, a NumPy array, a tensor\), or a string"),
        ({"x": 1}, "input must be values"),
    ],
)
def test_values_that_are_no_input(values: Any, words: str):
    with pytest.raises(FFNError, match=words) as error:
        ffncli.trace("4x8:relu", values)
    assert error.value.code == 2


def test_a_module_is_traced_with_its_own_weights():
    torch.manual_seed(3)
    module, x = SwiGLU(), torch.randn(2, 3, 4)
    before = torch.random.get_rng_state()
    session = ffncli.trace(module, x)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(part.training for part in module.modules())
    with torch.no_grad():
        expected = module.eval()(x)
        hidden = nn.functional.silu(module.w1(x)) * module.w3(x)
        module.w1.weight.zero_()
    torch.testing.assert_close(session["down"], expected)
    torch.testing.assert_close(session["hidden"], hidden)
    assert (session.block.activation, session.block.gated, session.block.weights) == (
        "silu", True, "the module's own weights",
    )  # fmt: skip
    assert session.block.name == "SwiGLU"
    verdict = ffncli.verify(module, check="module")
    assert not verdict.failed
    assert any(row.passed for row in verdict.rows)
    assert ffncli.count(module).ffn_params_total == 3 * 4 * 12


def test_a_step_s_tensor_is_there_whether_it_was_kept_or_not():
    kept, again = ffncli.trace("4x8:relu", X, keep=True), ffncli.trace("4x8:relu", X)
    weights = kept.prepared.weights
    up = torch.tensor(X) @ weights["up.weight"].T + weights["up.bias"]
    for session in (kept, again):
        torch.testing.assert_close(session["up"], up)
        assert torch.equal(session["act"], session["up"].relu())
    assert set(again.tensors) == set()
    with pytest.raises(FFNError, match="no step 'gate'; steps: x, up, act, down"):
        again["gate"]
    random = ffncli.trace("4x8:relu", X, dropout=0.5, train=True, keep="dropout")
    assert torch.equal(random["dropout"] == 0, random.tensors["dropout"] == 0)
    with pytest.raises(FFNError, match=r"the tensor of 'act' was not kept; call trace with keep=\['act'\]"):
        random["act"]


def test_a_frame_has_a_row_for_each_value():
    session = ffncli.trace(made("mixtral").path, layer=1, prompt=PROMPT, position=[-1, 0], expert="all", dtype="bf16")
    name = next(record.name for record in session.steps if record.tokens and record.name.endswith(".act"))
    frame, record = session.frame(name), session.step(name)
    assert list(frame.columns) == ["layer", "token", "unit", "value"]
    assert set(frame["layer"]) == {1}
    table = frame.pivot(index="token", columns="unit", values="value")
    positions = [(3, 0)[row] for row in record.tokens]
    assert torch.equal(torch.tensor(table.loc[positions].to_numpy()), session[name].float())
    down = session.frame("moe" if any(r.name == "moe" for r in session.steps) else "experts")
    assert down["token"].unique().tolist() == [3, 0]
    session = ffncli.trace("4x8:relu", X)
    plain = session.frame()
    assert (len(plain), plain["value"].max(), set(plain["layer"])) == (24, session["act"].max(), {0})


def test_what_a_notebook_shows():
    session = ffncli.trace("4x8:relu", X)
    lines = repr(session).splitlines()
    assert lines[0] == "<Session of 4x8:relu"
    assert lines[1].split() == ["x", "[3,", "4]", "float32", "-3", "to", "8"]
    assert len(lines) == 5
    html = session._repr_html_()
    assert html.startswith("<table><caption>4x8:relu</caption><tr><th>step</th>")
    assert html.count("<tr>") == 1 + len(session.steps)
    assert "<td>x · W1 + b1</td>" in html
    many = ffncli.trace("8x16:swiglu", experts=4, expert="all")
    assert len(repr(many).splitlines()) == 8
