"""An object of a plain Python class that keeps weights as attributes, as an nn.Module with those weights."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ffncli.errors import FFNError
from ffncli.kernels.kernel import Kernel


class OfObject(nn.Module):
    """A module that calls a plain object. Its parameters are the object's tensors of floats, also those in the lists,
    dicts and objects of its attributes, in which they are replaced by the parameters; modules are submodules.

    Raises FFNError, which names the object as `label`, for NumPy arrays and for an object without weights.
    """

    def __init__(self, target: Any, label: str) -> None:
        super().__init__()
        self._target = target
        self._bound: list[tuple[Any, Any, nn.Module, str]] = []  # owner and its slot, then the parameter's place
        self._adopt(self, target, label, {id(target)})
        if not any(p.dim() > 1 for p in self.parameters()):
            what = f"{label} keeps no weight matrices of torch as attributes"
            raise FFNError(what, "keep them there, or write a function of x and weights, such as mlp(x, up, down)")

    def forward(self, x: Tensor) -> Any:
        """Put the current parameters into the object, and call it."""
        for owner, slot, home, name in self._bound:
            current = home._parameters[name]
            if _get(owner, slot) is not current:
                _set(owner, slot, current)
        return self._target(x) if callable(self._target) else self._target.forward(x)

    def _adopt(self, home: nn.Module, owner: Any, label: str, seen: set[int]) -> None:
        """Register the tensors and modules of `owner` in `home`, and those of its parts in modules of their own."""
        for slot, value in _slots(owner):
            if id(value) in seen:
                continue
            if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
                raise FFNError(f"{label} keeps NumPy arrays ({slot})", "keep torch tensors")
            name = str(slot).replace(".", "_")
            name = f"{name}_" if hasattr(home, name) else name
            if isinstance(value, nn.Module):
                home.add_module(name, value)
            elif isinstance(value, Tensor):
                if value.is_floating_point() and value.dim():
                    parameter = nn.Parameter(value.detach())
                    home.register_parameter(name, parameter)
                    _set(owner, slot, parameter)
                    self._bound.append((owner, slot, home, name))
            elif isinstance(value, (list, dict)) or _is_plain(value):
                part = nn.Module()
                self._adopt(part, value, label, seen | {id(value)})
                if next(part.parameters(), None) is not None:
                    home.add_module(name, part)


def as_module(target: Any, label: str) -> nn.Module:
    """Return the module itself, or a plain object as a module, whose class has the name of the object's class."""
    if isinstance(target, nn.Module):
        return target
    kind: type[OfObject] = type(type(target).__name__, (OfObject,), {})
    return kind(target, label)


def is_class(value: object) -> bool:
    """Return whether the instances of a class may be blocks: it is an nn.Module, or has __call__ or forward."""
    return inspect.isclass(value) and (issubclass(value, nn.Module) or _may_be_called(value))


def is_instance(value: object) -> bool:
    """Return whether a value may be a block: a module, or an object of a plain class with __call__ or forward."""
    return isinstance(value, nn.Module) or (_is_plain(value) and _may_be_called(type(value)))


def keeps_weights(value: object) -> bool:
    """Return whether an object of a plain class keeps weight matrices, and takes nothing but x."""
    if isinstance(value, nn.Module) or not is_instance(value):
        return False
    kept = [tensor for tensor in _tensors(value, {id(value)}) if tensor.dim() > 1]
    call: Any = value if callable(value) else value.forward  # type: ignore[attr-defined]
    needed = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
    return bool(kept) and [p.kind.description for p in needed] in (["positional-only"], ["positional or keyword"])


def _tensors(owner: Any, seen: set[int]) -> Iterator[Tensor]:
    for _, value in _slots(owner):
        if id(value) in seen:
            continue
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, (list, dict)) or _is_plain(value):
            yield from _tensors(value, seen | {id(value)})


def _may_be_called(kind: type[Any]) -> bool:
    return any("__call__" in vars(one) or "forward" in vars(one) for one in kind.__mro__)


def _is_plain(value: object) -> bool:
    """Return whether a value is an object of a class written in Python, other than a function's or torch's."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in ("builtins", "torch", "numpy", "types", "functools"):
        return False
    other = inspect.isclass(value) or inspect.ismodule(value) or inspect.isroutine(value)
    has_slots = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    return has_slots and not other and not isinstance(value, (nn.Module, Kernel))


def _slots(owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a list or dict, or the attributes of an object."""
    if isinstance(owner, list):
        yield from enumerate(list(owner))
    elif isinstance(owner, dict):
        yield from list(owner.items())
    else:
        names = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((name, getattr(owner, name)) for name in names if hasattr(owner, name) and name != "__dict__")
        yield from list(getattr(owner, "__dict__", {}).items())


def _get(owner: Any, slot: Any) -> Any:
    return owner[slot] if isinstance(owner, (list, dict)) else getattr(owner, slot, None)


def _set(owner: Any, slot: Any, value: Any) -> None:
    if isinstance(owner, (list, dict)):
        owner[slot] = value
    else:
        setattr(owner, slot, value)
