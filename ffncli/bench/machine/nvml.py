"""A GPU's state from NVIDIA's management library: clocks, power, temperature, throttling reasons. Read-only.

Through nvidia-ml-py (module `pynvml`, extra `gpu`). A reading takes microseconds to milliseconds and is taken
between blocks only, at most 5 % of the time. Values that a card or a driver does not provide are None.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ffncli.bench.machine.counters import CLOCK

NEEDS = "clocks and power were not read: pip install 'ffncli[gpu]'"
_SHARE = 0.05  # of the time that readings may take

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h: nvmlClocksEventReason...), why a clock is below its maximum.
IDLE, SETTING, POWER_CAP, DISPLAY = 0x1, 0x2, 0x4, 0x100
_REASONS = {
    IDLE: "idle",
    SETTING: "clocks set by a user",
    POWER_CAP: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    DISPLAY: "display clock",
}
_THROTTLES = 0x8 | 0x20 | 0x40 | 0x80  # signs of a problem; a power cap is normal for a busy card


@dataclass(frozen=True)
class Sample:
    """One reading. Clocks in MHz, power in watts (on recent cards the mean of the last second), temperature in °C."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    reasons: int = 0
    rated_mhz: int | None = None

    @property
    def why(self) -> tuple[str, ...]:
        """The reasons in words."""
        return tuple(text for bit, text in _REASONS.items() if self.reasons & bit)


class GpuProbe:
    """One GPU to be read. `driver` and `rated_mhz` (the highest SM clock) are constant."""

    def __init__(self, nvml: Any, handle: Any, now: Callable[[], float] = time.perf_counter) -> None:
        self._nvml, self._handle, self._now = nvml, handle, now
        self._last, self._next = Sample(), float("-inf")
        self.driver = _text(self._ask(nvml.nvmlSystemGetDriverVersion))
        self.rated_mhz: int | None = self._of_gpu("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)

    def read(self) -> Sample:
        """A reading; an empty one if it would exceed its share of the time: the last one is of another arm's block."""
        began = self._now()
        if began < self._next:
            return Sample()
        power = self._of_gpu("nvmlDeviceGetPowerUsage")
        self._last = Sample(
            self._of_gpu("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            self._of_gpu("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            None if power is None else power / 1000,
            self._of_gpu("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            self._reasons(),
            self.rated_mhz,
        )
        ended = self._now()
        self._next = ended + (ended - began) / _SHARE
        return self._last

    def fresh(self) -> Sample:
        """A new reading, regardless of its cost: after a turn of a third of a second."""
        self._next = float("-inf")
        return self.read()

    def _reasons(self) -> int:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            reasons = self._of_gpu(name)  # the second is the name in drivers before 535
            if reasons is not None:
                return int(reasons)
        return 0

    def _of_gpu(self, name: str, *more: Any) -> Any:
        asks = getattr(self._nvml, name, None)
        return None if asks is None else self._ask(asks, self._handle, *more)

    def _ask(self, asks: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return asks(*arguments)
        except self._nvml.NVMLError:  # for example, not supported by this card
            return None


def probe_of(uuid: str, nvml: Any = None, now: Callable[[], float] = time.perf_counter) -> tuple[GpuProbe | None, str]:
    """(the GPU with torch's uuid; the reason if there is none).

    By uuid, since CUDA_VISIBLE_DEVICES numbers GPUs differently than NVML. `nvml` is pynvml or a stand-in.
    """
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None, NEEDS
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except nvml.NVMLError as error:
        return None, f"clocks and power were not read: NVML says {str(error) or type(error).__name__}"
    return GpuProbe(nvml, handle, now), ""


@cache
def gpu_probe(device: str) -> tuple[GpuProbe | None, str]:
    """`probe_of` of the GPU that torch calls `cuda` or `cuda:1`; opened once in a process."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(torch.device(device)), "uuid", None)
    return (
        (None, "clocks and power were not read: torch has no uuid for this GPU")
        if uuid is None
        else probe_of(str(uuid))
    )


def clock_flags(before: Sample, after: Sample, sm_hz: float | None = None) -> tuple[str, ...]:
    """The GPU's state during a block between two readings: `sm=1410` MHz, `power=312` W; `gpu-throttled`,
    `power-capped`.

    `clock=0.71` is the share of the rated clock, given if below 0.75, as for a CPU. Reasons count if either reading has
    them. The SM clock is `sm_hz` if the GPU counted it itself; other figures are from the reading after the block, when
    the GPU has just worked, or from that before it if there was none after. Without a reading there is no `clock`: why
    it is low is not known.
    """
    newest = before if after == Sample() else after
    sm_mhz = round(sm_hz / 1e6) if sm_hz else newest.sm_mhz
    flags = []
    reasons = before.reasons | after.reasons
    if reasons & _THROTTLES:
        flags.append("gpu-throttled")
    if reasons & POWER_CAP:
        flags.append("power-capped")
    if sm_mhz is not None:
        flags.append(f"sm={sm_mhz}")
        if newest.rated_mhz and sm_mhz < CLOCK * newest.rated_mhz:
            flags.append(f"clock={sm_mhz / newest.rated_mhz:.2f}")
    if newest.power_w is not None:
        flags.append(f"power={newest.power_w:.0f}")
    return tuple(flags)


def _text(answer: object) -> str:
    """The answer as text: old pynvml versions return bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer or "")
