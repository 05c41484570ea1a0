import pytest

from ffncli.models.tensors import read_weights as reader


@pytest.fixture(params=[7, 1 << 20], ids="blocks of {}".format)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read a row at a time, or all rows at once."""
    monkeypatch.setattr(reader, "_BLOCK", request.param)
