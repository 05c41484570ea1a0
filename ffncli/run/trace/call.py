"""`ffncli.trace` and `ffncli.survey`: what `ffn trace` does, as calls with the command line's names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from ffncli.errors import FFNError
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.ranks.environment import device_of, split_over, torchrun
from ffncli.run.trace.question import Question
from ffncli.run.trace.question_checks import check, check_survey
from ffncli.run.user.arguments import DimensionNames, Input, Number, Source, converted
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from ffncli.run.trace.session import Note, Session
    from ffncli.run.trace.survey import Survey


def trace(
    source: Source = None,
    input: Input = None,
    *,
    layer: Number | None = None,
    prompt: str | None = None,
    input_ids: Iterable[int] | str | None = None,
    position: Number | Iterable[int] | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    threads: int | None = None,
    train: bool | None = None,
    vocab: int | None = None,
    show: int | str | None = 8,
    expert: Number | Iterable[int] | None = None,
    top_units: int | None = None,
    explain: str | Iterable[str] = (),
    terms: int | None = None,
    depth: int | None = None,
    unembed: bool = False,
    neuron: int | None = None,
    top_tokens: int | None = None,
    promotes: str | None = None,
    sample_top_k: int | None = None,
    sample_top_p: float | None = None,
    set: str | Iterable[str] = (),
    ablate: str | Iterable[str] = (),
    example: str | None = None,
    keep: bool | str | Iterable[str] = (),
    save: str | os.PathLike[str] | None = None,
    save_weights: bool | None = None,
    force: bool = False,
    tp: int | None = None,
    ep: int | None = None,
    **dimensions: Unpack[DimensionNames],
) -> Session:
    """Run one layer's FFN step by step, as `ffn trace` does, and return everything that is known about the run.

    >>> import ffncli
    >>> session = ffncli.trace("512x2048:gelu", tokens=2, explain="up[0,3]")
    >>> session["act"].shape, session.step("act").formula, session.explain[0].place
    (torch.Size([2, 2048]), 'gelu(up)', 'up[0,3]')
    >>> session.frame("act").columns.tolist()
    ['layer', 'token', 'unit', 'value']

    `source` is any SOURCE (a directory, a model's name, `512x2048:gelu`, `my.py:Class`), a path, what `load` gave, or
    an nn.Module: a transformers model or a layer of one, else identified as `my.py:Class` is. None is a demo block.
    `input` are values [tokens, d_model], [d_model] or [batch, tokens, d_model] (list, NumPy array or tensor), or text
    as typed. The other arguments are the command line's options by their names (`ffn trace --help`), as numbers and
    lists too: `layer=1`, `position=[0, 3]`, `show=None` (all values), `d_ff="4x"`. `keep` names steps whose tensors
    stay (True: all); `threads` are the process's. Raises FFNError as the command line does.
    """
    options = converted(locals(), "trace")
    if options["layer"] == "all":
        raise FFNError("layer='all' means one row per layer", "call ffncli.survey, which takes the same source")
    return session_for(Question(**options))


def survey(
    source: Source,
    *,
    prompt: str | None = None,
    input_ids: Iterable[int] | str | None = None,
    position: Number | Iterable[int] | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    input: Input = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    threads: int | None = None,
    top_units: int | None = None,
    **dimensions: Unpack[DimensionNames],
) -> Survey:
    """Look at every layer that has an FFN, as `ffn trace --layer all` does: `rows` has a record for each.

    >>> import ffncli
    >>> [row.layer for row in ffncli.survey("llama-2-7b", d_model=8, d_ff=16, tokens=2).rows][-1]
    31

    The arguments are those of `trace`. Raises FFNError as it does.
    """
    return survey_for(Question(**converted(locals(), "survey"), layer="all"))


@package_errors()
def session_for(question: Question, note: Note = lambda text: None) -> Session:
    """Check a question about one layer, then run it: torch is loaded once every check that does not need it has passed.

    `note` gets every remark when it arises. Raises FFNError for what cannot be, and (exit 3) without torch.
    """
    question = of_this_rank(question)
    with sleep_while_waiting():  # a module of the user's own imports torch
        checked = check(question)
    set_threads(question.threads)
    from ffncli.run.trace.session import session_of

    return session_of(checked, note)


@package_errors()
def survey_for(question: Question, note: Note = lambda text: None) -> Survey:
    """The same of a question about all layers."""
    if torchrun() is not None:
        raise FFNError("--layer all runs in one process", "give --layer I, or start it without torchrun")
    with sleep_while_waiting():
        checked = check_survey(question)
    set_threads(question.threads)
    from ffncli.run.trace.survey import survey_of

    return survey_of(checked, note)


def of_this_rank(question: Question) -> Question:
    """The question as this process answers it: under torchrun over all ranks, on the device of this one.

    Raises FFNError for what several processes cannot do.
    """
    place = torchrun()
    if place is None:
        return question
    ranks = split_over(question.tp, question.ep, place.world_size)
    if question.input == "-":
        raise FFNError("--input -: several ranks cannot read one standard input", "write it to a file")
    saves: dict[str, Any] = {} if place.first else {"save": None, "save_weights": None}
    return replace(question, tp=ranks.tp, ep=ranks.ep, device=device_of(place, question.device), **saves)
