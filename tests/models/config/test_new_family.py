"""The manual's example of a new family: its row, run as the page shows it, counts and finds what a module holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from docs.blocks import blocks
from ffncli.errors import FFNError
from ffncli.models.config import families
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.source import load
from tests import ROOT

PAGE = blocks((ROOT / "docs" / "new_models.md").read_text("utf-8"))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's config, with the page's row in place."""
    (code,) = (block.body for block in PAGE if block.language == "py")
    (text,) = (block.body for block in PAGE if block.notes.get("file") == "tomorrow/config.json")
    values: dict[str, Any] = json.loads(text)
    with pytest.raises(FFNError, match="model_type 'tomorrow' is not known"):
        from_config(values, "c", "c")
    named: dict[str, Any] = {}
    exec(code, named)
    monkeypatch.setitem(families.FAMILIES, "tomorrow", named["ROWS"]["tomorrow"])  # type: ignore[arg-type]
    monkeypatch.setitem(families.BY_TYPE, "tomorrow", "tomorrow")  # type: ignore[arg-type]
    return values


def test_the_pages_row_counts_what_a_module_has(config: dict[str, Any], tmp_path: Path) -> None:
    d, f = config["width"], config["mlp_width"]
    layer = torch.nn.ModuleDict(
        {name: torch.nn.Linear(*sizes, bias=False) for name, sizes in
         {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}.items()}
    )  # fmt: skip
    held = sum(p.numel() for p in layer.parameters()) * config["depth"]
    assert count(from_config(config, "c", "c")).ffn_params_total == held
    stored = {f"model.layers.{i}.mlp.{n}": p.detach().clone() for i in range(4) for n, p in layer.named_parameters()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load(str(tmp_path))
    assert (found.differences, count(found).ffn_params_total) == ((), held)
    assert found.model.main.spec.activation == "silu"


def test_a_field_that_the_pages_row_does_not_read_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(FFNError, match=r"mlp_clip = 3\.0: not known for model_type tomorrow"):
        from_config({**config, "mlp_clip": 3.0}, "c", "c")
