"""Tiny models with a tokenizer, run by hand: what enters and leaves a module that the test names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracles.architectures import build, cases
from tests.oracles.huggingface import Made, make

WORDS = ("[UNK]", "<s>", "</s>", "Hello", "world", "the", "cat", "sat", "on", "mat", "\x1b[31mred", "naïve", "日本")
PROMPT = "Hello the cat sat"
IDS = (3, 5, 6, 7)


def give_tokenizer(path: Path, words: Sequence[str] = WORDS) -> Path:
    """A tokenizer of whole words beside a model: `words` have the numbers 0, 1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    return path


@cache
def made(name: str) -> Made:
    """One of the oracle's models on disk, with a tokenizer."""
    found = make(name, Path(mkdtemp(prefix=f"ffn-{name}-")))
    give_tokenizer(found.path)
    return found


def built(name: str, path: Path, **values: Any) -> nn.Module:
    """An architecture's tiny model with random weights, saved under `path` with a tokenizer."""
    from dataclasses import replace

    case = cases()[name]
    model = build(name, replace(case, values={**case.values, **values})).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator) + (0.8 if "norm" in parameter else 0))
    model.save_pretrained(path)  # type: ignore[operator]
    give_tokenizer(path)
    return model


def through(model: nn.Module, names: Mapping[str, str], **given: Any) -> dict[str, Tensor]:
    """One whole forward pass, listened to: `up` names a module whose input is wanted, `down=` whose output is."""
    seen: dict[str, Tensor] = {}

    def first(value: Any) -> Tensor:
        return (value[0] if isinstance(value, tuple) else value).detach().clone().flatten(0, -2)

    hooks = []
    for key, name in names.items():
        module = model.get_submodule(name)
        if key.endswith("output"):
            hooks.append(module.register_forward_hook(lambda m, a, out, key=key: seen.update({key: first(out)})))
        else:
            hooks.append(module.register_forward_pre_hook(lambda m, a, key=key: seen.update({key: first(a)})))
    try:
        with torch.no_grad():
            model(**given)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def ids(numbers: Sequence[int] = IDS) -> Tensor:
    """A batch of one prompt."""
    return torch.tensor([list(numbers)])
