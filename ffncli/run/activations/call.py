"""`ffn activations --source` as a function call; errors that need no torch are raised before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import leading_axes
from ffncli.models.model import Resolved, folder_of
from ffncli.models.source import is_user_module
from ffncli.run.activations.question import DataQuestion
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.pretrained.prompt import prompt_of
from ffncli.run.user.load import load

if TYPE_CHECKING:
    from ffncli.run.activations.on_data import ActivationData

_NEEDED = {"activation": "its activation", "top_k": "how many experts a token goes to"}  # no model runs without these


def activations_of(question: DataQuestion, others: Sequence[str] = (), dtype: str | None = None) -> ActivationData:
    """Collect the inputs of the activations in one layer of a model, or in every layer if the layer is `all`, and the
    outputs of `others` for these inputs.

    `others` are canonical names. A source that cannot be run for lack of a field is refused before torch is loaded.
    """
    leading = leading_axes(question.tokens, question.batch, question.seq_len)
    model_input = prompt_of(question.prompt, question.input_ids, question.position)
    with question.limited():
        with sleep_while_waiting():  # a user's module imports torch
            resolved = _model(question.source or "", question.seed or 0)
        if question.layer != "all":
            resolved.model.layer(question.layer)
        if model_input:
            folder_of(resolved, model_input.option)
        set_threads(question.threads)
        from ffncli.run.activations.on_data import activations_on_data

        return activations_on_data(
            resolved, model_input, others, layer=question.layer, input=question.input, leading=leading, dtype=dtype,
            device=question.device, seed=question.seed,
        )  # fmt: skip


def _model(source: str, seed: int) -> Resolved:
    """Load a source that describes itself fully; refuse a source that would need an option."""
    try:
        resolved = load(source, None, seed)
    except FFNError as error:
        if is_user_module(source) and error.hint.startswith(("give --", "give d_")):
            raise FFNError(error.message, "no option sets it here: give it a default") from None
        raise
    if lacking := [
        words for name, words in _NEEDED.items() if name in resolved.model.unknown and not resolved.model.refused
    ]:
        what = f"{shown(resolved.source)} does not specify {' and '.join(lacking)}, so it cannot be run"
        raise FFNError(what, "add it to its config.json; `ffn trace` has options for it")
    return resolved
