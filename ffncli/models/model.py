"""Model: what a source turns out to be. Stacks of layers, in groups of layers that have equal steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Step
from ffncli.errors import FFNError, shown


@dataclass(frozen=True)
class Group:
    """Layers of one stack (`encoder`, `decoder`, or `block` for bare dimensions) that share one spec."""

    stack: str
    layers: tuple[int, ...]
    spec: FFNSpec

    @property
    def steps(self) -> tuple[Step, ...]:
        """The block as assignments."""
        return steps(self.spec)


@dataclass(frozen=True)
class Layer:
    """One layer: `decoder.3`, with its spec."""

    stack: str
    index: int
    spec: FFNSpec


@dataclass(frozen=True)
class Model:
    """`source` is what was typed, `location` where the weights are, if any; `bare` means dimensions without layers.

    `dtype` is the stored one where known. `evidence` says, in order, what decided gatedness and widths.
    """

    name: str
    source: str
    groups: tuple[Group, ...]
    citation: str = ""
    model_type: str = ""
    dtype: str | None = None
    location: Path | None = None
    bare: bool = False
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Group:
        """The group with most layers, ties to the first: what "per layer" means for the model."""
        return max(self.groups, key=lambda group: len(group.layers))

    @property
    def layer_count(self) -> int | None:
        """FFN blocks, encoder and decoder together; None for bare dimensions."""
        return None if self.bare else sum(len(group.layers) for group in self.groups)

    def layer(self, text: str | None) -> Layer:
        """The layer for `3` or `decoder.3` (None: 0, of the first stack). Raises FFNError where there is none."""
        stacks = list(dict.fromkeys(group.stack for group in self.groups))
        stack, _, number = ("0" if text is None else text).rpartition(".")
        if stack and stack not in stacks:
            raise FFNError(f"--layer {shown(text)}: no stack '{stack}'", f"this model has: {', '.join(stacks)}")
        if not stack and len(stacks) > 1 and text is not None:
            raise FFNError(f"--layer {shown(text)} is ambiguous", "say " + " or ".join(f"{s}.{number}" for s in stacks))
        stack = stack or stacks[0]
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise FFNError(f"--layer must be a whole number from 0, got {shown(text)}")
        count = sum(len(group.layers) for group in self.groups if group.stack == stack)
        for group in self.groups:
            if group.stack == stack and int(number) in group.layers:
                return Layer(stack, int(number), group.spec)
        known = "a bare block is layer 0" if self.bare else f"{self.name} has {stack} layers 0 to {count - 1}"
        raise FFNError(f"--layer {text or 0} is out of range", known)

    def with_specs(self, change: Sequence[FFNSpec]) -> Model:
        """The same layers with other specs, one per group."""
        return replace(self, groups=tuple(replace(g, spec=s) for g, s in zip(self.groups, change, strict=True)))


def block_model(spec: FFNSpec, source: str, name: str | None = None, notes: tuple[str, ...] = ()) -> Model:
    """A bare block: dimensions, no layers."""
    return Model(name or source, source, (Group("block", (0,), spec),), bare=True, notes=notes)


def grouped(stack: str, specs: Sequence[FFNSpec]) -> list[Group]:
    """One spec per layer → groups of layers with equal specs, in order of first appearance."""
    found: dict[FFNSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        found.setdefault(spec, []).append(index)
    return [Group(stack, tuple(layers), spec) for spec, layers in found.items()]
