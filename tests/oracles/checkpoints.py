"""Tiny checkpoints written by hand, files that safetensors would not write, and checks of refusals."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unicodedata import bidirectional, category

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.files.checkpoint import Checkpoint, open_checkpoint
from ffncli.models.model import require_runnable

LLAMA = {"model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "hidden_act": "silu", "num_hidden_layers": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 4, "n_inner": 6, "activation_function": "gelu_new", "n_layer": 2}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"model_type": "t5", "d_model": 4, "d_ff": 6, "num_layers": 2, "feed_forward_proj": "relu"}
INDEX = "model.safetensors.index.json"
D_MODEL, D_FF = 4, 6


def tensors(family: str, dtype: Any = None) -> dict[str, Any]:
    """Return random FFN tensors of both layers, with the names and the orientation of the family's files."""
    import torch

    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        if family == "gpt2":
            shapes |= {f"transformer.h.{i}.ln_2.{n}": (D_MODEL,) for n in ("weight", "bias")}
            for name, shape in (("c_fc", (D_MODEL, D_FF)), ("c_proj", (D_FF, D_MODEL))):
                shapes[f"transformer.h.{i}.mlp.{name}.weight"] = shape
                shapes[f"transformer.h.{i}.mlp.{name}.bias"] = shape[1:]
            continue
        stem = f"model.layers.{i}."
        shapes[f"{stem}post_attention_layernorm.weight"] = (D_MODEL,)
        if family == "llama":
            shapes |= {f"{stem}mlp.{n}_proj.weight": (D_FF, D_MODEL) for n in ("gate", "up")}
            shapes[f"{stem}mlp.down_proj.weight"] = (D_MODEL, D_FF)
            continue
        shapes[f"{stem}block_sparse_moe.gate.weight"] = (4, D_MODEL)
        for e in range(4):
            shapes |= {f"{stem}block_sparse_moe.experts.{e}.{w}.weight": (D_FF, D_MODEL) for w in ("w1", "w3")}
            shapes[f"{stem}block_sparse_moe.experts.{e}.w2.weight"] = (D_MODEL, D_FF)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype or torch.float32) for name, shape in shapes.items()}


def folder(path: Path, config: Mapping[str, Any] | str | bytes | None, stored: Mapping[str, Any] | None = None) -> str:
    """Write a model directory: config.json (values, or a string unchanged), and model.safetensors from `stored`."""
    path.mkdir(exist_ok=True)
    if config is not None:
        raw = config if isinstance(config, (str, bytes)) else json.dumps(config)
        (path / "config.json").write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    if stored:
        from safetensors.torch import save_file

        save_file(dict(stored), path / "model.safetensors")
    return str(path)


def sensitive(path: Path, times: float, layer: int, seed: int) -> str:
    """Write a Llama of 12 layers. In one of them, a channel of W1 and W3 is `times` as large, and the norm before it
    makes the input that much smaller, so that the layer computes the same."""
    import torch

    generator, stored = torch.Generator().manual_seed(seed), {}
    for i in range(12):
        stem = f"model.layers.{i}."
        stored[f"{stem}post_attention_layernorm.weight"] = torch.ones(64)
        if i == layer:
            stored[f"{stem}post_attention_layernorm.weight"][7] /= times
        shapes = {"gate": (64, 64), "up": (64, 64), "down": (64, 64)}
        for name, shape in shapes.items():
            w = torch.randn(shape, generator=generator) / 8
            if i == layer and name != "down":
                w[:, 7] *= times
            stored[f"{stem}mlp.{name}_proj.weight"] = w
    return folder(path, {**LLAMA, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12}, stored)


def checkpoint_in(folder: Path) -> Checkpoint:
    """Return the checkpoint in this directory, which must have one."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    return checkpoint


def with_token(config: Mapping[str, Any], field: str, token: str) -> str:
    """Return the config as a JSON string in which `token` replaces the field's value, without quoting."""
    return json.dumps({**config, field: "@"}).replace('"@"', token)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """Return the entry of one tensor in a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw_safetensors(header: Any, data: bytes | int = 8, length: int | None = None) -> bytes:
    """Return a safetensors file with any header (values or bytes), any data (or a number of zeros) and any length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = bytes(data) if isinstance(data, int) else data
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def harmful(text: str) -> list[str]:
    """Return the characters that would control a terminal or reorder the text; line ends are allowed."""
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    kinds = {"Cc", "Cs", "Zl", "Zp"}
    return [c for c in text if c != "\n" and (category(c) in kinds or bidirectional(c) in directions)]


def refusal(values: Mapping[str, Any], where: str = "config.json") -> str:
    """Why a config's model is not run: the error of a config that is refused, or the reason for which it is only
    counted; empty if it is run."""
    try:
        require_runnable(from_config(values, "c", where))
    except FFNError as error:
        return str(error)
    return ""


def expect_refusal(result: tuple[int, str, str], *parts: object, code: int = 2) -> str:
    """Check that a refused command prints one line, which contains all `parts`; return the line."""
    got, out, err = result
    assert (got, out) == (code, ""), f"exit {got}, stdout {out[:200]!r}, stderr {err!r}"
    assert err.startswith("error: "), err
    assert err.endswith("\n"), err
    assert len(err.splitlines()) == 1, err
    assert [bad for bad in ("Traceback", "a bug in ffn") if bad in err] == []
    assert harmful(err) == []
    assert [part for part in map(str, parts) if part not in err] == [], err
    return err


def expect_difference(result: tuple[int, str, str], *parts: object) -> str:
    """Check that stderr has one line with all `parts`, which the answer also contains; return the answer."""
    code, out, err = result
    assert (code, bool(out)) == (1, True), f"exit {code}, stdout {out[:200]!r}, stderr {err!r}"
    errors = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1, err
    assert errors[0].startswith("error: "), err
    assert harmful(out + err) == []
    assert [part for part in map(str, parts) if part not in errors[0]] == [], err
    return out
