"""What a run that ends early keeps: in its error, or in a note where the launcher of the ranks prints the error."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ffncli.cli.bench.command import _kept
from ffncli.errors import FFNError, Terminated

KEPT = "1 of 2 units kept in a.csv; resume with `ffn bench --resume a.csv`"


def ended(stop, tmp_path, monkeypatch):
    """(the error of a run that ends so, its notes)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.partial.jsonl").touch()
    notes: list[str] = []
    files = SimpleNamespace(journal=Path("a.partial.jsonl"), csv=Path("a.csv"))
    journal, request = SimpleNamespace(count=1, files=files), SimpleNamespace(units=2)
    with pytest.raises(BaseException) as caught, _kept(journal, request, SimpleNamespace(note=notes.append)):
        raise stop
    return caught.value, notes


@pytest.mark.parametrize(("stop", "what"), [(KeyboardInterrupt(), "interrupted"), (Terminated(), "terminated")])
@pytest.mark.parametrize("agent", ["True", ""])
def test_the_one_error_of_a_stop_is_the_launcher_s_if_there_is_one(stop, what, agent, tmp_path, monkeypatch):
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": agent}.items():
        monkeypatch.setenv(name, str(value))
    error, notes = ended(stop, tmp_path, monkeypatch)
    if agent:
        assert error is stop
        assert notes == [KEPT]
    else:
        assert isinstance(error, FFNError)
        assert error.message == f"{what}: {KEPT}"
        assert notes == []
