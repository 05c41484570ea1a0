"""The FFN that ffn reads from disk and runs is the one that transformers runs: family by family, on tiny random models.

Errors are max|a − b| / max|b| with transformers' tensor as b.
"""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ffncli.block.steps import ffn_span, ffn_steps
from ffncli.models.counting.count import count
from ffncli.models.files import checkpoint
from ffncli.models.source import load
from ffncli.models.tensors import read_weights as values
from ffncli.run.engine.execute import execute
from ffncli.run.engine.locate import live_ffn
from ffncli.run.engine.prepare import Prepared, prepare
from tests.oracles.architectures.traced import Caught
from tests.oracles.huggingface import CASES, D_MODEL, DTYPES, Made, make

Zoo = Callable[[str], Made]

FP32 = 1e-6
BLOCKS = [pytest.param(name, stack, id=f"{name}/{stack}") for name, case in CASES.items() for stack in case.at]
# RMSNorm in transformers computes in float32, so only blocks with LayerNorm can agree to float64.
EXACT = [pytest.param(name, stack, id=f"{name}/{stack}") for name, c in CASES.items() if c.exact_norm for stack in c.at]
PLAIN = {
    "gpt2": "mlp.c_fc.weight", "bert": "intermediate.dense.weight", "vit": "intermediate.dense.weight",
    "t5-relu": "DenseReluDense.wi.weight", "opt": "fc1.weight", "whisper": "fc1.weight", "phi": "mlp.fc1.weight",
    **dict.fromkeys(("falcon-7b", "gpt_neox", "bloom"), "mlp.dense_h_to_4h.weight"),
}  # fmt: skip
GATED = {
    "t5-gated-gelu": "DenseReluDense.wi_0.weight", "mt5": "DenseReluDense.wi_0.weight", "llama": "mlp.gate_proj.weight",
    "gemma2": "mlp.gate_proj.weight", "phi3": "mlp.gate_up_proj.weight",
    "mixtral": "block_sparse_moe.experts.{e}.w1.weight", "qwen3_moe": "mlp.experts.{e}.gate_proj.weight",
    "gpt_oss": "mlp.experts.gate_up_proj",
}  # fmt: skip
# What of layer 1 is the FFN with its norms on disk, and how many tensors that is.
OWN = {
    "gpt2": (r"transformer\.h\.1\.(ln_2|mlp\.c_fc|mlp\.c_proj)\.(weight|bias)", 6),
    "bert": (r"bert\.encoder\.layer\.1\.(intermediate\.dense|output\.dense|output\.LayerNorm)\.(weight|bias)", 6),
    "t5-gated-gelu": (r"decoder\.block\.1\.layer\.2\.(layer_norm|DenseReluDense\.w(i_0|i_1|o))\.weight", 4),
    "falcon-40b": (r"transformer\.h\.1\.(ln_mlp\.(weight|bias)|mlp\.dense_(h_to_4h|4h_to_h)\.weight)", 4),
    "llama": (r"model\.layers\.1\.(post_attention_layernorm|mlp\.(gate|up|down)_proj)\.weight", 4),
    "phi3": (r"model\.layers\.1\.(post_attention_layernorm|mlp\.(gate_up|down)_proj)\.weight", 3),
    "gemma2": (r"model\.layers\.1\.((pre|post)_feedforward_layernorm|mlp\.(gate|up|down)_proj)\.weight", 5),
    "mixtral": (r"model\.layers\.1\.(post_attention_layernorm|block_sparse_moe\..*)\.weight", 14),
    "deepseek_v3": (r"model\.layers\.1\.(post_attention_layernorm\.weight|mlp\..*)", 30),
    "gpt_oss": (r"model\.layers\.1\.(post_attention_layernorm\.weight|mlp\..*)", 7),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Makes and saves each model once."""
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def ready_for(source: Path, stack: str = "", dtype: str = "fp32") -> Prepared:
    model = load(str(source))
    stacks = {group.stack for group in model.model.groups}
    return prepare(model, layer=f"{stack}.1" if len(stacks) > 1 else "1", dtype=dtype)


def tensors_of(ready: Prepared, inputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every tensor of a run by name, the inputs too."""
    given = dict(ready.inputs if inputs is None else inputs)
    return given | {event.name: event.tensor for event in execute(ready.steps, ready.weights, given)}


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "stack"), BLOCKS)
def test_ffn_equals_the_module(zoo: Zoo, name: str, stack: str, dtype: str) -> None:
    made = zoo(name)
    ready = ready_for(made.path, stack, dtype)
    tensors, (start, end) = tensors_of(ready), ffn_span(ready.steps)
    assert ready.origin == f"weights of {stack} layer 1"
    tolerance = FP32 if dtype == "fp32" else made.case.fp64
    assert error(tensors[end], made.ffn(stack, 1, tensors[start])) <= tolerance


@pytest.mark.parametrize(("name", "stack"), BLOCKS)
def test_block_equals_the_forward_pass(zoo: Zoo, name: str, stack: str) -> None:
    """Norms and residual included: what enters and leaves the block while transformers runs the whole model."""
    _assert_block_equals(zoo(name), stack, "fp32", FP32)


@pytest.mark.parametrize(("name", "stack"), BLOCKS)
def test_what_live_modules_catch_is_what_those_named_by_hand_catch(zoo: Zoo, name: str, stack: str) -> None:
    made = zoo(name)
    ours, caught = load(str(made.path)), Caught()
    stacks = {group.stack for group in ours.model.groups}
    live = live_ffn(made.model, ours, ours.model.layer(f"{stack}.1" if len(stacks) > 1 else "1"))
    with caught.watch(made.model, (live.enters, *live.leaves, *live.norms.values())):
        theirs = made.capture(stack, 1, "fp32")
    assert torch.equal(caught.given[live.enters].reshape(theirs.ffn_input.shape), theirs.ffn_input)
    (output,) = (caught.made[module] for module in live.leaves)
    assert error(output.reshape(theirs.ffn_output.shape), theirs.ffn_output) == 0
    if "norm" in live.norms:
        assert torch.equal(caught.given[live.norms["norm"]].reshape(theirs.x.shape), theirs.x)


@pytest.mark.parametrize(("name", "stack"), EXACT)
def test_block_equals_the_forward_pass_in_float64(zoo: Zoo, name: str, stack: str) -> None:
    made = zoo(name)
    _assert_block_equals(made, stack, "fp64", made.case.fp64)


def _assert_block_equals(made: Made, stack: str, dtype: str, tolerance: float) -> None:
    theirs, ready = made.capture(stack, 1, dtype), ready_for(made.path, stack, dtype)
    inputs = {"x": theirs.x} | ({} if theirs.attention is None else {"attention": theirs.attention})
    assert set(ready.inputs) == set(inputs)
    ours, (start, end) = tensors_of(ready, inputs), ffn_span(ready.steps)
    assert error(ours[start], theirs.ffn_input) <= tolerance
    assert error(ours[end], theirs.ffn_output) <= tolerance
    assert error(ours[ready.steps[-1].output], theirs.out) <= tolerance


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("deepseek")])
def test_deepseek_in_float64_where_its_router_is_exact(zoo: Zoo, name: str) -> None:
    """transformers casts the router's input to float32: with 64ths for input and router that loses nothing."""
    made = zoo(name)
    ready = ready_for(made.path, "decoder", "fp64")
    start, end = ffn_span(ready.steps)
    x = (torch.randn(64, D_MODEL, generator=torch.Generator().manual_seed(3)) * 64).round().double() / 64
    ours = {event.name: event.tensor for event in execute(ffn_steps(ready.steps), ready.weights, {start: x})}
    assert error(ours[end], made.ffn("decoder", 1, x)) <= 1e-12


@pytest.mark.parametrize("name", ["qwen3_moe-layer-1-dense", "qwen3_moe-every-second", "deepseek_v3"])
def test_dense_and_moe_layers_of_one_model(zoo: Zoo, name: str) -> None:
    made, seen = zoo(name), set()
    model = load(str(made.path))
    for index in range(3):
        ready = prepare(model, layer=str(index), dtype="fp32")
        tensors, (start, end) = tensors_of(ready), ffn_span(ready.steps)
        assert error(tensors[end], made.ffn("decoder", index, tensors[start])) <= FP32
        experts = hasattr(made.layer("decoder", index).mlp, "experts")
        assert (ready.layer.spec.moe is not None) == experts
        seen.add(experts)
    assert seen == {True, False}


def test_gpt_oss_limits_are_reached(zoo: Zoo) -> None:
    """Without values beyond the limit the comparison above would say nothing of the clamp."""
    ready = ready_for(zoo("gpt_oss").path)
    tensors = tensors_of(ready)
    gates = torch.cat([t.flatten() for n, t in tensors.items() if n.endswith(".gate")])
    ups = torch.cat([t.flatten() for n, t in tensors.items() if n.endswith(".up")])
    assert gates.max() > 0.75
    assert ups.max() > 0.75
    assert ups.min() < -0.75
    assert gates.min() < -0.75  # not clamped below


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_counts_are_the_modules_elements(zoo: Zoo, name: str) -> None:
    made = zoo(name)
    counted = count(load(str(made.path)))
    layers = [(stack, index) for stack in made.case.at for index in range(made.layer_count(stack))]
    theirs = {(stack, index): made.ffn_params(stack, index) for stack, index in layers}
    ours = {(group.stack, index): group.ffn_params_per_layer for group in counted.groups for index in group.layers}
    assert ours == theirs
    assert counted.ffn_params_total == sum(theirs.values())
    assert counted.ffn_params_per_layer in theirs.values()
    assert counted.layers == len(layers)
    assert counted.dtype == "fp32"


@pytest.mark.parametrize("name", CASES)
def test_stored_shapes_are_the_counted_ones(zoo: Zoo, name: str) -> None:
    """Reading weights gives exactly the tensors that were counted."""
    made = zoo(name)
    for stack in made.case.at:
        ready = ready_for(made.path, stack)
        group = next(g for g in count(load(str(made.path))).groups if g.stack == stack and 1 in g.layers)
        assert {n: tuple(t.shape) for n, t in ready.weights.items()} == {t.name: t.shape for t in group.tensors}


# --- what the files say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tensor"), [*PLAIN.items(), *GATED.items()])
def test_evidence_names_the_deciding_tensor(zoo: Zoo, name: str, tensor: str) -> None:
    model, gated = load(str(zoo(name).path)), name in GATED
    fused = "gate and up in " if "gate_up" in tensor else ""
    assert model.evidence[0].startswith(f"{'gated' if gated else 'plain'}: {fused}tensor '")
    assert model.evidence[0].endswith(tensor.format(e=0) + "'")
    assert all(group.spec.gated == gated for group in model.model.groups)


@pytest.mark.parametrize(("name", "says", "gated"), [("t5-relu", "gated-relu", False), ("t5-gated-silu", "silu", True)])
def test_tensors_override_the_config(zoo: Zoo, tmp_path: Path, name: str, says: str, gated: bool) -> None:
    made = zoo(name)
    liar = _with_config(made, tmp_path, feed_forward_proj=says, is_gated_act=not gated)
    model = load(str(liar))
    assert all(group.spec.gated == gated for group in model.model.groups)
    assert any("override" in line for line in model.evidence)
    ready = ready_for(liar, "decoder", "fp64")
    tensors, (start, end) = tensors_of(ready), ffn_span(ready.steps)
    assert error(tensors[end], made.ffn("decoder", 1, tensors[start])) <= 1e-12


@pytest.mark.parametrize(("name", "field", "says"), [
    ("llama", "mlp_bias", True), ("llama-mlp_bias", "mlp_bias", False), ("opt", "enable_bias", False),
    ("falcon-7b", "bias", True), ("falcon-sequential-bias", "bias", False),
])  # fmt: skip
def test_biases_follow_the_tensors(zoo: Zoo, tmp_path: Path, name: str, field: str, says: bool) -> None:
    made = zoo(name)
    liar = _with_config(made, tmp_path, **{field: says})
    model = load(str(liar))
    assert model.model.main.spec.bias is not says
    assert f"bias: {'absent' if says else 'present'} in the file, unlike the config" in model.evidence
    ready = ready_for(liar, "decoder", "fp64")
    tensors, (start, end) = tensors_of(ready), ffn_span(ready.steps)
    assert error(tensors[end], made.ffn("decoder", 1, tensors[start])) <= 1e-12


def _with_config(made: Made, path: Path, **changes: Any) -> Path:
    """The same tensors beside a config that says something else."""
    config = json.loads((made.path / "config.json").read_text())
    assert all(config[name] != value for name, value in changes.items())
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "model.safetensors").symlink_to(made.path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_experts_in_one_tensor(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """The layout that transformers has in memory, where somebody saved it as it is."""
    made = zoo(name)
    made.model.save_pretrained(tmp_path, save_original_format=False)
    names = checkpoint.open_checkpoint(tmp_path).files
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    per_expert, together = ready_for(made.path), ready_for(tmp_path)
    assert set(per_expert.weights) == set(together.weights)
    assert all(torch.equal(per_expert.weights[n], together.weights[n]) for n in together.weights)


def test_norms_called_gamma_and_beta(zoo: Zoo, tmp_path: Path) -> None:
    """The first BERT checkpoints name them so; transformers still reads them."""
    made = zoo("bert")
    tensors = load_file(made.path / "model.safetensors")
    renamed = {
        re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)): tensor
        for name, tensor in tensors.items()
    }
    assert sum(name.endswith(("gamma", "beta")) for name in renamed) > 2
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    _assert_block_equals(Made(made.case, tmp_path, made.model), "encoder", "fp64", 1e-12)


def test_stored_in_bfloat16(zoo: Zoo, tmp_path: Path) -> None:
    """What is stored in 16 bits is computed in the dtype asked for, without another rounding."""
    narrow = copy.deepcopy(zoo("llama").model).bfloat16()
    narrow.save_pretrained(tmp_path)
    assert count(load(str(tmp_path))).dtype == "bf16"
    made, ready = Made(zoo("llama").case, tmp_path, narrow), ready_for(tmp_path, dtype="fp64")
    tensors, (start, end) = tensors_of(ready), ffn_span(ready.steps)
    assert error(tensors[end], made.ffn("decoder", 1, tensors[start])) <= 1e-12


# --- shards, and what is read -----------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(file, tensor) of every tensor whose values were read."""
    seen: list[tuple[str, str]] = []
    original = values.stored

    def stored(opened: checkpoint.Checkpoint, name: str, *more: Any) -> Any:
        found = original(opened, name, *more)
        seen.append((found.place.path.name, name))
        return found

    monkeypatch.setattr(values, "stored", stored)
    return seen


@pytest.mark.parametrize("name", OWN)
def test_only_the_layers_own_tensors_are_read(zoo: Zoo, reads: list[tuple[str, str]], name: str) -> None:
    made, (pattern, number) = zoo(name), OWN[name]
    names = checkpoint.open_checkpoint(made.path).files
    own = {tensor for tensor in names if re.fullmatch(pattern, tensor)}
    assert len(own) == number < len(names)
    ready_for(made.path, "decoder")
    assert {tensor for _, tensor in reads} == own


@pytest.mark.parametrize("name", OWN)
def test_sharded_checkpoint(zoo: Zoo, tmp_path: Path, reads: list[tuple[str, str]], name: str) -> None:
    """The same numbers, though the layer's tensors lie in several files."""
    made = zoo(name)
    made.model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    whole = tensors_of(ready_for(made.path, "decoder"))
    reads.clear()
    sharded = tensors_of(ready_for(tmp_path, "decoder"))
    assert len({file for file, _ in reads}) > 1
    assert {tensor for _, tensor in reads} == {t for t in _stored(tmp_path) if re.fullmatch(OWN[name][0], t)}
    assert set(whole) == set(sharded)
    assert all(torch.equal(whole[tensor], sharded[tensor]) for tensor in whole)


def _stored(path: Path) -> set[str]:
    return set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"])


# --- through the command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("given", ["randn", ",".join(f"{i / 7 - 2:.6f}" for i in range(2 * D_MODEL))])
def test_trace_command(zoo: Zoo, stdout_of, name: str, given: str) -> None:
    made = zoo(name)
    options = ("--layer", "1", "--format", "json", "--show", "all", "--dtype", "fp64", f"--input={given}")
    out = stdout_of("trace", str(made.path), *options)
    answer = json.loads(out)
    values = {step["name"]: torch.tensor(step["values"], dtype=torch.float64) for step in answer["steps"]}
    if given != "randn":
        assert values["x"].flatten().tolist() == [float(word) for word in given.split(",")]
    assert answer["block"]["layer"] == 1
    assert answer["block"]["weights"] == "weights of decoder layer 1"
    theirs = made.ffn("decoder", 1, values[answer["ffn_input"]])
    assert error(values[answer["ffn_output"]], theirs) <= 1e-12
