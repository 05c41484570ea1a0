import unicodedata
from pathlib import Path

import pytest

from ffncli.errors import ExitCode, FFNError, clean, did_you_mean, shown, shown_path


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


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "a\u202eb", "bad\udcff", "\x9b0m"])
def test_a_path_is_shown_without_its_control_characters(name: str):
    assert shown_path(Path("models", name)).isprintable()
    assert clean(str(Path("models", name))) == shown_path(Path("models", name))
    assert shown_path(Path("models/é/模型 [/x]")) == "models/é/模型 [/x]"


@pytest.mark.parametrize(
    ("character", "text"),
    [
        ("\x1b", r"\x1b"), ("\xad", r"\xad"), ("\u202e", r"\u202e"), ("\ufffb", r"\ufffb"),
        ("\U000e0041", r"\U000e0041"), ("\xa0", "\xa0"), ("\u3000", "\u3000"), ("\ue0b0", "\ue0b0"),
    ],
)  # fmt: skip
def test_one_sanitiser_for_paths_and_texts(character: str, text: str):
    """Characters that control, reorder or hide text are escaped as in Python; visible spaces and symbols stay."""
    assert clean(character) == shown_path(Path(character)) == text


@pytest.mark.parametrize("category", ["Cc", "Cf", "Cs", "Zl", "Zp"])
def test_no_character_of_a_controlling_category_gets_through(category: str):
    """Unicode's own table gives these characters."""
    every = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == category]
    assert every
    assert all(clean(character).isascii() and clean(character).isprintable() for character in every)
