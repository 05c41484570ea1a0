"""One run of `ffn trace`, as every page of its answer reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffncli.models.examples import Example
from ffncli.models.model import Resolved

if TYPE_CHECKING:
    from ffncli.run.prepare import Prepared, Request
    from ffncli.run.tokens import Token
    from ffncli.run.trace import Trace


@dataclass(frozen=True)
class Traced:
    """What was asked, what ran, what came of it.

    `given` are the tokens that a real model was run on. `show` values per axis (None: all) and `digits` of each are
    what a page shows; `inside` are the experts to look into (None: all).
    """

    model: Resolved
    request: Request
    example: Example | None
    ready: Prepared
    given: tuple[Token, ...]
    result: Trace
    inside: frozenset[int] | None
    show: int | None
    digits: int
