"""Tiny models as transformers saves them: the FFN parameters counted from the module, the config and the headers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ffncli.models.config.read import read_config
from ffncli.models.counting.count import count
from ffncli.models.files.checkpoint import open_checkpoint
from ffncli.models.files.inventory import take_inventory
from ffncli.models.tensors.matching import items_of
from ffncli.models.tensors.recognise import recognise
from tests.oracles.architectures import Architecture, class_of, numbers
from tests.oracles.architectures.tiny import Tiny, make

COLUMNS = ("model_type", "class", "config_count", "header_count", "module_count", "result", "reason")


@dataclass(frozen=True)
class Counts:
    """FFN parameters of one model, all layers: by its config.json, its headers, its module, and both files read.

    `header` is by names and shapes alone. `stored` is what `load` finds in the headers with the config beside them
    (None: not all of it), `differences` what it says of the two.
    """

    config: int
    header: int
    module: int
    stored: int | None
    differences: tuple[str, ...]

    @property
    def reason(self) -> str:
        """How they disagree; empty where all of them are the same."""
        return "; ".join((*self._unlike(), *self.differences))

    def _unlike(self) -> Iterator[str]:
        if self.config != self.module:
            yield f"the config makes {self.config:,}, the module has {self.module:,}"
        if self.header != self.module:
            yield f"{self.header:,} by the tensors' names alone, the module has {self.module:,}"
        if self.stored != self.module:
            yield f"{self.stored or 0:,} by the tensors beside the config, the module has {self.module:,}"


def counts(tiny: Tiny) -> Counts:
    """Count one architecture, as transformers saves it, in every way."""
    both = tiny.saved_model
    return Counts(
        config=count(read_config(tiny.folder / "config.json", tiny.name)).ffn_params_total,
        header=_by_headers(tiny.folder),
        module=numbers(tiny.module, tiny.case.ffn),
        stored=both.stored.params if both.stored else None,
        differences=tuple(map(str, both.differences)),
    )


def _by_headers(folder: Path) -> int:
    """FFN parameters by the tensors' names and shapes alone: no config is read."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    layers = recognise(items_of(take_inventory(checkpoint), None))[0]
    return sum(found.params for seen in layers.values() for founds in seen.values() for found in founds)


def row(name: str, case: Architecture) -> tuple[object, ...]:
    """One line of the table of architectures (COLUMNS); one that a case gives a reason for is not counted."""
    built = class_of(name, case)
    if case.reason:
        return (name, built, None, None, None, "not counted", case.reason)
    found = counts(make(name, case))
    return (name, built, found.config, found.header, found.module, "differs" if found.reason else "same", found.reason)
