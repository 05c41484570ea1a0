"""A user's nn.Module as a source: `my.py:FeedForwardBlock`, built, run, recognised, with its weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from ffncli.block import activations, dtypes
from ffncli.block.recipe import steps
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, shown_path
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Resolved, block_model
from ffncli.run.engine.execute import execute
from ffncli.run.engine.weights import require_memory
from ffncli.run.user.construct import NotTaken, calls
from ffncli.run.user.ffn_layers import ffn_layers
from ffncli.run.user.identify import Match, ModuleSample, confirmed, identify
from ffncli.run.user.probe import Runner, parameter_dtype, probes, runner_for, same_eps
from ffncli.run.user.python_file import import_file, pick, user_code
from ffncli.run.user.time_limit import loading
from ffncli.run.user.wiring import MOST_MATRICES, matrices


@dataclass(frozen=True)
class LoadedModule:
    """The model that matches a module, its weights (canonical, [out, in], the module's dtype), and the module.

    `runner` runs it on tokens [tokens, d_model], `match` maps its parameters to the block's.
    """

    model: Resolved
    weights: Mapping[str, Tensor]
    module: nn.Module
    runner: Runner
    match: Match


def load_module(text: str, dimensions: Dimensions, seed: int = 0) -> LoadedModule:
    """The block that `my.py:Name` computes, with the weights its constructor draws under `torch.manual_seed(seed)`.

    The file is executed. Constructor arguments are filled by name from the dimension options; the computation
    is identified by matching its outputs. Raises FFNError (exit 2) for errors in the user's code, and for a module
    that matches no block that can be described; exit 3 where all that takes too long.
    """
    with built(text, dimensions, seed) as module:
        return one_block(module, dimensions)


def load_object(module: nn.Module, dimensions: Dimensions) -> LoadedModule:
    """The block that a module of the caller's computes, with a copy of its weights as they are now, on the CPU.

    The module itself is neither run nor changed. Raises FFNError as `load_module`.
    """
    with copied(module, dimensions) as twin:
        return one_block(twin, dimensions)


@dataclass(frozen=True)
class BuiltModule:
    """A module in eval mode: what was typed for it, its name and file, and the assumed arguments of its constructor.

    `runner` runs it; None for a whole model, whose FFNs are in `layers`: layer → the name of the module.
    """

    text: str
    name: str
    path: Path
    module: nn.Module
    runner: Runner | None
    taken: tuple[str, ...] = ()
    layers: Mapping[int, str] = field(default_factory=dict)


@contextmanager
def built(text: str, dimensions: Dimensions, seed: int) -> Iterator[BuiltModule]:
    """The module that `my.py:Name` means, within the limit on loading it and without drawing from torch's generator."""
    path_text, _, name = text.partition(".py:") if ".py:" in text else (text.removesuffix(".py"), "", None)
    path = Path(os.path.abspath(os.path.expanduser(path_text + ".py")))
    with torch.random.fork_rng(devices=[]), loading(path):
        torch.manual_seed(seed)
        target = pick(import_file(path), name or None, path)
        module, runner, taken, layers = _built(target, dimensions, path, seed)
        shown_name = name if name and isinstance(target, nn.Module) else type(module).__name__
        yield BuiltModule(text, shown_name, path, module, runner, taken, layers)


@contextmanager
def copied(module: nn.Module, dimensions: Dimensions) -> Iterator[BuiltModule]:
    """A copy of the caller's module."""
    name, path = type(module).__name__, Path("the module")
    with torch.random.fork_rng(devices=[]):
        with user_code(path, "raised while it was copied"):
            twin = copy.deepcopy(module).cpu()
        twin, runner, _, layers = _built(twin, dimensions, path, 0)
        yield BuiltModule(name, name, path, twin, runner, layers=layers)


def one_block(built: BuiltModule, dimensions: Dimensions) -> LoadedModule:
    """The block that a module computes. Raises FFNError for a whole model, and if no block matches it."""
    if built.runner is None:
        what = f"{shown_path(built.path)}: {built.name} is a model with {len(built.layers)} FFNs"
        example = type(built.module.get_submodule(next(iter(built.layers.values())))).__name__
        raise FFNError(what, f"give the class of one, {example}")
    match, dropout, remarks = recognised(built.module, built.runner, built.path)
    model, weights = _record(built.text, built.name, built.module, match, dimensions, (dropout, built.taken, remarks))
    return LoadedModule(model, weights, built.module, built.runner, match)


def _built(
    target: type[nn.Module] | nn.Module, dimensions: Dimensions, path: Path, seed: int
) -> tuple[nn.Module, Runner | None, tuple[str, ...], Mapping[int, str]]:
    """The module in eval mode, how to run it, the assumed values of its constructor's arguments, its layers' FFNs."""
    if isinstance(target, nn.Module):
        if dimensions != Dimensions(d_model=dimensions.d_model):
            raise NotTaken("the dimension options cannot change a module that is already built", "give its class")
        return target.eval(), *_runner(target, dimensions, path, ())
    failures: list[FFNError] = []
    for call in calls(target, dimensions):
        try:
            torch.manual_seed(seed)
            with user_code(path, f"raised while {target.__name__} was built"):
                module = target(*call.positional, **call.named).eval()
            return module, *_runner(module, dimensions, path, tuple(call.taken))
        except FFNError as error:
            failures.append(error)
    raise failures[0]


def _runner(
    module: nn.Module, dimensions: Dimensions, path: Path, taken: tuple[str, ...]
) -> tuple[Runner | None, tuple[str, ...], Mapping[int, str]]:
    """How to run a module that is one block; of a whole model, the FFNs of its layers."""
    layers = ffn_layers(module)
    return None if layers else runner_for(module, dimensions, path), taken, layers


def recognised(module: nn.Module, run: Runner, path: Path) -> tuple[Match, float, tuple[str, ...]]:
    """The block that the module computes, its dropout, and remarks. Raises FFNError if there is no match."""
    parameters = dict(module.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    label, hint = f"{shown_path(path)}: {type(module).__name__}", f"it has {total:,} parameters in all"
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    if len(matrices(shapes, run.d_model)) > MOST_MATRICES:
        raise FFNError(f"{label} has {len(matrices(shapes, run.d_model))} weight matrices, a dense block 2 or 3", hint)
    require_memory(2 * 8 * total, "matching the module's outputs", "give smaller dimensions")
    with user_code(path, "raised while the module was copied"):
        twin = copy.deepcopy(module)
    same_eps(twin, parameter_dtype(module))
    original, drawn, captured = probes(twin, run)
    match = identify(drawn)
    if match is None:
        raise FFNError(f"{label} has no pair of matrices between d_model {run.d_model} and another width", hint)
    if match.error <= drawn.tolerance and match.mixed_bias:
        raise FFNError(f"{label} has a bias on some projections only", f"this version supports all or none; {hint}")
    if match.error > drawn.tolerance or max(confirmed(match, probe) for probe in (original, drawn)) > drawn.tolerance:
        raise FFNError(f"{label} does not match any block known here; nearest: {_nearest_block(match)}", hint)
    p, remarks = _dropout(match, original, captured)
    return match, p, remarks


def _dropout(match: Match, sample: ModuleSample, captured: list[tuple[float, Tensor]]) -> tuple[float, tuple[str, ...]]:
    """The probability of the dropout before the down projection, if the module has one; others get a remark."""
    block = steps(match.spec(sample.parameters))
    entering = next(step.inputs[0] for step in block if step.output == "down")
    events = execute(block, match.weights(sample.parameters), {"x": sample.x})
    hidden = next(event.tensor for event in events if event.name == entering)
    probability, remarks = 0.0, []
    for p, received in captured:
        if received.shape == hidden.shape and torch.allclose(received.to(hidden.dtype), hidden, 1e-4) and p < 1:
            probability = p
        else:
            remarks.append(f"dropout {p:g} not directly before the down projection is ignored")
    return probability, tuple(dict.fromkeys(remarks))


def _record(
    text: str, name: str, module: nn.Module, match: Match, dimensions: Dimensions,
    extras: tuple[float, tuple[str, ...], tuple[str, ...]],
) -> tuple[Resolved, Mapping[str, Tensor]]:  # fmt: skip
    dropout, taken, remarks = extras
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    spec = replace(match.spec(parameters), dropout=dropout)
    notes = [f"assuming {', '.join(taken)}"] if taken else []
    notes += [*remarks, *_unused(match, parameters)]
    if dimensions.activation is not None and activations.resolve(dimensions.activation)[0] != spec.activation:
        notes.append(f"--activation is {dimensions.activation}, but the module computes {spec.activation}")
    row = dtypes.find(str(parameter_dtype(module)))
    weights = match.weights(parameters)
    block = block_model(spec, text, name, tuple(notes))
    model = replace(block.model, dtype=row.name if row else None)
    evidence = tuple(evidence_of(match, parameters, spec.d_ff))
    return replace(block, model=model, evidence=evidence, weights={(model.main.stack, 0): weights}), weights


def evidence_of(match: Match, parameters: Mapping[str, Tensor], d_ff: int) -> Iterator[str]:
    """The evidence for the block, in order."""
    other, off = match.next_best
    yield f"activation: {match.activation} matches its outputs to {match.error:.1e} (next best: {other}, {off:.1e})"
    where = ", ".join(f"{n.removesuffix('.weight')} = {v}" for n, v in match.wiring.items() if n.endswith(".weight"))
    yield f"{'gated' if 'gate.weight' in match.wiring else 'plain'}: {where}"
    down = match.wiring["down.weight"]
    yield f"d_ff: {d_ff}, from {down.parameter} {list(parameters[down.parameter].shape)}"
    if match.norms.kind != "none":
        parts = ", ".join(f"{name} = {view}" for name, view in match.norms.views.items()) or "no parameters"
        yield f"norm: {match.norms.kind}, {match.norms.position}, eps {match.norms.eps:g}: {parts}"
    if match.residual:
        yield "residual: the input is added to the block's result"


def _unused(match: Match, parameters: Mapping[str, Tensor]) -> Iterator[str]:
    """Notes on parameters that the block does not use, and on those that it uses twice."""
    used = [view.parameter for view in match.views.values()]
    idle = [f"{name} [{', '.join(map(str, p.shape))}]" for name, p in parameters.items() if name not in used]
    if idle:
        names = ", ".join(idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        yield f"parameters that this block does not use, not counted: {names}"
    counted = sum(prod(view.of(parameters).shape) for view in match.views.values())
    total = sum(parameters[name].numel() for name in set(used))
    if counted != total:
        yield f"a tensor is used twice: {counted:,} parameters are counted, {total:,} of them different"


def _nearest_block(match: Match) -> str:
    words = ["gated" if "gate.weight" in match.wiring else "plain", match.activation]
    words += [f"{match.norms.position} {match.norms.kind}"] if match.norms.kind != "none" else []
    words += ["residual"] if match.residual else []
    return f"{' '.join(words)}, off by {match.error:.1e}"
