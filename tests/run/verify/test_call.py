"""`ffncli.verify` gives what `ffn verify --json` prints, and refuses what that refuses."""

import doctest
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ffncli
from ffncli.block.activations import TABLE, Limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs
from ffncli.errors import FFNError
from ffncli.options.opt import as_typed
from ffncli.run.engine.execute import run
from ffncli.run.verify import question as verify_question
from ffncli.run.verify.module import block_module
from ffncli.run.verify.verify import CHECKS as VERIFY_CHECKS
from tests.kernels.test_kernels import BLOCKS, drawn
from tests.oracles.checkpoints import LLAMA, folder, tensors
from tests.oracles.modules import relative_error
from tests.oracles.own_modules import MODULES

OWN = {"d_model": 8, "d_ff": 24, "dropout": 0.2}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MODULES + "\ndef mlp(x, gate, up, down):\n    return F.linear(F.silu(F.linear(x, gate)), down)\n")
    return str(path)


def typed(options: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (None, {}),
        (None, {"d_model": 8, "activation": "swiglu", "dtype": "bf16", "check": "module,kernels"}),
        ("16x40:swiglu", {"experts": 4, "seed": 1, "tokens": 3, "check": "tokens"}),
        ("16x40", {"kernel": "packed,eager", "tolerance": 1e-12, "batch": 2, "seq_len": 2}),
        ("MINE:FeedForwardBlock", {**OWN, "check": "module"}),
        ("8x24:swiglu", {"kernel": "bad=MINE:mlp", "check": "kernels"}),
        ("8x32:relu", {"against": "MINE:Needs3D", "check": "layout"}),
    ],
)
def test_a_call_answers_as_the_command_does(call, mine: str, source: str | None, options: dict[str, Any]):
    source = source and source.replace("MINE", mine)
    options = {
        name: value.replace("MINE", mine) if isinstance(value, str) else value for name, value in options.items()
    }
    verdict = ffncli.verify(source, **options)
    code, out, _ = call("verify", *([source] if source else []), *typed(options), "--json")
    answer = json.loads(out)
    assert json.loads(json.dumps([asdict(row) for row in verdict.rows])) == answer["rows"]
    assert json.loads(json.dumps(asdict(verdict.block))) == answer["block"]
    assert code == bool(verdict.failed)


def test_lists_paths_and_loaded_models_are_taken(tmp_path: Path, mine: str):
    path = Path(folder(tmp_path / "llama", LLAMA, tensors("llama")))
    options: dict[str, Any] = {"layer": numpy.int64(1), "check": ["layout", "kernels"], "kernel": ("eager", "packed")}
    found = [ffncli.verify(source, against=source, **options) for source in (str(path), path, ffncli.load(str(path)))]
    assert found[0].rows == found[1].rows == found[2].rows
    assert {row.check for row in found[0].rows} == {"layout", "kernels"}
    assert found[0].failed == ()
    subjects = [row.subject for row in ffncli.verify(f"{mine}:FeedForwardBlock", check="module", **OWN).rows]
    assert "FeedForwardBlock, train, same mask" in subjects


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"check": "modul"}, "did you mean 'module'?"),
        ({"kernel": "eager", "check": "tokens"}, "kernel contradicts check='tokens'"),
        ({"kernel": "fast"}, "unknown kernel 'fast'"),
        ({"device": "cuda:77"}, "cuda:77: there "),
        ({"layer": 3}, " 3 is out of range"),
        ({"against": "nowhere/at/all"}, "does not exist"),
        ({"tokens": 3, "batch": 2}, "contradicts"),
    ],
)
def test_what_the_command_line_refuses_is_refused(call, options: dict[str, Any], words: str):
    with pytest.raises(FFNError) as error:
        ffncli.verify("4x8:relu", **options)
    assert words in str(error.value)
    assert call("verify", "4x8:relu", *typed(options))[2].rstrip().endswith(f"error: {error.value.in_words(as_typed)}")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("check", 3, "check must be names of checks"),
        ("kernel", [len], "kernel must be names such as 'eager'"),
        ("tolerance", -1, "tolerance must be a number from 0, got -1"),
        ("tolerance", "x", "tolerance must be a number from 0"),
        ("tolerance", float("nan"), "tolerance must be a number from 0"),
        ("against", torch.ones(2), "against must be a string such as"),
        ("tokens", 0, "tokens must be one or more whole numbers from 1"),
        ("tokens", [1, 33], "tokens must be one number, got 2; only referee tries several"),
        ("zzz", "a", r"no argument 'zzz'.*see help\(ffncli.verify\)"),
    ],
)
def test_a_wrong_type_is_said_with_what_is_accepted(name: str, value: Any, words: str):
    with pytest.raises(FFNError, match=words):
        ffncli.verify("4x8:relu", **{name: value})


def test_threads_are_set_if_asked_for():
    torch.set_num_threads(2)
    ffncli.verify("4x8:relu", check="zero")
    assert torch.get_num_threads() == 2
    ffncli.verify("4x8:relu", check="zero", threads=1)
    assert torch.get_num_threads() == 1


def test_the_examples_in_the_help_hold():
    found = doctest.testmod(verify_question)
    assert (found.attempted >= 3, found.failed) == (True, 0)


def test_convolutions_run_through_cudnn_as_they_are_timed(monkeypatch: pytest.MonkeyPatch):
    """Their products are in full float32, and cuDNN stays on: torch's context manager turns it off by default."""
    seen = []
    values = VERIFY_CHECKS["finite"]

    def rows(case: Any) -> Any:
        seen.append((torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32))
        return values.rows(case)

    monkeypatch.setitem(VERIFY_CHECKS, "finite", replace(values, rows=rows))
    assert not ffncli.verify("4x8", check="finite").failed
    assert seen == [(True, False)]


MORE = {
    "post": FFNSpec(6, 24, "gelu", norm="layernorm", norm_position="post", residual=True),
    "branch": FFNSpec(6, 24, "swiglu", norm="rmsnorm", norm_position="branch", residual=True, residual_scale=0.3),
    "gemma": FFNSpec(6, 24, "geglu", norm="rmsnorm", norm_position="pre+branch", norm_weight="one_plus", residual=True),
    "no weight": FFNSpec(6, 24, "swiglu", norm="layernorm", norm_weight="none", norm_bias=False, residual=True),
    "bias alone": FFNSpec(6, 24, "swiglu", norm="rmsnorm", norm_bias=True),
    "parallel": FFNSpec(6, 24, "gelu", norm="layernorm", parallel=True),
    "identity experts": FFNSpec(6, 24, "swiglu", moe=MoE(4, 4, identity_experts=3, score_dtype="input")),
    "learned scale": FFNSpec(6, 24, "swiglu", norm="rmsnorm", learned_scale=True, residual=True),
    "latent": FFNSpec(6, 24, "relu2", bias=False, moe=MoE(4, 2, 1, latent=3)),
    "gated norm": FFNSpec(6, 24, "swiglu", norm="rmsnorm", norm_gate=2, residual=True),
    "norm behind": FFNSpec(
        6,
        24,
        "swiglu",
        norm="rmsnorm",
        norm_position="pre+branch",
        norm_weight="one_plus",
        post_norm_eps=1e-2,
        post_norm_weigh="input",
        residual=True,
    ),
    "shared limits": FFNSpec(
        6,
        24,
        "silu",
        gated=True,
        limits=Limits(act_high=0.2, up_limit=0.3),
        shared_limits=Limits(gate_cap=0.3, up_cap=0.2),
        moe=MoE(4, 2, 1),
    ),
    **{f"activation {name}": FFNSpec(6, 24, name) for name in TABLE},
}


@pytest.mark.parametrize("label", [*BLOCKS, *MORE])
def test_module_is_the_steps(label):
    spec = (BLOCKS | MORE)[label]
    block, generator = steps(spec), torch.Generator().manual_seed(0)
    weights = drawn(block, generator)
    inputs = {name: torch.randn(7, 6, generator=generator).double() for name in block_inputs(block)}
    module = block_module(spec, weights)
    expected = run(block, weights, inputs)
    assert relative_error(module(*inputs.values()), expected) < 1e-12
    shared = {p.data_ptr() for p in module.parameters()}
    assert all(t.data_ptr() in shared for t in weights.values())  # nothing was copied


def test_a_weight_that_is_not_the_blocks_is_an_error():
    spec = FFNSpec(6, 24, "gelu")
    weights = drawn(steps(spec), torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match=r"up\.bias"):
        block_module(spec, {name: t for name, t in weights.items() if name != "up.bias"})
