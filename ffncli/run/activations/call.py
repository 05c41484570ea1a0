"""What `ffn activations --source` does, as a call: what can be wrong without torch is said before it is loaded."""

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

_NEEDED = {"activation": "its activation", "top_k": "how many experts a token goes to"}  # for want of which none is run


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
    """What enters the activations of a SOURCE's layer (`all`: of every one), and what `others` would make of it.

    `others` are canonical names, `leading` the input's axes before d_model, the rest the command line's names. Raises
    FFNError as `activations_on_data`, and for a source that does not say all that it needs to be run.
    """
    with sleep_while_waiting():  # a module of the user's own imports torch
        model = _model(source, seed or 0)
    if layer != "all":
        model.layer(layer)
    given = prompt_of(prompt, input_ids, position)
    if given:
        folder_of(model, given.option)

    # From here on torch is needed; what can be wrong without it has been said.
    set_threads(threads)
    from ffncli.run.activations.on_data import activations_on_data
    from ffncli.run.engine.prepare import LayerRequest

    request = LayerRequest(layer, input, leading, dtype, device, seed)
    return activations_on_data(model, request, given, others)


def _model(source: str, seed: int) -> Resolved:
    """The model of a source; all it is, it says itself. Raises FFNError where it needs to be told something."""
    try:
        model = load(source, None, seed)
    except FFNError as error:
        if is_user_module(source) and error.hint.startswith("give --"):
            raise FFNError(error.message, "here it cannot be told: give it a default") from None
        raise
    if lacking := [words for name, words in _NEEDED.items() if name in model.model.unknown and not model.model.refused]:
        what = f"{shown(model.source)} does not say {' and '.join(lacking)}, so it cannot be run"
        raise FFNError(what, "its config.json has to; `ffn trace` can be told")
    return model
