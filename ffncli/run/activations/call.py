"""What `ffn activations --source` does, as a call; errors that need no torch are raised before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.errors import FFNError, shown
from ffncli.models.model import Resolved
from ffncli.models.runnable import folder_of
from ffncli.models.source import is_user_module
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.pretrained.prompt import prompt_of
from ffncli.run.user.load import load

if TYPE_CHECKING:
    from ffncli.run.activations.on_data import ActivationData

_NEEDED = {"activation": "its activation", "top_k": "how many experts a token goes to"}  # without these no model runs


def activations_of(
    source: str,
    others: Sequence[str] = (),
    *,
    layer: str | None = None,
    prompt: str | None = None,
    input_ids: tuple[int, ...] | None = None,
    position: str | None = None,
    input: str | None = None,
    leading: tuple[int, ...] | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    threads: int | None = None,
) -> ActivationData:
    """The inputs of the activations of a SOURCE's layer (`all`: of every layer), and the outputs of `others` for them.

    `others` are canonical names, `leading` the input's axes before d_model, the rest are named as on the command line.
    Raises FFNError as `activations_on_data`, and for a source that lacks something required to run it.
    """
    with sleep_while_waiting():  # a user's module imports torch
        resolved = _model(source, seed or 0)
    if layer != "all":
        resolved.model.layer(layer)
    model_input = prompt_of(prompt, input_ids, position)
    if model_input:
        folder_of(resolved, model_input.option)

    # From here on torch is needed; every error that can be raised without it has been raised.
    set_threads(threads)
    from ffncli.run.activations.on_data import activations_on_data

    return activations_on_data(
        resolved, model_input, others, layer=layer, input=input, leading=leading, dtype=dtype, device=device, seed=seed
    )


def _model(source: str, seed: int) -> Resolved:
    """The model of a source that describes itself fully. Raises FFNError if an option would be needed."""
    try:
        resolved = load(source, None, seed)
    except FFNError as error:
        if is_user_module(source) and error.hint.startswith("give --"):
            raise FFNError(error.message, "no option sets it here: give it a default") from None
        raise
    if lacking := [
        words for name, words in _NEEDED.items() if name in resolved.model.unknown and not resolved.model.refused
    ]:
        what = f"{shown(resolved.source)} does not say {' and '.join(lacking)}, so it cannot be run"
        raise FFNError(what, "add it to its config.json; `ffn trace` has options for it")
    return resolved
