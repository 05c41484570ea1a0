"""`-o FILE` of every command: once the file has been written, one note on stderr says so."""

from pathlib import Path

import pytest

from ffncli.cli.main import COMMANDS
from tests.oracles.prompted import made
from tests.pages.test_report import RESULTS

ONE = str(RESULTS)
MARKS = {"experts": pytest.mark.models, "verify, a certificate": pytest.mark.runs}
# command → (words, the file's suffix); {mixture} is a checkpoint
WRITES = {
    "explain": ("explain gate", ".md"),
    "trace": ("trace 4x8:relu", ".json"),
    "trace, a page": ("trace 4x8:relu", ".html"),
    "params": ("params gpt2", ".csv"),
    "plan": ("plan gpt2 --device h100", ".html"),
    "activations": ("activations gelu", ".txt"),
    "experts": ("experts {mixture} -p Hello", ".json"),
    "precision": ("precision 4x8:relu --dtype fp8", ".json"),
    "approximate": ("approximate --d-ff 1 --activation relu --seeds 1 --steps 2", ".csv"),
    "verify": ("verify 4x8:relu --check convolution", ".json"),
    "verify, a certificate": ("verify 4x8:relu --kernel eager --referee", ".json"),
    "bench": ("bench --list-kernels", ".json"),
    "merge": (f"merge {ONE}", ".csv"),
    "export": ("export 4x8:relu --as torch", ".py"),
    "export, a folder": ("export 4x8:relu --as flashinfer-trace", ""),
    "models": ("models", ".html"),
    "compare": (f"compare {ONE} {ONE}", ".json"),
    "report": (f"report {ONE}", ".html"),
    "doctor": ("doctor --no-noise", ""),
}
NAMED = {"merge", "export", "export, a folder", "report"}  # their answer goes to stdout all the same


def test_every_command_is_here() -> None:
    assert {label.partition(",")[0] for label in WRITES} == {*COMMANDS}


@pytest.mark.parametrize("label", [pytest.param(name, marks=MARKS.get(name, ())) for name in WRITES])
def test_a_note_names_the_file(label: str, call, tmp_path: Path) -> None:
    line, suffix = WRITES[label]
    words = (line.format(mixture=made("mixtral").path) if "{" in line else line).split()
    path = tmp_path / f"out{suffix}"
    code, out, err = call(*words, "-o", str(path))
    said = [text for text in err.splitlines() if str(path) in text]
    assert (code, path.exists(), bool(out)) == (0, True, label in NAMED)
    assert [text.partition(": ")[2].partition(": ")[0] for text in said] == [f"wrote {path}"]
    assert said[0].startswith("note: ")
    code, _, err = call(*words, "-q", "-o", str(tmp_path / f"quiet{suffix}"))
    assert (code, err) == (0, "")
