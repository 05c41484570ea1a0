"""A user's nn.Module as a source: building it, running it, and recognising the block that it computes, with its
weights.

The module is one block (`my.py:FeedForwardBlock`); a model of several layers (`my.py:GPT --layer 1`), whose FFNs are
found by parameter names; or a transformers model in memory, whose blocks are described by its config.
"""

import copy
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from inspect import isclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block import activations, dtypes
from ffncli.block.recipe import FFNSpec, steps
from ffncli.errors import FFNError, shown_path
from ffncli.models.config.read import from_config
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Layer, Model, Resolved, block_model, grouped, ranges
from ffncli.options.opt import chosen
from ffncli.run.engine.execute import execute
from ffncli.run.engine.locate import live_parameters, live_tensors, live_weights
from ffncli.run.engine.weights import require_memory
from ffncli.run.user.identify import MOST_MATRICES, BlockMatch, Match, ModuleSample, confirmed, identify, matrices
from ffncli.run.user.mixtures import MixtureMatch, identify_mixture, is_mixture
from ffncli.run.user.parts import Part, ffn_of, parts_by_name, parts_by_output
from ffncli.run.user.plain_object import as_module
from ffncli.run.user.probe import Runner, parameter_dtype, probes, runner_for, same_eps
from ffncli.run.user.python_file import NotTaken, calls, import_file, pick, user_code
from ffncli.run.user.time_limit import loading
from ffncli.show.text import plural


@dataclass(frozen=True)
class LoadedModule:
    """A loaded module, the model that matches it, and the module's weights in canonical form ([out, in], the module's
    dtype).

    `runner` runs the module on tokens [tokens, d_model]; `match` maps its parameters to the block's weights.
    """

    model: Resolved
    weights: Mapping[str, Tensor]
    module: nn.Module
    runner: Runner
    match: BlockMatch


def load_module(text: str, dimensions: Dimensions, seed: int = 0) -> LoadedModule:
    """Load the block of `my.py:Name`, with the weights that its constructor draws after `torch.manual_seed(seed)`.

    The file is executed. Constructor arguments are filled by name from the dimension options; the computation is
    identified by matching its outputs. Raises FFNError: exit code 2 for errors in the user's code and for a module that
    matches no block, exit code 3 if loading takes too long.
    """
    with built(text, dimensions, seed) as module:
        return one_block(module, dimensions)


def load_object(module: nn.Module, dimensions: Dimensions) -> LoadedModule:
    """Recognise the block that the caller's module computes; its weights are copied to the CPU.

    The module itself is neither run nor changed.
    """
    with copied(module, dimensions) as twin:
        return one_block(twin, dimensions)


@dataclass(frozen=True)
class BuiltModule:
    """A module in eval mode: the SOURCE typed for it, its name and file, and the assumed arguments of its constructor
    (`taken`).

    `runner` runs the module; it is None for a whole model, whose FFNs are `parts`.
    """

    text: str
    name: str
    path: Path
    module: nn.Module
    runner: Runner | None
    taken: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()


@contextmanager
def built(text: str, dimensions: Dimensions, seed: int) -> Iterator[BuiltModule]:
    """Build the module `my.py:Name` within the load time limit, without changing the state of torch's generator."""
    path_text, _, name = text.partition(".py:") if ".py:" in text else (text.removesuffix(".py"), "", None)
    path = Path(os.path.abspath(os.path.expanduser(path_text + ".py")))
    with torch.random.fork_rng(devices=[]), loading(path):
        torch.manual_seed(seed)
        target = pick(import_file(path), name or None, path)
        module, runner, taken, parts = _built(target, dimensions, path, seed)
        shown_name = name if name and not isclass(target) else type(module).__name__
        yield BuiltModule(text, shown_name, path, module, runner, taken, parts)


@contextmanager
def copied(module: nn.Module, dimensions: Dimensions) -> Iterator[BuiltModule]:
    """Yield a copy of the caller's module on the CPU."""
    name, path = type(module).__name__, Path("the module")
    with torch.random.fork_rng(devices=[]):
        with user_code(path, "raised while it was copied"):
            twin = copy.deepcopy(module).cpu()
        twin, runner, _, parts = _built(twin, dimensions, path, 0)
        yield BuiltModule(name, name, path, twin, runner, parts=parts)


def one_block(built: BuiltModule, dimensions: Dimensions) -> LoadedModule:
    """Recognise the block that a module computes; raise FFNError for a whole model."""
    if built.runner is None:
        count = len(built.parts)
        what = f"{shown_path(built.path)}: {built.name} is a model with {count} {plural('FFN', count)}"
        example = type(built.module.get_submodule(built.parts[0].name)).__name__
        raise FFNError(what, f"give the class of one FFN, {example}")
    match, dropout, remarks = recognised(built.module, built.runner, built.path)
    model, weights = _record(built.text, built.name, built.module, match, dimensions, (dropout, built.taken, remarks))
    return LoadedModule(model, weights, built.module, built.runner, match)


def _built(
    target: Any, dimensions: Dimensions, path: Path, seed: int
) -> tuple[nn.Module, Runner | None, tuple[str, ...], tuple[Part, ...]]:
    """Return the module in eval mode, its runner, its constructor's assumed arguments, and a whole model's FFNs.

    `target` is a class or an instance: an nn.Module, or a plain object that keeps weights as attributes.
    """
    if not isclass(target):
        if unused := chosen(replace(dimensions, d_model=None)):
            what = "the dimension options cannot change a module that is already built"
            raise NotTaken(what, "give its class", unused=unused)
        module = as_module(target, f"{shown_path(path)}: {type(target).__name__}").eval()
        return module, *_runner(module, dimensions, path, ())
    failures: list[FFNError] = []
    for call in calls(target, dimensions):
        try:
            torch.manual_seed(seed)
            with user_code(path, f"raised while {target.__name__} was built"):
                made = target(*call.positional, **call.named)
            module = as_module(made, f"{shown_path(path)}: {target.__name__}").eval()
            return module, *_runner(module, dimensions, path, tuple(call.taken))
        except FFNError as error:
            failures.append(error)
    raise failures[0]


def _runner(
    module: nn.Module, dimensions: Dimensions, path: Path, taken: tuple[str, ...]
) -> tuple[Runner | None, tuple[str, ...], tuple[Part, ...]]:
    """Return (runner, `taken`, the FFNs): a runner for a single block, FFNs for a whole model."""
    parts = parts_by_name(module, path)
    if parts:
        return None, taken, parts
    try:
        return runner_for(module, dimensions, path), taken, ()
    except FFNError:
        if is_mixture(module) and any("expert" in name for name, _ in module.named_parameters()):
            raise _refuse_mixture(f"{shown_path(path)}: {type(module).__name__}", _IN_A_MODEL) from None
        parts = parts_by_output(module, path, lambda part: _is_ffn(part, path))
        if not parts:
            raise
        return None, taken, parts


def _is_ffn(part: nn.Module, path: Path) -> bool:
    with suppress(FFNError):
        recognised(part, runner_for(part, Dimensions(), path), path)
        return True
    return False


def recognised(module: nn.Module, run: Runner, path: Path) -> tuple[BlockMatch, float, tuple[str, ...]]:
    """Return the match of the block that the module computes, its dropout probability, and remarks."""
    parameters = dict(module.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    label, hint = f"{shown_path(path)}: {type(module).__name__}", f"it has {total:,} parameters in all"
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    mixture = is_mixture(module)
    if not mixture and len(matrices(shapes, run.d_model)) > MOST_MATRICES:
        raise FFNError(
            f"{label} has {len(matrices(shapes, run.d_model))} weight matrices, but a dense block has 2 or 3", hint
        )
    require_memory(2 * 8 * total, "matching the module's outputs", "give smaller dimensions")
    with user_code(path, "raised while the module was copied"):
        twin = copy.deepcopy(module)
    same_eps(twin, parameter_dtype(module))
    original, drawn, captured = probes(twin, run)
    if mixture:
        return _mixture(label, identify_mixture(twin, run, drawn), original), 0.0, _ignored(captured)
    match = identify(drawn)
    if match is None:
        raise FFNError(f"{label} has no pair of matrices between d_model {run.d_model} and another width", hint)
    if match.error <= drawn.tolerance and match.mixed_bias:
        raise FFNError(f"{label} has a bias on only one of gate and up", f"this version supports both or none; {hint}")
    if match.error > drawn.tolerance or max(confirmed(match, probe) for probe in (original, drawn)) > drawn.tolerance:
        raise FFNError(f"{label} does not match any block known here; nearest: {_nearest_block(match)}", hint)
    p, remarks = _dropout(match, original, captured)
    return match, p, remarks


def _mixture(label: str, match: MixtureMatch | str, original: ModuleSample) -> MixtureMatch:
    """Return the match of a mixture; raise FFNError if there is none, or none that holds for the module's weights."""
    if isinstance(match, str):
        raise _refuse_mixture(label, match)
    if (error := confirmed(match, original)) > original.tolerance:
        raise _refuse_mixture(label, f"with its own weights, its output is {error:.1e} off the mixture found")
    return match


def _ignored(captured: list[tuple[float, Tensor]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"dropout {p:g} inside a mixture is ignored" for p, _ in captured))


def _refuse_mixture(label: str, why: str) -> FFNError:
    what = f"{label} is a mixture of experts, but {why}"
    return FFNError(what, "give its sizes, as in 16x24:swiglu --experts 4 --top-k 2, its config or its tensors")


_IN_A_MODEL = "a model's mixtures are not read: name the class of one"


def _dropout(match: Match, sample: ModuleSample, captured: list[tuple[float, Tensor]]) -> tuple[float, tuple[str, ...]]:
    """Return (the dropout probability before the down projection, 0 if there is none; remarks on other dropouts)."""
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
    text: str, name: str, module: nn.Module, match: BlockMatch, dimensions: Dimensions,
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
    evidence = tuple(match.evidence(parameters))
    return replace(block, model=model, evidence=evidence, weights={(model.main.stack, 0): weights}), weights


def _unused(match: BlockMatch, parameters: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield notes on parameters that the block does not use, and on parameters that it uses twice."""
    used = [name for view in match.views.values() for name in view.names]
    idle = [f"{name} [{', '.join(map(str, p.shape))}]" for name, p in parameters.items() if name not in used]
    if idle:
        names = ", ".join(idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        yield f"parameters that this block does not use, not counted: {names}"
    if match.tied:
        names = " and ".join(name for kind in match.tied for name in match.views[f"down.{kind}"].names)
        yield f"{names}: used by two projections, counted once"


def _nearest_block(match: Match) -> str:
    words = ["gated" if "gate.weight" in match.wiring else "plain", match.activation]
    words += [f"{match.norms.position} {match.norms.kind}"] if match.norms.kind != "none" else []
    words += ["residual"] if match.residual else []
    return f"{' '.join(words)}, off by {match.error:.1e}"


def model_of(built: BuiltModule, dimensions: Dimensions) -> Resolved:
    """Return the block that a module computes; for a whole model, or a module that computes another function, the FFNs
    inside it, recognised by their outputs. An FFN that runs several times is counted once.

    The attention, norms and embeddings of a whole model are ignored.
    """
    if built.runner is None:
        return _whole_model(built)
    try:
        return one_block(built, dimensions).model
    except FFNError:
        mixture = is_mixture(built.module)
        parts = () if mixture else parts_by_output(built.module, built.path, lambda part: _is_ffn(part, built.path))
        if not parts:
            raise
        return _whole_model(replace(built, parts=parts))


def _whole_model(built: BuiltModule) -> Resolved:
    """Return the FFNs of a model, by stack and layer."""
    specs: dict[tuple[str, int], dict[int, FFNSpec]] = {}
    weights: dict[tuple[str, int], Mapping[str, Tensor]] = {}
    match: BlockMatch | None = None
    evidence: tuple[str, ...] = ()
    for part in built.parts:
        if "expert" in part.name:
            where = f"{shown_path(built.path)}: {built.name}: {part.name.partition('.expert')[0]}"
            raise _refuse_mixture(where, _IN_A_MODEL)
        ffn = ffn_of(built.module, part.name)
        match = _same(ffn, match, built) or _matched(ffn, part.name, built)
        parameters = {n: p.detach() for n, p in ffn.named_parameters()}
        spec = match.spec(parameters)
        specs.setdefault((part.stack, part.runs), {})[part.index] = spec
        weights[part.stack, part.index] = match.weights(parameters)
        if not evidence:
            names = ", ".join(dict.fromkeys((part.name, built.parts[-1].name)))
            evidence = (f"FFNs, first and last: {names}", *match.evidence(parameters))
    groups = [group for (stack, runs), of in specs.items() for group in grouped(stack, of, runs)]
    notes = [f"assuming {', '.join(built.taken)}"] if built.taken else []
    stacks: dict[str, list[int]] = {}
    for part in built.parts:
        stacks.setdefault(part.stack, []).append(part.index)
    of_stack = {stack: f"{stack} " if len(stacks) > 1 else "" for stack in stacks}
    listed = " and ".join(of_stack[stack] + ranges(tuple(sorted(layers))) for stack, layers in stacks.items())
    notes.append(f"only the FFNs of {listed}: attention, norms and embeddings are ignored")
    every = [p for part in built.parts for p in ffn_of(built.module, part.name).parameters()]
    counted, distinct = sum(p.numel() for p in every), sum({id(p): p.numel() for p in every}.values())
    if counted != distinct:
        notes.append(f"FFNs share some of their tensors: {counted:,} parameters are counted, {distinct:,} are distinct")
    again = Counter(part.runs for part in built.parts if part.runs > 1)
    for runs, count in again.items():
        notes.append(f"{count} {plural('FFN', count)} run{'s' if count == 1 else ''} {runs} times: counted once")
    return Resolved(
        Model(built.name, tuple(groups)), built.text, evidence=evidence, notes=tuple(notes), weights=weights
    )


def _matched(ffn: nn.Module, name: str, built: BuiltModule) -> BlockMatch:
    """Return the match of the block that an FFN computes."""
    try:
        return recognised(ffn, runner_for(ffn, Dimensions(), built.path), built.path)[0]
    except FFNError as error:
        if not name or name.rpartition(".")[2].isdigit():
            what = f"{shown_path(built.path)}: {built.name} has the matrices of its FFN in the layer itself"
            hint = "put them in a module of their own, or give its weights in a file"
            raise FFNError(f"{what} {name}".rstrip(), hint) from None
        raise FFNError(f"{error.message} ({name})", error.hint) from None


def _same(ffn: nn.Module, match: BlockMatch | None, built: BuiltModule) -> BlockMatch | None:
    """Return the previous layer's match if this FFN computes the same block, else None."""
    if not isinstance(match, Match):
        return None
    if {view.parameter for view in match.views.values()} != {n for n, _ in ffn.named_parameters()}:
        return None
    import copy

    runner = runner_for(ffn, Dimensions(), built.path)
    with torch.no_grad():
        original, drawn, _ = probes(copy.deepcopy(ffn), runner)
    fits = all(confirmed(match, probe) <= probe.tolerance for probe in (original, drawn))
    return replace(match, error=confirmed(match, drawn)) if fits else None


def described(model: nn.Module) -> Resolved:
    """Return a transformers model's blocks by its config; raise FFNError for another module or family."""
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or not hasattr(config, "to_dict"):
        raise FFNError(f"{type(model).__name__} is not a transformers model", "for a single block, use ffncli.kernel")
    return _by_config(config, model)


def in_memory(module: nn.Module) -> Resolved | None:
    """Describe a transformers model, or a layer of one (`model.encoder.layer[3]`), with views of its weights.

    Returns None for every other module: a module without a config, of an unknown family or FFN, or an FFN itself.
    Raises FFNError for a transformers layer that does not contain its config, because a layer's outputs cannot match a
    block.
    """
    parts = [part for part in module.modules() if hasattr(getattr(part, "config", None), "to_dict")]
    if not parts:
        _refuse_layer(module)
        return None
    try:
        resolved = _by_config(parts[0].config, module)
        layers = [Layer(group.stack, index, group.spec) for group in resolved.model.groups for index in group.layers]
        with suppress(FFNError):
            if live_parameters(module, resolved, layers[0])[0]:  # empty if the parameters are named as inside a layer
                return replace(resolved, weights=_LiveWeights(module, resolved, layers))
        return _single(module, resolved, layers)
    except FFNError:
        return None


def _refuse_layer(module: nn.Module) -> None:
    kind = type(module)
    if kind.__module__.startswith("transformers.") and any("Attention" in type(m).__name__ for m in module.modules()):
        what = f"a {kind.__name__} does not carry the config that describes its FFN"
        raise FFNError(what, "give the whole model: ffncli.trace(model, layer=0)")


def _single(module: nn.Module, resolved: Resolved, layers: Sequence[Layer]) -> Resolved | None:
    """Return a single layer, under the layer index that its submodules store."""
    numbers: list[int] = [n for n in (vars(part).get("layer_idx") for part in module.modules()) if isinstance(n, int)]
    layer = next((layer for layer in layers if layer.index == (numbers or [0])[0]), None)
    if layer is None:
        return None
    place = nn.Module()
    place.layers = nn.ModuleDict({str(layer.index): module})
    _, located = live_parameters(place, resolved, layer)
    if len([name for item in located for name in item.names]) == len(live_tensors(module)):
        return None  # only an FFN; matching its outputs also reveals norms without parameters
    group = next(g for g in resolved.model.groups if g.stack == layer.stack and layer.index in g.layers)
    model = replace(resolved.model, groups=(replace(group, layers=(layer.index,)),))
    doubt = (
        [] if numbers else [f"{type(module).__name__} has no layer_idx: treated as {layer.stack} layer {layer.index}"]
    )
    return replace(
        resolved, model=model, weights=_LiveWeights(place, resolved, [layer]), notes=(*resolved.notes, *doubt)
    )


def _by_config(config: Any, module: nn.Module) -> Resolved:
    values = json.loads(json.dumps(config.to_dict(), default=str))
    return from_config(values, type(module).__name__, f"the config of {type(module).__name__}")


class _LiveWeights(Mapping[tuple[str, int], Mapping[str, Tensor]]):
    """The canonical weights of each layer, located at each access."""

    def __init__(self, module: nn.Module, resolved: Resolved, layers: Sequence[Layer]) -> None:
        self._module, self._resolved = module, resolved
        self._layers = {(layer.stack, layer.index): layer for layer in layers}

    def __getitem__(self, key: tuple[str, int]) -> Mapping[str, Tensor]:
        _, located = live_parameters(self._module, self._resolved, self._layers[key])
        return live_weights(self._module, located)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
