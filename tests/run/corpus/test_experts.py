"""A mixture's experts over a corpus, against transformers' routers, simulated caches, and zeroed experts."""

from collections import Counter, OrderedDict
from functools import cache
from itertools import accumulate, combinations
from math import log2
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ffncli
from ffncli.errors import FFNError
from tests.oracles.prompted import made
from tests.run.corpus.test_corpus import TEXTS, entering_and_chosen, ids_of

MIXTURES = {"mixtral": "gate", "qwen3_moe": "gate", "gpt_oss": "router"}


@cache
def choices(name: str, layer: int) -> list[list[int]]:
    """Each token's experts as transformers' router gives them, the heaviest first, text after text."""
    model, mlp = made(name).model, f"model.layers.{layer}.mlp"
    out: list[list[int]] = []
    for text in TEXTS:
        _, chosen = entering_and_chosen(model, mlp, f"{mlp}.{MIXTURES[name]}", text)
        out += chosen.tolist()
    return out


def test_the_losses_are_those_of_transformers_over_the_corpus() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, config = made("mixtral").model, made("mixtral").model.config
    with torch.no_grad():
        texts = [model(input_ids=ids_of(text), output_router_logits=True).router_logits for text in TEXTS]
    for layer in ffncli.experts(made("mixtral").path, TEXTS, batch_size=5, ablate_texts=0).layers:
        logits = torch.cat([text[layer.layer] for text in texts])
        expected = load_balancing_loss_func((logits,), config.num_local_experts, config.num_experts_per_tok)
        values = {one.name: one.value for one in layer.losses}
        assert values["transformers"] == pytest.approx(expected.item(), rel=1e-5)
        assert values["z-loss"] == pytest.approx(logits.double().logsumexp(-1).square().mean().item(), rel=1e-5)


def test_the_trend_is_that_of_tenths_on_their_own() -> None:
    """Each tenth by transformers' loss function, and the line by numpy's polynomial fit."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, texts = made("mixtral").model, (TEXTS * 2)[:37]
    survey = ffncli.experts(made("mixtral").path, texts, batch_size=5, ablate_texts=0)
    with torch.no_grad():
        logits = [model(input_ids=ids_of(text), output_router_logits=True).router_logits for text in texts]
    parts = [[at for at in range(37) if at * 10 // 37 == part] for part in range(10)]
    for layer in survey.layers:
        whole, expected = choices("mixtral", layer.layer), dict[str, list[float]]()
        ends = [0, *accumulate(len(text.split()) for text in TEXTS)]
        for tenth, part in zip(layer.tenths, parts, strict=True):
            chosen = [e for at in part for token in whole[ends[at % 23] : ends[at % 23 + 1]] for e in token]
            some = torch.cat([logits[at][layer.layer] for at in part])
            load = [count / len(chosen) for count in Counter(chosen).values()]
            figures = {"entropy_bits": -sum(share * log2(share) for share in load)}
            experts = made("mixtral").model.config.num_local_experts
            figures["transformers"] = load_balancing_loss_func((some,), experts, 2).item()
            figures["switch"] = figures["transformers"] / 2
            figures["z-loss"] = some.double().logsumexp(-1).square().mean().item()
            assert tenth.tokens == len(some)
            assert {"entropy_bits": tenth.entropy_bits, **tenth.losses} == pytest.approx(figures, rel=1e-5)
            assert tenth.busiest_share == pytest.approx(max(load))
            for name, value in figures.items():
                expected.setdefault(name, []).append(value)
        for trend in layer.trends:
            line, error = numpy.polyfit(numpy.arange(10) / 10, expected[trend.figure], 1, cov=True)
            assert (trend.change, trend.error) == pytest.approx((line[0], error[0, 0] ** 0.5), rel=1e-4)
    frame = survey.trend_frame()
    assert frame["switch"].tolist() == [one.losses["switch"] for layer in survey.layers for one in layer.tenths]
    assert ffncli.experts(made("mixtral").path, texts[:2], ablate_texts=0).layers[0].trends == ()


@pytest.mark.parametrize("name", MIXTURES)
def test_loads_pairs_and_coverage_are_those_of_the_router(name: str) -> None:
    survey = ffncli.experts(made(name).path, TEXTS, batch_size=5, ablate_texts=0)
    for layer in survey.layers:
        tokens = choices(name, layer.layer)
        load = Counter(expert for token in tokens for expert in token)
        count = len(layer.experts)
        assert [one.tokens for one in layer.experts] == [load[expert] for expert in range(count)]
        assert layer.tokens == len(tokens) == survey.tokens
        assert layer.choices == sum(load.values())
        assert layer.idle_experts == tuple(expert for expert in range(count) if not load[expert])
        shares = [load[e] / layer.choices for e in load]
        assert layer.entropy_bits == pytest.approx(-sum(share * log2(share) for share in shares))
        together = Counter(pair for token in tokens for pair in combinations(sorted(token), 2))
        assert {(p.first, p.second): p.tokens for p in layer.pairs} == dict(together.most_common(len(layer.pairs)))
        for pair in layer.pairs:
            chance = load[pair.first] * load[pair.second] / len(tokens)
            assert pair.lift == pytest.approx(pair.tokens / chance)
        for one in layer.coverage:
            assert one.experts == len({expert for token in tokens[: one.tokens] for expert in token})
        assert layer.coverage[-1].tokens == len(tokens)


@pytest.mark.parametrize("name", MIXTURES)
def test_hit_rates_are_those_of_a_cache(name: str) -> None:
    """A cache of n experts, simulated choice by choice."""
    for layer in ffncli.experts(made(name).path, TEXTS, batch_size=3, ablate_texts=0).layers:
        tokens = choices(name, layer.layer)
        assert len(layer.hit_rates) == len(layer.experts)
        for size, rate in enumerate(layer.hit_rates, 1):
            cache: OrderedDict[int, None] = OrderedDict()
            hits = 0
            for expert in (expert for token in tokens for expert in token):
                hits += expert in cache
                cache[expert] = None
                cache.move_to_end(expert)
                if len(cache) > size:
                    cache.popitem(last=False)
            assert rate == pytest.approx(hits / layer.choices)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_output_changes_are_those_of_a_block_without_the_expert(name: str) -> None:
    model = made(name).model
    for layer in ffncli.experts(made(name).path, TEXTS, ablate_texts=0).layers:
        block: Any = model.get_submodule(f"model.layers.{layer.layer}.mlp")
        pairs = [entering_and_chosen(model, f"model.layers.{layer.layer}.mlp",
                                     f"model.layers.{layer.layer}.mlp.gate", text) for text in TEXTS]  # fmt: skip
        x, chosen = (torch.cat([pair[at] for pair in pairs]) for at in (0, 1))
        with torch.no_grad():
            whole = output(block, x)
            for one in layer.experts:
                if not one.tokens:
                    assert one.output_change is None
                    continue
                rows = (chosen == one.expert).any(-1)
                kept = block.experts.down_proj[one.expert].clone()
                block.experts.down_proj[one.expert] = 0
                without = output(block, x)
                block.experts.down_proj[one.expert] = kept
                gap = (whole - without)[rows].norm(dim=-1) / whole[rows].norm(dim=-1)
                assert one.output_change == pytest.approx(float(gap.mean()), rel=1e-4)


def output(block: Any, x: Tensor) -> Tensor:
    made_of = block(x[None])
    tensor: Tensor = made_of[0] if isinstance(made_of, tuple) else made_of
    return tensor.reshape(x.shape)


@pytest.mark.parametrize(("name", "layer"), [("mixtral", 1), ("qwen3_moe", 2)])
def test_worth_is_that_of_the_model_with_zeros(name: str, layer: int) -> None:
    from transformers import AutoModelForCausalLM

    survey = ffncli.experts(made(name).path, TEXTS, layer=layer, ablate_texts=3, dtype="fp64")
    assert (survey.ablated_texts, survey.ablated_tokens) == (3, sum(len(text.split()) for text in TEXTS[:3]))
    model: Any = AutoModelForCausalLM.from_pretrained(made(name).path, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    down = model.model.layers[layer].mlp.experts.down_proj
    with torch.no_grad():
        old = torch.cat([model(ids_of(text)).logits[0] for text in TEXTS[:3]])
        for one in survey.layers[0].experts:
            if not one.tokens:
                assert one.divergence is None
                continue
            kept = down[one.expert].clone()
            down[one.expert] = 0
            new = torch.cat([model(ids_of(text)).logits[0] for text in TEXTS[:3]])
            down[one.expert] = kept
            gap = functional.kl_div(new.log_softmax(-1), old.log_softmax(-1), log_target=True, reduction="sum")
            assert one.divergence == pytest.approx(float(gap) / len(old), abs=1e-12)
            assert one.argmax_changed == pytest.approx(float((old.argmax(-1) != new.argmax(-1)).double().mean()))


def test_routes_go_to_a_benchmark(tmp_path: Path) -> None:
    from ffncli.bench.request.data import traced_routes

    path = tmp_path / "routes.safetensors"
    survey = ffncli.experts(made("mixtral").path, TEXTS, layer=1, ablate_texts=0, save_routes=path)
    assert any("saved the routes" in note for note in survey.notes)
    experts = len(survey.layers[0].experts)
    chosen = traced_routes(str(path), experts, 2)
    assert [sorted(row.nonzero().flatten().tolist()) for row in chosen] == [sorted(c) for c in choices("mixtral", 1)]


def test_a_frame_has_a_row_for_each_expert() -> None:
    survey = ffncli.experts(made("mixtral").path, TEXTS, ablate_texts=0)
    frame = survey.frame()
    assert len(frame) == sum(len(layer.experts) for layer in survey.layers)
    assert frame.tokens.sum() == sum(layer.choices for layer in survey.layers)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("llama", {}, "has no experts"),
        ("deepseek_v3", {"layer": 0}, "this layer of"),
        ("mixtral", {"save_routes": "a.csv", "layer": 0}, "must end in .safetensors"),
        ("mixtral", {"ablate_texts": -1}, "ablate_texts must be"),
    ],
)
def test_what_cannot_be_is_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(FFNError) as caught:
        ffncli.experts(made(name).path, TEXTS, **arguments)
    assert words in str(caught.value)
