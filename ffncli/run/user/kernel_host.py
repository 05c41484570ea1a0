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
from ffncli.run.user.surroundings import Surroundings
from ffncli.system.child import reads_memory, see_users_folders, settle
from ffncli.system.gpu import use_device

if TYPE_CHECKING:
    from torch import Tensor

    from ffncli.kernels.kernel import Computes, Kernel, Params
    from ffncli.run.user.host_requests import CallRequest, GradientRequest, HostRequest, HostSetup, LoadRequest

Answer = dict[str, Any]
_LONGEST = 300  # maximum length of an error message, in characters
_MOST_GRAPHS = 64  # of a compiled function; torch runs it uncompiled beyond its own limit of 8


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
    see_users_folders()
    host = KernelHost(setup.device, memory_number)
    _send(connection, {"ready": True, "reads_memory": reads_memory(os.getppid())})
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
    kernel: Kernel | None = None
    compute: Computes | None = None
    params: Params = ()
    request: LoadRequest | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    earlier: list[Mapping[str, Tensor]] = field(default_factory=list)
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    surroundings: Surroundings = field(default_factory=Surroundings)

    def answer(self, request: HostRequest) -> Answer:
        """Carry out a request and return the answer; an exception becomes an answer with `error`."""
        from ffncli.run.user.host_requests import (
            CallRequest,
            GradientRequest,
            LoadRequest,
            ShowSurroundings,
            TakeWeights,
        )

        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.config.recompile_limit = _MOST_GRAPHS
        try:
            if isinstance(request, LoadRequest):
                return self._load(request)
            if isinstance(request, GradientRequest):
                return self._gradients(request)
            if isinstance(request, TakeWeights):
                return self._take_weights()
            if isinstance(request, ShowSurroundings):
                read = self.surroundings
                return {"files": [*read.files], "variables": [*read.variables]}
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
        self.compute, self.params, self.weights, self.inputs, self.earlier = None, (), {}, {}, []
        self.memory, self.request = mmap(self.memory_number, request.size), request
        self.surroundings.begin(None if request.choice.ref else request.choice.file)
        kernel = self.kernel = kernel_of(request.choice, request.steps, request.spec)
        refusal = kernel.refusal(request.steps, self.device, request.dtype)
        if refusal is None:
            torch.backends.cudnn.allow_tf32 = False  # convolutions round float32 to 10 bits on GPUs by default
            self.weights = {name: region.of(self.memory).to(self.device) for name, region in request.weights.items()}
            with torch.no_grad():
                self.params = tuple(kernel.prepare(request.steps, self.weights))
            self.compute = kernel.build(request.steps, self.device, request.dtype)
            if dynamo := sys.modules.get(
                "torch._dynamo"
            ):  # beyond its limit torch runs a function without compiling it
                dynamo.config.recompile_limit = _MOST_GRAPHS
        return {"name": kernel.name, "refusal": refusal, "computes": kernel.computes, "trains": kernel.trains}

    def _take_weights(self) -> Answer:
        """Prepare other weights, which are new tensors; the first ones stay, so that none has the address of one."""
        import torch

        assert self.request is not None
        assert self.memory is not None
        assert self.kernel is not None
        self.earlier.append(self.weights)
        regions = self.request.weights.items()
        self.weights = {name: region.of(self.memory).to(self.device, copy=True) for name, region in regions}
        with torch.no_grad():
            self.params = tuple(self.kernel.prepare(self.request.steps, self.weights))
        return {}

    def _call(self, request: CallRequest) -> Answer:
        import torch

        assert self.compute is not None
        x = self._input(request.tokens, request.place)
        with torch.enable_grad() if request.grad else torch.inference_mode():
            out: object = self.compute(x, self.params)
        return self._answer_with(out, x, request)

    def _input(self, tokens: int, place: int) -> Tensor:
        """Return x as the kernel gets it: the same tensor in every call with this place and number of tokens."""
        shared = self._shared(tokens, place)
        key = (place, tokens)
        x = self.inputs.setdefault(key, shared.to(self.device))  # on a CPU, this is the shared memory itself
        if self.device != "cpu":
            x.copy_(shared)
        return x

    def _shared(self, tokens: int, place: int) -> Tensor:
        assert self.request is not None
        assert self.memory is not None
        return self.request.inputs[place].of(self.memory)[:tokens]

    def _answer_with(self, out: object, x: Tensor, request: CallRequest) -> Answer:
        """Write the output to the shared memory, and x, in case the kernel has changed it; return the output's form."""
        import torch

        assert self.request is not None
        assert self.memory is not None
        shared = self._shared(request.tokens, request.place)
        if self.device != "cpu":
            shared.copy_(x.detach())
        if not isinstance(out, torch.Tensor):
            return {"type": type(out).__name__}
        if list(out.shape) == list(shared.shape) and out.dtype == shared.dtype:
            self.request.output.of(self.memory)[: request.tokens].copy_(out.detach())
        return {"shape": list(out.shape), "dtype": str(out.dtype).removeprefix("torch.")}

    def _gradients(self, request: GradientRequest) -> Answer:
        """Run the kernel and its backward pass as training does: into `.grad` of x and of the canonical weights, also
        through the kernel's own form of the weights."""
        import torch

        from ffncli.run.user.host_requests import laid_out

        assert self.request is not None
        assert self.memory is not None
        assert self.kernel is not None
        assert self.compute is not None
        assert self.request.upstream is not None
        g = laid_out(self.request.upstream.of(self.memory).to(self.device), request.tokens, request.layout)
        leaves = {name: tensor.detach() for name, tensor in self.weights.items()}
        for name in leaves.keys() & set(request.trained):
            leaves[name].requires_grad_()
        entering = []
        with torch.enable_grad():
            for place in (request.place, *(() if request.then is None else (request.then,))):
                x = self._input(request.tokens, place).detach()
                entering.append(x.requires_grad_("x" in request.trained))
                out: object = self.compute(x, tuple(self.kernel.prepare(self.request.steps, leaves)))
                if not isinstance(out, torch.Tensor) or out.shape != x.shape or out.dtype != x.dtype:
                    return self._answer_with(out, x, request)
                if not out.requires_grad:
                    return self._answer_with(out, x, request) | {"requires_grad": False}
                for _ in range(request.passes - 1):  # only the last pass counts
                    out.backward(g, retain_graph=True)  # type: ignore[no-untyped-call]
                    for tensor in (x, *leaves.values()):
                        tensor.grad = None
                out.backward(g)  # type: ignore[no-untyped-call]
        missing = []
        for name, tensor in {"x": entering[0], **leaves}.items():
            if tensor.grad is not None:
                place = self.request.gradients[name].of(self.memory)
                (place[: request.tokens] if name == "x" else place).copy_(tensor.grad)
            elif name in request.trained:
                missing.append(name)
        return self._answer_with(out, entering[0], request) | {"requires_grad": True, "missing": missing}

    def _show_weights(self) -> Answer:
        if self.request is not None and self.memory is not None and self.device != "cpu":
            for name, tensor in self.weights.items():
                self.request.weights[name].of(self.memory).copy_(tensor)
        return {}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread left running by the user's code must not keep the process alive
