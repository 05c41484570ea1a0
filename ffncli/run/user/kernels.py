"""Users' kernels: `[label=][ref:]file.py:name` names a plain function, an nn.Module (class or instance), or a Kernel.

A function's first argument is x; the others are named after the block's weights: `def mlp(x, gate, up, down)`.
Arguments for other parameters have names such as `up_bias` (a bias), `act_weight` (a learned parameter of an
activation) and `shared__up` (a weight of a shared expert). Functions and modules are differentiable with respect to x
and their params; the caller enables or disables gradients. If a kernel computes in fewer bits than the dtype has, its
attribute `computes` declares the format ("fp8-rowwise").
"""

import copy
import hashlib
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import parameters
from ffncli.errors import FFNError, did_you_mean, shown, shown_path
from ffncli.kernels import BUILT_IN, built_in
from ffncli.kernels.choice import KernelChoice, by_argument, missing_weight, require_unlike
from ffncli.kernels.kernel import Computes, Kernel, Params, Steps
from ffncli.models.dimensions import Dimensions
from ffncli.run.user.module import LoadedModule, load_module
from ffncli.run.user.plain_object import is_class, is_instance, keeps_weights
from ffncli.run.user.python_file import NotTaken, import_file, kind_of, user_code
from ffncli.run.user.time_limit import loading
from ffncli.system.files import file_at, process_folder


def kernel_of(choice: KernelChoice, steps: Steps, spec: FFNSpec) -> Kernel:
    """Return the chosen kernel for the block's kernel steps, under its label; executes a user's file."""
    if choice.file is None:
        return built_in(choice.kernel)
    with loading(choice.file):
        return _user_kernel(choice, choice.file, steps, spec)


def kernels_of(
    choices: Sequence[KernelChoice], steps: Steps, spec: FFNSpec, compiling: bool = True
) -> tuple[Kernel, ...]:
    """Return all kernels to verify: the chosen built-in kernels (all of them if none is chosen), then the user's
    kernels.

    Without `compiling`, kernels that need compilation refuse every block unless chosen, because compiling one kernel
    takes longer than running all other kernels together. A slowed kernel raises FFNError, because it has the same
    output as the kernel that it slows.
    """
    if slow := next((choice for choice in choices if choice.factor is not None), None):
        raise FFNError(f"--kernel: {shown(slow.text)} can only be timed", f"verify {shown(slow.kernel)} itself")
    named = [kernel_of(choice, steps, spec) for choice in choices if choice.file is None]
    user_kernels = [kernel_of(choice, steps, spec) for choice in choices if choice.file is not None]
    every = [built_in(name) for name in BUILT_IN]
    kernels = [*(named or (every if compiling else map(_unless_named, every))), *user_kernels]
    require_unlike([kernel.name for kernel in kernels])
    return tuple(kernels)


def _unless_named(kernel: Kernel) -> Kernel:
    """Return the kernel; if it needs compilation or declares a format (`computes`), make it refuse every block."""
    if not kernel.compiles and not kernel.computes:
        return kernel
    reason = "takes seconds to compile" if kernel.compiles else f"computes in {kernel.computes}"
    why = f"not run by default, because it {reason}: --kernel {kernel.name}"
    return replace(kernel, needs=(), refuses=lambda steps: why)


def _user_kernel(choice: KernelChoice, path: Path, steps: Steps, spec: FFNSpec) -> Kernel:
    """Execute a user's file, from a copy if it is at a git commit, and return its kernel."""
    if choice.ref is None:
        return _kernel_in(path, choice, shown_path(Path(choice.kernel)), steps, spec)
    copied, commit = _copy_at(choice.ref, path)
    origin = f"{shown_path(Path(choice.kernel))} at commit {commit[:12]}"
    try:
        return _kernel_in(copied, choice, origin, steps, spec)
    except FFNError as error:
        message, hint = (text.replace(shown_path(copied), origin) for text in (error.message, error.hint))
        raise FFNError(message, hint, error.code) from None


def _kernel_in(path: Path, choice: KernelChoice, origin: str, steps: Steps, spec: FFNSpec) -> Kernel:
    """Return the kernel in a file. The kernel's origin is the given `origin`, followed by the file's sha256."""
    target, name = _target(path, choice.attribute)
    label = choice.with_attribute(name).label
    origin += f", sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    if isinstance(target, Kernel):
        return _guarded_kernel(target, path, label, origin)
    declared = getattr(target, "computes", "")
    computes = declared if isinstance(declared, str) else ""
    if inspect.isclass(target) or isinstance(target, nn.Module) or keeps_weights(target):
        kernel = _module_kernel(f"{path}:{name}", path, label, steps, spec)
    else:
        kernel = _function_kernel(target, path, label, steps)
    return replace(kernel, origin=origin, computes=computes)


@cache
def _copy_at(ref: str, path: Path) -> tuple[Path, str]:
    """Return (a copy of the file at the commit, in a private folder that is removed when the process ends; the commit).

    Only this file is copied, so it cannot import modules next to it in the repository.
    """
    original = file_at(ref, path, "--kernel")
    copied = process_folder() / path.name
    copied.write_bytes(original.data)
    return copied, original.commit


def _target(path: Path, name: str | None) -> tuple[Any, str]:
    """Return (the object `name` in the file, its name); if `name` is None, the file's only kernel."""
    module = import_file(path, "file.py:name")
    homes = (module.__name__, Kernel.__module__)
    names = [
        n
        for n, v in vars(module).items()
        if _is_kernel(v) and getattr(v, "__module__", None) in homes and v is not Kernel
    ]
    there = "it has " + (", ".join(names) or "no function, no nn.Module class and no Kernel")
    if name is None:
        public = [n for n in names if not n.startswith("_")]
        if len(public) != 1:
            why = f"{shown_path(path)} has {len(public)} kernels"
            raise FFNError(why, f"name one, as in {path.name}:name; {there}")
        (name,) = public
    if name not in vars(module):
        raise FFNError(f"{shown_path(path)} has no {shown(name)}", did_you_mean(name, names, there))
    target = vars(module)[name]
    if inspect.isclass(target) and issubclass(target, Function):
        return target.apply, name
    instance = is_instance(target) or (callable(target) and not inspect.isclass(target))
    if not (_is_kernel(target) or is_class(target) or instance):
        hint = "name a function, an nn.Module class, a class that keeps weights, an instance of one, or a Kernel"
        raise FFNError(f"{shown_path(path)}: {name} is not a kernel (it is {kind_of(target)})", hint)
    return target, name


def _is_kernel(value: object) -> bool:
    if inspect.isclass(value):
        return issubclass(value, nn.Module)
    return isinstance(value, (Kernel, torch.jit.ScriptFunction)) or inspect.isroutine(value)


# --- functions, modules and Kernels
# --------------------------------------------------------------------------------------------------


def _guarded_kernel(kernel: Kernel, path: Path, label: str, origin: str) -> Kernel:
    """Return a user's Kernel whose exceptions are shortened to one line."""

    def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        with user_code(path, "raised by its prepare"):
            return kernel.prepare(steps, weights)

    def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        with user_code(path, "raised by its build"):
            return _Guarded(kernel.build(steps, device, dtype), path)

    return replace(kernel, name=label, prepare=prepare, build=build, origin=origin)


@dataclass(frozen=True)
class _Guarded:
    """A wrapper of a user's function that shortens exceptions to one line and sends printed output to stderr."""

    compute: Computes
    path: Path

    def __call__(self, x: Tensor, params: Params) -> Tensor:
        with user_code(self.path, "raised when it was called"):
            return self.compute(x, params)

    def located(self, error: BaseException) -> BaseException:
        """Return the exception that a call of this wrapper would have raised if the function had raised `error`."""
        try:
            with user_code(self.path, "raised when it was called"):
                raise error
        except BaseException as shortened:  # includes SystemExit
            return shortened


def unguarded(compute: Computes) -> Computes:
    """Return the user's own function, for timing; the wrapper costs tens of microseconds per call."""
    return compute.compute if isinstance(compute, _Guarded) else compute


def located(compute: Computes, error: BaseException) -> BaseException:
    """Return `error`, raised by the unguarded function of `compute`, with file and line added."""
    return compute.located(error) if isinstance(compute, _Guarded) else error


def _function_kernel(call: Callable[..., Any], path: Path, label: str, steps: Steps) -> Kernel:
    _arguments(call, path, steps)

    def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        names = list(parameters(steps))
        places = {argument: names.index(name) for argument, name in _arguments(call, path, steps).items()}
        positional = _positional(call, places)
        first, rest = [places.pop(argument) for argument in positional], list(places.items())

        def in_order(x: Tensor, params: Params) -> Tensor:
            out: Tensor = call(x, *params)
            return out

        def compute(x: Tensor, params: Params) -> Tensor:
            at = params.__getitem__
            out: Tensor = call(x, *map(at, first), **{keyword: params[at] for keyword, at in rest})
            return out

        return _Guarded(in_order if first == [*range(len(names))] else compute, path)

    return Kernel(label, build)


def _arguments(call: Callable[..., Any], path: Path, steps: Steps) -> dict[str, str]:
    """Return a mapping from a function's arguments to parameters; reject an argument without a matching weight."""
    weights = by_argument(steps)
    try:
        declared = _declared(call)
    except (ValueError, TypeError):
        raise FFNError(f"{shown_path(path)}: the arguments of {shown(call)} cannot be read", "use a def") from None
    label = f"{shown_path(path)}: {getattr(call, '__name__', 'it')}({', '.join(map(str, declared))})"
    takes = ("positional-only", "positional or keyword")
    if not declared or declared[0].kind.description not in takes:
        raise FFNError(
            f"{label} has no argument for x", f"the first argument is the input, the others {', '.join(weights)}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in declared):
        return weights
    if missing := missing_weight([p.name for p in declared[1:] if p.default is p.empty], steps):
        raise FFNError(f"{label} {missing[0]}", missing[1])
    return {p.name: weights[p.name] for p in declared[1:] if p.name in weights}


def _declared(call: Callable[..., Any], follow_wrapped: bool = True) -> list[Parameter]:
    """Return a function's arguments: those of `forward` for an autograd Function's `apply`, those of the schema for a
    scripted function and an operator of torch.library. Raises ValueError or TypeError if they cannot be read."""
    home = getattr(call, "__self__", None)
    if inspect.isclass(home) and issubclass(home, Function):
        taken = list(inspect.signature(home.forward).parameters.values())
        return taken[home.setup_context is Function.setup_context :]  # without setup_context, ctx comes first
    schema = getattr(getattr(call, "_opoverload", getattr(call, "default", call)), "_schema", None)
    schema = call.schema if isinstance(call, torch.jit.ScriptFunction) else schema
    if isinstance(schema, torch._C.FunctionSchema):
        defaults = [a.default_value if a.has_default_value() else Parameter.empty for a in schema.arguments]
        named = zip(schema.arguments, defaults, strict=True)
        return [Parameter(a.name, Parameter.POSITIONAL_OR_KEYWORD, default=default) for a, default in named]
    return list(inspect.signature(call, follow_wrapped=follow_wrapped).parameters.values())


def _positional(call: Callable[..., Any], weights: Container[str]) -> list[str]:
    """Return the arguments after x that can be given by position, which costs less than by name; none if a decorator
    hides the function's own arguments."""
    declared = _declared(call, follow_wrapped=False)[1:]
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in takewhile(lambda p: p.kind in kinds and p.name in weights, declared)]


class _ModuleOnParams:
    """A user's module, called with given tensors in place of its parameters.

    If the tensors are the same as in the last call, nothing is set again; torch.func.functional_call would cost about
    20 µs per call.
    """

    def __init__(self, loaded: LoadedModule, module: nn.Module) -> None:
        self._layout, self._module = loaded.runner.layout, module
        self._params: Params = ()
        self._places = [_places(module, parameter) for parameter in module.parameters()]

    def __call__(self, x: Tensor, params: Params) -> Tensor:
        """Return the module's output [tokens, d_model]."""
        if params is not self._params:
            for places, tensor in zip(self._places, params, strict=True):
                for home, name in places:
                    home[name] = tensor
            self._params = params
        out = self._module(self._layout.there(x))
        return self._layout.back(out[0] if isinstance(out, (tuple, list)) else out)


def _places(module: nn.Module, parameter: nn.Parameter) -> list[tuple[dict[str, Any], str]]:
    """Return every dict and key that hold a parameter; there are several if modules share the parameter."""
    homes = [part._parameters for part in module.modules()]
    return [(home, name) for home in homes for name, value in home.items() if value is parameter]


def _module_kernel(text: str, path: Path, label: str, steps: Steps, spec: FFNSpec) -> Kernel:
    """Return the kernel of a module of the block's dimensions, with parameters identified by its outputs."""
    loaded = _built(text, spec)
    views, wanted = loaded.match.views, list(parameters(steps))
    if loaded.match.tied:
        what = f"{shown_path(path)}: {type(loaded.module).__name__} uses one matrix for two projections"
        raise FFNError(what, "the block here has a matrix for each")
    if set(views) != set(wanted):
        has = f"{shown_path(path)}: {type(loaded.module).__name__} computes a block with {', '.join(sorted(views))}"
        raise FFNError(has, f"the block here has {', '.join(sorted(wanted))}")

    def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        like = weights["down.weight"]
        state = {n: p.detach().to(like.device, like.dtype, copy=True) for n, p in loaded.module.named_parameters()}
        for name, view in views.items():
            view.write(state, weights[name])
        return tuple(state.values())

    def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        return _Guarded(_ModuleOnParams(loaded, copy.deepcopy(loaded.module).to(device, dtype)), path)

    return Kernel(label, build, prepare)


def _built(text: str, spec: FFNSpec) -> LoadedModule:
    """Build the module with the block's widths and, of its other choices, those that the constructor accepts."""
    options: dict[str, Any] = {
        "d_model": str(spec.d_model), "d_ff": str(spec.d_ff), "bias": spec.bias, "activation": spec.activation,
    }  # fmt: skip
    if spec.moe:
        options |= {"experts": spec.moe.experts, "top_k": spec.moe.top_k}
        options |= {"shared_experts": spec.moe.shared_experts} if spec.moe.shared_experts else {}
    while True:
        try:
            loaded = load_module(text, Dimensions(**options))
            break
        except NotTaken as error:
            if not set(error.unused) & set(options):
                raise
            options = {name: value for name, value in options.items() if name not in error.unused}
    if (has := _sizes(loaded.model.model.main.spec)) != (wanted := _sizes(spec)):
        raise FFNError(f"{text} is {has}, but this block is {wanted}")
    return loaded


def _sizes(spec: FFNSpec) -> str:
    """Return text such as `16x24`, or `16x24 with 4 experts, top 2`."""
    experts = f" with {spec.moe.experts} experts, top {spec.moe.top_k}" if spec.moe else ""
    return f"{spec.d_model}x{spec.d_ff}{experts}"
