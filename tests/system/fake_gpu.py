"""A stand-in for torch with a GPU that cannot be used, and for a machine that has one: by the texts torch raises."""

from types import SimpleNamespace

import torch

# What torch 2.10 to 2.13 and CUDA's runtime say, in a situation each (c10/cuda/CUDAException.h, CUDAFunctions.cpp,
# torch/csrc/cuda/Module.cpp; the rest is cudaGetErrorString's).
TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with `TORCH_USE_CUDA_DSA`."
)
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable" + TAIL
FULL = "CUDA error: out of memory" + TAIL
TOO_NEW = "CUDA error: no kernel image is available for execution on the device" + TAIL
NONE_VISIBLE = "No CUDA GPUs are available"
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NOT_COMPILED = "Torch not compiled with CUDA enabled"
NOT_READY = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
MISMATCH = "Error 803: system has unsupported display driver / cuda driver combination"
OLD_CARD = "Error 804: forward compatibility was attempted on non supported HW"
ECC = "CUDA error: uncorrectable ECC error encountered" + TAIL
UNKNOWN = "CUDA error: unspecified launch failure" + TAIL
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 MiB is free."
)


class AcceleratorError(RuntimeError):
    """torch's type for what the driver reports."""


class FakeCudaTorch:
    """As much of torch as the question needs; `raises` is the text of what making a tensor raises, None for none."""

    __version__ = "2.13.0+cu130"

    def __init__(self, raises=None, count=1, cuda="13.0", hip=None, free=(1 << 20, 80 << 30)):
        self.raises, self.made, self.current = raises, [], None
        self.version = SimpleNamespace(cuda=cuda, hip=hip)
        self.cuda = SimpleNamespace(
            device_count=lambda: count,
            is_available=lambda: raises is None and count > 0,
            set_device=self._set,
            mem_get_info=lambda device: free,
            get_device_capability=lambda index: (12, 0),
            get_arch_list=lambda: ["sm_80", "sm_90"],
        )

    def _set(self, index):
        self.current = index

    def device(self, text):
        return text

    def ones(self, *shape, device):
        self.made.append(device)
        if self.raises is not None:
            raise AcceleratorError(self.raises) if self.raises != NOT_COMPILED else AssertionError(self.raises)
        return torch.ones(*shape)


def install(monkeypatch, fake):
    """The real torch with that GPU: what a command asks of it is what `fake` answers."""
    ones = torch.ones

    def made(*shape, device="cpu", **more):
        return (
            fake.ones(*shape, device=device) if str(device).startswith("cuda") else ones(*shape, device=device, **more)
        )

    monkeypatch.setattr(torch, "ones", made)
    monkeypatch.setattr(torch, "__version__", fake.__version__)
    monkeypatch.setattr(torch.version, "cuda", fake.version.cuda)
    for name, answer in vars(fake.cuda).items():
        monkeypatch.setattr(torch.cuda, name, answer)
