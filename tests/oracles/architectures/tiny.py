"""The tiny model of an architecture, built and saved once for all tests of the architecture; and the counts of its FFN
parameters from the module, the config and the headers."""

import json
import math
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ffncli.models.config.read import from_config, read_config
from ffncli.models.counting.count import count
from ffncli.models.files.inventory import take_inventory
from ffncli.models.model import Resolved
from ffncli.models.source import load
from ffncli.models.tensors.matching import items_of
from ffncli.models.tensors.recognise import recognise
from tests.oracles.architectures import Architecture, build, cases, class_of, fresh, numbers, towers
from tests.oracles.architectures.nested import composite
from tests.oracles.checkpoints import checkpoint_in

# Tests with this mark take a `name`; tests/conftest.py runs the tests of a name in a row, so that it is built once.
statement = pytest.mark.architecture

TOKENS = 8
UNFILLED = "pix2struct_text_model"  # transformers cannot initialise its parameters if it is built separately
_HEADS = {"num_key_value_heads": 4}
# Values that a forward pass needs, in addition to the sizes that a count needs.
RUNNING: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
                     "longcat_flash", "minicpm3", "youtu"), _HEADS),
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "whisper": {"num_mel_bins": 8, "max_source_positions": TOKENS},
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A tiny model in memory, which is saved to disk when it is first needed there.

    `case` says which parameters are the FFN's; `config` has the contents of its config.json; every parameter of
    `module` is random; `wide` is the same model with every d_ff doubled, on the meta device.
    """

    name: str
    case: Architecture
    module: nn.Module
    wide: nn.Module
    config: Mapping[str, Any]

    @cached_property
    def model(self) -> Resolved:
        """The model that ffn reads from the config alone."""
        return from_config(self.config, self.name, f"{self.name}/config.json")

    @cached_property
    def wide_model(self) -> Resolved:
        """The model that ffn reads from the wide module's config."""
        return from_config(_config(self.wide), self.name, f"{self.name}/config.json")

    @cached_property
    def folder(self) -> Path:
        """The folder in which transformers saved the model."""
        folder = Path(mkdtemp(prefix=f"ffn-{self.name}-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.module.save_pretrained(folder / "whole")  # type: ignore[operator]
        return folder / "whole"

    @cached_property
    def saved_model(self) -> Resolved:
        """The model that ffn reads from that folder."""
        return load(str(self.folder))

    @cached_property
    def without_config(self) -> Path:
        """A folder with the same files except config.json."""
        bare = self.folder.parent / "bare"
        bare.mkdir()
        for file in self.folder.iterdir():
            if file.name != "config.json":
                os.link(file, bare / file.name)
        return bare


@lru_cache(maxsize=1)
def tiny(name: str) -> Tiny:
    """Return the tiny model of a text architecture."""
    case = _cases().get(name)
    return make(name, case if case else composite(name))


def make(name: str, case: Architecture) -> Tiny:
    """Build a case so that it can run: with random values of fan-in scale everywhere, also in stored buffers."""
    case = replace(case, values={**case.values, **RUNNING.get(name, {})})
    wide = build(name, case, factor=2, meta=True)  # this also checks that the model is tiny
    torch.manual_seed(0)
    model = (build(name, case, meta=True).to_empty(device="cpu") if name == UNFILLED else fresh(name, case)).eval()
    config = _config(model)  # saving will add to it
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    if name == "nllb-moe":
        for module in model.modules():
            if type(module).__name__ == "NllbMoeExperts":
                module.forward = MethodType(_mixed, module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for at, tensor in _stored(model):
            scale = 1 / math.sqrt(tensor.shape[-1]) if tensor.dim() > 1 else 0.3
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
            if "norm" in at.lower() or ".ln_" in at:
                tensor.add_(0.8)
            if at.endswith("balancing_biases"):  # of ZAYA's one expert per token: the scores decide, too
                tensor.mul_(0.05)
            if at.endswith("running_var"):
                tensor.abs_()
        for at, table in model.named_buffers():
            if at.endswith("tid2eid"):  # two different experts for every token id
                table.copy_(torch.rand(len(table), 8, generator=generator).topk(table.shape[1]).indices)
    return Tiny(name, case, model, wide, config)


@cache
def _cases() -> Mapping[str, Architecture]:
    return {**cases(), **towers()}


def _config(model: nn.Module) -> Mapping[str, Any]:
    """Return what transformers would write to config.json."""
    values: Mapping[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))  # type: ignore[union-attr, operator]
    return values


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a checkpoint that are not constants."""
    kept = set(model.state_dict())
    for at, tensor in (*model.named_parameters(), *model.named_buffers()):
        if at in kept and tensor.is_floating_point() and not at.endswith((".beta", ".eps")):
            yield at, tensor


def _mixed(self: Any, tokens: Tensor, _: Tensor, weights: Tensor) -> Tensor:
    """Compute NLLB's experts on `tokens` [tokens, d], multiplied by the routing weights and by 1 - the dropout."""
    mixed = sum(weights[:, e, None] * self[f"expert_{e}"](tokens) for e in range(self.num_experts))
    return mixed * (1 - self.moe_token_dropout)


COLUMNS = ("model_type", "class", "config_count", "header_count", "module_count", "result", "reason")


@dataclass(frozen=True)
class Counts:
    """FFN parameter counts of one model, all layers, from its config.json, its headers, its module, and both files.

    `header` uses only names and shapes. `stored` is the count that `load` finds in the headers if it also has the
    config (None: incomplete), and `differences` are the differences that it reports.
    """

    config: int
    header: int
    module: int
    stored: int | None
    differences: tuple[str, ...]

    @property
    def reason(self) -> str:
        """How the counts disagree; empty if all of them are the same."""
        return "; ".join((*self._unlike(), *self.differences))

    def _unlike(self) -> Iterator[str]:
        if self.config != self.module:
            yield f"the config makes {self.config:,}, the module has {self.module:,}"
        if self.header != self.module:
            yield f"{self.header:,} by the tensors' names alone, the module has {self.module:,}"
        if self.stored != self.module:
            yield f"{self.stored or 0:,} by the tensors beside the config, the module has {self.module:,}"


def counts(tiny: Tiny) -> Counts:
    """Count the FFN parameters of an architecture, as saved by transformers, in every way."""
    both = tiny.saved_model
    return Counts(
        config=count(read_config(tiny.folder / "config.json", tiny.name)).ffn_params_total,
        header=_by_headers(tiny.folder),
        module=numbers(tiny.module, tiny.case.ffn),
        stored=both.stored.params if both.stored else None,
        differences=tuple(map(str, both.differences)),
    )


def _by_headers(folder: Path) -> int:
    """Count FFN parameters from the tensors' names and shapes alone, without the config."""
    layers = recognise(items_of(take_inventory(checkpoint_in(folder)), None))[0]
    return sum(found.params for seen in layers.values() for founds in seen.values() for found in founds)


def row(name: str, case: Architecture) -> tuple[object, ...]:
    """Return a line of the table of architectures (COLUMNS); if the case has a reason, it is not counted."""
    built = class_of(name, case)
    if case.reason:
        return (name, built, None, None, None, "not counted", case.reason)
    found = counts(make(name, case))
    return (name, built, found.config, found.header, found.module, "differs" if found.reason else "same", found.reason)
