from __future__ import annotations

import pytest

from ffncli.errors import ExitCode, FFNError, did_you_mean, shown


def test_exit_codes_are_what_scripts_rely_on():
    expected = {"OK": 0, "FAILED": 1, "USAGE": 2, "ENVIRONMENT": 3, "INCONCLUSIVE": 4, "BUG": 70}
    assert {code.name: code.value for code in ExitCode} == {**expected, "INTERRUPTED": 130, "TERMINATED": 143}
    assert FFNError("x").code == 2


def test_an_error_reads_as_one_sentence():
    assert str(FFNError("wrong")) == "wrong"
    assert str(FFNError("wrong", "mend it")) == "wrong; mend it"


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\n", r"'a\n'"), ("x" * 58, repr("x" * 58)), ("x" * 59, "'" + "x" * 58 + "…"), (10**5000, "<int>")],
    ids=["line", "short", "long", "huge"],
)
def test_a_value_is_quoted_on_one_short_line(value, text):
    assert shown(value) == text


def test_near_names_are_offered_in_any_case():
    assert did_you_mean("GPT-2", ["gpt2", "bert"], "none") == "did you mean 'gpt2'?"
    assert did_you_mean("zzz", ["gpt2"], "none") == "none"
