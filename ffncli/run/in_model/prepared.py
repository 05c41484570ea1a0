"""A kernel's prepared weights of one FFN, and whether they are still those of the model."""

from __future__ import annotations

from collections.abc import MutableMapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.dataclass import dataclass
from ffncli.kernels import onednn
from ffncli.kernels.kernel import Params
from ffncli.run.engine.weights import require_memory
from ffncli.run.in_model.find import FoundFFN, kernel_weights
from ffncli.run.in_model.kernel_call import SharedKernel

_SAMPLES = 8  # values of each copied tensor that are compared at every call, on a CPU: each is a read from memory
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _LiveTensor:
    """A tensor of the model as it was when the weights were prepared; `seen` and `kept` are some of its values, now
    and then, where a copy of it is in use."""

    home: MutableMapping[str, Any]
    leaf: str
    tensor: Tensor
    pointer: int
    version: int
    seen: Tensor | None
    kept: list[int]

    @property
    def unchanged(self) -> bool:
        now = self.home.get(self.leaf)
        if now is not self.tensor or now.data_ptr() != self.pointer or _version(now) != self.version:
            return False
        return self.seen is None or self.seen.tolist() == self.kept


class PreparedWeights:
    """A kernel's params for one FFN of a model, prepared again when the model's tensors have changed."""

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
        """Prepare them from the model's tensors as they are. Raises FFNError (exit 3) if memory is too small."""
        tensors = [home[leaf] for home, leaf in self._places]
        if self._built.device == "cpu":
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
        if self._built.kernel.per_weights:  # made at its first call, for each number of tokens
            self.copied_bytes += sum(t.nbytes for t in tensors)
        self._sources = tuple(
            _source(home, leaf, tensor, self.copied_bytes > 0)
            for (home, leaf), tensor in zip(self._places, tensors, strict=True)
        )

    def now(self) -> Params | None:
        """The params of the tensors as they are, prepared again if these have changed; None if they have been moved to
        another dtype or device, or have another shape: the kernel was verified for what they were.

        A write that torch does not count (through `.data`) is seen where the kernel has copies, on a CPU, by 8 values
        of each tensor.
        """
        with self._lock:
            if self._sources and all(source.unchanged for source in self._sources):
                return self._params
            self._sources, self._params = (), ()  # what they hold of the former tensors is freed
            if [_kind(home.get(leaf)) for home, leaf in self._places] != self._kinds:
                return None
            self.renew()
            return self._params


def _place(model: nn.Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """The dict in which a module has a parameter or a buffer, and its key there."""
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
    """How often torch has counted a write to it; it counts none where the tensor was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
