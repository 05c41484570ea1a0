"""Choose and check the device of a benchmark, in the parent (which loads torch only if there may be a GPU) and in a
worker. Between blocks, read a GPU's clocks, power, temperature and throttling reasons by NVIDIA's management library,
without changing anything.

A reading takes microseconds to milliseconds. Readings are only made between blocks, and take at most 5 % of the time.
Values that a card or driver does not provide are None. Limits of the GPU that hold for a whole run are in
`system/gpu.py`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from ffncli.bench.machine.counters import CLOCK
from ffncli.errors import FFNError
from ffncli.system.gpu import (
    GpuHandles,
    answer,
    device_index,
    gpu_state,
    has_driver,
    open_gpu,
    problem_of,
    use_device,
    uuid_of,
)

_SHARE = 0.05  # maximum fraction of the time to spend on readings

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h: nvmlClocksEventReason...), the reasons for a clock below its
# maximum.
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
# Expected reasons for a low clock: a T4, an L4 or a laptop's GPU is at its power limit under any real load, and a user
# may lock a lower clock. If the clock is below the rated clock for any other reason, or for no reported reason, the GPU
# is slow.
_EXPECTED = SETTING | POWER_CAP
_THROTTLES = 0x8 | 0x20 | 0x40 | 0x80  # signs of a problem; a power cap is normal for a busy card


def default_device() -> str:
    """Return a GPU if torch has one, otherwise the CPU."""
    if not has_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_gpu(devices: Sequence[str], sustained: bool) -> None:
    """Raise FFNError if a GPU is certainly missing (exit 3), and for `sustained` without a GPU.

    This does not use the GPU: otherwise the parent would occupy GPU memory that the workers need and, in exclusive
    mode, lock them out. The workers test the GPU (`use_in_worker`). If there are no driver files, torch decides, since
    a sandbox may hide them.
    """
    gpus = [device for device in devices if device_index(device) is not None]
    if sustained and not gpus:
        raise FFNError("--sustained needs --device cuda", "on a CPU, blocks are long enough for the clock to settle")
    if not gpus or has_driver():
        return
    import torch

    index = device_index(gpus[0])
    if not torch.cuda.is_available() and index is not None and (problem := problem_of(index, torch)):
        raise problem.error(gpus[0])


def use_in_worker(device: str) -> None:
    """Make the device torch's current one. Raises FFNError (exit 3) if torch cannot compute there."""
    import torch

    if device_index(device) is not None:
        with suppress(RuntimeError, AssertionError):  # the GPU cannot be used; the reason is raised below
            neighbours(device)
    use_device(device, torch)


@cache
def neighbours(device: str) -> str:
    """Return which other processes use a GPU, in words. The processes are listed on the first call, before this process
    uses the GPU."""
    gpu, _ = gpu_handles(device)
    return gpu_state(gpu).neighbours if gpu else ""


# --- a GPU's state between blocks, by NVIDIA's management library -----------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One reading: clocks in MHz, power in watts (on recent cards, the mean of the last second), temperature in °C."""

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
    """Reads one GPU. `driver` and `rated_mhz` (the highest SM clock) are constant."""

    def __init__(self, gpu: GpuHandles, now: Callable[[], float] = time.perf_counter) -> None:
        self._gpu, self._nvml, self._now = gpu, gpu.nvml, now
        self._next = float("-inf")
        self._fastest = 0
        self.driver = _text(answer(gpu.nvml, gpu.nvml.nvmlSystemGetDriverVersion))
        self.rated_mhz: int | None = gpu.ask("nvmlDeviceGetMaxClockInfo", gpu.nvml.NVML_CLOCK_SM)

    def read(self) -> Sample:
        """Return a new reading, or an empty one if reading would take too much time; an older reading would belong to
        another kernel's block."""
        began = self._now()
        if began < self._next:
            return Sample()
        power, reasons = self._gpu.ask("nvmlDeviceGetPowerUsage"), self._reasons()
        clock = self._gpu.ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)
        sample = Sample(
            clock,
            self._gpu.ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            None if power is None else power / 1000,
            self._gpu.ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            reasons or 0,
            self._reference(clock, reasons),
        )
        ended = self._now()
        self._next = ended + (ended - began) / _SHARE
        return sample

    def fresh(self) -> Sample:
        """Return a new reading, whatever it costs; used after a turn, which lasts a third of a second."""
        self._next = float("-inf")
        return self.read()

    def energy(self) -> float | None:
        """Return the joules since the driver was loaded (Volta and later); differences are exact over any period."""
        millijoules = self._gpu.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def _reference(self, clock: int | None, reasons: int | None) -> int | None:
        """Return the clock to compare with: the rated clock or, if no reasons are known, the highest clock so far,
        because a power limit then looks like a fault."""
        self._fastest = max(self._fastest, clock or 0)
        return self.rated_mhz if reasons is not None else self._fastest or None

    def _reasons(self) -> int | None:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            reasons = self._gpu.ask(name)  # drivers before 535 use the second name
            if reasons is not None:
                return int(reasons)
        return None


@cache
def gpu_probe(device: str) -> tuple[GpuProbe | None, str]:
    """Return (the probe of torch's `cuda` or `cuda:1`, the reason if it cannot be read); once per process."""
    gpu, why = gpu_handles(device)
    return (GpuProbe(gpu), why) if gpu else (None, why)


@cache
def gpu_handles(device: str) -> tuple[GpuHandles | None, str]:
    """Return (the GPU's NVML handles, the reason if it cannot be read); opened once per process."""
    import torch

    if torch.version.hip:
        return None, "clocks and power of AMD GPUs are not read"
    uuid = uuid_of(device, torch)
    return open_gpu(uuid) if uuid else (None, "clocks and power were not read: torch has no uuid for this GPU")


def clock_flags(before: Sample, after: Sample, sm_hz: float | None = None) -> tuple[str, ...]:
    """Return flags for the GPU's state during a block, from a reading before it and one after it: `sm=1410` MHz,
    `power=312` W; `gpu-throttled`, `power-capped`.

    `clock=0.71` is the fraction of the rated clock. It is included if it is below 0.75, as for a CPU, unless the power
    limit or a clock set by a user explains it. A reason counts if it is in either reading. The SM clock is `sm_hz` if
    the GPU has counted it. Other values come from the reading after the block, just after the GPU has worked, or from
    the reading before the block if the later one is empty. Without a reading there is no `clock`, since the reason for
    a low clock is unknown.
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
        if newest.rated_mhz and sm_mhz < CLOCK * newest.rated_mhz and not reasons & _EXPECTED:
            flags.append(f"clock={sm_mhz / newest.rated_mhz:.2f}")
    if newest.power_w is not None:
        flags.append(f"power={newest.power_w:.0f}")
    return tuple(flags)


def _text(answer: object) -> str:
    """Return an answer as a string: old pynvml versions return bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer or "")
