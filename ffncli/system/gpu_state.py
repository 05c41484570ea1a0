"""What a GPU is doing and what limits it: memory, other processes, clocks, power, by NVIDIA's management library.

Read-only. Through nvidia-ml-py (module `pynvml`, extra `gpu`), by the uuid that torch gives: CUDA_VISIBLE_DEVICES
numbers GPUs differently than NVML. What a card or a driver does not provide is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ffncli.dataclass import dataclass
from ffncli.system.packages import extra_command

NEEDS = f"clocks and power were not read: {extra_command('gpu')}"
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}  # nvmlComputeMode_t


@dataclass(frozen=True)
class GpuHandles:
    """One GPU as NVML has it. `whole` is the card, `part` the share of it that a process gets: the same without MIG.

    Clocks and power are the card's, processes those of the part.
    """

    nvml: Any
    whole: Any
    part: Any

    def ask(self, name: str, *more: Any, part: bool = False) -> Any:
        """The answer of one of NVML's functions about the GPU; None if this card or driver does not provide it."""
        asks = getattr(self.nvml, name, None)
        return None if asks is None else answer(self.nvml, asks, self.part if part else self.whole, *more)


def answer(nvml: Any, asks: Callable[..., Any], *arguments: Any) -> Any:
    """What `asks` returns; None if NVML refuses."""
    try:
        return asks(*arguments)
    except nvml.NVMLError:  # for example, not supported by this card
        return None


def open_gpu(uuid: str, nvml: Any = None) -> tuple[GpuHandles | None, str]:
    """(the GPU with torch's uuid, "") or (None, the reason). `nvml` is pynvml or a stand-in.

    torch gives the uuid without the prefix that says whether it is a card's or that of a part of one (MIG).
    """
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None, NEEDS
    try:
        nvml.nvmlInit()
        return _by_uuid(uuid, nvml), ""
    except nvml.NVMLError as error:
        return None, f"clocks and power were not read: NVML says {str(error) or type(error).__name__}"


def _by_uuid(uuid: str, nvml: Any) -> GpuHandles:
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        card = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
        return GpuHandles(nvml, card, card)
    except nvml.NVMLError:
        try:
            part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")
        except nvml.NVMLError:
            part = None
        if part is None:
            raise
        return GpuHandles(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part), part)


@dataclass(frozen=True)
class GpuState:
    """One reading. Memory in bytes, clocks in MHz, power in watts; `busy` is the share of the last moments (a second or
    less) in which a kernel ran. `others` counts the processes that compute there, this one left out, and
    `others_memory` the bytes that they hold.
    """

    memory_free: int | None = None
    memory_total: int | None = None
    others: int | None = None
    others_memory: int | None = None
    busy: float | None = None
    sm_mhz: int | None = None
    rated_mhz: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    mig: bool = False

    @property
    def neighbours(self) -> str:
        """`2 other processes use this GPU (31.2 GB, 97 % busy)`; empty if there is none."""
        if not self.others:
            return ""
        figures = [f"{self.others_memory / 1e9:.1f} GB"] if self.others_memory else []
        figures += [f"{100 * self.busy:.0f} % busy"] if self.busy is not None else []
        count = "1 other process uses" if self.others == 1 else f"{self.others} other processes use"
        return f"{count} this GPU" + (f" ({', '.join(figures)})" if figures else "")

    @property
    def power_lowered(self) -> bool:
        """Whether somebody set a lower power limit than the card's own."""
        return None not in (self.power_limit_w, self.power_default_w) and self.power_limit_w < self.power_default_w  # type: ignore[operator]


def gpu_state(gpu: GpuHandles) -> GpuState:
    """A reading of the GPU: some milliseconds."""
    memory = gpu.ask("nvmlDeviceGetMemoryInfo", part=True)
    processes = gpu.ask("nvmlDeviceGetComputeRunningProcesses", part=True)
    others = None if processes is None else [one for one in processes if one.pid != os.getpid()]
    rates = gpu.ask("nvmlDeviceGetUtilizationRates")
    mode = gpu.ask("nvmlDeviceGetComputeMode")
    persistence = gpu.ask("nvmlDeviceGetPersistenceMode")
    return GpuState(
        memory_free=None if memory is None else int(memory.free),
        memory_total=None if memory is None else int(memory.total),
        others=None if others is None else len(others),
        others_memory=None if others is None else sum(int(one.usedGpuMemory or 0) for one in others),
        busy=None if rates is None else rates.gpu / 100,
        sm_mhz=gpu.ask("nvmlDeviceGetClockInfo", getattr(gpu.nvml, "NVML_CLOCK_SM", 1)),
        rated_mhz=gpu.ask("nvmlDeviceGetMaxClockInfo", getattr(gpu.nvml, "NVML_CLOCK_SM", 1)),
        power_limit_w=_watts(gpu.ask("nvmlDeviceGetEnforcedPowerLimit")),
        power_default_w=_watts(gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit")),
        persistence=None if persistence is None else bool(persistence),
        compute_mode=None if mode is None else _COMPUTE_MODES.get(int(mode), str(mode)),
        mig=gpu.part is not gpu.whole,
    )


def uuid_of(device: str, torch: Any) -> str | None:
    """torch's uuid of `cuda` or `cuda:1`; None if this version or card has none."""
    uuid = getattr(torch.cuda.get_device_properties(torch.device(device)), "uuid", None)
    return None if uuid is None else str(uuid)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
