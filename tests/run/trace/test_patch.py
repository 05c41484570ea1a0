"""Patching against hooks on transformers' modules in float64: exact runs, and attribution as autograd has it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ffncli
from ffncli.errors import FFNError
from tests.oracles.prompted import DENSE, PROMPT, WORDS, ids, in_double, made

pytestmark = pytest.mark.models
OTHER = "world the mat sat"
THERE = tuple(WORDS.index(word) for word in OTHER.split())


def last_logits(model: Any, module: str, numbers: Any, edit: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the last logits of a model in which the input [1, tokens, units] of a module is edited."""
    hook = model.get_submodule(module).register_forward_pre_hook(lambda m, args: (edit(args[0]), *args[1:]))
    try:
        return model(input_ids=numbers).logits[0, -1]  # type: ignore[no-any-return]
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3", "gpt_neox"])
def test_a_patch_is_that_of_hooks(name: str) -> None:
    path, model = in_double(name)
    down, seen = DENSE[name][0].format(i=1), list[Tensor]()

    def keep(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x

    with torch.no_grad():
        old, new = (last_logits(model, down, ids(numbers), keep) for numbers in ((3, 5, 6, 7), THERE))
    towards, away = int(new.argmax()), int(old.argmax()) if new.argmax() != old.argmax() else None

    def of(out: Tensor) -> Tensor:
        return out[towards] if away is None else out[towards] - out[away]

    def metric(edit: Callable[[Tensor], Tensor]) -> Tensor:
        return of(last_logits(model, down, ids(), edit))

    def exact(at: Any) -> float:
        def edit(x: Tensor) -> Tensor:
            x = x.clone()
            x[at] = seen[1].view_as(x)[at]
            return x

        with torch.no_grad():
            return float(metric(edit)) - float(of(old))

    patch = ffncli.trace(path, layer=1, prompt=PROMPT, dtype="fp64", patch_from=OTHER).patch
    assert patch is not None
    assert (patch.towards, patch.away) == (towards, away)
    close = {"rel": 0, "abs": 8 * math.ulp(float(old.abs().max()))}  # the largest figure that is added up
    assert patch.base == pytest.approx(float(of(old)), **close)
    assert patch.patched - patch.base == pytest.approx(exact(...), **close)
    delta = torch.zeros_like(seen[0], requires_grad=True)
    (slope,) = torch.autograd.grad(metric(lambda x: x + delta), delta)
    parts = (slope * (seen[1] - seen[0])).reshape(4, -1)
    assert patch.attribution == pytest.approx(float(parts.sum()), **close)
    for token in patch.tokens:
        at = (0, token.place) if seen[0].dim() == 3 else (token.place,)
        assert token.exact == pytest.approx(exact(at), **close)
        assert token.attribution == pytest.approx(float(parts[token.place].sum()), **close)
    best = parts.sum(0).abs().sort(descending=True).indices[:10].tolist()
    assert [unit.place for unit in patch.units] == best
    for unit in patch.units:
        assert unit.exact == pytest.approx(exact((..., unit.place)), **close)
        assert unit.attribution == pytest.approx(float(parts[:, unit.place].sum()), **close)
    every = (*patch.tokens, *patch.units)
    worst = max(abs(one.exact - one.attribution) for one in every)
    assert patch.error == pytest.approx(worst / max(abs(one.exact) for one in every))
    frame = patch.frame()
    assert frame["kind"].tolist() == ["token"] * 4 + ["unit"] * len(patch.units)
    assert frame.exact.tolist() == [one.exact for one in every]


def test_the_same_prompt_changes_nothing() -> None:
    patch = ffncli.trace(made("llama").path, layer=1, prompt=PROMPT, patch_from=PROMPT, patch="up").patch
    assert patch is not None
    assert (patch.step, patch.away, patch.base, patch.attribution) == ("up", None, patch.patched, 0.0)
    assert patch.error is None


def test_in_a_mixture_the_output_is_patched() -> None:
    """Against a hook that puts in what the block of a mixture writes for the other prompt."""
    path, model = in_double("mixtral")
    model.set_experts_implementation("eager")
    seen: list[Tensor] = []

    def swap(m: Any, args: Any, out: Tensor) -> Tensor:
        seen.append(out)
        return seen[0]

    hook = model.get_submodule("model.layers.1.mlp").register_forward_hook(swap)
    with torch.no_grad():
        new, patched = (model(input_ids=ids(numbers)).logits[0, -1] for numbers in (THERE, (3, 5, 6, 7)))
    hook.remove()
    with torch.no_grad():
        old = model(input_ids=ids()).logits[0, -1]
    patch = ffncli.trace(path, layer=1, prompt=PROMPT, dtype="fp64", patch_from=OTHER).patch
    assert patch is not None
    assert (patch.step, patch.towards) == ("experts", int(new.argmax()))
    towards, away = int(new.argmax()), int(old.argmax())
    assert patch.away == (away if away != towards else None)
    expected = patched[towards] - (patched[away] if away != towards else 0)
    assert patch.patched == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": PROMPT, "patch_from": "cat"}, "1 token cannot replace those of 4"),
        ({"prompt": PROMPT, "patch_from": OTHER, "patch": "nope"}, "no step"),
        ({"prompt": PROMPT, "patch": "act"}, "needs patch_from"),
        ({"prompt": PROMPT, "patch_from": ""}, "patch_from is empty"),
        ({"patch_from": OTHER}, "needs prompt"),
    ],
)
def test_what_cannot_be_patched(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(FFNError, match=words):
        ffncli.trace(made("llama").path, layer=1, **arguments)
