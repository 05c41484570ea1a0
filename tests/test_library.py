"""`import ffncli`: the names that the package promises, loaded when first used."""

from __future__ import annotations

import pytest

import ffncli
from ffncli.errors import FFNError


def test_every_name_is_there_and_is_what_its_module_has():
    from ffncli.run.prepare import trace_layer
    from ffncli.run.sources import load

    assert set(dir(ffncli)) == {*ffncli.__all__, "__version__"}
    assert all(callable(getattr(ffncli, name)) for name in ffncli.__all__)
    assert (ffncli.load, ffncli.trace, ffncli.FFNError) == (load, trace_layer, FFNError)
    assert "load" in vars(ffncli)  # looked up once
    assert not hasattr(ffncli, "no_such_name")
    with pytest.raises(ImportError):
        from ffncli import no_such_name  # noqa: F401


def test_a_request_takes_the_models_own_unless_told():
    ready = ffncli.Request()
    assert (ready.device, ready.seed, ready.train, ready.leading) == ("cpu", None, None, None)
    found = ffncli.trace(ffncli.load("4x8:relu"))
    assert (found.step("x").shape, found.step("x").dtype) == ((4, 4), "float32")
