"""The bytes that torch really keeps for a backward pass, storage by storage, through saved_tensors_hooks."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class _Box:
    """A saved tensor; it lives as long as the graph that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_storages(compute: Callable[[], Any], parameters: Mapping[str, Tensor]) -> dict[int, int]:
    """Run `compute` with gradients; return the bytes of each storage that its result's graph keeps, by address, without
    those of the parameters."""
    boxes: list[weakref.ref[_Box]] = []

    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())  # an undetached result would keep its own graph alive
        boxes.append(weakref.ref(box))
        return box

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        result = compute()
    alive = [box.tensor for ref in boxes if (box := ref()) is not None]
    known = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    del result
    return {at: size for at, size in storages.items() if at not in known}
