"""The GPU that `--device` names: every command checks here that a tensor can be created on it. Also reads the GPU's
current load and limits.

torch is passed as an argument: nothing here imports it. A GPU may be present but unusable: busy in exclusive mode,
full, too new for this torch, hidden by CUDA_VISIBLE_DEVICES. So a tensor is created on it, and torch's error is turned
into one line.

Memory, other processes, clocks and power are read through nvidia-ml-py (module `pynvml`, extra `gpu`), by the uuid that
torch reports, because a GPU's index under CUDA_VISIBLE_DEVICES may differ from its index in NVML. Whatever a card or a
driver does not provide is None.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ffncli.errors import ExitCode, FFNError, clean, shown
from ffncli.system.cgroup import ROOT
from ffncli.system.packages import extra_command

# How torch's messages about errors of the driver, cuDNN and Triton begin.
_REPORTED = re.compile(r"\b(CUDA|HIP|CUBLAS|cuDNN)( driver)? error|\bTriton Error \[(CUDA|HIP)\]")
_DEVICE = re.compile(r"cpu|cuda(?::(0|[1-9][0-9]{0,2}))?")
_OTHERS = {"mps": "Apple's GPUs", "xpu": "Intel's GPUs"}  # torch's names for devices that ffn does not support
# The files of a driver, under the root: NVIDIA's own, its modules on Tegra, WSL's, AMD's. In a container that has one
# of several GPUs, the index of that GPU need not be 0; in some sandboxes /proc/driver is missing.
_NODES = (
    "dev/nvidia[0-9]*", "dev/nvidiactl", "proc/driver/nvidia/version", "dev/nvhost-gpu", "dev/nvmap", "dev/dxg",
    "dev/kfd",
)  # fmt: skip
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ON_CPU = "use --device cpu"


@dataclass(frozen=True)
class GpuProblem:
    """The reason why a GPU cannot be used here, with advice."""

    message: str
    hint: str = _ON_CPU

    def error(self, device: str) -> FFNError:
        """Return the problem as a one-line error, exit 3."""
        return FFNError(f"--device {device}: {self.message}", self.hint, ExitCode.ENVIRONMENT)


def device_index(text: str, option: str = "--device") -> int | None:
    """Return the GPU's index in torch, or None for the CPU. Raises FFNError for anything but cpu, cuda or cuda:1."""
    match = _DEVICE.fullmatch(text)
    if match is None:
        name = text.partition(":")[0]
        if name in _OTHERS:
            raise FFNError(f"{option}: {_OTHERS[name]} ({name}) are not supported", "use cpu, cuda or cuda:1")
        raise FFNError(f"{option}: unknown device {shown(text)}", "use cpu, cuda or cuda:1")
    return None if text == "cpu" else int(match[1] or 0)


def has_driver(root: Path = ROOT) -> bool:
    """Return True if a driver's files show that there may be a GPU; without such files, only torch can tell."""
    return sys.platform == "win32" or any(True for name in _NODES for _ in root.glob(name))


def use_device(device: str, torch: Any, root: Path = ROOT) -> str:
    """Check that a tensor can be created on the device, and return it. A GPU becomes the current GPU, on which a user's
    own kernels are launched.

    Raises FFNError: exit 2 for an unknown name, exit 3 if torch cannot compute there.
    """
    index = device_index(device)
    if index is not None:
        if problem := problem_of(index, torch, root):
            raise problem.error(device)
        torch.cuda.set_device(index)
        # torch warns about its own thread for gradients, which then does what is missing.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    return device


def problem_of(index: int, torch: Any, root: Path = ROOT) -> GpuProblem | None:
    """Return the reason why torch cannot compute on that GPU, or None if it can. This is checked by creating a tensor
    and running a kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch also reports some of these problems as warnings of several lines
        if not (torch.version.cuda or getattr(torch.version, "hip", None)):
            return _cpu_build(torch, root)
        count = torch.cuda.device_count()
        if 0 < count <= index:
            return _beyond(count)
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
        except Exception as error:
            return explained(str(error), torch, index, root)
    return None


def gpu_failure(error: BaseException, torch: Any = None) -> FFNError | None:
    """Return an error (exit 3) if a GPU's driver reported `error`; None if torch rejected arguments."""
    if not is_gpu_error(error):
        return None
    problem = explained(str(error), torch, 0)
    return FFNError(problem.message, problem.hint, ExitCode.ENVIRONMENT)


@contextmanager
def gpu_errors(device: str, torch: Any) -> Iterator[None]:
    """Turn errors of the GPU in this context into FFNErrors (exit 3): a GPU can become busy or full after the check."""
    try:
        yield
    except RuntimeError as error:
        index = device_index(device)
        if index is None or not is_gpu_error(error):
            raise
        raise explained(str(error), torch, index).error(device) from error


def is_gpu_error(error: BaseException) -> bool:
    """Return True if a driver or one of its libraries reported the error."""
    return type(error).__name__ == "AcceleratorError" or bool(_REPORTED.search(str(error)))


# --- torch's messages as one line -------------------------------------------------------------------------------------


def explained(text: str, torch: Any, index: int, root: Path = ROOT) -> GpuProblem:
    """Return the problem behind an error message; the first line of an unknown message is quoted."""
    for pattern, explain in _KNOWN.items():
        if match := re.search(pattern, text, re.I):
            return explain(match, torch, index, root)
    first = clean(next((line.strip() for line in text.splitlines() if line.strip()), "no reason given"))
    return GpuProblem(f"the GPU cannot be used: {first[:120].rstrip('.')}", f"`ffn doctor` checks it, or {_ON_CPU}")


def _cpu_build(torch: Any, root: Path) -> GpuProblem:
    if not has_driver(root):
        return GpuProblem("there is no GPU here (no driver, and torch was built for CPUs only)")
    how = "install one with CUDA: https://pytorch.org/get-started"
    return GpuProblem(f"torch {torch.__version__} was built for CPUs only", f"{how}, or {_ON_CPU}")


def _beyond(count: int) -> GpuProblem:
    gpus, hiding = "1 GPU" if count == 1 else f"{count} GPUs", _hiding()
    there = f"{hiding} leaves {gpus}" if hiding else f"there {'is' if count == 1 else 'are'} {gpus} here"
    return GpuProblem(there, "use cuda" if count == 1 else f"use cuda:0 to cuda:{count - 1}")


def _hiding() -> str:
    """Return the variable that hides GPUs, with its value: `CUDA_VISIBLE_DEVICES=0`; "" if none is set."""
    name = next((name for name in _HIDING if name in os.environ), "")
    return f"{name}={clean(os.environ[name])[:40]}" if name else ""


def _no_driver(match: re.Match[str], torch: Any, index: int, root: Path) -> GpuProblem:
    if has_driver(root):
        hint = "in a container, start it with its GPUs (docker run --gpus all)"
        return GpuProblem("the driver's library is not installed here", f"{hint}, or {_ON_CPU}")
    return GpuProblem("there is no GPU here (no driver)")


def _none_visible(match: re.Match[str], torch: Any, index: int, root: Path) -> GpuProblem:
    if hiding := _hiding():
        return GpuProblem(f"{hiding} leaves no GPU", f"unset it, or {_ON_CPU}")
    locked = [node for name in _NODES for node in root.glob(name) if not os.access(node, os.R_OK)]
    if locked:
        who = "add your user to the groups render and video" if locked[0].name == "kfd" else "ask for access to it"
        return GpuProblem(f"{locked[0]} cannot be opened: permission denied", f"{who}, or {_ON_CPU}")
    return GpuProblem("torch sees no GPU", f"nvidia-smi lists the GPUs; or {_ON_CPU}")


def _old_driver(match: re.Match[str], torch: Any, index: int, root: Path) -> GpuProblem:
    version = re.search(r"version (\d{4,5})", match.string)
    supports = f" (it supports CUDA {int(version[1]) // 1000}.{int(version[1]) % 1000 // 10})" if version else ""
    return GpuProblem(
        f"the driver is too old for torch {torch.__version__}{supports}",
        f"update the driver, install a torch for an older CUDA, or {_ON_CPU}",
    )


def _full(match: re.Match[str], torch: Any, index: int, root: Path) -> GpuProblem:
    try:
        free, total = torch.cuda.mem_get_info(index)
        left = f": {free / 1e9:.1f} of {total / 1e9:.1f} GB are free"
    except Exception:  # a full GPU may not even have room for the context that this query needs
        left = ""
    return GpuProblem(f"no memory is left on the GPU{left}", f"nvidia-smi shows who uses it; or {_ON_CPU}")


def _no_kernels(match: re.Match[str], torch: Any, index: int, root: Path) -> GpuProblem:
    try:
        major, minor = torch.cuda.get_device_capability(index)
        named = f" (sm_{major}{minor}; it has {', '.join(torch.cuda.get_arch_list())})"
    except Exception:
        named = ""
    how = "install a build that has them: https://pytorch.org/get-started"
    return GpuProblem(f"torch {torch.__version__} has no kernels for this GPU{named}", f"{how}, or {_ON_CPU}")


def _plain(message: str, hint: str) -> Callable[[re.Match[str], Any, int, Path], GpuProblem]:
    return lambda match, torch, index, root: GpuProblem(message, f"{hint}, or {_ON_CPU}")


# The messages come from torch (c10/cuda, torch/csrc/cuda), CUDA and HIP; the numbers in them are values of cudaError_t.
_KNOWN: Mapping[str, Callable[[re.Match[str], Any, int, Path], GpuProblem]] = {
    r"found no nvidia driver|no hip driver": _no_driver,
    r"driver on your system is too old|driver version is insufficient": _old_driver,
    r"no (cuda|hip) gpus are available|no (cuda|rocm)-capable device": _none_visible,
    r"busy or unavailable": _plain(
        "the GPU is busy: another process has it in exclusive mode, or its compute mode is prohibited",
        "nvidia-smi shows both; wait for that process",
    ),
    r"out of memory": _full,
    r"no kernel image|invalid device function|not compatible with the current pytorch": _no_kernels,
    r"error 802|system not yet initialized": _plain(
        "the GPUs are not ready: the fabric manager is not running", "start nvidia-fabricmanager"
    ),
    r"error 803|unsupported display driver|driver/library version mismatch": _plain(
        "the driver was updated, and its parts no longer match", "restart the machine"
    ),
    r"error 804|forward compatibility was attempted": _plain(
        "this GPU does not support the CUDA compatibility library that is installed", "remove cuda-compat"
    ),
    r"ecc error": _plain("the GPU reports a memory error that it could not correct", "nvidia-smi -q -d ECC shows it"),
    r"invalid device ordinal": lambda match, torch, index, root: _beyond(torch.cuda.device_count()),
}
NEEDS = f"clocks and power were not read: {extra_command('gpu')}"
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}  # nvmlComputeMode_t


@dataclass(frozen=True)
class GpuHandles:
    """One GPU as seen by NVML. `whole` is the card, `part` is the share of it that a process gets; without MIG they are
    the same.

    Clocks and power belong to the card, processes to the part.
    """

    nvml: Any
    whole: Any
    part: Any

    def ask(self, name: str, *more: Any, part: bool = False) -> Any:
        """Return the result of one of NVML's functions for the GPU; None if this card or driver does not provide it."""
        asks = getattr(self.nvml, name, None)
        return None if asks is None else answer(self.nvml, asks, self.part if part else self.whole, *more)


def answer(nvml: Any, asks: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `asks`; None if NVML refuses."""
    try:
        return asks(*arguments)
    except nvml.NVMLError:  # for example, because the card does not support it
        return None


def open_gpu(uuid: str, nvml: Any = None) -> tuple[GpuHandles | None, str]:
    """Return (the GPU with torch's uuid, "") or (None, the reason). `nvml` is pynvml or a stand-in.

    torch reports the uuid without the prefix that distinguishes a card from a part of a card (MIG).
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
    """A GPU's state at one moment. Memory is in bytes, clocks in MHz, power in watts; `busy` is the fraction of the
    last second or less in which a kernel was running. `others` is the number of other processes that compute on the
    GPU, `others_memory` the memory that they use."""

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
        """Text such as `2 other processes use this GPU (31.2 GB, 97 % busy)`; "" if there are no others."""
        if not self.others:
            return ""
        figures = [f"{self.others_memory / 1e9:.1f} GB"] if self.others_memory else []
        figures += [f"{100 * self.busy:.0f} % busy"] if self.busy is not None else []
        count = "1 other process uses" if self.others == 1 else f"{self.others} other processes use"
        return f"{count} this GPU" + (f" ({', '.join(figures)})" if figures else "")

    @property
    def power_lowered(self) -> bool:
        """Whether somebody set a power limit below the card's default."""
        return None not in (self.power_limit_w, self.power_default_w) and self.power_limit_w < self.power_default_w  # type: ignore[operator]


def gpu_state(gpu: GpuHandles) -> GpuState:
    """Read the state of the GPU, which takes a few milliseconds."""
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
    """Return torch's uuid of `cuda` or `cuda:1`; None if this version of torch or this card has none."""
    uuid = getattr(torch.cuda.get_device_properties(torch.device(device)), "uuid", None)
    return None if uuid is None else str(uuid)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
