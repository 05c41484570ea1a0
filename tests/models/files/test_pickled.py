"""`.pt` files: tensors by the places of their bytes, held to what torch.load reads; nothing else is ever unpickled."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ffncli
from ffncli.errors import FFNError
from ffncli.models.files.checkpoint import read_pickled
from tests.oracles.modules import Plain


def layers(count: int = 2) -> dict[str, torch.Tensor]:
    """The weights of a model of two layers under GPT-2's names, [out, in]."""
    torch.manual_seed(3)
    out = {}
    for i in range(count):
        for name, linear in (("c_fc", nn.Linear(8, 32)), ("c_proj", nn.Linear(32, 8))):
            out |= {f"h.{i}.mlp.{name}.{key}": value.detach() for key, value in linear.named_parameters()}
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", ["", "state_dict", "model"])
def test_bytes_are_those_that_torch_reads(tmp_path: Path, dtype: torch.dtype, inside: str) -> None:
    path = tmp_path / "raw.pt"
    weights = {name: tensor.to(dtype) for name, tensor in layers().items()}
    torch.save({inside: weights, "step": 3} if inside else weights, path)
    columns, raw = read_pickled(path), path.read_bytes()
    assert columns.names == [*weights]
    for name, shape, size, start in zip(columns.names, columns.shapes, columns.bytes, columns.starts, strict=True):
        ours = torch.frombuffer(bytearray(raw[start : start + size]), dtype=dtype).view(shape)
        assert torch.equal(ours, weights[name])


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_layer_is_traced_with_its_weights(tmp_path: Path, suffix: str) -> None:
    path, weights = tmp_path / f"raw{suffix}", layers()
    torch.save(weights, path)
    session = ffncli.trace(path, layer=1, activation="gelu", tokens=3)
    x = session["x"]
    up = nn.functional.linear(x, weights["h.1.mlp.c_fc.weight"], weights["h.1.mlp.c_fc.bias"])
    down = nn.functional.linear(
        nn.functional.gelu(up), weights["h.1.mlp.c_proj.weight"], weights["h.1.mlp.c_proj.bias"]
    )
    assert torch.allclose(session["down"], down, atol=1e-6)
    assert ffncli.count(path).ffn_params_total == sum(t.numel() for t in weights.values())
    with pytest.raises(FFNError, match="does not say its activation"):
        ffncli.trace(path, layer=1)
    with pytest.raises(FFNError, match="is pickled, and transformers is given safetensors alone"):
        ffncli.trace(path, layer=1, prompt="Hello")


@pytest.mark.parametrize("parent", ["", "mlp.", "_orig_mod.ffn."])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_bare_ffn_has_one_layer(tmp_path: Path, parent: str, suffix: str) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weights = {f"{parent}fc1.weight": torch.randn(32, 8), f"{parent}fc2.weight": torch.randn(8, 32)}
    path = tmp_path / f"bare{suffix}"
    torch.save(weights, path) if suffix == ".pt" else save_file(weights, path)
    session = ffncli.trace(path, activation="relu", tokens=2)
    up, down = weights.values()
    assert torch.allclose(session["down"], (session["x"] @ up.T).relu() @ down.T, atol=1e-5)
    assert (session.block.d_model, session.block.d_ff, session.block.layer) == (8, 32, 0)
    assert any(f"{parent}fc1.weight" in text for text in session.block.evidence)


def test_only_tensors_are_unpickled(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "planted"),)

    for name, value in (("planted", {"x": Planted()}), ("module", Plain(4, 8))):
        torch.save(value, tmp_path / f"{name}.pt")
        with pytest.raises(FFNError, match="holds more than tensors"):
            ffncli.count(tmp_path / f"{name}.pt")
    assert not (tmp_path / "planted").exists() or not (tmp_path / "planted").is_dir()


def changed_archive(path: Path, change: Any) -> None:
    """The archive written again, its entries through `change`."""
    with zipfile.ZipFile(path) as old:
        entries = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        change(new, entries)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.pt"
    torch.save(layers(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(FFNError, match=r"is not a file of torch\.save since"):
        ffncli.count(path)
    torch.save(layers(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FFNError, match=r"is not a file of torch\.save since"):
        ffncli.count(path)
    path.write_bytes(whole)
    changed_archive(path, lambda new, entries: [
        new.writestr(name, data, zipfile.ZIP_DEFLATED) for name, data in entries.items()])  # fmt: skip
    with pytest.raises(FFNError, match="are compressed"):
        ffncli.count(path)
    for value, why in (([1, 2], "holds no dictionary"), ({"a": 1}, "holds no dictionary"), ({}, "holds no dictionary")):
        torch.save(value, path)
        with pytest.raises(FFNError, match=why):
            ffncli.count(path)
    torch.save({"fc1.weight": torch.randn(8, 32).T, "fc2.weight": torch.randn(8, 32)}, path)
    with pytest.raises(FFNError, match="does not lie in the file as it is"):
        ffncli.count(path)
