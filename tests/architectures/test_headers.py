"""Every text architecture as transformers saves it: config, headers and module agree, as the committed table says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ffncli.models.source import load
from tests.architectures.test_table import TABLE
from tests.oracles.architectures.saved import counts
from tests.oracles.architectures.tiny import statement, tiny


@statement
@pytest.mark.parametrize("name", [name for name, line in TABLE.items() if line["result"] == "same"])
def test_config_headers_and_module_agree(name: str) -> None:
    line, found = TABLE[name], counts(tiny(name))
    assert found.reason == ""
    assert [found.config, found.header, found.module] == [
        int(line[column]) for column in ("config_count", "header_count", "module_count")
    ]


def test_a_latent_width_that_the_tensors_contradict(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("nemotron_h").folder, tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "moe_latent_size": 11}))
    (found,) = load(str(folder)).differences
    assert (found.name, found.config, found.tensors, found.layers) == ("latent", "11", "10", 2)
