"""A row per layer: its figures from tensors that hooks saw, and from weights made so that the answer is known."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ffncli.errors import ExitCode, FFNError
from ffncli.models.source import load
from ffncli.run.engine import weights as weights_module
from ffncli.run.pretrained.capture import capture
from ffncli.run.pretrained.prompt import Prompt, layers_of
from ffncli.run.trace import survey as survey_module
from ffncli.run.trace.survey import survey
from tests.oracles.prompted import PROMPT, built, ids, made, through

ASKED = Prompt(PROMPT)


def rows(path: Path | str, asked: Prompt | None = ASKED, **request: Any) -> tuple[Any, ...]:
    return survey(load(str(path)), asked, **request).rows


def norm(tensor: Tensor) -> float:
    return float(tensor.norm(dim=-1).mean())


def test_figures_of_a_gated_layer() -> None:
    """Llama's act is silu of the gate projection's output."""
    found = rows(made("llama").path)
    assert [(row.stack, row.layer, row.tokens) for row in found] == [("decoder", 0, 4), ("decoder", 1, 4)]
    for row in found:
        at = f"model.layers.{row.layer}.mlp"
        seen = through(
            made("llama").model, {"input": at, "output": at, "gate_output": f"{at}.gate_proj"}, input_ids=ids()
        )
        act = torch.nn.functional.silu(seen["gate_output"]).abs()
        assert row.zero_share == float((act == 0).float().mean())
        assert row.near_zero_share == pytest.approx(float((act <= 1e-3).float().mean()))
        assert (row.units, row.dead_units) == (40, 0)
        means = act.mean(0)
        assert [unit.unit for unit in row.most_active] == means.argsort(descending=True)[:3].tolist()
        assert [unit.mean_abs for unit in row.most_active] == pytest.approx(means.sort().values.flip(0)[:3].tolist())
        assert row.input_norm == pytest.approx(norm(seen["input"]))
        assert row.output_norm == pytest.approx(norm(seen["output"]))
        assert row.gain == pytest.approx(norm(seen["output"]) / norm(seen["input"]))
        assert row.agreement.relative_error <= 1e-6


def test_dead_units_and_the_most_active_one(tmp_path: Path) -> None:
    """OPT's relu, with biases that keep five units off, three almost off, and one far above the others."""
    from safetensors.torch import load_file, save_file

    built("opt", tmp_path, activation_function="relu")
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.decoder.layers.1.fc1"
    weight, bias = stored[f"{layer}.weight"], stored[f"{layer}.bias"]
    weight.mul_(0.01)
    bias.fill_(1.0)  # the others are always on
    bias[:5] = -1e6
    weight[5:8], bias[5:8] = 0, 5e-4
    bias[9] = 1e6
    save_file(stored, tmp_path / "model.safetensors")
    row = rows(tmp_path)[1]
    assert (row.dead_units, row.near_dead_units) == (5, 8)
    assert row.most_active[0].unit == 9
    assert (row.zero_share, row.near_zero_share) == (5 / row.units, 8 / row.units)


def test_experts_count_where_they_have_tokens() -> None:
    found = rows(made("mixtral").path)
    for row in found:
        name = f"model.layers.{row.layer}.mlp.gate"
        router = through(made("mixtral").model, {"input": name}, input_ids=ids())["input"] @ (
            made("mixtral").model.get_submodule(name).weight.T  # type: ignore[operator]
        )
        used = router.topk(2).indices.unique().tolist()
        assert row.units == 40 * len(used)
        assert {unit.expert for unit in row.most_active} <= set(used)


def test_shared_experts_count_too() -> None:
    dense, moe, _ = rows(made("deepseek_v3").path)
    assert dense.units == 40
    assert moe.units % 12 == 0
    every = survey(load(str(made("deepseek_v3").path)), ASKED, top=99).rows[1].most_active
    shared = [unit for unit in every if unit.shared]
    assert len(shared) == 24  # two shared experts of 12, as one
    assert all(unit.expert is None for unit in shared)


def test_two_stacks_and_their_tokens() -> None:
    found = survey(load(str(made("t5-gated-gelu").path)), Prompt(PROMPT))
    assert [(row.stack, row.layer, row.tokens) for row in found.rows] == [
        ("encoder", 0, 4), ("encoder", 1, 4), ("decoder", 0, 1), ("decoder", 1, 1), ("decoder", 2, 1),
    ]  # fmt: skip
    assert all(row.agreement and row.agreement.relative_error <= 1e-6 for row in found.rows)
    assert {stack: len(tokens) for stack, tokens in found.tokens.items()} == {"encoder": 4, "decoder": 1}


def test_whispers_encoder_is_left_out() -> None:
    found = survey(load(str(made("whisper").path)), Prompt(PROMPT))
    assert [(row.stack, row.layer) for row in found.rows] == [("decoder", 0), ("decoder", 1)]
    assert found.notes[0] == "a prompt cannot reach the encoder"


def test_a_layer_that_waits_for_a_picture_is_left_out(tmp_path: Path) -> None:
    built("mllama", tmp_path)
    found = survey(load(str(tmp_path)), Prompt(None, (3, 4)))
    assert 1 not in [row.layer for row in found.rows]
    assert len(found.rows) == len(layers_of(load(str(tmp_path)))) - 1
    assert found.notes == ("decoder layer 1 did not run on this prompt",)
    with pytest.raises(FFNError, match="mllama: decoder layer 1 did not run on this prompt"):
        capture(load(str(tmp_path)), Prompt(None, (3, 4)), layer="1")


def test_a_bug_of_ours_is_not_blamed_on_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(survey_module, "survey_layer", fail)
    with pytest.raises(ZeroDivisionError):
        rows(made("llama").path)


def test_positions_choose_tokens() -> None:
    assert [row.tokens for row in rows(made("llama").path, Prompt(PROMPT, None, "1:3"))] == [2, 2]


def test_without_a_prompt_every_layer_has_the_same_input() -> None:
    found = rows(made("llama").path, None, input="ones", leading=(3,))
    assert [(row.tokens, row.agreement) for row in found] == [(3, None), (3, None)]
    assert found[0].input_norm != found[1].input_norm  # each behind its own norm
    with torch.no_grad():
        layer: Any = made("llama").layer("decoder", 0)
        entering = layer.post_attention_layernorm(torch.ones(3, 16))
        assert found[0].input_norm == pytest.approx(norm(entering))
        assert found[0].output_norm == pytest.approx(norm(layer.mlp(entering[None])[0]))


def test_one_layers_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []
    look = survey_module.survey_layer

    def watched(layer: Any, steps: Any, weights: Any, *rest: Any) -> Any:
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(weights["up.weight"]))
        return look(layer, steps, weights, *rest)

    monkeypatch.setattr(survey_module, "survey_layer", watched)
    gc.freeze()  # what was there before need not be gone through three times
    try:
        rows(made("deepseek_v3").path, dtype="fp64")  # cast: no view of the file
    finally:
        gc.unfreeze()
    assert alive == [0, 0, 0]


def test_bare_dimensions_have_no_layers() -> None:
    with pytest.raises(FFNError, match="8x16 is one block and has no layers"):
        layers_of(load("8x16"))


def test_short_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "available_memory", lambda _: 100)
    with pytest.raises(FFNError, match="LlamaForCausalLM up to this layer would need") as error:
        rows(made("llama").path)
    assert error.value.code == ExitCode.ENVIRONMENT
