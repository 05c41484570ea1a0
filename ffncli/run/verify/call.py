"""What `ffn verify` does, as a call: what can be wrong without torch is said before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.errors import FFNError, shown, shown_path
from ffncli.kernels.choice import choices
from ffncli.models.dimensions import Dimensions, with_dimensions
from ffncli.models.examples import notebook
from ffncli.models.model import Resolved
from ffncli.models.source import is_user_module
from ffncli.run.engine.threads import set_threads, sleep_while_waiting
from ffncli.run.user.load import load

if TYPE_CHECKING:
    from ffncli.run.verify.checks.case import Own
    from ffncli.run.verify.verify import Verdict


def verify_source(
    source: str | None = None,
    dimensions: Dimensions | None = None,
    *,
    layer: str | None = None,
    checks: Sequence[str] | None = None,
    kernels: Sequence[str] = (),
    against: str | None = None,
    tolerance: float | None = None,
    input: str | None = None,
    leading: tuple[int, ...] | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    threads: int | None = None,
) -> Verdict:
    """Verify a layer of any SOURCE, by the command line's names; without one and without dimensions the notebook's.

    `leading` are the input's axes before d_model. Raises FFNError as `verify_layer`, and for a directory without
    tensors, which proves nothing of its own.
    """
    sleep_while_waiting()  # a module of the user's own imports torch
    _require_kernels_check(checks, kernels)
    compared, said = choices(kernels), dimensions or Dimensions()
    example = notebook() if source is None and said.d_model is None else None
    own: Own | None = None
    if example:
        model = with_dimensions(example.model, said)
    else:
        model, own = _model(source, said, seed or 0)
        _require_tensors(model)
    other = _reference(against, model, seed or 0) if against is not None else None

    # From here on torch is needed; what can be wrong without it has been said.
    set_threads(threads)
    from ffncli.run.engine.prepare import LayerRequest
    from ffncli.run.verify.verify import VerifyQuestion, verify_layer

    request = LayerRequest(layer, input, leading, dtype, device, seed)
    names = None if checks is None else tuple(checks)
    return verify_layer(model, VerifyQuestion(request, names, compared, tolerance, own, other), example)


def _require_kernels_check(checks: Sequence[str] | None, kernels: Sequence[str]) -> None:
    """Raises FFNError where kernels are named and their check is left out."""
    if checks is not None and kernels and "kernels" not in checks:
        raise FFNError(
            f"--kernel contradicts --check {shown(','.join(checks))}",
            "no kernel would be looked at: add kernels to --check",
        )


def _reference(against: str, model: Resolved, seed: int) -> Resolved:
    """The model to compare with; a module of one's own is run at the width that is compared."""
    width = str(model.main.spec.d_model) if is_user_module(against) else None
    return load(against, Dimensions(d_model=width), seed)


def _require_tensors(model: Resolved) -> None:
    """Raises FFNError for a directory without tensors: what holds for random weights proves nothing of its own.

    A config.json that was named as such is asked about with random weights.
    """
    folder = model.location
    if model.checkpoint is not None or folder is None or model.source.endswith(".json"):
        return
    pickled = any(any(folder.glob(f"*{end}")) for end in (".bin", ".pt", ".pth"))
    there = "pickled weights alone, which are never loaded" if pickled else "no safetensors"
    config = shown_path(folder / "config.json")
    raise FFNError(
        f"nothing to verify: {shown_path(folder)} has {there}", f"{config} can be verified with random weights"
    )


def _model(source: str | None, said: Dimensions, seed: int) -> tuple[Resolved, Own | None]:
    """The model, and the user's module where the source is one."""
    if source is None or not is_user_module(source):
        return load(source, said), None
    from ffncli.run.user.module import load_module
    from ffncli.run.verify.checks.case import Own

    found = load_module(source, said, seed)
    return found.model, Own(found.module, found.runner)
