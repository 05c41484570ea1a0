"""Every text architecture as transformers saves it: config, headers and module agree, as the committed table says."""

from __future__ import annotations

import pytest

from tests.models.test_architectures_table import TABLE
from tests.oracles.architectures import cases
from tests.oracles.architectures.saved import counts

CASES = cases()


@pytest.mark.parametrize("name", [name for name, line in TABLE.items() if line["result"] == "same"])
def test_config_headers_and_module_agree(name: str) -> None:
    line, found = TABLE[name], counts(name, CASES[name])
    assert found.reason == ""
    assert [found.config, found.header, found.module] == [
        int(line[column]) for column in ("config_count", "header_count", "module_count")
    ]
