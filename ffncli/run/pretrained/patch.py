"""Patching: values of a step, taken from a run on another prompt, put into the run on this one; what moves the
prediction, token by token and unit by unit, by exact runs and by attribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_span, ffn_steps, id_inputs
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.models.model import Layer, Resolved, folder_of
from ffncli.run.engine.execute import Mode, run
from ffncli.run.engine.locate import LiveFFN, live_ffn, live_weights
from ffncli.run.engine.prepare import device_of, dtype_of
from ffncli.run.pretrained.capture import ForwardInput, forward_arguments, kept
from ffncli.run.pretrained.loading import Pretrained, offline, read_config
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.pretrained.tokens import token_text, tokenizer_of, tokens_of
from ffncli.run.pretrained.what_if import output_of, replaced_ffn
from ffncli.show.text import plural
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

MOST_UNITS, _MOST_TOKENS = 10, 512


@dataclass(frozen=True)
class PatchEffect:
    """What the values of one token (all units), or of one unit (all tokens), change: by an `exact` run, and by
    `attribution`, the gradient times the difference."""

    place: int
    text: str | None
    exact: float
    attribution: float


@dataclass(frozen=True)
class Patch:
    """The effect of a step's values from another prompt on the difference of two logits after the last token: of
    `towards`, the likeliest token after the other prompt, minus `away`, the likeliest token after this one; if they are
    the same token, on its logit alone.

    `base` is that difference without and `patched` with all values of the step. `tokens` has every token, `units` the
    10 with the largest attribution. `attribution` is the sum for the whole step; `error` is the largest |attribution -
    exact| over the listed tokens and units, divided by the largest |exact|; None if nothing changes.
    """

    step: str
    towards: int
    towards_text: str | None
    away: int | None
    away_text: str | None
    base: float
    patched: float
    attribution: float
    tokens: tuple[PatchEffect, ...]
    units: tuple[PatchEffect, ...]
    error: float | None

    @package_errors()
    def frame(self) -> DataFrame:
        """Return a row for each token and each unit (`kind`), as a pandas DataFrame."""
        import pandas

        kinds = (("token", self.tokens), ("unit", self.units))
        return pandas.DataFrame([{"kind": kind, **asdict(one)} for kind, some in kinds for one in some])


Edit = Callable[[Tensor], Tensor]


def patch(
    resolved: Resolved, layer: Layer, prompt: Prompt, other: Prompt, step: str, dtype: str | None = None,
    device: str = "cpu",
) -> Patch:  # fmt: skip
    """Measure what the values of `step` from the prompt `other` change. Raises FFNError for prompts of different
    lengths, and for a step that the block does not have."""
    path, names = folder_of(resolved, option("patch_from")), [one.output for one in ffn_steps(steps(layer.spec))]
    if step not in names:
        hint = did_you_mean(step, names, f"it has {', '.join(names)}")
        raise FFNError(f"{option('patch')}: the block has no step {shown(step)}", hint)
    computed, device = dtype_of(dtype), device_of(device)
    with offline() as transformers:
        config, tokenizer = read_config(transformers, path), tokenizer_of(transformers, path)
        both = [tokens_of(one, tokenizer, path) for one in (prompt, other)]
        if len(both[0]) != len(both[1]) or len(both[0]) > _MOST_TOKENS:
            many = f"{len(both[1])} {plural('token', len(both[1]))}"
            what = f"{option('patch_from')}: {many} cannot replace those of {len(both[0])}"
            raise FFNError(what, f"give texts of as many tokens, at most {_MOST_TOKENS}")
        loaded = kept(resolved, transformers, path, config, computed, device, with_head=True)
        edited = _Edited(loaded, live_ffn(loaded.module, resolved, layer), layer, step, device)
        here, there = (forward_arguments(loaded, tokens, tokenizer, [layer]) for tokens in both)
        return _measured(edited, here, there, tokenizer)


@dataclass(frozen=True)
class _Edited:
    """A model whose FFN of one layer computes with an edited step."""

    loaded: Pretrained
    live: LiveFFN
    layer: Layer
    step: str
    device: str

    def logits(self, inputs: ForwardInput, edit: Edit, gradient: bool = False) -> Tensor:
        """Return the logits after the last token, float64."""
        block = ffn_steps(steps(self.layer.spec))
        ids = torch.tensor([[token.id] for token in inputs.of(self.layer.stack)], device=self.device)

        def compute(x: Tensor) -> Tensor:
            given = {ffn_span(block)[0]: x, **dict.fromkeys(id_inputs(block), ids)}
            weights = live_weights(self.loaded.module, self.live.located)
            return run(block, weights, given, Mode(edits={self.step: edit}))

        with replaced_ffn(self.loaded.module, self.live, compute):
            return output_of(self.loaded, inputs, gradient)[-1].double()

    def seen(self, inputs: ForwardInput) -> tuple[Tensor, int]:
        """Return the step's values, and the likeliest next token."""
        values: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            values.append(x.detach().clone())
            return x

        likeliest = int(self.logits(inputs, keep).argmax())
        return values[0], likeliest


def _measured(edited: _Edited, here: ForwardInput, there: ForwardInput, tokenizer: Any) -> Patch:
    """Return what the values from `there` change in the run on `here`, by exact runs and by the gradient."""
    (mine, first), (theirs, towards) = edited.seen(here), edited.seen(there)
    away = first if first != towards else None

    def margin(edit: Edit, gradient: bool = False) -> Tensor:
        out = edited.logits(here, edit, gradient)
        return out[towards] - out[away] if away is not None else out[towards]

    delta = torch.zeros_like(mine, requires_grad=True)
    with torch.enable_grad():
        start = margin(lambda x: x + delta, gradient=True)
        (slope,) = torch.autograd.grad(start, delta)
    base = float(start.detach())
    parts = slope.double() * (theirs - mine).double()

    def effect(place: int, text: str | None, at: tuple[slice | int, ...], attribution: float) -> PatchEffect:
        def edit(x: Tensor) -> Tensor:
            new = x.clone()
            new[at] = theirs[at]
            return new

        return PatchEffect(place, text, float(margin(edit)) - base, attribution)

    listed = here.of(edited.layer.stack)
    tokens = tuple(effect(at, token.text, (at,), float(parts[at].sum())) for at, token in enumerate(listed))
    by_unit = parts.sum(0)
    best = by_unit.abs().topk(min(MOST_UNITS, len(by_unit))).indices.tolist()
    units = tuple(effect(unit, None, (slice(None), unit), float(by_unit[unit])) for unit in best)
    every = (*tokens, *units)
    largest = max(abs(one.exact) for one in every)
    worst = max(abs(one.attribution - one.exact) for one in every)
    return Patch(
        edited.step, towards, token_text(tokenizer, towards), away,
        None if away is None else token_text(tokenizer, away), base, float(margin(lambda x: theirs)),
        float(parts.sum()), tokens, units, worst / largest if largest else None,
    )  # fmt: skip
