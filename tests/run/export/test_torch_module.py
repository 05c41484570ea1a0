"""--as torch: the file is run, with our weights, against the block in float64."""

import re
import runpy

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.models.model import Model, Resolved, block_model
from ffncli.models.source import load
from ffncli.run.engine.weights import random_weights
from ffncli.run.export.problem import problem_of
from ffncli.run.export.torch_module import torch_file
from tests.run.export.blocks import DENSE, MIXTURES, close, drawn, expected, problem

BLOCKS = DENSE | MIXTURES


def loaded(text: str) -> dict:
    """The names that the file defines."""
    names: dict = {"__name__": "block"}
    exec(compile(text, "block.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", BLOCKS)
def test_the_module_has_our_names_and_our_numbers(name):
    block = problem(BLOCKS[name])
    weights, inputs = drawn(block)
    names = loaded(torch_file(block))
    module = names["Block"]().double()
    module.load_state_dict(weights, strict=True)
    want = expected(name, block, weights, inputs)
    with torch.no_grad():
        close(module.eval()(*inputs.values()), want)
        batched = {key: tensor.reshape(1, *tensor.shape) for key, tensor in inputs.items()}
        close(module(*batched.values())[0], want)
    close(names["reference"](module, *inputs.values()), want)


@pytest.mark.parametrize("name", ["gated", "mixtral"])
def test_the_ffn_alone(name):
    block = problem(BLOCKS[name], "ffn")
    weights, inputs = drawn(block)
    module = loaded(torch_file(block))["Block"]().double()
    module.load_state_dict(weights)
    assert not any(key.startswith("norm") for key in weights)
    with torch.no_grad():
        close(module(*inputs.values()), expected(name, block, weights, inputs))


def test_under_the_same_seed_it_has_the_weights_of_a_trace():
    spec = BLOCKS["bias, after"]
    module_type = loaded(torch_file(problem(spec)))["Block"]
    torch.manual_seed(5)
    state = module_type().state_dict()
    ours = random_weights(steps(spec), torch.Generator().manual_seed(5))
    assert list(state) == list(ours)
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.items())


def test_its_reference_starts_from_the_rounded_numbers():
    names = loaded(torch_file(problem(BLOCKS["gated"], dtype="bf16")))
    torch.manual_seed(0)
    block = names["Block"]().to(names["DTYPE"])
    (x,) = names["example_inputs"](7)
    exact = names["reference"](block, x)
    assert (exact.dtype, x.dtype, exact.shape) == (torch.float64, torch.bfloat16, (7, 8))
    apart = names["errors"](block(x).detach(), exact)
    assert apart.shape == (7,)
    assert 1e-4 < apart.max() < names["TOLERANCE"] < 0.04
    assert names["errors"](exact + exact.abs().max(), exact).tolist() == pytest.approx([1.0] * 7)


def test_dropout_acts_in_training_alone():
    names = loaded(torch_file(problem(BLOCKS["dropout"])))
    torch.manual_seed(0)
    block = names["Block"]().double()
    x = torch.randn(50, 8, dtype=torch.float64)
    trained, exact = block(x).detach(), names["reference"](block, x)
    assert (trained - exact).abs().max() > 0.01
    close(block.eval()(x).detach(), exact)


@pytest.mark.parametrize(("name", "end"), [("gated", ""), ("mixtral", "; 0 tokens beyond it")])
def test_run_as_a_program_it_compares_itself(name, end, tmp_path, capsys):
    path = tmp_path / "block.py"
    path.write_text(torch_file(problem(BLOCKS[name], dtype="fp32", tokens=(1, 3))), "utf-8")
    names = runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(\d+) tokens: error (\S+), allowed (\S+e-06)(.*)", line) for line in lines]
    assert [(match[1], match[4]) for match in found] == [("1", end), ("3", end)]
    assert all(float(match[2]) < names["TOLERANCE"] for match in found)


def test_constants_are_the_problems():
    block = problem_of(load("llama-2-7b"), "block", tokens=(1, 512))
    names = loaded(torch_file(block))
    assert (names["DTYPE"], names["PARAMETERS"]) == (torch.float16, 3 * 4096 * 11008 + 4096)
    assert [row["matmul_flops"] for row in names["WORKLOADS"]] == [n * 6 * 4096 * 11008 for n in (1, 512)]
    assert names["TOLERANCE"] == block.tolerance
    assert "Parameters" not in names


def test_every_known_model_is_written_without_a_weight():
    """Quick, since nothing is drawn."""
    from ffncli.models import catalog

    for name in catalog.names():
        model = load(name)
        for group in model.model.groups:
            text = torch_file(problem_of(model, "block", f"{group.stack}.{group.layers[0]}"))
            assert compile(text, name, "exec").co_names


def test_text_from_a_file_stays_in_a_comment():
    spec = FFNSpec(4, 8, "relu", moe=MoE(2, 1))
    base = block_model(spec, "x")
    bad = 'x"""\nimport os\r\nos.abort()\u2028#'
    model = Resolved(Model(bad, base.model.groups, bare=True), bad, citation=bad)
    text = torch_file(problem_of(model, "block"))
    assert "os.abort" in text
    assert not [line for line in text.splitlines() if "abort" in line and not line.startswith("# ")]
    assert "os" not in loaded(text)
