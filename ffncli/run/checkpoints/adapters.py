"""A LoRA adapter as PEFT writes it (adapter_config.json, adapter_model.safetensors), applied to its base's tensors.

The change of a matrix W is scaling · B · A, where scaling is alpha / r, or alpha / √r with rank stabilisation (rsLoRA).
DoRA then rescales each row of W + change to a learned magnitude. The arithmetic is PEFT's, in its order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.checkpoint import Checkpoint, open_checkpoint
from ffncli.models.files.strict_json import MOST_CONFIG_BYTES, read_object
from ffncli.models.tensors.ffns import NAMINGS, last
from ffncli.models.tensors.layout import Located, canonical
from ffncli.models.tensors.read_weights import values
from ffncli.models.tensors.recognise import placed

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PIECE = re.compile(r"^(?:base_model\.model\.)?(.*)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?$")
_LEAVES = {last(leaf) for naming in NAMINGS for leaf in naming.names}


@dataclass(frozen=True)
class LowRank:
    """The adapter of one matrix: the names of its tensors, its rank and alpha, and the factor of B · A."""

    pieces: Mapping[str, str]
    rank: int
    alpha: float
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: `modules` maps the names of modules, as in the model in memory, to what changes them.

    `transposed`: the modules keep their matrices as [in, out] (GPT-2's Conv1D).
    """

    where: str
    checkpoint: Checkpoint
    modules: Mapping[str, LowRank]
    transposed: bool
    dora: bool
    rslora: bool

    def match(self, names: Iterable[str]) -> dict[str, LowRank]:
        """Return the adapted tensors among `names` by name. Raises FFNError if an FFN's module matches none of them."""
        stems = {name.removesuffix(".weight"): name for name in names}
        by_place = {(place[1], role): name for stem, name in stems.items()
                    if (place := placed(name)) and (role := _role(stem))}  # fmt: skip
        out: dict[str, LowRank] = {}
        for module, change in self.modules.items():
            ends = [module.split(".", at)[-1] for at in range(module.count(".") + 1)]
            stem = next((end for end in ends if end in stems), None) or next(
                (stem for stem in stems if stem.endswith(f".{module}")), None
            )
            place = placed(f"{module}.weight")
            name = stems[stem] if stem else by_place.get((place[1], _role(module))) if place else None
            if name is not None:
                out[name] = change
            elif last(module) in _LEAVES and not re.search(r"att", module):
                hint = "is it the adapter of another model?"
                raise FFNError(f"{self.where} changes {shown(module, 120)}, which the base does not have", hint)
        return out

    def merge_into(self, module: Any) -> None:
        """Merge the adapter into a model of transformers in memory."""
        import torch

        for name, change in self.modules.items():
            place = next(
                (
                    n
                    for n, _ in module.named_modules()
                    if n and (n == name or name.endswith(f".{n}") or n.endswith(f".{name}"))
                ),
                None,
            )
            if place is None:
                raise FFNError(f"{self.where} changes {shown(name, 120)}, which the model does not have")
            weight = module.get_submodule(place).weight
            with torch.no_grad():
                turned = weight.T if self.transposed else weight
                turned.copy_(self._merged(turned.float().clone(), change))

    def applied(self, matrix: Tensor, item: Located, change: LowRank) -> Tensor:
        """Return a canonical float32 matrix [out, in] with the adapter merged into it."""
        import torch

        parts = self._parts(change)
        product = parts["lora_B"] @ parts["lora_A"]
        delta = (product.T if self.transposed else product) * change.scaling
        if delta.numel() != torch.Size(item.stored_shape()).numel():
            what = f"{self.where}: the change of {shown(item.names[0], 120)} has shape {list(delta.shape)}"
            raise FFNError(what, f"the base's matrix has shape {list(item.stored_shape())}")
        if "lora_magnitude_vector" not in parts:
            return matrix.add_(canonical(delta, item))
        spread = parts["lora_magnitude_vector"].reshape(-1, 1).expand(product.shape)
        magnitude = canonical(spread.T if self.transposed else spread, item)[:, :1]
        matrix.add_(canonical(delta, item))
        return matrix.mul_(magnitude / matrix.norm(dim=1, keepdim=True))

    def _parts(self, change: LowRank) -> dict[str, Tensor]:
        return {kind: values(self.checkpoint, name).float() for kind, name in change.pieces.items()}

    def _merged(self, matrix: Tensor, change: LowRank) -> Tensor:
        """Return a whole matrix [out, in] with its change."""
        parts = self._parts(change)
        matrix.add_((parts["lora_B"] @ parts["lora_A"]) * change.scaling)
        if "lora_magnitude_vector" not in parts:
            return matrix
        return matrix.mul_(parts["lora_magnitude_vector"].reshape(-1, 1) / matrix.norm(dim=1, keepdim=True))


def _role(module: str) -> str:
    """Return what a projection with an unambiguous name is, so that it is found in a GGUF file too."""
    match = re.search(r"(gate|up|down)_proj$|ffn_(gate|up|down)$", module)
    return match[1] or match[2] if match else ""


def is_adapter(path: Path) -> bool:
    """Return whether a path is a directory with an adapter of PEFT."""
    return (path / CONFIG).is_file()


def open_adapter(folder: Path) -> Adapter:
    """Open an adapter. Raises FFNError for a method other than LoRA, and for tensors that do not fit together."""
    where = shown_path(folder)
    config = read_object(folder / CONFIG, MOST_CONFIG_BYTES, constants=True)
    if config.get("peft_type") != "LORA":
        raise FFNError(f"{where} is an adapter of the kind {shown(config.get('peft_type'))}", "LoRA is supported")
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    checkpoint = open_checkpoint(file) if file else None
    if checkpoint is None:
        raise FFNError(f"{where} has no {_FILES[0]}")
    pieces: dict[str, dict[str, str]] = {}
    for name in checkpoint.files:
        match = _PIECE.match(name)
        if match is None:
            raise FFNError(
                f"{where}: tensor {shown(name, 120)} is not part of a LoRA of a matrix", "merge it with PEFT"
            )
        pieces.setdefault(match[1], {})[match[2]] = name
    rslora, dora = config.get("use_rslora") is True, config.get("use_dora") is True
    modules = {}
    for module, parts in pieces.items():
        if not {"lora_A", "lora_B"} <= parts.keys():
            raise FFNError(f"{where}: {shown(module, 120)} lacks lora_A or lora_B")
        rank = checkpoint.info(parts["lora_A"]).shape[0]
        alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
        if not isinstance(alpha, int | float) or not rank:
            raise FFNError(f"{where}: {CONFIG} has the lora_alpha {shown(alpha)}, which is not a number")
        modules[module] = LowRank(parts, rank, float(alpha), alpha / (sqrt(rank) if rslora else rank))
    transposed = config.get("fan_in_fan_out") is True
    return Adapter(where, checkpoint, modules, transposed, dora, rslora)


def _pattern(config: Mapping[str, Any], key: str, module: str, otherwise: Any) -> Any:
    """Return a module's place value from a table of module names or patterns, else the value for all."""
    table = config.get(key)
    for pattern, value in table.items() if isinstance(table, Mapping) else ():
        if module.endswith(pattern) or (len(pattern) < 200 and re.search(rf"(?:^|\.){re.escape(pattern)}$", module)):
            return value
    return otherwise
