"""Running a module of unknown structure: finding its input layout, and recording its output with known parameters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ffncli.errors import FFNError, shown_path
from ffncli.models.dimensions import Dimensions, whole
from ffncli.run.user.identify import EPS, ModuleSample, biases
from ffncli.run.user.python_file import user_code

# The probe's tokens cycle through these scales: near the kinks, and far out, where gelu_10 is flat.
_SCALES = (0.02, 1.0, 5.0, 0.3)
_EXACT, _NARROW = 1e-9, 2e-5  # tolerances: computed in float64, or partly in float32 (an RMSNorm with x.float())


@dataclass(frozen=True)
class _Layout:
    """A module's input layout: `there` converts [tokens, d_model] to it, `back` converts the output."""

    name: str
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


_LAYOUTS = (
    _Layout("[batch, tokens, d_model]", lambda x: x[None], lambda y: y[0]),
    _Layout("[tokens, d_model]", lambda x: x, lambda y: y),
    _Layout("[batch, d_model, tokens]", lambda x: x.T[None].contiguous(), lambda y: y[0].T),
)


@dataclass(frozen=True)
class Runner:
    """Runs a module on tokens [tokens, d_model]; exceptions raised by its forward are cut to one line."""

    path: Path
    layout: _Layout
    d_model: int

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the output [tokens, d_model]; the first output if there are several."""
        inputs = self.layout.there(x)
        with user_code(self.path, f"raised by its forward on an input {self.layout.name} = {list(inputs.shape)}"):
            with torch.no_grad():
                out: Any = module(inputs)
            out = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(out, Tensor) or out.shape != inputs.shape:
            kind = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise FFNError(
                f"{shown_path(self.path)}: {type(module).__name__} returns {kind} for input {list(inputs.shape)}",
                "an FFN block returns a tensor of its input's shape",
            )
        return self.layout.back(out)


def runner_for(module: nn.Module, dimensions: Dimensions, path: Path) -> Runner:
    """Return a runner with the first width and layout that the module accepts; the sizes of its parameters are the
    candidate widths."""
    shapes = [parameter.shape for parameter in module.parameters() if not nn.parameter.is_lazy(parameter)]
    sizes = dict.fromkeys(size for shape in shapes if len(shape) > 1 for size in reversed(shape))
    widths = [whole("--d-model", dimensions.d_model)] if dimensions.d_model is not None else list(sizes)
    if not widths:
        raise FFNError(f"{shown_path(path)}: {type(module).__name__} has no weight matrix", "an FFN block has two")
    failures: list[FFNError] = []
    for d_model in widths:
        for layout in _LAYOUTS:
            runner = Runner(path, layout, d_model)
            try:
                runner(module, torch.zeros(_tokens(d_model), d_model, dtype=parameter_dtype(module)))
                return runner
            except FFNError as error:
                failures.append(error)
    raise next(
        (error for error in failures if error.__cause__ is None), failures[0]
    )  # the runner's own check of the output, if the forward ran, has the clearest message


def probes(twin: nn.Module, run: Runner) -> tuple[ModuleSample, ModuleSample, list[tuple[float, Tensor]]]:
    """Return the module's output with its own weights, its output with random weights, and the inputs of its dropouts.

    Random weights reveal what initial weights hide, such as a norm's ones and a bias's zeros. The module runs in
    float64 if it supports that.
    """
    dtype = parameter_dtype(twin)
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(_SCALES, dtype=torch.float64).repeat(_tokens(run.d_model))[: _tokens(run.d_model), None]
    x = torch.randn(len(scales), run.d_model, generator=generator, dtype=torch.float64) * scales
    captured: list[tuple[float, Tensor]] = []
    try:
        original = _probe(twin.double(), run, x, captured)
    except FFNError:  # the module creates float32 tensors itself, so it runs only in its own dtype
        captured.clear()
        original = _probe(twin.to(torch.promote_types(dtype, torch.float32)), run, x.float(), captured)
    _require_one_answer(twin, run, original)
    kept = replace(original, parameters={name: tensor.clone() for name, tensor in original.parameters.items()})
    with torch.no_grad():
        for parameter in twin.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * (4 / run.d_model**0.5) if parameter.dim() > 1 else drawn)
    drawn_probe = _probe(twin, run, original.x, [])
    return kept, replace(drawn_probe, **_traits(twin, run, drawn_probe)), captured


_MOST_CALLS = 12  # of a module that draws random numbers: a block that is left out half of the time may agree once


def _require_one_answer(twin: nn.Module, run: Runner, sample: ModuleSample) -> None:
    """Raise FFNError if the module gives another output for the same input; a module that draws random numbers is
    called several times."""
    for _ in range(_MOST_CALLS):
        before = torch.get_rng_state()
        again = _probe(twin, run, sample.x, []).y
        if not torch.allclose(again, sample.y, 1e-3, 1e-6, equal_nan=True):
            apart = float((again - sample.y).abs().max())
            what = f"{type(twin).__name__} gives two answers to one input, {apart:.2g} apart: it is random in eval mode"
            raise FFNError(what, "a block is a function of its input and weights")
        if torch.equal(torch.get_rng_state(), before):
            return


def _traits(twin: nn.Module, run: Runner, probe: ModuleSample) -> dict[str, Any]:
    """Return whether the module adds its input at the end (`residual`) and normalises its input (`pre`); None if
    unclear.

    If all matrices and their biases are zero, a residual block returns its input. If there is a norm on the input, the
    branch does not depend on the input's scale.
    """
    large = probe.x[probe.x.abs().amax(-1) > 1]  # near 0 a norm's eps would hide that the branch is scale-free
    scaled = run(twin, 4 * large)
    paired = biases({name: tuple(parameter.shape) for name, parameter in twin.named_parameters()})
    kept = {name: parameter.detach().clone() for name, parameter in twin.named_parameters()}
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if parameter.dim() > 1 or name in paired.values():
                parameter.zero_()
        closed = run(twin, probe.x)
        for name, parameter in twin.named_parameters():
            parameter.copy_(kept[name])
    if not (torch.equal(closed, probe.x) or not closed.any()):
        return {"residual": None, "pre": None}
    residual = bool(closed.any())
    branch = run(twin, large) - (large if residual else 0)
    moved = (scaled - (4 * large if residual else 0) - branch).abs().max() / branch.abs().max()
    return {"residual": residual, "pre": bool(moved < 1e-2)}


def _probe(twin: nn.Module, run: Runner, x: Tensor, captured: list[tuple[float, Tensor]]) -> ModuleSample:
    axes = run.layout.there(torch.zeros(1, 1)).dim()

    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        received = arguments[0] if arguments else None
        if isinstance(module, nn.Dropout) and module.p and isinstance(received, Tensor):
            captured.append((module.p, run.layout.back(received) if received.dim() == axes else received))

    handles = [m.register_forward_pre_hook(record) for m in twin.modules() if isinstance(m, nn.Dropout)]
    widths = _Widths()  # type: ignore[no-untyped-call]
    with widths:
        y = run(twin, x)
    for handle in handles:
        handle.remove()
    exact = x.dtype == torch.float64 and not widths.narrow
    eps = tuple(dict.fromkeys(_eps(twin))) or (*EPS, torch.finfo(x.dtype).eps)
    parameters = {name: parameter.detach() for name, parameter in twin.named_parameters()}
    return ModuleSample(parameters, x, y.to(x.dtype), _EXACT if exact else _NARROW, eps)


class _Widths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records whether any tensor, except scalars, is computed in less than float64."""

    narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        floats = isinstance(out, Tensor) and out.is_floating_point() and out.dim() > 0
        self.narrow = self.narrow or (floats and out.dtype.itemsize < 8)
        return out


def _eps(module: nn.Module) -> Iterator[float]:
    """Yield the numeric attributes with `eps` in their names, of the module and its submodules."""
    for part in module.modules():
        for name, value in vars(part).items():
            if "eps" in name and type(value) is float and 0 <= value < 1:
                yield value


def same_eps(twin: nn.Module, dtype: torch.dtype) -> None:
    """Set a missing epsilon of an nn.RMSNorm to the epsilon of `dtype`, because the float64 twin would use a smaller
    default."""
    for part in twin.modules():
        if isinstance(part, nn.RMSNorm) and part.eps is None:
            part.eps = torch.finfo(dtype).eps


def _tokens(d_model: int) -> int:
    """Return the number of tokens to probe with; it never equals d_model, so a transposed layout has another shape."""
    return 24 if d_model != 24 else 28


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the module's first floating-point parameter; float32 if there is none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
