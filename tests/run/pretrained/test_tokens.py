"""Tokens and positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from ffncli.errors import FFNError
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import positions, token_text, tokenizer_of, tokens_of
from tests.oracles.prompted import WORDS, give_tokenizer


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (None, (0, 1, 2, 3, 4)), ("all", (0, 1, 2, 3, 4)), ("-1", (4,)), ("0", (0,)), ("3,0", (3, 0)), ("1:3", (1, 2)),
        ("-2:", (3, 4)), (":2", (0, 1)), ("0,4,-1,0", (0, 4)), (" 1 , 2 ", (1, 2)), ("3:99", (3, 4)),
        (":", (0, 1, 2, 3, 4)),
    ],
)  # fmt: skip
def test_positions(text: str | None, meant: tuple[int, ...]) -> None:
    assert positions(text, 5) == meant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "--position 5 is out of range; the 5 tokens have positions 0 to 4"),
        ("-6", "--position -6 is out of range"),
        ("x", "--position must be a number, a list 0,3 or a range 2:5, got 'x'"),
        ("", "must be a number"), ("1.5", "must be a number"), ("1:2:3", "must be a number"), ("²", "must be a number"),
        ("3:3", "--position 3:3 is empty"), ("9" * 10, "must be a number"),
    ],
)  # fmt: skip
def test_positions_that_are_none(text: str, said: str) -> None:
    with pytest.raises(FFNError) as error:
        positions(text, 5)
    assert said in str(error.value)


def test_a_range_of_any_size_costs_nothing() -> None:
    assert positions("0:999999999", 2) == (0, 1)


def test_texts_are_what_the_tokenizer_says(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(transformers, give_tokenizer(tmp_path))
    found = tokens_of(Prompt("Hello naïve 日本 nobody"), tokenizer, tmp_path)
    assert [(t.position, t.id, t.text) for t in found] == [
        (0, 3, "Hello"),
        (1, 11, "naïve"),
        (2, 12, "日本"),
        (3, 0, "[UNK]"),
    ]
    assert token_text(tokenizer, len(WORDS)) is None
    assert token_text(None, 0) is None


@pytest.mark.parametrize("space", ["▁", "Ġ"])
def test_a_leading_space_is_part_of_a_token(tmp_path: Path, space: str) -> None:
    """SentencePiece's and byte-level BPE's marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({"a": 0, f"{space}b": 1, space: 2, "b": 3}, [(space, "b")]))
    if space == "▁":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace()
    else:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = tokenizer_of(transformers, tmp_path)
    assert [t.text for t in tokens_of(Prompt("a b"), tokenizer, tmp_path)] == ["a", " b"]


def test_numbers_need_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_of(transformers, tmp_path) is None
    assert [(t.id, t.text) for t in tokens_of(Prompt(None, (7, 3)), None, tmp_path)] == [(7, None), (3, None)]


def test_a_prompt_needs_one(tmp_path: Path) -> None:
    with pytest.raises(FFNError, match=r"has no tokenizer \(tokenizer.json\); --input-ids 1,2,3 gives"):
        tokens_of(Prompt("Hello"), None, tmp_path)


def test_a_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    give_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(FFNError, match="its tokenizer cannot be loaded") as error:
        tokenizer_of(transformers, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", ["", "   "])
def test_an_empty_prompt(tmp_path: Path, prompt: str) -> None:
    tokenizer = tokenizer_of(transformers, give_tokenizer(tmp_path))
    with pytest.raises(FFNError, match=r"--prompt (is empty|'   ' has no tokens)"):
        tokens_of(Prompt(prompt), tokenizer, tmp_path)
