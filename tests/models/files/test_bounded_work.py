"""Headers made to be slow: four times the tensors take about four times the work, whatever they are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from ffncli.errors import FFNError
from ffncli.models.counting.count import count
from ffncli.models.source import load
from ffncli.models.tensors.recognise import MOST_FFNS
from tests.oracles.checkpoints import INDEX, LLAMA

pytestmark = pytest.mark.fuzz

Named = Iterator[tuple[str, tuple[int, ...]]]
MOST = 9  # times the work, for four times the tensors: 4 is in step, 16 is each with each
MANY_LAYERS = {**LLAMA, "num_hidden_layers": 9999}


def mlp(stem: str, width: int = 6) -> Named:
    """A gated FFN."""
    for name in ("gate", "up"):
        yield f"{stem}{name}_proj.weight", (width, 4)
    yield f"{stem}down_proj.weight", (4, width)


def unlike_experts(n: int) -> Named:
    for e in range(n // 3):
        yield from mlp(f"model.layers.0.mlp.experts.{e}.", 3 + e)


def places_in_one_layer(n: int) -> Named:
    for place in range(n // 3):
        yield from mlp(f"model.layers.0.place_{place}.")


def unlike_layers(n: int) -> Named:
    for i in range(n // 3):
        yield from mlp(f"model.layers.{i}.mlp.", 3 + i)


def loose_tensors(n: int) -> Named:
    """As many FFNs as a layer may have, and what fits no role."""
    for place in range(200):
        yield from mlp(f"model.layers.0.place_{place}.")
    for i in range(n - 600):
        yield f"model.layers.0.place_{i % 200}.x{i}", (1,)


def unlike_loose_tensors(n: int) -> Named:
    for i in range(n // 4):
        yield from mlp(f"model.layers.{i}.mlp.")
        yield f"model.layers.{i}.mlp.x", (1 + i,)


def prefixes(n: int) -> Named:
    yield from mlp("model.layers.0.mlp.")
    for i in range(n // 3):
        yield from mlp(f"prefix_{i}.layers.0.mlp.")


def norms(n: int) -> Named:
    yield from mlp("model.layers.0.mlp.")
    for i in range(n):
        yield f"model.layers.0.x{i}.norm.weight", (2 + i,)


def deep_names(n: int) -> Named:
    yield from mlp("model.layers.0." + "a." * n)
    for i in range(n):
        yield f"model.layers.0.{'a.' * (i % 500)}x{i}", (1,)


def write(path: Path, named: Named, config: dict[str, Any] | None) -> str:
    """A model directory whose data are a hole in the file."""
    path.mkdir(parents=True)
    header, at = {}, 0
    for name, shape in named:
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * prod(shape)]}
        at += 4 * prod(shape)
    text = json.dumps(header, separators=(",", ":")).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def work(source: str) -> float:
    """Processor time of counting a model."""
    start = process_time()
    with suppress(FFNError):  # a refusal takes its time too
        count(load(source))
    return process_time() - start


def in_step(less: str, more: str) -> bool:
    """Whether the work for `more`, four times `less`, is in step, in any of three measurements."""
    bound = MOST * max(min(work(less) for _ in range(2)), 0.01)
    return any(work(more) < bound for _ in range(3))


@pytest.mark.parametrize("config", [None, LLAMA, MANY_LAYERS], ids=["none", "known", "many-layers"])
@pytest.mark.parametrize(
    "make",
    [unlike_experts, places_in_one_layer, unlike_layers, loose_tensors, unlike_loose_tensors, prefixes, norms,
     deep_names],
)  # fmt: skip
def test_the_work_grows_with_the_tensors(make: Callable[[int], Named], config: dict[str, Any] | None, tmp_path: Path):
    assert in_step(*(write(tmp_path / str(n), make(n), config) for n in (1000, 4000)))


@pytest.mark.parametrize("config", [None, LLAMA, MANY_LAYERS], ids=["none", "known", "many-layers"])
def test_the_work_grows_with_an_indexs_missing_files(config: dict[str, Any] | None, tmp_path: Path):
    sources = []
    for n in (1000, 4000):
        source = write(tmp_path / str(n), iter(()), config)
        (tmp_path / str(n) / "model.safetensors").unlink()
        names = (name for name, _ in unlike_layers(n))
        index = {"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(names)}}
        (tmp_path / str(n) / INDEX).write_text(json.dumps(index))
        sources.append(source)
    assert in_step(*sources)


@pytest.mark.parametrize("over", [0, 1])
def test_a_layer_has_so_many_ffns_and_no_more(over: int, tmp_path: Path):
    source = write(tmp_path / "model", places_in_one_layer(3 * (MOST_FFNS + over)), None)
    if over:
        with pytest.raises(FFNError, match=f"'model.layers', layer 0 has more than {MOST_FFNS} FFNs"):
            load(source)
    else:
        assert load(source).model.layer_count == MOST_FFNS
