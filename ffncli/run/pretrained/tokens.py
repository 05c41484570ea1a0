"""The tokens of a prompt: their ids, their strings, and the positions to trace."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffncli.errors import FFNError, option, shown, shown_path
from ffncli.models.model import is_gguf
from ffncli.run.engine.prepare import Token
from ffncli.run.pretrained.loading import arguments_for, cannot
from ffncli.run.pretrained.prompt import Prompt

# Every tokenizer has one of these files. If a folder has none of them, transformers would create an empty tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "vocab.json",
          "vocab.txt", "tekken.json", "sentencepiece.model", "tiktoken.model", "bpe.codes", "vocab.bpe")  # fmt: skip

_OR_IDS = f"give some text, or token ids as {option('input_ids')}"


def tokenizer_of(transformers: Any, path: Path) -> Any:
    """Return the tokenizer of a directory or a GGUF file, or None if there is no tokenizer."""
    if is_gguf(path):
        from ffncli.models.files.gguf import read_gguf

        there = "tokenizer.ggml.model" in read_gguf(path).metadata
    else:
        there = any((path / name).is_file() for name in _FILES)
    if not there:
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(**arguments_for(path))
    except Exception as error:  # tokenizer libraries raise all kinds of exceptions
        raise cannot(f"{shown_path(path)}: its tokenizer cannot be loaded", error) from None


def tokens_of(prompt: Prompt, tokenizer: Any, path: Path) -> tuple[Token, ...]:
    """Return the model's input tokens, including the special tokens that the tokenizer adds to a prompt."""
    if prompt.ids is not None:
        return with_texts(prompt.ids, tokenizer)
    if not prompt.text:
        raise FFNError(f"{prompt.option} is empty", _OR_IDS)
    if tokenizer is None:
        name = "tokenizer.ggml.model" if is_gguf(path) else _FILES[0]
        what = f"{shown_path(path)} has no tokenizer ({name})"
        raise FFNError(what, f"{option('input_ids')} accepts token ids")
    try:
        ids = tokenizer(prompt.text)["input_ids"]
    except Exception as error:  # surrogates that UTF-8 cannot encode, and other strings that a tokenizer refuses
        raise cannot(f"the tokenizer cannot read the prompt {shown(prompt.text)}", error) from None
    if not ids:
        raise FFNError(f"{prompt.option} {shown(prompt.text)} has no tokens", _OR_IDS)
    return with_texts(ids, tokenizer)


def with_texts(ids: Sequence[int], tokenizer: Any) -> tuple[Token, ...]:
    """Return the tokens with the given ids, at positions 0, 1, ..."""
    return tuple(Token(at, int(number), token_text(tokenizer, int(number))) for at, number in enumerate(ids))


def token_text(tokenizer: Any, number: int) -> str | None:
    """Return one token as a string, with its leading space if it has one; None if the tokenizer lacks the token."""
    raw = None if tokenizer is None or number >= len(tokenizer) else tokenizer.convert_ids_to_tokens(number)
    if raw is None:
        return None
    text = str(tokenizer.decode([number], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # SentencePiece marks the beginning of a word, but its decoder drops the space before the first word.
    return " " + text if str(raw).startswith("▁") and not text.startswith(" ") else text


def one_token(tokenizer: Any, text: str, vocab: int) -> int:
    """Return the id of the token given as `promotes`: the token's text, or `id:N` with N below `vocab`. Raises
    FFNError, which lists the tokens, if `text` is not exactly one token.
    """
    if match := re.fullmatch(r"id:([0-9]{1,9})", text):
        if int(match[1]) >= vocab:
            raise FFNError(f"{option('promotes')} {text} is out of range", f"the model has {vocab:,} tokens")
        return int(match[1])
    if tokenizer is None:
        what = f"{option('promotes')} {shown(text)}: the model has no tokenizer"
        raise FFNError(what, f"give the token's id, as in {option('promotes', 'id:42')}")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    exact = next((i for i in ids[-1:] if token_text(tokenizer, i) == text), None)  # SentencePiece adds a space token
    if len(ids) != 1 and exact is None:
        parts = ", ".join(shown(token_text(tokenizer, i) or f"id:{i}") for i in ids[:8])
        raise FFNError(f"{option('promotes')} {shown(text)} is {len(ids)} tokens: {parts}", "name one of them, or id:N")
    return int(ids[-1])


def positions(text: str | None, count: int) -> tuple[int, ...]:
    """Parse `-1`, `0,3` or `2:5` into distinct positions among `count` tokens; all positions if `text` is None."""
    if text is None or text == "all":
        return tuple(range(count))
    out: list[int] = []
    for word in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(-?\d{1,9})|(-?\d{1,9})?:(-?\d{1,9})?", word, re.ASCII)
        if not match:
            raise FFNError(f"{option('position')} must be a number, a list 0,3 or a range 2:5, got {shown(text)}")
        if match[1] is None:
            chosen = range(count)[slice(*(int(n) if n else None for n in (match[2], match[3])))]
            if not chosen:
                raise FFNError(f"{option('position')} {word} is empty", _range_text(count))
            out += chosen
        elif not -count <= int(match[1]) < count:
            raise FFNError(f"{option('position')} {match[1]} is out of range", _range_text(count))
        else:
            out.append(int(match[1]) % count)
    return tuple(dict.fromkeys(out))


def _range_text(count: int) -> str:
    return f"the {count} tokens have positions 0 to {count - 1}" if count > 1 else "the one token has position 0"
