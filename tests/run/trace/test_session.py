"""`ffncli.trace` gives what `ffn trace --json` prints, from the same question; and keeps no tensor beyond that."""

import ast
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ffncli
from ffncli.cli.trace import command as command_line
from ffncli.errors import FFNError
from tests.oracles.checkpoints import LLAMA, folder, tensors
from tests.oracles.prompted import IDS, PROMPT, made

pytestmark = pytest.mark.models

EXPERTS = {"experts": 4, "top_k": 2}
QUESTIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "small block": (None, {}),
    "dimensions": ("8x16:swiglu", {"batch": 2, "seq_len": 3, "show": 2, "dtype": "bf16", "top_units": 2, "seed": 5}),
    "d_model alone": (None, {"d_model": 8, "d_ff": "4x", "activation": "gelu", "bias": False, "tokens": 3}),
    "train": ("4x8", {"dropout": 0.5, "train": True, "seed": 3}),
    "explain": ("4x8", {"explain": ["up[0,3]", "down[-1,0]"], "terms": 2, "depth": 3}),
    "experts": ("8x16:swiglu", {**EXPERTS, "expert": [1, 3], "explain": "experts.1.up[0,3]", "show": None}),
    "final layer": ("8x16:gelu", {"vocab": 12, "sample_top_k": 3, "sample_top_p": 0.5}),
    "text": (None, {"example": "llama", "tokens": 2, "explain": "H[0,3]"}),
    "not finite": ("4x8", {"input": "nan,inf,1,2"}),
    "directory": ("llama", {"layer": 1}),
    "prompt": ("llama", {"layer": 1, "prompt": PROMPT}),
    "positions": ("llama", {"layer": "1", "input_ids": IDS, "position": [-1, 0], "explain": "act[0,3]"}),
    "unembed": ("gpt2", {"layer": 0, "prompt": PROMPT, "unembed": True, "position": -1, "top_tokens": 4}),
    "neuron": ("mixtral", {"unembed": True, "neuron": 2, "expert": 1, "sample_top_k": 2}),
    "routes": ("mixtral", {"layer": 1, "prompt": PROMPT, "expert": "all"}),
    "stack": ("t5-gated-gelu", {"layer": "decoder.1", "prompt": PROMPT}),
}


def source_of(name: str | None) -> str | None:
    return str(made(name).path) if name in ("llama", "gpt2", "mixtral", "t5-gated-gelu") else name


def typed(options: Mapping[str, Any]) -> list[str]:
    """A call's arguments as they are typed in a shell."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{name}")
            continue
        parts = value if isinstance(value, (list, tuple)) else ["all" if value is None else value]
        words.append(f"{option}={','.join(map(str, parts))}")
    return words


def as_json(value: Any) -> Any:
    """A record as docs/commands/trace.md has it: what is not finite is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): as_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_library_answers_as_the_shell_does(call, name: str):
    source, options = source_of(QUESTIONS[name][0]), QUESTIONS[name][1]
    code, out, err = call("trace", *([source] if source else []), *typed(options), "--json")
    assert code == 0, err
    printed = {key: value for key, value in json.loads(out).items() if key not in ("schema_version", "command")}
    del printed["conventions"]
    session = ffncli.trace(source, **options)
    for key, value in printed.items():
        record = as_json(getattr(session, key))
        if key == "unembed":
            assert {one.pop("vocab") for one in record} == {session.unembed[0].vocab}
        assert record == value, key
    for key in {"model_run", "routes", "unembed", "sampling", "facts", "explain"} - printed.keys():
        assert not getattr(session, key)
    notes = [*session.notes, *map(str, session.not_finite)]
    assert err == "".join(f"note: {note}\n" for note in notes)


def test_every_part_of_an_answer_is_asked_above():
    asked = {key for _, options in QUESTIONS.values() for key in options}
    assert {"prompt", "input_ids", "unembed", "neuron", "explain", "vocab", "example", "expert"} <= asked


def test_a_loaded_model_and_a_path_are_sources_too():
    path = made("llama").path
    one, same, loaded = (
        ffncli.trace(source, layer=1, tokens=2) for source in (str(path), path, ffncli.load(str(path)))
    )
    assert one.steps == same.steps == loaded.steps
    wider = ffncli.trace(ffncli.load("4x8:relu"), d_ff=16)
    assert (wider.block.d_ff, wider["up"].shape) == (16, (4, 16))


def test_the_agreement_is_with_the_models_own_ffn():
    from tests.oracles.prompted import through

    path, module = made("llama").path, made("llama").model
    session = ffncli.trace(path, layer=1, input_ids=IDS, keep="down", dtype="fp32")
    theirs = through(module, {"output": "model.layers.1.mlp"}, input_ids=torch.tensor([IDS]))["output"]
    torch.testing.assert_close(session.tensors["down"], theirs, rtol=1e-4, atol=1e-4)
    assert session.model_run is not None
    assert session.model_run.agreement.relative_error <= 1e-6
    assert [token.id for token in session.tokens] == list(IDS)


def test_broken_weights_are_named(tmp_path: Path):
    path = Path(folder(tmp_path, LLAMA, tensors("llama")))
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if "layers.1" in name and "up_proj" in name)
    weights[name][0, :3] = torch.nan
    save_file(weights, file)
    session = ffncli.trace(path, layer=1)
    fault = session.not_finite[0]
    assert (fault.kind, fault.name, fault.nan) == ("weight", "up.weight", 3)
    rows = ffncli.survey(path, tokens=2).not_finite
    assert [row.layer for row in rows] == [1]
    assert str(rows[0].not_finite[0]) == "weight up.weight has 3 NaN"


@pytest.mark.parametrize(
    ("source", "options", "kept"),
    [
        ("4x8:relu", {}, set()),
        ("4x8:relu", {"keep": ["act"]}, {"act"}),
        ("4x8:relu", {"keep": "x"}, {"x"}),
        ("4x8:relu", {"keep": True}, {"x", "up", "act", "down"}),
        ("4x8:relu", {"explain": "up[0,3]"}, {"x", "up"}),
        ("4x8:relu", {"explain": "up[0,3]", "keep": ["down"]}, {"x", "up", "down"}),
        ("4x8:relu", {"explain": "down[0,3]", "depth": 2}, {"up", "act", "down"}),
        ("4x8:relu", {"vocab": 6}, {"probs"}),
        ("4x8:relu", {"experts": 2, "top_k": 1}, {"router", "route"}),
        ("4x8:relu", {"experts": 2, "top_k": 2, "keep": "experts.1.up"}, {"router", "route", "experts.1.up"}),
        ("llama", {"prompt": PROMPT}, {"down"}),
        ("llama", {"unembed": True}, {"down"}),
    ],
)
def test_no_tensor_stays_that_the_answer_does_not_need(source: str, options: dict[str, Any], kept: set[str]):
    session = ffncli.trace(source_of(source), **options)
    assert set(session.tensors) == kept
    for name, tensor in session.tensors.items():
        assert tuple(tensor.shape) == session[name].shape if name in {s.name for s in session.steps} else True


def test_what_is_saved_is_what_was_kept(tmp_path: Path):
    session = ffncli.trace("4x8:relu", save=tmp_path / "t.safetensors", save_weights=False)
    assert session.notes == (f"saved 4 tensors to {tmp_path / 't.safetensors'}, without weights",)
    saved = load_file(tmp_path / "t.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in session.tensors.items())
    with pytest.raises(FFNError, match="exists already"):
        ffncli.trace("4x8:relu", save=tmp_path / "t.safetensors")
    ffncli.trace("4x8:relu", save=tmp_path / "t.safetensors", force=True)


def test_all_layers_are_what_the_shell_prints(call):
    for name, options in (("llama", {"prompt": PROMPT}), ("mixtral", {"tokens": 3, "top_units": 2})):
        printed = json.loads(call("trace", source_of(name), "--layer", "all", *typed(options), "--json")[1])
        found = ffncli.survey(source_of(name), **options)
        rows = [as_json(row) for row in found.rows]
        for row in rows:
            error = row.pop("agreement") or dict.fromkeys(("max_error", "relative_error", "ulps"))
            row.update(error)
        assert rows == printed["layers"]
        assert (found.prompt, found.input) == (printed["model"]["prompt"], printed["model"]["input"])
    with pytest.raises(FFNError, match=r"ffncli\.survey"):
        ffncli.trace(source_of("llama"), layer="all")


# --- how the command is made ------------------------------------------------------------------------------------------

PAGES = ("page", "unembed_page", "explain_page", "layers_page", "ranks_page")


def test_the_command_parses_calls_and_shows():
    """At most 40 lines, the options' names included."""
    tree = ast.parse(inspect.getsource(command_line))
    (command,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "command")
    assert command.end_lineno is not None
    assert command.end_lineno - command.lineno + 1 <= 40


@pytest.mark.parametrize("page", PAGES)
def test_a_page_only_renders(page: str):
    """Whatever of run/ it names is a type: a page that computes would have to import it for real."""
    text = (Path(command_line.__file__).parent / f"{page}.py").read_text("utf-8")
    tree = ast.parse(text)
    types = {id(inner) for node in tree.body if isinstance(node, ast.If) for inner in ast.walk(node)}
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in types
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    assert names
    assert not [name for name in names if str(name).startswith(("ffncli.run", "ffncli.kernels", "torch"))]
