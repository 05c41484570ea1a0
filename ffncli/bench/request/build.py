"""The complete request for a benchmark, checked: for the command line, its self-test and the library alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ffncli.bench.machine.devices import default_device, require_gpu
from ffncli.bench.records import BLOCK, MODEL, Case, Method
from ffncli.bench.request.grid import BenchRequest, Grid, cases, load_block
from ffncli.bench.request.kernels import ChosenKernels, choose_kernels, named_certificates, require_arguments
from ffncli.bench.request.machines import LauncherChoice, require_any_gpu
from ffncli.bench.request.options import CONFLICTS, require_compatible
from ffncli.errors import FFNError, option, shown
from ffncli.kernels import AUTO
from ffncli.kernels.choice import choices
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import folder_of
from ffncli.options.accept import listed
from ffncli.options.conflicts import check

IN_MODEL = (AUTO,)  # the kernels of a model, if none is named


def build_request(
    grid: Grid,
    kernels: Sequence[str] | None,
    baseline: str | None,
    method: Method,
    *,
    fail_if_slower: float | None = None,
    strict: bool = False,
    asked: Mapping[str, str] | None = None,
    certificates: Sequence[str] = (),
    cluster: LauncherChoice | None = None,
    frozen: tuple[Case, ...] = (),
) -> tuple[BenchRequest, tuple[str, ...]]:
    """(the request with defaults filled in; notes about it). `kernels` and `baseline` are as on the command line.

    `asked` are the options with their values, `certificates` the files of certificates. With
    a `cluster`, whose machines need not be like this one, its slots look for their GPUs. `frozen` cases, all on the
    grid's devices and threads, take the place of the grid's. Raises FFNError for an impossible request, before anything
    is measured.
    """
    devices = listed(grid.device) or (() if cluster else (default_device(),))
    wanted = kernels or (IN_MODEL if method.in_model else None)
    named = {"kernel": tuple(kernels or ()), "baseline": baseline, "fail_if_slower": fail_if_slower}
    require_compatible(grid, _of(grid, devices, method), named, {"launcher": cluster is not None})
    if cluster is not None:
        require_any_gpu(devices)
    if grid.ranks.world_size > 1 and (len(set(devices)) > 1 or set(devices) - {"cpu", "cuda"}):
        what = f"over ranks {option('device')} is cpu or cuda: every rank has a GPU of its own"
        raise FFNError(what, f"as in {option('device', 'cuda')}")
    if method.in_model:
        folder_of(load_block(os.fspath(grid.source or ""), Dimensions()), option("in_model"))
        baseline, grid = None, replace(grid, cache="warm")
    about: list[str] = []
    points = frozen or cases(replace(grid, device=devices), about.append, method.seed)
    specs = [case.spec for case in points]
    chosen = ChosenKernels((), BLOCK, {}) if method.by_step else choose_kernels(wanted, baseline, grid.ranks, specs)
    check(CONFLICTS, {"calibrate": method.calibrate, "kernel": tuple(kernel.kernel for kernel in chosen.kernels)})
    if cluster is None:
        require_gpu(devices, method.sustained)
    if method.in_model:  # the kernels that were named, without a baseline that was put before them
        kernels_of_model = chosen.kernels[len(chosen.kernels) - len(choices(wanted or ())) :]
        if slow := next((choice for choice in kernels_of_model if choice.factor is not None), None):
            raise FFNError(f"{option('in_model')}: {shown(slow.text)} can only be timed by itself", "leave it out")
        chosen = replace(chosen, kernels=kernels_of_model, baseline=MODEL, notes=())
    require_arguments(chosen, points)
    data = [pair for case in points for pair in ((case.routing, case.routing_sha256), (case.input, case.input_sha256))]
    files = {**chosen.files, **{os.path.abspath(name): sha256 for name, sha256 in data if sha256}}
    request = BenchRequest(
        points, chosen.kernels, chosen.baseline, method, fail_if_slower, strict, asked or {}, files, os.getcwd(),
        named_certificates(certificates, chosen, points), cluster,
    )  # fmt: skip
    return request, (*chosen.notes, *about)


def _of(grid: Grid, devices: Sequence[str], method: Method) -> dict[str, Any]:
    """What a request comes to, by the names of options: the devices by their kind, how it measures, and its ranks."""
    names = ("processes", "launch", "sustained", "by_step", "in_model")
    return {
        "device": tuple(device.partition(":")[0] for device in devices),
        **{name: getattr(method, name) for name in names},
        **{name: value for name, value in vars(grid.ranks).items() if value > 1},
    }


def require_resumable(request: BenchRequest, more: Mapping[str, Any]) -> None:
    """Raises FFNError for options of a resumed run that contradict it: a gate that could never fail, or a picture."""
    method = request.method
    stored = {"by_step": method.by_step, "in_model": method.in_model, "processes": method.processes}
    of_model = {"source": True} if method.in_model else {}
    require_compatible(stored, of_model, {"fail_if_slower": request.fail_if_slower}, more)
