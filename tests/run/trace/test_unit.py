"""One unit over a corpus, against all of its values as hooks on transformers' modules give them."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import ffncli
from ffncli.errors import FFNError
from ffncli.run.trace.unit import UnitSurvey
from tests.oracles.prompted import built, in_double, made, through
from tests.run.corpus.test_corpus import TEXTS, ids_of, values_of

pytestmark = pytest.mark.models

# name → the matrices [d_ff, d_model] that the activation reads and that the units write
WEIGHTS = {
    "llama": ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.down_proj.weight"),
    "bert": ("bert.encoder.layer.1.intermediate.dense.weight", "bert.encoder.layer.1.output.dense.weight"),
}


def check(unit: UnitSurvey, per_text: list[tuple[Tensor, Tensor]], at: int) -> Tensor:
    """Compare all figures with all values of a layer, text by text; return the values [tokens, d_ff]."""
    every, active = (torch.cat([pair[which] for pair in per_text]).double() for which in (0, 1))
    values = every[:, at]
    close = {"rel": 1e-5, "abs": 1e-6 * float(every.abs().max())}
    assert unit.values.tolist() == pytest.approx(values.tolist(), **close)
    assert unit.places.tolist() == [[n, i] for n, (x, _) in enumerate(per_text) for i in range(len(x))]
    assert unit.active_share == pytest.approx(float((active[:, at] > 0).double().mean()))
    centred = values - values.mean()
    assert unit.mean == pytest.approx(float(values.mean()), **close)
    assert unit.std == pytest.approx(float(centred.square().mean().sqrt()), **close)
    assert unit.kurtosis == pytest.approx(float((centred**4).mean() / centred.square().mean() ** 2), rel=1e-4)
    for one in unit.quantiles:
        assert one.value == pytest.approx(float(numpy.quantile(values.numpy(), one.share)), **close)
    counts, edges = numpy.histogram(unit.values.numpy(), len(unit.histogram))
    assert [one.count for one in unit.histogram] == counts.tolist()
    assert [one.low for one in unit.histogram] == pytest.approx(edges[:-1].tolist())
    assert [one.value for one in unit.top] == pytest.approx(values.sort(descending=True).values[:10].tolist(), **close)
    for one in unit.top:
        word = TEXTS[one.at.text].split()[one.at.token]
        assert one.context.count(f"«{word}»") == 1
    correlations = torch.corrcoef(every.t())[at]
    for one in unit.similar:
        assert one.correlation == pytest.approx(float(correlations[one.unit]), abs=1e-6)
    best = correlations.abs().nan_to_num(0.0)
    best[at] = 0
    assert int(best.argmax()) in {one.unit for one in unit.similar}
    words: dict[int, list[float]] = defaultdict(list)
    for text, (x, _) in zip(TEXTS, per_text, strict=True):
        for word, value in zip(ids_of(text)[0].tolist(), x[:, at].tolist(), strict=True):
            words[word].append(value)
    means = {word: sum(some) / len(some) for word, some in words.items()}
    assert [one.id for one in unit.fires_on] == sorted(means, key=lambda word: -means[word])[:10]
    for token in unit.fires_on:
        assert token.tokens == len(words[token.id])
        assert token.mean == pytest.approx(means[token.id], **close)
        assert token.max == pytest.approx(max(words[token.id]), **close)
    return every


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_unit_is_that_of_hooks(name: str) -> None:
    path, model = in_double(name)
    unit = ffncli.unit(path, TEXTS, layer=1, neuron=5, batch_size=4, dtype="fp64")
    check(unit, values_of(name, [1], TEXTS)[1], 5)
    into, out = (model.state_dict()[key] for key in WEIGHTS[name])
    for one in unit.similar:
        for found, rows in ((one.cosine_in, into), (one.cosine_out, out.t())):
            expected = float(rows[one.unit] @ rows[5] / rows[one.unit].norm() / rows[5].norm())
            assert found == pytest.approx(expected, rel=1e-9)
    frame = unit.frame()
    assert frame.value.tolist() == unit.values.tolist()
    assert (unit.tokens, unit.texts) == (len(frame), len(TEXTS))


def test_a_unit_of_an_expert_counts_its_tokens() -> None:
    model, values, places = made("mixtral").model, [], []
    mlp = model.get_submodule("model.layers.1.mlp")
    for number, text in enumerate(TEXTS):
        x = through(model, {"x": "model.layers.1.mlp"}, input_ids=ids_of(text))["x"]
        with torch.no_grad():
            _, _, chosen = mlp.gate(x)  # type: ignore[operator]
            gate, up = (x @ mlp.experts.gate_up_proj[2].t()).chunk(2, -1)  # type: ignore[union-attr, index]
        rows = (chosen == 2).any(-1)
        values += (torch.nn.functional.silu(gate) * up)[rows, 7].tolist()
        places += [[number, at] for at in rows.nonzero().flatten().tolist()]
    unit = ffncli.unit(made("mixtral").path, TEXTS, layer=1, neuron=7, expert=2, batch_size=4)
    assert unit.places.tolist() == places
    assert unit.values.tolist() == pytest.approx(values, rel=1e-4, abs=1e-5)
    words = [ids_of(TEXTS[text])[0, at].item() for text, at in places]
    assert {one.id: one.tokens for one in unit.fires_on} == {
        w: words.count(w) for w in {one.id for one in unit.fires_on}
    }


def test_what_it_writes_is_what_the_lens_says() -> None:
    unit = ffncli.unit(made("llama").path, TEXTS[:3], layer=1, neuron=3)
    lens = ffncli.trace(made("llama").path, layer=1, unembed=True, neuron=3)
    assert lens.unembed is not None
    for one, other in zip(unit.writes, lens.unembed, strict=True):
        assert [(t.id, t.logit) for t in one.promoted] == [(t.id, t.logit) for t in other.promoted]


def test_a_duplicate_is_the_most_similar(tmp_path: Path) -> None:
    model: Any = built("llama", tmp_path)
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        for rows in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.t()):
            rows[9] = rows[4]
    model.save_pretrained(tmp_path)
    first = ffncli.unit(tmp_path, TEXTS, layer=1, neuron=4).similar[0]
    assert (first.unit, first.cosine_in, first.cosine_out) == (9, pytest.approx(1), pytest.approx(1))
    assert first.correlation == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("llama", {"layer": 1}, "a unit of one layer"),
        ("llama", {"neuron": 1}, "a unit of one layer"),
        ("llama", {"layer": 1, "neuron": 4000}, "out of range"),
        ("llama", {"layer": 1, "neuron": 1, "expert": 0}, "no experts"),
        ("mixtral", {"layer": 1, "neuron": 1}, "has 4 experts"),
        ("mixtral", {"layer": 1, "neuron": 1, "expert": 4}, "has 4 experts"),
    ],
)
def test_what_is_no_unit_is_refused(name: str, arguments: dict[str, int], words: str) -> None:
    with pytest.raises(FFNError, match=words):
        ffncli.unit(made(name).path, TEXTS[:2], **arguments)
