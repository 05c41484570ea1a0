"""`python -m ffncli.run.user.kernel_host FD MEMORY`: a process that only calls a kernel. Its parent runs `hosted.py`.

Weights and inputs are in the shared memory, and the output is written there. This process holds no reference output, so
the user's code cannot read one. Requests arrive pickled from the parent process; answers are JSON, because the parent
must not unpickle data from a process that runs the user's code.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ffncli.errors import FFNError, clean
from ffncli.run.engine.threads import set_threads
from ffncli.system.child import settle
from ffncli.system.gpu import use_device

if TYPE_CHECKING:
    from torch import Tensor

    from ffncli.kernels.kernel import Computes, Params
    from ffncli.run.user.host_requests import CallRequest, HostRequest, HostSetup, LoadRequest

Answer = dict[str, Any]
_LONGEST = 300  # maximum length of an error message, in characters


def main(arguments: list[str]) -> int:
    """Serve requests. The arguments are the file descriptors of the connection and of the shared memory."""
    settle()
    connection_number, memory_number = map(int, arguments)
    try:
        with Connection(connection_number) as connection:
            serve(connection, memory_number)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed the connection
        return 0
    return 0


def serve(connection: Connection, memory_number: int) -> None:
    """Answer requests until the connection is closed."""
    set_threads()  # imports torch with the settings that let its threads sleep while they wait
    setup: HostSetup = connection.recv()
    _limit(setup.most_bytes)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # kernels are called with NaN, about which numpy warns
    set_threads(setup.threads)
    host = KernelHost(setup.device, memory_number)
    _send(connection, {"ready": True})
    while True:
        _send(connection, host.answer(connection.recv()))


def _send(connection: Connection, answer: Answer) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _limit(most_bytes: int | None) -> None:
    """Limit allocations to `most_bytes`, so that a kernel that needs too much memory fails, rather than the machine."""
    if most_bytes is None or sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes if hard < 0 else min(most_bytes, hard), hard))


@dataclass
class KernelHost:
    """The most recently loaded kernel, its prepared weights, and its inputs by region index and number of tokens."""

    device: str
    memory_number: int
    memory: mmap | None = None
    compute: Computes | None = None
    params: Params = ()
    request: LoadRequest | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def answer(self, request: HostRequest) -> Answer:
        """Carry out a request and return the answer; an exception becomes an answer with `error`."""
        from ffncli.run.user.host_requests import CallRequest, LoadRequest

        try:
            if isinstance(request, LoadRequest):
                return self._load(request)
            return self._call(request) if isinstance(request, CallRequest) else self._show_weights()
        except FFNError as error:
            return {"error": error.message[:_LONGEST], "hint": error.hint[:_LONGEST]}
        except MemoryError:
            return {"error": "not enough memory", "hint": ""}
        except BaseException as error:  # includes SystemExit
            text = clean(" ".join(str(error).split()))
            return {"error": f"{type(error).__name__}: {text}"[:_LONGEST], "hint": ""}

    def _load(self, request: LoadRequest) -> Answer:
        import torch

        from ffncli.run.user.kernels import kernel_of

        use_device(self.device, torch)
        self.compute, self.params, self.weights, self.inputs = None, (), {}, {}
        self.memory, self.request = mmap(self.memory_number, request.size), request
        kernel = kernel_of(request.choice, request.steps, request.spec)
        refusal = kernel.refusal(request.steps, self.device, request.dtype)
        if refusal is None:
            torch.backends.cudnn.allow_tf32 = False  # convolutions round float32 to 10 bits on GPUs by default
            self.weights = {name: region.of(self.memory).to(self.device) for name, region in request.weights.items()}
            with torch.no_grad():
                self.params = tuple(kernel.prepare(request.steps, self.weights))
            self.compute = kernel.build(request.steps, self.device, request.dtype)
        return {"name": kernel.name, "refusal": refusal, "computes": kernel.computes}

    def _call(self, request: CallRequest) -> Answer:
        import torch

        assert self.compute is not None
        assert self.request is not None
        assert self.memory is not None
        shared = self.request.inputs[request.place].of(self.memory)[: request.tokens]
        key = (request.place, request.tokens)
        x = self.inputs.setdefault(key, shared.to(self.device))  # on a CPU, this is the shared memory itself
        if self.device != "cpu":
            x.copy_(shared)
        with torch.inference_mode():
            out: object = self.compute(x, self.params)
        if self.device != "cpu":
            shared.copy_(x)
        if not isinstance(out, torch.Tensor):
            return {"type": type(out).__name__}
        if list(out.shape) == list(shared.shape) and out.dtype == shared.dtype:
            self.request.output.of(self.memory)[: request.tokens].copy_(out)
        return {"shape": list(out.shape), "dtype": str(out.dtype).removeprefix("torch.")}

    def _show_weights(self) -> Answer:
        if self.request is not None and self.memory is not None and self.device != "cpu":
            for name, tensor in self.weights.items():
                self.request.weights[name].of(self.memory).copy_(tensor)
        return {}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread left running by the user's code must not keep the process alive
