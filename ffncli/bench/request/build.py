"""The complete request for a benchmark, checked: for the command line, its self-test and the library alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ffncli.bench.machine.devices import default_device, require_gpu
from ffncli.bench.records import BLOCK, MODEL, Case, Method
from ffncli.bench.request.certificate import named_certificates
from ffncli.bench.request.cluster import LauncherChoice, require_named_places
from ffncli.bench.request.grid import BenchRequest, Grid, cases
from ffncli.bench.request.in_model import IN_MODEL, named_kernels, require_model
from ffncli.bench.request.kernels import ChosenKernels, choose_kernels, require_arguments
from ffncli.bench.request.split import require_possible
from ffncli.errors import FFNError
from ffncli.kernels import AUTO


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

    `asked` are the options with their values, `certificates` the files of --certificate. With
    a `cluster`, whose machines need not be like this one, its slots look for their GPUs. `frozen` cases, all on the
    grid's devices and threads, take the place of the grid's. Raises FFNError for an impossible request, before anything
    is measured.
    """
    if method.by_step:
        _require_steps_alone(grid, kernels, baseline, method)
    if method.in_model:
        require_model(grid, baseline, method)
        baseline, grid = None, replace(grid, caches=("warm",))
    if cluster is not None:
        require_named_places(grid.devices, grid.threads)
    devices = grid.devices or (default_device(),)
    require_possible(grid.ranks, grid.passes, devices, method)
    about: list[str] = []
    points = frozen or cases(replace(grid, devices=devices, seed=method.seed), about.append)
    specs = [case.spec for case in points]
    wanted = kernels or (IN_MODEL if method.in_model else None)
    chosen = ChosenKernels((), BLOCK, {}) if method.by_step else choose_kernels(wanted, baseline, grid.ranks, specs)
    if method.calibrate != "quick" and not any(kernel.kernel == AUTO for kernel in chosen.kernels):
        raise FFNError(f"--calibrate {method.calibrate} is for auto, which is not timed", "add it: --kernel eager,auto")
    _require_graphs_possible(devices, method)
    if cluster is None:
        require_gpu(devices, method.sustained)
    if method.in_model:
        chosen = replace(chosen, kernels=named_kernels(chosen, wanted or ()), baseline=MODEL, notes=())
    notes = (*chosen.notes, *about)
    require_arguments(chosen, points)
    request = BenchRequest(
        points, chosen.kernels, chosen.baseline, method, fail_if_slower, strict, asked or {},
        {**chosen.files, **_data_files(points)}, os.getcwd(), named_certificates(certificates, chosen, points), cluster,
    )  # fmt: skip
    require_gate(request)
    return request, notes


def _data_files(points: Sequence[Case]) -> dict[str, str]:
    """The files of --routing and --input, absolute, with their sha256."""
    names = [pair for case in points for pair in ((case.routing, case.routing_sha256), (case.input, case.input_sha256))]
    return {os.path.abspath(name): sha256 for name, sha256 in names if sha256}


def _require_steps_alone(grid: Grid, kernels: Sequence[str] | None, baseline: str | None, method: Method) -> None:
    """Raises FFNError for options that make no sense when the steps of a block are timed."""
    if kernels or baseline:
        raise FFNError("--by-step contradicts --kernel and --baseline", "it times steps, not kernels")
    if method.sustained or set(grid.passes) - {"forward"}:
        raise FFNError("--by-step times the forward pass, in short blocks", "leave out --pass and --sustained")


def _require_graphs_possible(devices: Sequence[str], method: Method) -> None:
    """Raises FFNError for CUDA graphs of what none can hold."""
    if method.launch != "graphs":
        return
    if method.by_step:
        raise FFNError("--by-step contradicts --launch graphs", "steps are launched one by one")
    if not all(device.startswith("cuda") for device in devices):
        raise FFNError("--launch graphs needs --device cuda", "CUDA graphs are a way to launch work on a GPU")


def require_gate(request: BenchRequest) -> None:
    """Raises FFNError for a gate that could never fail."""
    if request.fail_if_slower is None:
        return
    if request.method.by_step:
        raise FFNError("--by-step contradicts --fail-if-slower", "it times steps, not kernels")
    if request.method.processes == 1:
        raise FFNError(
            "--fail-if-slower needs several --processes", "one process cannot show process-to-process variation"
        )
