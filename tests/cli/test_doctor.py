"""`ffn doctor`: its page, its JSON and CSV, what it exits with."""

import json
import platform
import re
from dataclasses import fields

import pytest
import torch

from docs.schemas import keys_text
from ffncli.bench.doctor import doctor, noise
from ffncli.cli import doctor as page

QUIET = noise.Noise(0.0043, 1.0002, 0.9959, 1.0045, 0.031, 52.0, 0.01, 5, 130, 2, 10.2)


@pytest.fixture
def measured(monkeypatch):
    """The noise test, without waiting for it: what it is asked for, and the answer it gives."""
    asked = {}

    def measure(seconds, threads, told):
        asked.update(seconds=seconds, threads=threads)
        return asked.get("answer", QUIET)

    monkeypatch.setattr(noise, "measure_noise", measure)
    return asked


def test_json_has_what_is_documented(json_of, measured):
    answer = json_of("doctor", notes=True)
    assert answer["command"] == "doctor"
    assert answer["resolvable_difference"] == answer["noise"]["resolvable_difference"] == 0.0043
    assert measured["seconds"] == 10
    rows = {row["name"]: row for row in answer["rows"]}
    assert rows["torch"]["value"] == torch.__version__
    assert rows["python"]["value"] == platform.python_version()
    assert {row["status"] for row in rows.values()} <= {"ok", "note", "missing", "bad"}
    said = set(re.findall(r"`([^`]+)`", keys_text("doctor")))
    assert {"name", "value", "status", "advice"} == set(answer["rows"][0]) <= said
    assert {field.name for field in fields(noise.Noise)} <= said
    assert set(answer) <= said | {"schema_version", "command", "conventions"}


def test_without_noise(call, monkeypatch):
    monkeypatch.setattr(noise, "measure_noise", None)  # not to be called
    code, out, err = call("doctor", "--no-noise", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["resolvable_difference"] is None
    assert answer["noise"] is None
    assert "noise" not in {row["name"] for row in answer["rows"]}


def test_the_page_says_what_can_be_told_apart(stdout_of, measured):
    out = stdout_of("doctor", "--seconds", "4", "--threads", "1", notes=True)
    assert (measured["seconds"], measured["threads"]) == (4, 1)
    assert re.search(r"^noise +can resolve differences of 0\.43 % or more +ok$", out, re.M)
    assert "ratio 1.0002, 95 % interval 0.9959 to 1.0045" in out
    assert "only differences of 3.1 % or more could be resolved; matching this would take 52 times as long" in out
    table = out.split("\nWhat to do\n")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_a_noisy_machine_gets_advice(call, measured):
    measured["answer"] = noise.Noise(0.061, 1.0, 0.94, 1.061, 6.2, 1.1, 0.4, 3, 36, 2, 14.0)
    out = call("doctor")[1]
    assert "noise: ffn bench decides at 2 %: expect `inconclusive`; stop other work, or try --threads 1" in out
    assert "40 % of the blocks were disturbed: preempted" in out
    assert "one after the other" not in out  # it would have done no worse
    measured["answer"] = noise.Noise(0.061, 1.0, 0.94, 1.061, 6.2, 1.1, 0.4, 3, 36, 1, 14.0)
    out = call("doctor", "--threads", "1")[1]
    assert "noise: ffn bench decides at 2 %: expect `inconclusive`; stop other work\n" in out


def test_a_noise_test_that_fails_is_a_row(call, measured):
    measured["answer"] = None
    code, out, _ = call("doctor", "--json")
    row = json.loads(out)["rows"][-1]
    assert code == 0
    assert (row["name"], row["value"], row["status"]) == ("noise", "not measured", "bad")


def test_csv_is_the_rows(csv_of, measured):
    rows = csv_of("doctor", notes=True)
    assert list(rows[0]) == ["name", "value", "status", "advice"]
    assert rows[-1]["name"] == "noise"


def test_what_nothing_runs_without_exits_3_after_the_page(call, measured, monkeypatch):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "safetensors" else real(name))
    code, out, err = call("doctor")
    assert code == 3
    assert re.search(r"^safetensors +missing +missing$", out, re.M)
    assert err == "error: ffn cannot run here: safetensors; pip install 'safetensors>=0.5'\n"
    assert "seconds" not in measured


def test_long_values_go_on_in_the_next_row():
    check = doctor.DoctorCheck("name", " ".join(["word"] * 30), "note")
    rows = page._rows(check)
    assert " ".join(row[1] for row in rows) == check.value
    assert [row[0] for row in rows] == ["name", "", ""]
