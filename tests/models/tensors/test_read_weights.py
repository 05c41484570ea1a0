"""Weights of a layer: the right numbers in their places, every byte read once, clear errors if some are missing."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ffncli.block.steps import Axis
from ffncli.errors import ExitCode, FFNError
from ffncli.models.files import rows as reading
from ffncli.models.source import load
from ffncli.models.tensors import read_weights as values
from ffncli.models.tensors.layout import Located, canonical
from ffncli.models.tensors.read_weights import read_weights
from ffncli.models.tensors.slices import StoredSlice
from ffncli.run.engine.weights import stored_layer
from tests.oracles.checkpoints import LLAMA, checkpoint_in, expect_refusal, folder, tensors

E, F, D = Axis("experts", 3), Axis("d_ff", 10), Axis("d_model", 7)
PARTS = [(1, False), (2, False), (2, True), (3, True)]  # how many share a tensor, and whether they alternate
CASES = [  # axes, transposed, per expert; a bias has no orientation
    ((F, D), False, False), ((F, D), True, False), ((E, F, D), False, False), ((E, F, D), True, False),
    ((E, F, D), False, True), ((E, F, D), True, True), ((D,), False, False), ((E, D), False, False),
    ((E, D), False, True),
]  # fmt: skip


def place(canonical: list[Tensor], transposed: bool, interleaved: bool, axis: int) -> Tensor:
    """Several parameters as one stored tensor, written with torch's own joining functions."""
    if interleaved:
        together = torch.stack(canonical, dim=canonical[0].dim() + axis + 1).flatten(axis - 1, axis)
    else:
        together = torch.cat(canonical, dim=axis)
    return (together.transpose(-1, -2) if transposed else together).contiguous()


@pytest.fixture(params=[1, 30, 10_000], ids="blocks of {}".format)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values at a time, so that blocks end in the middle of parts, or all at once."""
    monkeypatch.setattr(values, "_BLOCK", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("parts", "interleaved"), PARTS)
@pytest.mark.parametrize(("axes", "transposed", "per_expert"), CASES)
def test_every_layout_is_put_in_its_place(
    axes: tuple[Axis, ...], transposed: bool, per_expert: bool, parts: int, interleaved: bool, tmp_path: Path
):
    bias = F not in axes
    shape = [axis.size for axis in axes]
    canonical = [torch.randn(shape) for _ in range(parts)]
    together = place(canonical, transposed, interleaved, -1 if bias else -2)
    stored = {f"w.{e}": t for e, t in enumerate(together.unbind())} if per_expert else {"w": together}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    checkpoint = checkpoint_in(tmp_path)
    located = tuple(
        Located(f"{part}.{'bias' if bias else 'weight'}", axes,
                StoredSlice("w.{e}" if per_expert else "w", transposed, part, parts, interleaved), tuple(stored))
        for part in range(parts)
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = read_weights(checkpoint, located, dtype)
        for tensor, wanted in zip(found.values(), canonical, strict=True):
            assert tensor.is_contiguous()
            assert torch.equal(tensor, wanted.to(dtype))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_one_below_the_other(transposed: bool, dtype: torch.dtype, tmp_path: Path):
    """DBRX's matrices [experts · d_ff, d_model], of which the last is applied as it lies."""
    axes = (E, D, F) if transposed else (E, F, D)
    canonical = torch.randn([axis.size for axis in axes])
    save_file({"w": (canonical.mT if transposed else canonical).reshape(-1, 7)}, tmp_path / "model.safetensors")
    checkpoint = checkpoint_in(tmp_path)
    item = Located("w.weight", axes, StoredSlice("w", transposed, stacked=True), ("w",))
    assert torch.equal(read_weights(checkpoint, (item,), dtype)["w.weight"], canonical.to(dtype))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("shape", "axes"), [((10, 7, 1), (F, D)), ((1, 3), (E,)), ((7,), (Axis("one", 1), D))])
def test_axes_of_one_may_be_elsewhere(shape: tuple[int, ...], axes: tuple[Axis, ...], tmp_path: Path):
    """A convolution of one tap, a correction with an axis too many, a gate squeezed to a vector."""
    tensor = torch.randn(shape)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    checkpoint = checkpoint_in(tmp_path)
    found = read_weights(checkpoint, (Located("w.weight", axes, StoredSlice("w"), ("w",)),), torch.float32)["w.weight"]
    assert torch.equal(found, tensor.view([axis.size for axis in axes]))


@pytest.mark.usefixtures("block")
def test_the_first_of_several_rows(tmp_path: Path):
    """Corrections for text and for images in one tensor."""
    tensor = torch.randn(2, 3)
    save_file({"w": tensor, "long": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    checkpoint = checkpoint_in(tmp_path)
    item = Located("w", (E,), StoredSlice("w", rows=2), ("w",))
    assert torch.equal(read_weights(checkpoint, (item,), torch.float32)["w"], tensor[0])
    assert torch.equal(canonical(tensor, item), tensor[0])
    with pytest.raises(FFNError, match=r"\[3, 3\], expected \[2, 3\] \(experts = 3\)"):
        read_weights(checkpoint, (replace(item, names=("long",)),), torch.float32)


def test_both_halves_must_fit(tmp_path: Path):
    save_file({"w": torch.zeros(20, 7)}, tmp_path / "model.safetensors")
    checkpoint = checkpoint_in(tmp_path)
    located = [
        Located(n, (a, D), StoredSlice("w", part=i, parts=2), ("w",)) for i, (n, a) in enumerate((("g", F), ("u", E)))
    ]
    with pytest.raises(FFNError, match=r"\[20, 7\], expected \[6, 7\] \(experts = 3, d_model = 7\)"):
        read_weights(checkpoint, tuple(located), torch.float32)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first byte, end) of every positional read."""
    seen: list[tuple[int, int]] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], start: int) -> int:
        got = original(descriptor, buffers, start)
        seen.append((start, start + got))
        return got

    monkeypatch.setattr(reading.os, "preadv", preadv)
    return seen


def fused(tmp_path: Path, layers: int = 3) -> tuple[str, int]:
    """A checkpoint with gate and up in one matrix; the bytes of one layer's FFN and norm."""
    shapes = {
        "mlp.gate_up_proj.weight": (12, 4),
        "mlp.down_proj.weight": (4, 6),
        "post_attention_layernorm.weight": (4,),
    }
    stored = {f"model.layers.{i}.{name}": torch.randn(shape) for i in range(layers) for name, shape in shapes.items()}
    stored |= {f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(50, 50) for i in range(layers)}
    config = {**LLAMA, "model_type": "phi3", "num_hidden_layers": layers}
    return folder(tmp_path, config, stored), 4 * sum(map(prod, shapes.values()))


def test_every_byte_is_read_once_and_no_other(spans: list[tuple[int, int]], tmp_path: Path):
    source, size = fused(tmp_path)
    model = load(source)
    stored_layer(model, model.model.layer("1"), torch.float32)
    assert sum(end - start for start, end in spans) == size
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_large_tensor_is_read_in_pieces(
    spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Between two of them Ctrl-C is heard."""
    monkeypatch.setattr(values, "_BLOCK", 8)
    monkeypatch.setattr(reading, "MOST_AT_ONCE", 20)
    source, size = fused(tmp_path)
    model = load(source)
    stored_layer(model, model.model.layer("1"), torch.float32)
    assert max(end - start for start, end in spans) == 20
    assert sum(end - start for start, end in spans) == size


def test_several_threads_read_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source, _ = fused(tmp_path)
    model = load(source)
    alone = stored_layer(model, model.model.layer("1"), torch.float32)
    monkeypatch.setattr(values, "_WORTH_WORKERS", 0)
    monkeypatch.setattr(values, "_BLOCK", 4)
    torch.set_num_threads(3)
    together = stored_layer(model, model.model.layer("1"), torch.float32)
    with ThreadPoolExecutor(1) as pool:  # what torch gives to a new thread
        assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (3, 3)
    assert alone is not None
    assert together is not None
    assert all(torch.equal(alone[0][name], together[0][name]) for name in alone[0])


def test_after_an_error_the_other_threads_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source, _ = fused(tmp_path)
    model, calls = load(source), []

    def fill(*_: object) -> None:
        calls.append(None)
        if len(calls) == 1:
            raise FFNError("the first one")
        time.sleep(0.05)

    monkeypatch.setattr(values, "_WORTH_WORKERS", 0)
    monkeypatch.setattr(values, "_BLOCK", 1)  # 33 blocks of a row
    monkeypatch.setattr(values._Destination, "fill", fill)
    torch.set_num_threads(2)
    with pytest.raises(FFNError, match="the first one"):
        stored_layer(model, model.model.layer("1"), torch.float32)
    assert len(calls) < 10


@pytest.mark.parametrize("workers", [1, 3])
def test_a_file_that_became_shorter(workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("llama"))
    model = load(source)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 50)
    monkeypatch.setattr(values, "_WORTH_WORKERS", 0)
    torch.set_num_threads(workers)
    with pytest.raises(FFNError, match=r"model\.safetensors is truncated: its tensors extend to byte") as refused:
        stored_layer(model, model.model.layer("1"), torch.float32)
    assert (refused.value.code, refused.value.hint) == (ExitCode.USAGE, "is the download complete?")


def test_a_file_that_went_away_or_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("llama"))
    model = load(source)
    (tmp_path / "model.safetensors").rename(tmp_path / "other")
    with pytest.raises(FFNError, match=r"model\.safetensors: the file does not exist") as refused:
        stored_layer(model, model.model.layer("0"), torch.float32)
    assert refused.value.code == ExitCode.USAGE
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(FFNError, match=r"model\.safetensors: Is a directory") as refused:
        stored_layer(model, model.model.layer("0"), torch.float32)
    assert refused.value.code == ExitCode.ENVIRONMENT


def test_a_truncated_checkpoint_is_refused_in_one_line(call, tmp_path: Path):
    source = folder(tmp_path, LLAMA, tensors("llama"))
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 1)
    expect_refusal(call("trace", source), "model.safetensors is truncated")
