"""The hidden units among the intermediates of a block: which events of `execute` a down projection reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ffncli.block.steps import Activation, Experts, Step
from ffncli.block.value import unit_steps
from ffncli.dataclass import dataclass
from ffncli.run.engine.execute import Event


@dataclass(frozen=True)
class UnitGroup:
    """Which of a layer's units: those of `expert` among `experts` routed ones, of the part `shared`, or of a dense FFN
    (part "", one of 1)."""

    part: str
    expert: int = 0
    experts: int = 1


DENSE = UnitGroup("")


@dataclass(frozen=True)
class UnitEvent:
    """The values of a group's units [tokens, d_ff], and the output of the activation that made them."""

    group: UnitGroup
    values: Tensor
    active: Tensor


class UnitEvents:
    """Finds the units among a block's events, which it must see in their order."""

    def __init__(self, block: Sequence[Step]) -> None:
        self._block = block
        self._mixtures = {step.output: step for step in block if isinstance(step.op, Experts)}
        self._active: dict[str, Tensor] = {}

    @property
    def groups(self) -> list[UnitGroup]:
        """All of them, each expert's too."""
        outer = dict.fromkeys(name.rpartition(".")[0] for name in unit_steps(self._block))
        routed = {name: _experts(step).experts.size for name, step in self._mixtures.items()}
        return [*map(UnitGroup, outer), *(UnitGroup(name, e, n) for name, n in routed.items() for e in range(n))]

    def of(self, event: Event) -> UnitEvent | None:
        """The units that an event is; None for any other intermediate."""
        owner, _, name = event.name.rpartition(".")
        op, program = event.step.op, self._program(owner)
        if isinstance(op, Activation) and op.function != "identity":
            self._active = {owner: event.tensor}
        if program.get(name) is None or owner not in self._active:
            return None
        return UnitEvent(self._group(owner, event.expert), event.tensor, self._active[owner])

    def columns(self, group: UnitGroup, weights: Mapping[str, Tensor]) -> Tensor:
        """The down projection of a group [written, d_ff]: a column is what its unit writes for an activation of 1."""
        reader = next(name for name in self._program(group.part).values() if name)
        step = self._mixtures.get(group.part)
        inside = weights if step is None else _experts(step).of_one(weights, group.expert, step.prefix)
        return inside[f"{reader}.weight"]

    def _program(self, owner: str) -> Mapping[str, str | None]:
        """The unit steps of the whole block, or of one expert's program, with the Linear that reads each."""
        if (step := self._mixtures.get(owner.partition(".")[0])) is not None:
            return unit_steps(_experts(step).program)
        readers = unit_steps(self._block)
        return {name.rpartition(".")[2]: reader for name, reader in readers.items() if name.rpartition(".")[0] == owner}

    def _group(self, owner: str, expert: int | None) -> UnitGroup:
        root = owner.partition(".")[0]
        return (
            UnitGroup(owner) if expert is None else UnitGroup(root, expert, _experts(self._mixtures[root]).experts.size)
        )


def _experts(step: Step) -> Experts:
    assert isinstance(step.op, Experts)
    return step.op
