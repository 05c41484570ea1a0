"""A stand-in for pynvml: one GPU whose figures a test sets; `refuses` names what this card does not support."""

import time
from types import SimpleNamespace

from ffncli.bench.machine.devices import GpuProbe
from ffncli.system.gpu import open_gpu


class FakeNvml:
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, uuid="GPU-1234", cost=0.0, wall=None):
        self.uuid, self.cost, self.wall = uuid, cost, wall
        self.sm, self.memory, self.milliwatts, self.celsius, self.bits, self.top = 1410, 1593, 312_400, 61, 0, 1410
        self.refuses, self.asked = set(), []
        self.limit, self.default_limit, self.persistent, self.mode, self.utilisation = 700_000, 700_000, 1, 0, 0
        self.processes, self.millijoules = [], None  # (pid, bytes); None: this card does not count its energy

    def _answer(self, name, value):
        self.asked.append(name)
        if self.wall is not None:
            self.wall[0] += self.cost
        if name in self.refuses:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self):
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.uuid:
            raise self.NVMLError("Not Found")
        return "part" if uuid.startswith("MIG-") else "handle"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        assert handle == "part"
        return "handle"

    def nvmlSystemGetDriverVersion(self):
        return self._answer("driver", b"550.54.15")

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return self._answer("rated", self.top)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        if handle == "part":  # a MIG instance has no clock of its own
            raise self.NVMLError("Not Supported")
        return self._answer("clock", self.sm if kind == self.NVML_CLOCK_SM else self.memory)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("power", self.milliwatts)

    def nvmlDeviceGetTemperature(self, handle, kind):
        return self._answer("temperature", self.celsius)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._answer("reasons", self.bits)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.millijoules is None:
            raise self.NVMLError("Not Supported")
        return self._answer("energy", self.millijoules)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._answer("memory", SimpleNamespace(free=79 << 30, total=80 << 30))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self._answer("processes", [SimpleNamespace(pid=pid, usedGpuMemory=n) for pid, n in self.processes])

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._answer("utilisation", SimpleNamespace(gpu=self.utilisation))

    def nvmlDeviceGetComputeMode(self, handle):
        return self._answer("mode", self.mode)

    def nvmlDeviceGetPersistenceMode(self, handle):
        return self._answer("persistence", self.persistent)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._answer("limit", self.limit)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return self._answer("default limit", self.default_limit)


def probe_of(uuid, nvml=None, now=time.perf_counter):
    """(the GPU with that uuid, read through `nvml` or pynvml; the reason if there is none)."""
    gpu, why = open_gpu(uuid, nvml)
    return (GpuProbe(gpu, now), why) if gpu else (None, why)
