"""The form of a row of `non_ffn_rows`: which fields hold what a family has outside its FFN, and what its code fixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from ffncli.dataclass import dataclass
from ffncli.models.config.attention import Attention, Flag, Heads
from ffncli.models.files.fields import Fields

Once = Callable[[Fields, int], int]


def none(config: Fields, d_model: int) -> int:
    """No such part."""
    return 0


def nothing(config: Fields, d_model: int) -> Callable[[int], int]:
    """No layer has anything besides its attention, its FFN and norms."""
    return lambda i: 0


@dataclass(frozen=True)
class StackRow:
    """A stack: its name, whether its layers also attend to the other stack, and the parts that it has once."""

    name: str = "decoder"
    cross: bool = False
    positions: Once = none
    stem: Once = none


@dataclass(frozen=True, kw_only=True)
class Rest:
    """One family. `norms` per layer (cross-attention adds its own), each of `norm_vectors` vectors (1 weight, 2 with
    bias, 0 neither). `embedding`: the field with the table's width if that is not d_model. `head` None: none.
    `adjust` makes the row for one config if plain fields cannot. Not `complete`: only its layers are known.

    Where layers differ, `mixers` gives each its attention (or what mixes tokens instead). `extra` is what a layer has
    besides attention, FFN and norms; `tables` are looked up by tokens, besides the input embedding.
    """

    attention: Attention = field(default_factory=Heads)
    mixers: Callable[[Fields], Callable[[int], Attention]] | None = None
    extra: Callable[[Fields, int], Callable[[int], int]] = nothing
    tables: Once = none
    d_model: str = "hidden_size"
    norms: int = 2
    norm_vectors: int = 1
    final_norm: bool = True
    vocabulary: str | None = "vocab_size"
    embedding: str | None = None
    other: Once = none
    head: Flag | None = False  # its bias
    tied: bool = False
    stacks: Sequence[StackRow] = (StackRow(),)
    needs: Sequence[str] = ()
    complete: bool = True
    adjust: Callable[[Fields, Rest], Rest] = lambda config, row: row
