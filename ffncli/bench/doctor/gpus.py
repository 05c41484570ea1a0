"""The GPUs of `ffn doctor`: whether torch can compute there, what they are, who else uses them, what limits them.

torch is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ffncli.bench.doctor.check import CheckStatus, DoctorCheck, size_text
from ffncli.system import hardware
from ffncli.system.gpu import has_driver, problem_of
from ffncli.system.gpu_state import GpuState, gpu_state


def gpu_checks() -> Iterator[DoctorCheck]:
    """Rows for every GPU that torch counts; one row if there is none, or none that can be used."""
    torch = _torch()
    if torch is None:
        return
    count = torch.cuda.device_count()
    if not count:
        yield _unusable(torch)
        return
    from ffncli.bench.machine import machine

    for index in range(count):
        yield from _of_gpu(index, torch)
    yield DoctorCheck("driver", machine.driver("cuda:0") or "unknown")


def _unusable(torch: Any) -> DoctorCheck:
    problem = problem_of(0, torch)
    if problem is None or not has_driver():
        return DoctorCheck("gpu", "none")
    status: CheckStatus = "bad" if torch.version.cuda or getattr(torch.version, "hip", None) else "missing"
    return DoctorCheck("gpu", problem.message, status, problem.hint)


def _of_gpu(index: int, torch: Any) -> Iterator[DoctorCheck]:
    from ffncli.bench.machine import machine
    from ffncli.bench.machine.devices import gpu_handles

    device = f"cuda:{index}"
    properties = torch.cuda.get_device_properties(index)
    handles, why = gpu_handles(device)
    state = gpu_state(handles) if handles else None  # before this process has anything there
    named = f"{properties.name}, {size_text(properties.total_memory)}, L2 {size_text(machine.llc_bytes(device))}"
    if problem := problem_of(index, torch):
        yield DoctorCheck(f"gpu {index}", f"{named}: {problem.message}", "bad", problem.hint)
    else:
        yield DoctorCheck(f"gpu {index}", named)
    if state is None:
        yield DoctorCheck(f"gpu {index} state", why, "note")
    else:
        yield from state_checks(index, state)
    row = hardware.find(properties.name)
    sheet = "not in the built-in table: only fractions of the measured roof"
    if row:
        sheet = f"{row.tflops.get('bf16') or row.tflops['fp16']:g} TFLOP/s dense, {row.gbytes_per_s:g} GB/s"
    yield DoctorCheck(f"data sheet {index}", sheet, "ok" if row else "note")


def state_checks(index: int, state: GpuState) -> Iterator[DoctorCheck]:
    """A GPU's memory and neighbours, its clock and power limit, its modes."""
    if state.memory_free is not None and state.memory_total is not None:
        value = f"{size_text(state.memory_free)} free of {size_text(state.memory_total)}"
        value += f", {state.neighbours}" if state.neighbours else ", no other process"
        advice = "times include the turns of the other work: stop it, or take another GPU" if state.neighbours else ""
        yield DoctorCheck(f"gpu {index} memory", value, "note" if advice else "ok", advice)
    clocks = [f"{state.sm_mhz} MHz now"] if state.sm_mhz is not None else []
    clocks += [f"up to {state.rated_mhz} MHz"] if state.rated_mhz is not None else []
    clocks += [f"power limit {state.power_limit_w:.0f} W"] if state.power_limit_w is not None else []
    if clocks:
        lowered = f"the power limit was lowered from {state.power_default_w:.0f} W" if state.power_lowered else ""
        advice = f"{lowered}: compare only with the same limit; nvidia-smi -pl changes it" if lowered else ""
        yield DoctorCheck(f"gpu {index} clocks", ", ".join(clocks), "note" if lowered else "ok", advice)
    yield from _modes(index, state)


def _modes(index: int, state: GpuState) -> Iterator[DoctorCheck]:
    """Persistence, compute mode and MIG, if the driver tells any of them."""
    modes, advice = [], []
    if state.persistence is not None:
        modes.append(f"persistence mode {'on' if state.persistence else 'off'}")
        if not state.persistence:
            advice.append("sudo nvidia-smi -pm 1 keeps the driver loaded: processes start sooner")
    if state.compute_mode is not None:
        modes.append(f"compute mode {state.compute_mode}")
        if state.compute_mode == "prohibited":
            advice.append("sudo nvidia-smi -c 0 allows computing")
    if state.mig:
        modes.append("a MIG instance: clocks and power are the whole card's")
    if modes:
        yield DoctorCheck(f"gpu {index} modes", ", ".join(modes), "note" if advice else "ok", "; ".join(advice))


def _torch() -> Any:
    try:
        import torch
    except Exception:  # its own row shows it
        return None
    return torch
