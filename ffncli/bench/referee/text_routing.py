"""--routing text: tokens go to experts by the words of a text, so that some experts are popular as some words are.

The text is Lincoln's Gettysburg Address (1863), in capitals or not the same word. It is a text, and not the routes of a
trained model: every different word has top_k experts by a hash, each occurrence goes to them, and what is real is how
often words come, and in which order. The same words, experts and top_k give the same routes on every machine.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

_BYTES = 6  # of a hash: as many as a float64 holds without rounding


@cache
def words() -> tuple[str, ...]:
    """The words of the text in their order, in small letters."""
    text = files("ffncli.bench.referee").joinpath("gettysburg.txt").read_text("utf-8")
    return tuple(re.findall(r"[a-z]+", text.lower()))


def word_keys(experts: int) -> Tensor:
    """A number for each word of the text and each expert, float64 [words, experts]: the experts with the largest are
    the word's."""
    rows = {word: [_key(word, expert) for expert in range(experts)] for word in dict.fromkeys(words())}
    return torch.tensor([rows[word] for word in words()], dtype=torch.float64)


def _key(word: str, expert: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{word} {expert}".encode()).digest()[:_BYTES])
