"""`ffn verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ffncli.cli.common.options import DimensionOptions, OutputOptions, PlaceOptions, Source, TokenOptions
from ffncli.cli.common.parsers import from_zero
from ffncli.cli.common.spread import spread
from ffncli.cli.verify.page import answer, failure
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

_Texts = list[str] | None
Checks = Annotated[
    _Texts, typer.Option("--check", metavar="NAME,...", help="Only these: module, tokens, layout, kernels, ...")
]
Kernels = Annotated[
    _Texts,
    typer.Option(
        "--kernel", metavar="NAME,...", help="eager, packed, compiled, ..., or yours: [label=]file.py:name (runs it)."
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="X",
        parser=from_zero("--tolerance"),
        help="Relative error that passes; default: dtype's.",
    ),
]
Against = Annotated[
    str | None, typer.Option("--against", metavar="SOURCE", help="The same layer of this model is the reference.")
]


@spread
def command(
    *,
    source: Source = None,
    checks: Checks = None,
    kernels: Kernels = None,
    against: Against = None,
    tolerance: Tolerance = None,
    place: PlaceOptions,
    tokens: TokenOptions,
    dimensions: DimensionOptions,
    show: OutputOptions,
) -> None:
    """Prove that ways of computing a block agree, and how a file was read; exit 1 where they do not.

    Try: ffn verify 512x2048:swiglu, ffn verify ./my-model --layer 1, ffn verify --kernel mine.py:mlp
    """
    output = show.output()
    sleep_while_waiting()  # a module of the user's own imports torch
    names, compared = _names(checks, kernels), choices(kernels or ())
    said, leading = dimensions.dimensions(), tokens.leading()
    example = notebook() if source is None and said.d_model is None else None
    if example:
        model, own = with_dimensions(example.model, said), None
    else:
        model, own = _model(source, said, place.seed or 0)
        _require_tensors(model)
    other = _reference(against, model, place.seed or 0) if against is not None else None

    # From here on torch is needed; what can be wrong without it has been said.
    set_threads(place.threads)
    from ffncli.run.engine.prepare import LayerRequest
    from ffncli.run.verify.verify import VerifyQuestion, verify_layer

    request = LayerRequest(place.layer, place.input, leading, place.dtype, place.device, place.seed)
    verdict = verify_layer(model, VerifyQuestion(request, names, compared, tolerance, own, other), example)
    output.notes(*model.notes, *map(str, model.differences), *verdict.ready.notes)
    output.show(answer(model, verdict, place.device))
    if verdict.failed:
        raise failure(verdict)


def _names(checks: _Texts, kernels: _Texts) -> tuple[str, ...] | None:
    """The checks asked for, None for all. Raises FFNError where kernels are named and their check is left out."""
    if not checks:
        return None
    names = tuple(name.strip() for text in checks for name in text.split(","))
    if kernels and "kernels" not in names:
        said = ",".join(names)
        raise FFNError(
            f"--kernel contradicts --check {shown(said)}", "no kernel would be looked at: add kernels to --check"
        )
    return names


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
