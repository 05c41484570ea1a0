"""Tiny models as transformers saves them: the FFN parameters counted from the module, the config and the headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ffncli.models.checkpoint import open_checkpoint
from ffncli.models.config import read_config
from ffncli.models.count import count
from ffncli.models.evidence import items_of
from ffncli.models.inventory import take_inventory
from ffncli.models.recognise import recognise
from ffncli.models.source import load
from tests.oracles.architectures import Architecture, build, numbers


@dataclass(frozen=True)
class Counts:
    """FFN parameters of one model, all layers: by its module, its config.json, its headers, and both files read.

    `header` is by names and shapes alone. `stored` is what `load` finds with the config beside them (None: not all of
    it), `differences` what it says of the two.
    """

    module: int
    config: int
    header: int
    stored: int | None
    differences: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether all of them agree."""
        return self.module == self.config == self.header == self.stored and not self.differences


def save(name: str, case: Architecture, folder: Path) -> int:
    """Build the architecture and save it as transformers does. Returns how many FFN parameters its module holds."""
    model = build(name, case)
    model.save_pretrained(folder)  # type: ignore[operator]
    return numbers(model, case.ffn)


def counts(name: str, case: Architecture, folder: Path) -> Counts:
    """The counts of one architecture, saved into an empty folder."""
    module = save(name, case, folder)
    both = load(str(folder))
    return Counts(
        module=module,
        config=count(read_config(folder / "config.json", name)).ffn_params_total,
        header=header_count(folder),
        stored=both.stored.params if both.stored else None,
        differences=tuple(map(str, both.differences)),
    )


def header_count(folder: Path) -> int:
    """FFN parameters by the tensors' names and shapes alone: no config is read."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    layers = recognise(items_of(take_inventory(checkpoint), None))
    return sum(found.params for seen in layers.values() for founds in seen.values() for found in founds)
