"""--explain, --terms and --depth of `ffn trace`: which numbers to explain, and how far."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.cli.options import positive
from ffncli.errors import FFNError, shown

if TYPE_CHECKING:
    from ffncli.block.steps import Step
    from ffncli.cli.traced import Traced
    from ffncli.show.parts import Answer

Spot = tuple[str, tuple[int, ...]]
_MOST = 100  # places in one command
_explain = partial(typer.Option, rich_help_panel="How a number came about")


@dataclass(frozen=True)
class ExplainOptions:
    """--explain and its kin."""

    explain: Annotated[
        list[str] | None,
        _explain("--explain", metavar="NAME[i,j]", help="Write out how that number came about; repeat for more."),
    ] = None
    terms: Annotated[
        int | None,
        _explain("--terms", metavar="N", parser=positive("--terms"), help="Largest terms written out, default 8."),
    ] = None
    depth: Annotated[
        int | None,
        _explain("--depth", metavar="N", parser=positive("--depth", 99), help="Go on to the largest term's origin."),
    ] = None

    def renamed(self, aliases: Mapping[str, str]) -> ExplainOptions:
        """The same questions with a text's names (`H`) read as ours (`hidden`); `aliases` maps ours to theirs."""
        ours = {theirs: name for name, theirs in aliases.items()}
        texts = [re.sub(r"\w+(?=\[|:)", lambda m: ours.get(m[0], m[0]), text) for text in self.explain or ()]
        return replace(self, explain=texts or None)

    def spots(self) -> list[Spot]:
        """(name, index) of every place asked for. Raises FFNError for what is no place, and for options of none."""
        if not self.explain:
            for option, value in (("--terms", self.terms), ("--depth", self.depth)):
                if value is not None:
                    raise FFNError(f"{option} needs --explain")
        found = [_spot(text) for texts in self.explain or () for text in _apart(texts)]
        if len(found) > _MOST:
            raise FFNError(f"--explain takes at most {_MOST} places, got {len(found)}")
        return found

    def keep(self, steps: Sequence[Step]) -> frozenset[str]:
        """The tensors that a trace must keep for it. Raises FFNError for a step that is not there."""
        from ffncli.run.places import needed

        try:
            return needed(steps, [name for name, _ in self.spots()], self.depth or 1)
        except FFNError as error:
            raise FFNError(f"--explain: {error.message}", error.hint) from None

    def with_answers(self, answer: Answer, traced: Traced) -> Answer:
        """A trace's answer with what there is to say of each place at its end; unchanged where nothing was asked.

        Raises FFNError for an index that is out of range.
        """
        if not self.explain:
            return answer
        from ffncli.cli.explain_page import explanation_parts, explanations_json
        from ffncli.run.explain import explain
        from ffncli.run.places import Scene

        ready, result = traced.ready, traced.result
        scene = Scene(ready.steps, ready.weights, result.tensors, ready.mode)
        found = [
            one
            for name, index in self.spots()
            for one in explain(scene, name, index, self.terms or 8, self.depth or 1, "--explain")
        ]
        parts = [*answer.parts, *explanation_parts(found, result, traced.digits, ready.tokens)]
        return replace(answer, body={**answer.body, "explain": explanations_json(found)}, parts=parts)


def _apart(text: str) -> list[str]:
    """`up[0,3],down[0,1]` → both; a comma within brackets, or of an index after a colon, parts nothing."""
    return re.split(r",(?![^\[]*\])", text) if "[" in text else [text]


def _spot(text: str) -> Spot:
    """`up[0,3]`, `up[0, -1]`, `up:0,3`, `experts[2].up[0,3]` → (name, index)."""
    plain = re.sub(r"\[([0-9]{1,9})\]\.", r".\1.", text.strip())
    match = re.fullmatch(r"([^\[\]:]+)(?:\[([^\[\]]*)\]|:(.*))", plain, re.DOTALL)
    words = (match[2] if match[2] is not None else match[3]).split(",") if match else []
    if not match or not all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", word, re.ASCII) for word in words):
        raise FFNError(f"--explain {shown(text)} is no place in a tensor", "give NAME[i,j], such as up[0,3]")
    return match[1].strip(), tuple(int(word) for word in words)
