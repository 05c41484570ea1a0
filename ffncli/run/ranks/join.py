"""Joining the other ranks of a run, and reporting lost ranks."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from ffncli.block.shard import Ranks
from ffncli.errors import ExitCode, FFNError, Terminated
from ffncli.run.ranks.environment import Place, device_of, torchrun
from ffncli.run.ranks.process import ignore_termination
from ffncli.run.ranks.store import CLOSED, FAILED, LEFT, STOPPED, TIMED_OUT, RankGroup, RankStore, absent, open_store
from ffncli.system.gpu import device_index, use_device

# The beginnings of a collective's error messages. gloo's errors name a source file; errors of NCCL and the stores have
# their own types.
_LOST = re.compile(r"gloo/|pair closure|NCCL|ProcessGroup|Connection (closed|reset)|Broken pipe")
_WAITED = re.compile(r"[Tt]imed out|[Tt]imeout")


@contextmanager
def joined(ranks: Ranks, device: str, timeout: float) -> Iterator[RankGroup]:
    """Join `ranks` in a process group with a mesh (gloo for CPUs, NCCL for GPUs), until the end of the with block.

    `timeout` is the number of seconds to wait for the other ranks, both to join and in every collective. Raises
    FFNError if this process is not a rank (exit 2), and if another rank is lost or does not join (exit 3).
    """
    place = torchrun()
    if place is None:
        raise FFNError("this process is not one of several ranks", "start it with torchrun")
    store = open_store(place, timeout)
    try:
        store.arrive(timeout)
        with _in_group(store, ranks, _device(device, place), timedelta(seconds=timeout)) as group:
            yield group
        store.answer(LEFT)
    except BaseException as error:
        lost = _reason(store, error, timeout)
        if lost is None:
            raise
        raise lost from error


@contextmanager
def _in_group(store: RankStore, ranks: Ranks, device: torch.device, limit: timedelta) -> Iterator[RankGroup]:
    backend, place = ("nccl" if device.type == "cuda" else "gloo"), store.place
    distributed.init_process_group(
        backend,
        store=PrefixStore("group", store.shared),
        rank=place.rank,
        world_size=place.world_size,
        timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield RankGroup(ranks, place.rank, device, _mesh(ranks, device.type, limit))
    finally:
        distributed.destroy_process_group()


def _mesh(ranks: Ranks, kind: str, limit: timedelta) -> DeviceMesh:
    """Return the mesh [ep, tp] of the ranks, with groups created here, because torch's default groups wait for half an
    hour."""
    grid = torch.arange(ranks.world_size).reshape(ranks.ep, ranks.tp)
    subgroups: Any = distributed.new_subgroups_by_enumeration
    groups = [subgroups(rows.tolist(), timeout=limit)[0] for rows in (grid.T, grid)]
    return DeviceMesh.from_group(groups, kind, mesh=grid, mesh_dim_names=("ep", "tp"))


def _device(device: str, place: Place) -> torch.device:
    """Return the device of this rank: the CPU, or the GPU with the rank's local index."""
    index = device_index(device)
    if index is None:
        return torch.device("cpu")
    return torch.device(use_device(device_of(place, device), torch))


def _reason(store: RankStore, error: BaseException, timeout: float) -> FFNError | Terminated | None:
    """Return an FFNError to raise instead, such as one that names a lost rank; None to raise `error` itself."""
    terminated, lost = isinstance(error, Terminated), _is_lost(error)
    if not (terminated or lost):
        _leave_word(store, isinstance(error, KeyboardInterrupt))
        return None
    ignore_termination()
    waited = lost and bool(_WAITED.search(str(error)))
    try:
        store.answer(STOPPED if terminated else TIMED_OUT if waited else CLOSED)
        answers = store.answers()
    except Exception:  # the store is lost, together with the machine that ran it
        return None if terminated else FFNError("the other ranks are lost", code=ExitCode.ENVIRONMENT)
    silent = [rank for rank in range(store.place.world_size) if rank not in answers]
    if silent:
        hung = TIMED_OUT in answers.values()
        return absent(silent, f"did not answer within {timeout:g} s" if hung else "ended before the others")
    if terminated:
        return None
    if STOPPED in answers.values():
        return Terminated()
    return FFNError("a rank stopped before the others", code=ExitCode.ENVIRONMENT)


def _leave_word(store: RankStore, stopped: bool) -> None:
    """Record for the other ranks that this rank was stopped, or that it reports its own error."""
    ignore_termination()
    with suppress(Exception):  # the store may be lost too
        store.answer(STOPPED if stopped else FAILED)
        if not stopped:
            store.may_report()


def _is_lost(error: BaseException) -> bool:
    """Return whether `error` is a collective's report that another rank has ended or does not answer."""
    if isinstance(error, (distributed.DistBackendError, distributed.DistNetworkError, distributed.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
