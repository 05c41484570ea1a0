"""Texts as batches of token ids: those of a window of texts sorted by length, so that little is padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown
from ffncli.run.corpus.texts import Text
from ffncli.run.pretrained.loading import cannot

_WINDOW = 16  # batches whose texts are sorted together


@dataclass(frozen=True)
class Tokenized:
    """A text's token ids, and whether it was `cut`."""

    number: int
    ids: tuple[int, ...]
    cut: bool


@dataclass(frozen=True)
class Batch:
    """Texts that run together: `ids` and `mask` [texts, length], padded at the right.

    `places` [tokens, 2] are the text's number and the position of every token that is not padding, and `rows` their
    rows among all texts · length; None if there is no padding.
    """

    ids: Tensor
    mask: Tensor
    places: Tensor
    rows: Tensor | None
    lengths: tuple[int, ...]
    numbers: tuple[int, ...]

    def tokens_of(self, tensor: Tensor) -> Tensor:
        """The rows [tokens, width] of a tensor [texts, length, width], whose length may be padded further, or of
        [texts · length, width]. Raises FFNError if its rows are not those of the tokens."""
        texts, length = self.ids.shape
        if tensor.dim() == 3 and tensor.shape[0] == texts and tensor.shape[1] >= length:
            tensor = tensor[:, :length]
        flat = tensor.reshape(-1, tensor.shape[-1])
        if flat.shape[0] != texts * length:
            raise FFNError(f"{flat.shape[0]} rows enter an FFN for {texts} texts of {length} tokens")
        return flat if self.rows is None else flat[self.rows]


def batch_of(texts: Sequence[Tokenized], padding: int, device: str) -> Batch:
    """These texts as one batch, padded with the token `padding`."""
    lengths = tuple(len(text.ids) for text in texts)
    longest = max(lengths)
    ids = torch.tensor([[*text.ids, *[padding] * (longest - len(text.ids))] for text in texts], device=device)
    count = torch.tensor(lengths)
    mask = torch.arange(longest) < count[:, None]
    places = torch.stack([torch.tensor([text.number for text in texts]).repeat_interleave(count),
                          torch.cat([torch.arange(length) for length in lengths])], 1)  # fmt: skip
    rows = None if mask.all() else mask.flatten().nonzero().flatten().to(device)
    return Batch(ids, mask.long().to(device), places.to(device), rows, lengths, tuple(text.number for text in texts))


@dataclass(frozen=True)
class BatchLimits:
    """At most so many `texts` and (padded) `tokens` in a batch, and `length` tokens of a text (None: any). Texts that
    are `in_order` are not sorted."""

    texts: int
    tokens: int
    length: int | None
    in_order: bool = False


def windows(texts: Iterable[Text], tokenizer: Any, limits: BatchLimits) -> Iterator[tuple[list[Tokenized], Text]]:
    """Some batches' texts at a time, in order, as token ids, with the last of them.

    Raises FFNError for a text that the tokenizer cannot read.
    """
    waiting = iter(texts)
    while window := list(islice(waiting, _WINDOW * limits.texts)):
        yield tokenized(window, tokenizer, limits.length), window[-1]


def tokenized(texts: Sequence[Text], tokenizer: Any, length: int | None) -> list[Tokenized]:
    """The texts' token ids, with the special ones that the tokenizer puts around a text. One of more than `length` is
    cut to it; one without tokens is left out."""
    try:
        every = tokenizer([text.text for text in texts])["input_ids"]
        long = [at for at, ids in enumerate(every) if length is not None and len(ids) > length]
        if long:
            shorter = tokenizer([texts[at].text for at in long], truncation=True, max_length=length)["input_ids"]
            every = [*every]
            for at, ids in zip(long, shorter, strict=True):
                every[at] = ids
    except Exception as error:
        where = f"texts {texts[0].number} to {texts[-1].number}"
        raise cannot(f"the tokenizer cannot read {where}, {shown(texts[0].text, 40)} …", error) from None
    cut = frozenset(long)
    return [
        Tokenized(t.number, tuple(ids), at in cut) for at, (t, ids) in enumerate(zip(texts, every, strict=True)) if ids
    ]


def batches(window: Sequence[Tokenized], limits: BatchLimits) -> Iterator[list[Tokenized]]:
    """The texts of a window by length, the longest first, as many at a time as the limits allow."""
    batch: list[Tokenized] = []
    for text in window if limits.in_order else sorted(window, key=lambda text: -len(text.ids)):
        longest = max(len(one.ids) for one in (*batch, text))
        if batch and (len(batch) == limits.texts or longest * (len(batch) + 1) > limits.tokens):
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
