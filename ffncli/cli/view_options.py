"""--show, --digits, --expert and --keep of `ffn trace`: how much of what ran is shown, and stays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.cli.options import natural, positive
from ffncli.errors import FFNError, shown
from ffncli.models.model import Resolved

if TYPE_CHECKING:
    from ffncli.run.prepare import Prepared
    from ffncli.run.trace import Trace


@dataclass(frozen=True)
class ViewOptions:
    """--expert, --show, --digits and --keep."""

    expert: Annotated[
        str | None, typer.Option("--expert", metavar="I,J|all", help="Show the steps inside experts.")
    ] = None
    show: Annotated[str, typer.Option("--show", metavar="N|all", help="Values shown per axis.")] = "8"
    digits: Annotated[
        int, typer.Option("--digits", metavar="N", parser=natural("--digits", 17), help="Digits shown.")
    ] = 4

    keep: Annotated[
        bool, typer.Option("--keep", help="Keep every intermediate in memory to the end, not the two largest alone.")
    ] = False

    def values(self) -> int | None:
        """Values per axis, None for all."""
        return None if self.show == "all" else positive("--show")(self.show)

    def inside(self, model: Resolved, layer: str | None) -> frozenset[int] | None:
        """The experts to look into: none, some (`0,3`), or all (None). FFNError where the model has no such expert."""
        if self.expert is None:
            return frozenset()
        moe = model.layer(layer).spec.moe
        if moe is None:
            first = next((g.layers[0] for g in model.groups if g.spec.moe), None)
            advice = "it is dense" if first is None else f"the first MoE layer is {first}"
            raise FFNError(f"--expert {shown(self.expert)}: this layer of {model.name} has no experts", advice)
        if self.expert == "all":
            return None
        if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", self.expert):
            raise FFNError(f"--expert must be a number, a comma list or all, got {shown(self.expert)}")
        chosen = frozenset(int(word) for word in self.expert.split(","))
        if max(chosen) >= moe.experts:
            last = f"{model.name} has experts 0 to {moe.experts - 1}"
            raise FFNError(f"--expert {max(chosen)} is out of range", last)
        return chosen

    def all_of(self, ready: Prepared, inside: frozenset[int] | None) -> frozenset[str]:
        """With --keep every tensor that is recorded, by its printed name; else none."""
        if not self.keep:
            return frozenset()
        from ffncli.run.saved import kept_for_saving

        return kept_for_saving(ready.steps, ready.inputs, inside)

    def remarks(self, inside: frozenset[int] | None, result: Trace) -> list[str]:
        """What was kept, and the experts among those asked for that no token is routed to."""
        out = []
        if self.keep:
            size = sum(tensor.numel() * tensor.element_size() for tensor in result.tensors.values())
            out.append(f"kept {len(result.tensors)} tensors, {size / 1e6:,.1f} MB")
        names = [record.name for record in result.steps]
        idle = [e for e in sorted(inside or ()) if not any(name.startswith(f"experts.{e}.") for name in names)]
        return out + ([f"no token is routed to expert {', '.join(map(str, idle))}"] if idle else [])
