"""`verify_source`: the library's call says what `ffn verify` says."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ffncli.errors import FFNError
from ffncli.models.dimensions import Dimensions
from ffncli.run.verify.call import verify_source


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("8x16:swiglu", "--check", "tokens,kernels", "--kernel", "packed", "--seed", "3"),
         {"source": "8x16:swiglu", "checks": ["tokens", "kernels"], "kernels": ["packed"], "seed": 3}),
        (("--d-model", "8", "--d-ff", "16", "--check", "zero", "--tokens", "3"),
         {"dimensions": Dimensions(d_model="8", d_ff="16"), "checks": ["zero"], "leading": (3,)}),
    ],
)  # fmt: skip
def test_the_call_has_the_rows_of_the_command(call, arguments, asked):
    code, out, _ = call("verify", *arguments, "--json")
    found = verify_source(**asked)
    assert (code, found.failed) == (0, ())
    assert json.loads(json.dumps([asdict(row) for row in found.rows])) == json.loads(out)["rows"]


def test_kernels_without_their_check_are_refused():
    with pytest.raises(FFNError, match="--kernel contradicts --check"):
        verify_source("8x16", checks=["tokens"], kernels=["packed"])
