"""Run a kernel in place of one FFN of a model; fall back to the model if results could differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.errors import ExitCode, FFNError
from ffncli.kernels import onednn
from ffncli.kernels.kernel import Params
from ffncli.run.engine.prepare import dtype_name
from ffncli.run.engine.weights import require_memory
from ffncli.run.in_model.find import FoundFFN, forward_replaced, kernel_weights
from ffncli.run.in_model.kernel_call import SharedKernel


class FFNSwap:
    """The kernel of one FFN, and replacements for the forwards of the FFN's modules; both are used while the swap is
    `on`.

    `calls` counts the FFN's calls: under `kernel` if the kernel computed them, else under the reason for using the
    model. A call inside torch.compile is counted once, when it is traced.
    """

    def __init__(self, model: nn.Module, ffn: FoundFFN, built: SharedKernel, tokens: tuple[int, ...]) -> None:
        self.ffn, self.built = ffn, built
        self._tokens = tokens if built.kernel.compiles or built.kernel.per_weights else ()
        self.weights = PreparedWeights(model, ffn, built)
        self.calls: Counter[str] = Counter()
        self._links = [_link(model, path) for path in ffn.modules]
        self._modules = [link[2] for link in self._links]
        self._inside = [part for module in self._modules for part in module.modules()]
        self._children = [(part._modules, tuple(part._modules.values())) for part in self._inside]
        self._parameters = [p for part in self._inside for p in part._parameters.values() if p is not None]
        self._forwards = self._replacements()
        kind = f"{dtype_name(built.dtype)} on {built.device}"
        self._elsewhere = f"its parameters are no longer {kind}, for which the kernel was verified"
        self._ready_for = f"the kernel was made ready for {' and '.join(map(str, tokens))} tokens"
        self._other_input = f"its input is not {kind}"

    @property
    def on(self) -> bool:
        """Whether the kernel is in place of the modules' forwards."""
        return any(vars(part).get("forward") is new for part, new in zip(self._modules, self._forwards, strict=True))

    def turn_on(self) -> None:
        """Put the kernel in place. Raise FFNError if something else has replaced a forward since."""
        self._require_ours()
        for part, new in zip(self._modules, self._forwards, strict=True):
            vars(part)["forward"] = new  # adds no module, so state_dict and named_modules stay the same

    def turn_off(self) -> None:
        """Restore the modules' own forwards. Raise FFNError if something else has replaced a forward since."""
        self._require_ours()
        for part in self._modules:
            vars(part).pop("forward", None)

    def _require_ours(self) -> None:
        for part, new in zip(self._modules, self._forwards, strict=True):
            if vars(part).get("forward") is not new and forward_replaced(part):
                what = f"{self.ffn.label}: something else has replaced the forward of {type(part).__name__} since"
                raise FFNError(what, "undo that first")

    def _replacements(self) -> list[_Forward]:
        if len(self._modules) == 1:
            return [_Whole(self, self._modules[0])]
        handed = local()
        return [_First(self, self._modules[0], handed), *(_Later(self, part, handed) for part in self._modules[1:-1]),
                _Last(self, self._modules[-1], handed)]  # fmt: skip

    # --- a call -------------------------------------------------------------------------------------------------------

    def output(self, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
        """Return the kernel's output for a call with these arguments; None if the model must compute it."""
        x = args[0] if len(args) == 1 and not options else None
        if torch.compiler.is_compiling():  # torch.compile must trace the model itself
            self._count_compiled()
            return None
        # Check the weights last: in train mode they change at every step, and preparing them again would be wasted.
        why, params = self._obstacle(x), None
        if not why:
            params, why = self._params()
        if not why and x is not None:
            why = self._obstacle_of_input(x)
        self.calls[why or "kernel"] += 1
        if why or params is None or x is None:
            return None
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if not torch.is_grad_enabled():
            return self.built.compute(flat, params).view(x.shape)
        with torch.no_grad():
            return self.built.compute(flat, params).view(x.shape)

    # runs once, while the call is traced, and leaves nothing in the graph
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _count_compiled(self) -> None:
        self.calls["inside torch.compile"] += 1

    def _params(self) -> tuple[Params | None, str]:
        """Return the kernel's weights, up to date with the model's weights, or None and the reason."""
        try:
            params = self.weights.now()
        except FFNError:
            return None, "memory is too small to prepare its changed weights again"
        return params, "" if params is not None else self._elsewhere

    def _obstacle(self, x: Any) -> str:
        """Return the reason why the model must compute this call itself; empty if the kernel can compute it."""
        if type(x) is not Tensor or x.numel() == 0:
            return "its input is not one non-empty tensor"
        for part in self._inside:  # loops, here and below: generators would add microseconds to every call
            if part.training:
                return "train mode"
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self._parameters)):
            return "gradients are on: call the model under torch.no_grad()"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast"
        for home, leaf, part in self._links:
            if home.get(leaf) is not part:
                return "its modules were replaced"
        return self._obstacle_inside()

    def _obstacle_of_input(self, x: Tensor) -> str:
        if x.dtype != self.built.dtype or x.device != self.built.device or x.shape[-1] != self.ffn.width:
            return self._other_input
        return self._ready_for if self._tokens and x.numel() // x.shape[-1] not in self._tokens else ""

    def _obstacle_inside(self) -> str:
        """Check the submodules, too: the kernel would not call their hooks, and would ignore an exchanged submodule."""
        for now, before in self._children:
            if (*now.values(),) != before:
                return "its modules were replaced"
        whole = len(self._modules) == 1
        # A single module's own hooks still run around its forward, with the right input and output.
        for part in self._inside[1:] if whole else self._inside:
            replaced = whole and "forward" in vars(part) and forward_replaced(part)
            if replaced or part._forward_hooks or part._forward_pre_hooks:
                return "there are hooks on its modules"
        return ""


class _Forward:
    """The replacement of a module's forward. A copied or pickled model gets the module's own forward back."""

    def __init__(self, swap: FFNSwap, module: nn.Module) -> None:
        self.swap, self.module = swap, module
        self.original: Callable[..., Any] = module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")


class _Whole(_Forward):
    """The replacement of the forward of a module that computes the whole FFN."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        out = self.swap.output(args, options)
        return self.original(*args, **options) if out is None else out


class _InRow(_Forward):
    """The replacement for one of several modules: the first module computes the whole FFN, the other modules pass on
    its output."""

    def __init__(self, swap: FFNSwap, module: nn.Module, handed: local) -> None:
        super().__init__(swap, module)
        self.handed = handed


class _First(_InRow):
    def __call__(self, *args: Any, **options: Any) -> Any:
        self.handed.out = out = self.swap.output(args, options)
        return self.original(*args, **options) if out is None else out


class _Later(_InRow):
    def __call__(self, *args: Any, **options: Any) -> Any:
        out = getattr(self.handed, "out", None)
        return out if out is not None and args and args[0] is out else self.original(*args, **options)


class _Last(_InRow):
    def __call__(self, *args: Any, **options: Any) -> Any:
        out, self.handed.out = getattr(self.handed, "out", None), None
        if out is None:
            return self.original(*args, **options)
        if args and args[0] is out:
            return out
        what = f"{self.swap.ffn.label}: the layer changes its hidden units between these modules"
        raise FFNError(what, "restore() the model, or leave this layer out", ExitCode.FAILED)


def _link(model: nn.Module, path: str) -> tuple[dict[str, Any], str, nn.Module]:
    """Return (the dict of modules of a module's parent, the module's key in it, the module)."""
    owner, _, leaf = path.rpartition(".")
    home: dict[str, Any] = model.get_submodule(owner)._modules
    return home, leaf, model.get_submodule(path)


_SAMPLES = 8  # values of each copied tensor compared at every call, on a CPU; each costs a read from memory
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _LiveTensor:
    """A model's tensor at the time when weights were prepared. If the kernel has a copy of the tensor, `kept` are
    sampled values, and `seen` is a live view of the same elements."""

    home: MutableMapping[str, Any]
    leaf: str
    tensor: Tensor
    pointer: int
    version: int
    seen: Tensor | None
    kept: list[int]

    def unchanged(self) -> bool:
        """Return whether the model still has this tensor, with the same values as far as it can be seen."""
        now = self.home.get(self.leaf)
        if now is not self.tensor or now.data_ptr() != self.pointer or _version(now) != self.version:
            return False
        return self.seen is None or self.seen.tolist() == self.kept


class PreparedWeights:
    """A kernel's params for one FFN of a model, prepared again whenever the model's tensors change."""

    def __init__(self, model: nn.Module, ffn: FoundFFN, built: SharedKernel) -> None:
        self._model, self._found, self._built = model, ffn, built
        names = dict.fromkeys(name for item in ffn.located for name in item.names)
        self._places = [_place(model, name) for name in names]
        self._sources: tuple[_LiveTensor, ...] = ()
        self._params: Params = ()
        self._kinds = [_kind(home.get(leaf)) for home, leaf in self._places]
        self.copied_bytes = 0
        self._lock = Lock()
        self.renew()

    def renew(self) -> None:
        """Prepare the kernel's weights from the model's current tensors."""
        tensors = [home[leaf] for home, leaf in self._places]
        if self._built.device.type == "cpu":
            needed = sum(t.nbytes for t in tensors) * max(1, self._built.kernel.forms(self._built.dtype))
            require_memory(needed, "a kernel's copy of an FFN's weights", "leave layers out")
        with torch.no_grad():
            weights = kernel_weights(self._model, self._found)
            self._params = self._built.kernel.prepare(self._built.steps, weights)
        live = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        plain = [p.untyped_storage() for p in self._params if not p.is_mkldnn]
        copies = {storage.data_ptr(): storage.nbytes() for storage in plain}
        self.copied_bytes = sum(size for pointer, size in copies.items() if pointer not in live)
        self.copied_bytes += sum(onednn.nbytes(p) for p in self._params if p.is_mkldnn)
        if self._built.kernel.per_weights:  # such a kernel copies weights at the first call for each number of tokens
            self.copied_bytes += sum(t.nbytes for t in tensors)
        self._sources = tuple(
            _source(home, leaf, tensor, self.copied_bytes > 0)
            for (home, leaf), tensor in zip(self._places, tensors, strict=True)
        )

    def now(self) -> Params | None:
        """Return the params for the model's current tensors, prepared again if the tensors have changed. Return None if
        a tensor has another dtype, device or shape than at the verification of the kernel.

        On a CPU, if the kernel has copies of the weights, 8 sampled values of each tensor also reveal writes that torch
        does not count (through `.data`).
        """
        with self._lock:
            if self._sources and all(map(_LiveTensor.unchanged, self._sources)):
                return self._params
            self._sources, self._params = (), ()  # frees the former tensors before new copies are made
            if [_kind(home.get(leaf)) for home, leaf in self._places] != self._kinds:
                return None
            self.renew()
            return self._params


def _place(model: nn.Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """Return (the dict that stores a parameter or buffer in its module, the key in that dict)."""
    owner, _, leaf = name.rpartition(".")
    part = model.get_submodule(owner)
    return (part._parameters if leaf in part._parameters else part._buffers), leaf


def _source(home: MutableMapping[str, Any], leaf: str, tensor: Tensor, copied: bool) -> _LiveTensor:
    seen = None
    if copied and tensor.device.type == "cpu" and tensor.is_contiguous():
        flat = tensor.detach().view(-1).view(_BITS.get(tensor.element_size(), tensor.dtype))
        seen = flat[:: max(1, -(-len(flat) // _SAMPLES))]
    kept = [] if seen is None else seen.tolist()
    return _LiveTensor(home, leaf, tensor, tensor.data_ptr(), _version(tensor), seen, kept)


def _kind(tensor: Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (tensor.dtype, tensor.device, tensor.shape)


def _version(tensor: Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 for a tensor created in inference mode, which has no such count."""
    return 0 if tensor.is_inference() else tensor._version
