"""A GPU whose tensors lie on the CPU but call themselves cuda, and a count of the random numbers drawn on either."""

import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_DRAWN = ("randn", "rand", "randint", "randperm", "normal", "normal_", "uniform_", "kaiming_uniform_")
_CPU, _GPU = torch.device("cpu"), torch.device("cuda")
_REAL = torch.Generator


class FakeGenerator(_REAL):
    """A generator that says which device it was made for; it draws on the CPU."""

    place: torch.device

    def __new__(cls, device: object = "cpu") -> "FakeGenerator":
        made: FakeGenerator = super().__new__(cls)
        made.place = torch.device(device)  # type: ignore[arg-type]
        return made

    @property
    def device(self) -> torch.device:
        return self.place

    def __init__(self, device: object = "cpu") -> None:
        super().__init__()


class FakeDraws(TorchFunctionMode):
    """Inside `with`, device "cuda" works. `drawn` are numbers by the type of the device that they are drawn on."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = {"cpu": 0, "cuda": 0}
        self._there: dict[int, object] = {}  # storages on the GPU

    def __enter__(self) -> "FakeDraws":
        torch.Generator = FakeGenerator  # type: ignore[misc]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.Generator = _REAL  # type: ignore[misc]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return _GPU if self._on_gpu(tensors[0]) else _CPU
        devices = [leaf for leaf in tree_leaves((args, kwargs)) if _is_device(leaf)]
        there = _is_gpu(devices[-1]) if devices else name != "cpu" and any(map(self._on_gpu, tensors))
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        out = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for storage in (tensor.untyped_storage() for tensor in results):
            if there and storage._cdata not in given:
                self._there[storage._cdata] = weakref.ref(storage, lambda _, key=storage._cdata: self._there.pop(key))
        if name in _DRAWN:
            self.drawn["cuda" if there else "cpu"] += sum(tensor.numel() for tensor in results)
        return out

    def _on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._there


def _is_device(value: object) -> bool:
    return (
        isinstance(value, torch.device) or value in ("cpu", "cuda") if isinstance(value, (str, torch.device)) else False
    )


def _is_gpu(device: object) -> bool:
    return torch.device(device).type == "cuda"  # type: ignore[arg-type]


def _on_cpu(value: object) -> object:
    return _CPU if _is_device(value) else value
