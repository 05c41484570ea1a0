"""Rounding inside a model, against transformers' own model with its weights rounded in place."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ffncli
from ffncli.errors import FFNError
from ffncli.run.precision import layers
from ffncli.run.pretrained.prompt import layers_of
from tests.oracles.prompted import IDS, PROMPT, WORDS, give_tokenizer, made, through

pytestmark = pytest.mark.models


def rounded(model: nn.Module, chosen: list[int], to: str) -> Any:
    """Return a copy of a Llama with the matrices of some layers rounded."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for i in chosen:
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight = model.get_parameter(f"model.layers.{i}.mlp.{name}.weight")
                weight.copy_(ffncli.quantize(weight, to).dequantize())
    return model


def next_tokens(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.tensor([IDS])).logits[0].double().log_softmax(-1)
    return out


def test_added_inherited_and_divergence_are_those_of_the_changed_model() -> None:
    found = ffncli.precision(made("llama").path, prompt=PROMPT, layer="all", dtype="fp8", what="weights", in_model=True)
    model = copy.deepcopy(made("llama").model).float()
    count = len(found.rows)
    whole, exact = rounded(model, [*range(count)], "fp8"), next_tokens(model)
    (all_layers,) = found.whole

    def divergence(other: Any) -> float:
        return float((exact.exp() * (exact - next_tokens(other))).sum(-1).mean())

    assert all_layers.kl == pytest.approx(divergence(whole), rel=1e-2, abs=1e-9)
    assert all_layers.kl > 0
    for row in found.rows:
        mlp, ids = f"model.layers.{row.layer}.mlp", {"input_ids": torch.tensor([IDS])}
        base = through(model, {"output": mlp}, **ids)["output"].double()
        quantized = through(whole, {"input": mlp, "output": mlp}, **ids)
        with torch.no_grad():
            unrounded = model.get_submodule(mlp)(quantized["input"]).double()
        inherited = float((unrounded - base).norm() / base.norm())
        total = float((quantized["output"].double() - base).norm() / base.norm())
        assert row.inherited == pytest.approx(inherited, rel=1e-3, abs=1e-6)
        assert row.added == pytest.approx(total - inherited, rel=1e-3, abs=1e-6)
        assert row.kl == pytest.approx(divergence(rounded(model, [row.layer], "fp8")), rel=1e-2, abs=1e-9)
        entering = through(model, {"input": mlp}, **ids)["input"]
        with torch.no_grad():
            alone = rounded(model, [row.layer], "fp8").get_submodule(mlp)(entering).double()
        assert row.error_rel == pytest.approx(float((alone - base).norm() / base.norm()), rel=1e-3)
    first = next(row for row in found.rows if row.layer == 0)
    assert first.inherited == pytest.approx(0, abs=1e-6)
    assert [row.kl for row in found.rows] == sorted((row.kl or 0 for row in found.rows), reverse=True)


def test_a_mixture_inside_a_model_keeps_its_weights() -> None:
    mixtral = made("mixtral").path
    before = ffncli.precision(mixtral, prompt=PROMPT, layer="all", dtype="fp8,int8", in_model=True)
    again = ffncli.precision(mixtral, prompt=PROMPT, layer="all", dtype="int8", in_model=True)
    assert [one.format for one in before.whole] == ["fp8", "int8"]
    assert before.whole[1].kl == again.whole[0].kl  # rounding to fp8 first left no trace
    assert all(row.kl is not None and row.kl < 1 for row in before.rows)


def test_shared_experts_wider_than_the_routed_ones_are_measured_in_a_model() -> None:
    found = ffncli.precision(made("deepseek_v3").path, prompt=PROMPT, layer="all", dtype="fp8", in_model=True)
    assert {layer.spec.moe is None for layer in layers_of(found.model)} == {True, False}
    assert all(row.kl is not None and 0 <= row.kl < 1 for row in found.rows)


def test_a_corpus_is_the_inputs_of_its_texts() -> None:
    texts, model = ["Hello the cat", "the cat sat on the mat"], copy.deepcopy(made("llama").model).float()
    precision = ffncli.precision(made("llama").path, prompts=texts, layer="all", dtype="fp8", what="weights")
    assert len(precision.rows) > 1
    assert precision.input == "--prompt: 2 texts, 9 tokens"
    for row in precision.rows:
        mlp = f"model.layers.{row.layer}.mlp"
        ids = [[WORDS.index(word) for word in text.split()] for text in texts]
        given = [through(model, {"input": mlp}, input_ids=torch.tensor([one]))["input"] for one in ids]
        with torch.no_grad():
            exact = model.get_submodule(mlp)(torch.cat(given)).double()
            error = rounded(model, [row.layer], "fp8").get_submodule(mlp)(torch.cat(given)).double() - exact
        assert row.error_rel == pytest.approx(float(error.norm() / exact.norm()), rel=1e-4)


@pytest.mark.parametrize("at_once", [512, 1])
def test_divergence_and_errors_over_texts_are_those_of_the_changed_model(at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(layers, "_MOST_AT_ONCE", at_once)
    texts, model = ["Hello the cat", "the cat sat on the mat"], copy.deepcopy(made("llama").model).float()
    given = [[WORDS.index(word) for word in text.split()] for text in texts]
    options: dict[str, Any] = {"layer": "all", "dtype": "fp8", "what": "weights", "in_model": True}
    found = ffncli.precision(made("llama").path, prompts=texts, **options)

    def logits(of: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([of(input_ids=torch.tensor([ids])).logits[0] for ids in given]).double()

    def entering(of: nn.Module, layer: int, key: str) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        every = [through(of, {key: name}, input_ids=torch.tensor([ids]))[key] for ids in given]
        return torch.cat(every).double()

    exact, whole = logits(model), rounded(model, [*range(len(found.rows))], "fp8")
    p = exact.log_softmax(-1)
    for one, other in ((found.whole[0], whole), *((r, rounded(model, [r.layer], "fp8")) for r in found.rows)):
        new = logits(other)
        kl = (p.exp() * (p - new.log_softmax(-1))).sum(-1).mean()
        assert one.kl == pytest.approx(float(kl), rel=1e-2, abs=1e-9)
        assert one.output_error == pytest.approx(float((new - exact).norm() / exact.norm()), rel=1e-3)
    for row in found.rows:
        base, changed = entering(model, row.layer, "output"), entering(whole, row.layer, "output")
        assert row.inherited is not None
        assert row.added is not None
        total = float((changed - base).norm() / base.norm())
        assert row.inherited + row.added == pytest.approx(total, rel=1e-3)


def test_a_model_without_a_head_has_the_error_of_its_last_hidden_state(tmp_path: Path) -> None:
    whole: Any = made("bert").model
    whole.bert.save_pretrained(tmp_path)
    give_tokenizer(tmp_path)
    found = ffncli.precision(tmp_path, prompt=PROMPT, layer="all", dtype="int8", in_model=True)

    def hidden(of: nn.Module) -> Tensor:
        with torch.no_grad():
            out: Tensor = of.float()(input_ids=torch.tensor([IDS])).last_hidden_state[0].double()
        return out

    for row in found.rows:
        changed = copy.deepcopy(whole.bert)
        with torch.no_grad():
            for name in ("intermediate", "output"):
                weight = changed.get_parameter(f"encoder.layer.{row.layer}.{name}.dense.weight")
                weight.copy_(ffncli.quantize(weight, "int8").dequantize())
        exact = hidden(copy.deepcopy(whole.bert))
        error = hidden(changed) - exact
        assert row.output_error == pytest.approx(float(error.norm() / exact.norm()), rel=1e-3)
    assert [row.kl for row in found.rows] == [None] * len(found.rows)
    assert found.whole[0].kl is None
    assert (found.whole[0].output_error or 0) > 0


@pytest.mark.parametrize("prompt", ["", " "])
def test_an_empty_prompt_is_one_line(prompt: str) -> None:
    with pytest.raises(FFNError, match="prompt"):
        ffncli.precision(made("llama").path, prompt=prompt, layer="all", dtype="fp8")
