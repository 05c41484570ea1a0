"""Gradients that reach an FFN in a model, and those of its weights, against transformers' own loss.backward()."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ffncli
from ffncli.errors import FFNError
from ffncli.models.source import load
from ffncli.run.engine.locate import live_ffn, live_parameters
from tests.oracles.architectures.traced import _canonical
from tests.oracles.prompted import IDS, PROMPT, built, made

FAMILIES = (
    "llama", "mistral", "smollm3", "qwen3", "olmo2", "granite", "cohere", "stablelm", "gemma", "gemma2", "gemma3_text",
    "phi3", "glm", "glm4", "gpt2", "gpt_neo", "gptj", "codegen", "bloom", "falcon", "gpt_neox", "phi", "opt", "biogpt",
    "starcoder2", "nemotron", "mpt", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3",
)  # fmt: skip
_SINGLE_INSIDE = ("bloom",)  # its GELU is written with a constant of eight digits
IDS_TENSOR = torch.tensor([IDS])


@cache
def model_at(name: str) -> tuple[Path, Any]:
    """A tiny model's folder, and the model with its head in float64, its experts eager."""
    from transformers import AutoModelForCausalLM

    path = made(name).path if name == "deepseek_v3" else Path(mkdtemp(prefix=f"ffn-{name}-"))
    if name != "deepseek_v3":
        built(name, path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    return path, model


def loss_of(model: Any, ids: Tensor = IDS_TENSOR) -> Tensor:
    """The mean cross-entropy of the next tokens in float64; transformers' own rounds the logits to float32."""
    logits = model(input_ids=ids).logits[0]
    loss = functional.cross_entropy(logits[:-1], ids[0, 1:])
    assert loss.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
    return loss


def canonical_gradients(
    path: Path, model: Any, index: int, ids: Tensor = IDS_TENSOR
) -> tuple[dict[str, Tensor], float]:
    """The gradients of a layer's FFN by canonical names after loss.backward(), and the loss."""
    model.zero_grad()
    loss = loss_of(model, ids)
    loss.backward()
    source = load(str(path))
    _, located = live_parameters(model, source, source.model.layer(index))
    own = dict(model.named_parameters())
    raw = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in own.items()}
    return {
        item.parameter: _canonical([raw[n] for n in item.names], item)
        for item in located if all(n in raw for n in item.names)
    }, loss.item()  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_weight_gradients_are_those_of_the_models_loss(name: str) -> None:
    path, model = model_at(name)
    index = 1
    theirs, loss = canonical_gradients(path, model, index)
    step = ffncli.trace(str(path), layer=index, prompt=PROMPT, dtype="fp64", backward=True).training_step
    mixture = model.config.model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
    limit = 1e-6 if mixture or name in _SINGLE_INSIDE else 1e-10  # routers compute in float32
    assert step.loss == pytest.approx(loss, rel=1e-6)
    floor = 0.01 * max(float(t.abs().max()) for t in theirs.values())
    compared = [n for n in step if n in theirs]
    assert {"up.weight", "down.weight"} <= {*compared}
    for weight in compared:
        error = float((step[weight] - theirs[weight]).abs().max()) / max(floor, float(theirs[weight].abs().max()))
        assert error <= limit, (weight, error)


def trained_on_bytes(name: str, path: Path) -> list[int]:
    """Train a small model on the bytes of a page and save it; return ids of a text like it."""
    import transformers

    page = (Path(__file__).parents[3] / "docs" / "tracing.md").read_bytes()
    text = torch.frombuffer(bytearray(page), dtype=torch.uint8).long()
    generator = torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=88, **sizes)
    else:
        config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_positions=64, **sizes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        ids = text[torch.randint(len(text) - 64, (8, 1), generator=generator) + torch.arange(64)]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    return [*b"the value of the"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weight_gradients_of_a_trained_model(name: str, tmp_path: Path) -> None:
    """A model that has learned nothing has a loss of 5.5."""
    from transformers import AutoModelForCausalLM

    ids = trained_on_bytes(name, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    theirs, loss = canonical_gradients(tmp_path, model, 1, torch.tensor([ids]))
    assert loss < 3.5
    step = ffncli.trace(str(tmp_path), layer=1, input_ids=ids, dtype="fp64", backward=True).training_step
    assert step.loss == pytest.approx(loss, rel=1e-9)
    compared = [weight for weight in step if weight in theirs]
    assert len(compared) >= 3
    for weight in compared:
        assert float((step[weight] - theirs[weight]).abs().max() / theirs[weight].abs().max()) <= 1e-10


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_the_new_loss_is_the_models_with_the_new_weights(name: str) -> None:
    path, model = model_at(name)
    session = ffncli.trace(str(path), layer=1, prompt=PROMPT, dtype="fp64")
    step = session.backward(lr=1e-3)
    assert [*step] == [*session.backward()]
    source = load(str(path))
    layer = source.model.layer(1)
    live = live_ffn(model, source, layer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    theirs, loss = canonical_gradients(path, model, 1)
    mine = {name for item in live.located for name in item.names if item.parameter in theirs}
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n in mine and p.grad is not None and not any(part in n for part in ("norm", "ln_2")):
                p -= 1e-3 * p.grad
        after = loss_of(model).item()
        for n, p in model.named_parameters():
            p.copy_(before[n])
    assert step.loss_after == pytest.approx(after, abs=1e-7)
    assert step.change == pytest.approx(after - loss, rel=1e-3)
    assert step.predicted_change / step.change == pytest.approx(1, abs=0.05)


def test_what_a_step_writes_is_read_in_the_vocabulary() -> None:
    path, model = model_at("llama")
    session = ffncli.trace(str(path), layer=1, prompt=PROMPT, dtype="fp64", backward=True, lr=1.0, unembed=True)
    step = session.training_step
    from ffncli.run.engine.execute import run

    new = run(session.prepared.steps, step.weights, session.prepared.inputs) - session["down"]
    logits = model.lm_head(model.model.norm(new[-1:]))[0]
    (record,) = session.unembed
    assert record.promoted[0].id == int(logits.argmax())
    assert record.promoted[0].logit == pytest.approx(float(logits.max()), rel=1e-9)
    assert record.direct is None


def test_the_norms_of_every_layer() -> None:
    path, model = model_at("llama")
    survey = ffncli.survey(str(path), prompt=PROMPT, dtype="fp64", backward=True)
    assert [(row.stack, row.layer) for row in survey.gradients] == [(row.stack, row.layer) for row in survey.rows]
    for row in survey.gradients:
        theirs, loss = canonical_gradients(path, model, row.layer)
        assert survey.loss == pytest.approx(loss, rel=1e-9)
        for name, norm in row.weight_norms.items():
            assert norm == pytest.approx(float(theirs[name].norm()), rel=1e-8)
        step = ffncli.trace(str(path), layer=row.layer, prompt=PROMPT, dtype="fp64", backward=True).training_step
        assert row.output_norm == pytest.approx(float(step["down"].norm()))
        assert row.input_norm == pytest.approx(float(step["norm"].norm()))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {}, "reads its tokens both ways"),
        ("t5-relu", {"layer": "decoder.0"}, "an encoder and a decoder"),
        ("llama", {"prompt": "Hello"}, "one token has no next token"),
        ("llama", {"loss": "mse"}, "contradicts prompt"), ("llama", {"kernel": "eager"}, "contradicts prompt"),
        ("llama", {"position": [0]}, "position"),
    ],
)  # fmt: skip
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    path = made(name).path if name in ("bert", "t5-relu") else model_at(name)[0]
    with pytest.raises(FFNError, match=message):
        ffncli.trace(str(path), **{"layer": 0, "prompt": PROMPT, "backward": True, **options})


def test_a_survey_needs_a_loss() -> None:
    with pytest.raises(FFNError, match="backward needs prompt"):
        ffncli.survey("gpt2", d_model=4, d_ff=8, backward=True)
