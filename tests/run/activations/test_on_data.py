"""What enters an activation and what others make of it: transformers' own modules, listened to and replaced."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.models.source import load
from ffncli.run.activations import on_data as entering_module
from ffncli.run.activations import on_data as on_data_module
from ffncli.run.activations.on_data import ActivationData, ActivationInput, ActivationOutput, activations_on_data
from ffncli.run.pretrained.prompt import Prompt
from tests.oracles.activations import ORACLES
from tests.oracles.prompted import ACTS, PROMPT, Recorder, built, ffn_input, made, run

pytestmark = pytest.mark.models

OTHERS = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid")
CASES = [
    ("llama", "decoder", 1), ("gemma2", "decoder", 0), ("gpt2", "decoder", 1), ("opt", "decoder", 1),
    ("bert", "encoder", 1), ("t5-gated-gelu", "encoder", 1), ("mixtral", "decoder", 1), ("gpt_oss", "decoder", 0),
    ("deepseek_v3", "decoder", 1), ("qwen2_moe", "decoder", 2),
]  # fmt: skip
CLOSE = 2e-5  # float32, summed in another order


def looked(
    source: Path | str, layer: str | None = None, others: tuple[str, ...] = OTHERS, **request: Any
) -> ActivationData:
    return activations_on_data(load(str(source)), Prompt(PROMPT), others, layer=layer, **request)


@cache
def own_run(name: str, stack: str, index: int) -> tuple[Any, Tensor]:
    """The model's own activations, listened to: the same for each other one that is compared with them."""
    return run(made(name), ACTS[name], stack, index)


@cache
def activations(name: str, stack: str, index: int) -> tuple[ActivationInput, ...]:
    (layer,) = looked(made(name).path, f"{stack}.{index}").layers
    return layer.activations


@pytest.mark.parametrize(("name", "stack", "index"), CASES)
def test_what_enters_is_what_the_models_own_activation_gets(name: str, stack: str, index: int) -> None:
    recorders, _ = own_run(name, stack, index)
    found = activations(name, stack, index)
    assert len(found) == len(recorders)
    for entered, recorder in zip(found, recorders, strict=True):
        z, d = torch.cat(recorder.entered).double(), entered.input
        assert d.values == z.numel()
        assert entered.units == sum(piece.shape[1] for piece in recorder.entered)
        assert (d.min, d.max) == (pytest.approx(z.min().item(), abs=CLOSE), pytest.approx(z.max().item(), abs=CLOSE))
        assert d.mean == pytest.approx(z.mean().item(), abs=CLOSE)
        assert d.std == pytest.approx(z.std(correction=0).item(), rel=CLOSE)
        assert d.negatives == int((z < 0).sum())
        shape = (z - z.mean()) / z.std(correction=0)
        assert d.excess_kurtosis == pytest.approx(shape.pow(4).mean().item() - 3, abs=1e-4)
        assert d.percentiles[2].value == pytest.approx(z.quantile(0.5).item(), abs=CLOSE)
        counts = torch.histc(z, 24, z.min().item(), z.max().item()).int().tolist()
        assert sum(abs(a - b) for a, b in zip(d.histogram, counts, strict=True)) <= 2  # one on the edge of two bins


def own_made(entered: ActivationInput, name: str) -> ActivationOutput:
    return next(made for made in entered.made if made.name == name)


@pytest.mark.parametrize(("name", "stack", "index"), CASES)
@pytest.mark.parametrize("other", OTHERS)
def test_what_each_other_makes_of_it(name: str, stack: str, index: int, other: str) -> None:
    """The other's values on what entered, and the output of the model's own FFN with its activation replaced."""
    recorders, before = own_run(name, stack, index)
    _, after = run(made(name), ACTS[name], stack, index, ORACLES[other])
    for entered, recorder in zip(activations(name, stack, index), recorders, strict=True):
        row = own_made(entered, other)
        pieces = [ORACLES[other](z).double() for z in recorder.entered]  # float32's own zeros: tanh reaches -1
        y, own = torch.cat(pieces), torch.cat(recorder.left).double()
        assert row.mean == pytest.approx(y.mean().item(), abs=CLOSE)
        assert row.variance == pytest.approx(y.var(correction=0).item(), rel=1e-4)
        assert row.exact_zero_share == (y == 0).double().mean().item()
        assert row.zero_share == pytest.approx((y.abs() <= 1e-3).double().mean().item())
        assert row.dead_units == sum(int((piece == 0).all(0).sum()) for piece in pieces)
        assert row.near_dead_units == sum(int((piece.abs() <= 1e-3).all(0).sum()) for piece in pieces)
        assert row.max_difference == pytest.approx((y - own).abs().max().item(), abs=CLOSE)
        assert row.relative_difference == pytest.approx(((y - own).norm() / own.norm()).item(), abs=CLOSE)
        if row.max_difference_at is not None and row is not entered.made[0]:
            there = (torch.cat(recorder.entered).flatten() - row.max_difference_at).abs().argmin()
            assert row.max_difference == pytest.approx((y - own).flatten()[there].abs().item(), abs=CLOSE)
        change = (after - before).norm() / before.norm()
        assert row.output_change == pytest.approx(change.item(), abs=CLOSE)


def test_the_own_activation_comes_first_and_changes_nothing() -> None:
    for name, own in (("llama", "silu"), ("gpt2", "gelu_tanh"), ("gpt_oss", "quick_gelu"), ("bert", "gelu")):
        (layer,) = looked(made(name).path, others=("relu",)).layers
        (entered,) = layer.activations
        assert [row.name for row in entered.made] == [own, "relu"]
        first = entered.made[0]
        assert (first.max_difference, first.relative_difference, first.output_change) == (0.0, 0.0, 0.0)
        assert layer.agreement is not None
        assert layer.agreement.relative_error <= 1e-6


def test_a_clip_is_applied_and_counted() -> None:
    """gpt-oss: what reaches the function is at most the limit; the gates themselves, from its own weights, are not."""
    made_model = made("gpt_oss")
    (entered,) = activations("gpt_oss", "decoder", 0)
    recorders, _ = run(made_model, ACTS["gpt_oss"], "decoder", 0)
    z = torch.cat(recorders[0].entered)
    assert entered.input.max == 0.75
    assert entered.clipped == int((z == 0.75).sum()) > 10
    assert entered.formula == "quick_gelu(min(gate, 0.75))"


def test_shared_experts_stand_apart_and_change_with_the_others() -> None:
    routed, shared = activations("deepseek_v3", "decoder", 1)
    assert (routed.step, shared.step) == ("experts.act", "shared.act")
    assert (shared.experts, shared.units, shared.input.values) == (None, 24, 96)
    assert routed.experts == routed.units // 12
    assert [made.output_change for made in routed.made] == [made.output_change for made in shared.made]


def test_what_the_own_activation_has_learned_is_its_own(tmp_path: Path) -> None:
    """Apertus' xielu with random parameters; another xielu would have the initial ones."""
    model = built("apertus", tmp_path)
    layer: Any = model.get_submodule("model.layers.1.mlp")
    recorder = Recorder(layer.act_fn)
    layer.act_fn = recorder
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 5, 6, 7]]))
    (found,) = looked(tmp_path, "1").layers
    first = found.activations[0].made[0]
    assert first.name == "xielu"
    assert first.mean == pytest.approx(recorder.left[0].double().mean().item(), rel=1e-5)
    fresh = ORACLES["xielu"](recorder.entered[0].double()).mean().item()
    assert abs(fresh - recorder.left[0].double().mean().item()) > 0.01


def test_dead_units_by_weights_that_leave_no_doubt(tmp_path: Path) -> None:
    """OPT's relu with five units that no token wakes, three almost off; gelu sees to it that none is exactly zero."""
    from safetensors.torch import load_file, save_file

    built("opt", tmp_path, activation_function="relu")
    stored = load_file(tmp_path / "model.safetensors")
    weight, bias = stored["model.decoder.layers.1.fc1.weight"], stored["model.decoder.layers.1.fc1.bias"]
    weight.mul_(0.01)
    bias.fill_(1.0)
    bias[:5] = -2.0
    weight[5:8], bias[5:8] = 0, 5e-4
    save_file(stored, tmp_path / "model.safetensors")
    (layer,) = looked(tmp_path, "1", ("gelu", "sigmoid")).layers
    (entered,) = layer.activations
    relu, gelu, sigmoid = entered.made
    assert (relu.dead_units, relu.near_dead_units) == (5, 8)
    assert (relu.exact_zero_share, relu.zero_share) == (5 / entered.units, 8 / entered.units)
    assert (gelu.dead_units, gelu.near_dead_units, sigmoid.near_dead_units) == (0, 3, 0)


def test_what_is_not_finite_is_said_and_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = made("llama")
    model.model.save_pretrained(tmp_path)  # type: ignore[operator]
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.gate_proj.weight"][3, 0] = float("nan")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    found = activations_on_data(load(str(tmp_path)), Prompt(None, (3, 5, 6, 7)), ("relu",))
    (entered,) = found.layers[0].activations
    recorders, _ = run(model, ACTS["llama"], "decoder", 0)
    z = recorders[0].entered[0].double()
    rest = torch.cat((z[:, :3], z[:, 4:]), 1)
    assert (entered.input.nan, entered.input.values) == (4, 160)
    assert entered.input.mean == pytest.approx(rest.mean().item(), abs=CLOSE)
    assert entered.made[1].nan == 4
    assert entered.made[1].mean == pytest.approx(rest.relu().mean().item(), abs=CLOSE)
    gap = rest.relu() - torch.nn.functional.silu(rest)
    assert entered.made[1].relative_difference == pytest.approx(
        (gap.norm() / torch.nn.functional.silu(rest).norm()).item(), abs=CLOSE
    )
    assert entered.made[1].output_change is None  # every output has a NaN
    assert [str(one) for one in found.layers[0].not_finite] == ["weight gate.weight has 1 NaN"]


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
def test_in_pieces_it_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = activations(name, "decoder", 1)
    monkeypatch.setattr(entering_module, "_CHUNK", 2)  # a token at a time
    monkeypatch.setattr(on_data_module, "_BLOCK", 2)
    for entered, again in zip(whole, activations(name, "decoder", 1), strict=True):
        assert entered.input.histogram == again.input.histogram
        assert entered.input.excess_kurtosis == pytest.approx(again.input.excess_kurtosis, abs=1e-4)
        for row, row_again in zip(entered.made, again.made, strict=True):
            assert row.near_dead_units == row_again.near_dead_units
            assert row.output_change == pytest.approx(row_again.output_change, abs=CLOSE)
            assert row.relative_difference == pytest.approx(row_again.relative_difference, abs=CLOSE)


def test_every_layer_is_what_it_is_alone() -> None:
    every = looked(made("deepseek_v3").path, "all").layers
    assert [(layer.stack, layer.layer) for layer in every] == [("decoder", 0), ("decoder", 1), ("decoder", 2)]
    assert every[1].activations == activations("deepseek_v3", "decoder", 1)


def test_a_prompt_reaches_the_layers_that_it_can() -> None:
    found = looked(made("whisper").path, "all")
    assert [layer.stack for layer in found.layers] == ["decoder", "decoder"]
    assert found.notes[0] == "a prompt cannot reach the encoder"


def test_without_a_prompt_the_input_goes_through_the_norm() -> None:
    (found,) = activations_on_data(
        load(str(made("llama").path)), None, ("relu",), layer="1", input="ones", leading=(3,)
    ).layers
    layer: Any = made("llama").layer("decoder", 1)
    with torch.no_grad():
        z: Tensor = layer.mlp.gate_proj(layer.post_attention_layernorm(torch.ones(3, 16)))
    assert found.activations[0].input.mean == pytest.approx(z.mean().item(), abs=CLOSE)
    assert (found.tokens, found.activations[0].input.values) == (3, 120)


def test_a_bilinear_block_has_the_identity_for_its_own() -> None:
    (found,) = activations_on_data(load("8x16:bilinear"), None, ("silu",)).layers
    (entered,) = found.activations
    assert [row.name for row in entered.made] == ["identity", "silu"]
    assert entered.made[0].mean == pytest.approx(entered.input.mean)


def test_bare_dimensions_have_no_layers() -> None:
    with pytest.raises(FFNError, match="8x16 is one block and has no layers"):
        activations_on_data(load("8x16"), None, (), layer="all")


def test_positions_choose_what_enters() -> None:
    found = activations_on_data(load(str(made("llama").path)), Prompt(PROMPT, None, "-1"), ("relu",), layer="1")
    x = ffn_input(made("llama"), "decoder", 1)[-1:]
    layer: Any = made("llama").layer("decoder", 1)
    with torch.no_grad():
        z = layer.mlp.gate_proj(x)
    assert found.layers[0].activations[0].input.mean == pytest.approx(z.mean().item(), abs=CLOSE)
    assert [token.text for token in found.tokens["decoder"]] == ["sat"]
