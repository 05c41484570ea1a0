"""A kernel in its own process, which loads the kernel's file and calls the kernel. The judging process never imports
that file.

Inputs and weights are in memory shared by both processes, so the judging process can detect that a kernel writes to
them. The judging process uses only the kernel's output, and trusts nothing else that the kernel's process sends.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Step
from ffncli.errors import ExitCode, FFNError, clean
from ffncli.kernels.choice import KernelChoice
from ffncli.run.user.host_requests import (
    CallRequest,
    GradientRequest,
    HostRequest,
    HostSetup,
    Layout,
    LoadRequest,
    Region,
    ShowSurroundings,
    ShowWeights,
    TakeWeights,
    laid_out,
)
from ffncli.run.user.surroundings import MOST_FILES
from ffncli.show.text import seconds_text, time_text
from ffncli.system import child
from ffncli.system.child import PrintedBytes, module_command, passed_on, unreadable
from ffncli.system.host import available_memory
from ffncli.system.isolation import isolated, isolation

HOST = module_command("ffncli.run.user.kernel_host")
PLACES = 2  # input buffers for x
_ALIGNMENT = 256  # bytes; some kernels round differently if a tensor is not aligned
_START = 300.0  # seconds for Python and torch to start; long, because a disk may be slow
_PATIENCE = 5.0  # seconds to wait for a process to end after its last answer
_MOST_ANSWER = 1 << 16  # bytes


class KernelFailure(Exception):
    """Raised if a kernel raises, breaks its contract, or takes too long. If `gone` is True, the kernel's process has
    ended."""

    def __init__(self, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


@dataclass(frozen=True)
class TimeLimits:
    """Limits in seconds: `load` for loading a file (which may compile C++), `call` for one call."""

    load: float = 180.0
    call: float = 60.0


@dataclass(frozen=True)
class Gradients:
    """A kernel's output, and its gradients of x and of the canonical weights by name."""

    output: Tensor
    by_name: Mapping[str, Tensor]


@dataclass
class HostedKernel:
    """A kernel in a running host process. Raises KernelFailure if it fails, FFNError if it cannot load."""

    choice: KernelChoice
    device: str
    limits: TimeLimits
    process: subprocess.Popen[bytes]
    connection: Connection
    memory_number: int
    memory: mmap | None = None
    request: LoadRequest | None = None
    name: str = ""  # the kernel's name, as given by the loaded file
    computes: str = ""  # the number format that the kernel declares
    trains: bool = True  # whether the kernel declares that it has gradients
    torch_threads: int | None = None
    reads_memory: bool | None = (
        None  # whether the process could read the judging one's memory before it loaded the file
    )
    isolated: str = ""  # what took rights from the process; empty if nothing did
    changed: set[str] = field(default_factory=set)  # tensors, such as `its input x`, `the weight up.weight`
    _weights: Mapping[str, Tensor] = field(default_factory=dict)

    def load(
        self,
        spec: FFNSpec,
        steps: Sequence[Step],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        tokens: int,
        backward: bool = False,
    ) -> str | None:
        """Load the kernel for this block and up to `tokens` tokens; return the reason if the kernel refuses the block,
        else None. With `backward`, there is room for gradients."""
        self.request = self._placed(spec, tuple(steps), weights, dtype, tokens, backward)
        self._weights, self.changed = weights, set()
        with _allowing(self):
            os.ftruncate(self.memory_number, max(self.request.size, os.fstat(self.memory_number).st_size))
            self.memory = mmap(self.memory_number, self.request.size)
            for name, region in self.request.weights.items():
                region.of(self.memory).copy_(weights[name])
        answer = self._ask(self.request, self.limits.load, "did not load its file within", "--load-time")
        if "error" in answer:
            raise FFNError(_text(answer, "error"), _text(answer, "hint"))
        self.name = _text(answer, "name")
        self.computes = _text(answer, "computes") if answer.get("computes") else ""
        self.trains = answer.get("trains") is not False
        return None if answer.get("refusal") is None else _text(answer, "refusal")

    def call(self, x: Tensor, place: int = 0, grad: bool = False) -> Tensor:
        """Copy x [tokens, d_model] to the input buffer of index `place`, call the kernel on it (with `grad`, in grad
        mode), return the output."""
        return self._call(CallRequest(len(x), place, grad), {place: x})[1]

    def gradients(
        self,
        x: Tensor,
        g: Tensor,
        trained: Sequence[str],
        layout: Layout = "rows",
        passes: int = 1,
        then: Tensor | None = None,
        place: int = 0,
    ) -> Gradients | None:
        """Return the output and the gradients of the tensors in `trained` (`x` and canonical weights), as in
        GradientRequest; None if the output has no gradient. A gradient that the kernel does not return is 0.

        g [tokens, d_model] is the gradient of the output; it must be constant in the dimensions that `layout` expands.
        The kernel must have been loaded with `backward`. `then` is another x.
        """
        assert self.request is not None
        assert self.request.upstream is not None
        assert self.memory is not None
        upstream = self.request.upstream.of(self.memory)
        if layout in ("rows", "columns"):
            laid_out(upstream, len(g), layout).copy_(g)
        else:
            upstream[:1].copy_(g[:1])
        for region in self.request.gradients.values():
            region.of(self.memory).fill_(torch.nan)
        inputs = {place: x} if then is None else {place: x, 1 - place: then}
        other = None if then is None else 1 - place
        request = GradientRequest(len(x), place, True, tuple(trained), layout, passes, other)
        answer, output = self._call(request, inputs)
        if not same_bits(laid_out(upstream, len(g), layout), g):
            self.changed.add("the gradient of its output")
        if not answer.get("requires_grad"):
            return None
        given = {name: self.request.gradients[name].of(self.memory) for name in trained}
        missing = answer.get("missing")
        for name, gradient in given.items():
            if isinstance(missing, list) and name in missing:
                gradient.zero_()
        gradients = {name: gradient[: len(x)] if name == "x" else gradient for name, gradient in given.items()}
        return Gradients(output, {name: gradient.clone() for name, gradient in gradients.items()})

    def _call(self, request: CallRequest, inputs: Mapping[int, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Copy the inputs to the buffers of these indices and call the kernel; return its answer and its output."""
        assert self.request is not None
        assert self.memory is not None
        x = inputs[request.place]
        output = self.request.output.of(self.memory)[: len(x)]
        output.fill_(torch.nan)  # so that a missing output is not mistaken for the last call's output
        for place, values in inputs.items():
            self.request.inputs[place].of(self.memory)[: len(x)].copy_(values)
        answer = self._ask(request, self.limits.call, "did not return within", "--call-time")
        if not all(same_bits(self.request.inputs[n].of(self.memory)[: len(x)], inputs[n]) for n in inputs):
            self.changed.add("its input x")
        if "error" in answer:
            raise KernelFailure("; ".join(filter(None, (_text(answer, "error"), _text(answer, "hint")))))
        if "type" in answer:
            raise KernelFailure(f"returns a {_text(answer, 'type')}, not a tensor")
        if answer.get("shape") != list(x.shape):
            raise KernelFailure(f"returns shape {_text(answer, 'shape')}, expected {list(x.shape)}")
        dtype = str(x.dtype).removeprefix("torch.")
        if answer.get("dtype") != dtype:
            raise KernelFailure(f"returns {_text(answer, 'dtype')}, expected {dtype}")
        return answer, output.clone()

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the loaded kernel other weights of the same shapes, without loading its file again."""
        assert self.request is not None
        assert self.memory is not None
        self._weights = weights
        for name, region in self.request.weights.items():
            region.of(self.memory).copy_(weights[name])
        answer = self._ask(TakeWeights(), self.limits.call, "did not prepare its weights within", "--call-time")
        if "error" in answer:
            raise KernelFailure("; ".join(filter(None, (_text(answer, "error"), _text(answer, "hint")))))

    def inspect(self) -> None:
        """Add to `changed` the weights that have changed since loading."""
        if self.request is None or self.memory is None:
            return
        self._ask(ShowWeights(), self.limits.call, "did not answer within", "--call-time")
        for name, region in self.request.weights.items():
            if not same_bits(region.of(self.memory), self._weights[name]):
                self.changed.add(f"the weight {name}")

    def surroundings(self) -> tuple[list[str], list[str]]:
        """Return (the files, the environment variables) that the kernel's code has read, as its process says."""
        answer = self._ask(ShowSurroundings(), self.limits.call, "did not answer within", "--call-time")
        given = [answer.get(key) for key in ("files", "variables")]
        files, variables = ([*filter(_is_text, of)] if isinstance(of, list) else [] for of in given)
        if len(files) > MOST_FILES:
            raise FFNError(f"{self.choice.label} reads more than {MOST_FILES} files", "put its code into fewer files")
        return files, variables

    def threads(self) -> int | None:
        """Return the current number of threads of the kernel's process; None if the system does not report it."""
        folder = Path(f"/proc/{self.process.pid}/task")
        try:
            return len(os.listdir(folder))
        except OSError:
            return None

    def _placed(
        self,
        spec: FFNSpec,
        steps: tuple[Step, ...],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        tokens: int,
        backward: bool,
    ) -> LoadRequest:
        """Build the load request, with a region of the shared memory for every tensor."""
        end = 0

        def next_region(shape: Sequence[int], kind: torch.dtype) -> Region:
            nonlocal end
            region = Region(-(-end // _ALIGNMENT) * _ALIGNMENT, tuple(shape), kind)
            end = region.end
            return region

        regions = {name: next_region(tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        inputs = tuple(next_region((tokens, spec.d_model), dtype) for _ in range(PLACES))
        output = next_region((tokens, spec.d_model), dtype)
        if not backward:
            return LoadRequest(self.choice, spec, steps, dtype, end, regions, inputs, output)
        upstream = next_region((tokens, spec.d_model), dtype)
        trained = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
        gradients = {name: next_region(tensor.shape, tensor.dtype) for name, tensor in trained.items()}
        gradients["x"] = next_region((tokens, spec.d_model), dtype)
        return LoadRequest(self.choice, spec, steps, dtype, end, regions, inputs, output, upstream, gradients)

    def _ask(self, request: HostRequest | HostSetup | None, seconds: float, slow: str, option: str) -> dict[str, Any]:
        """Send a request and return the answer. Raise KernelFailure if the process does not answer, or ends."""
        try:
            if request is not None:
                self.connection.send(request)
            if not self.connection.poll(seconds):
                child.end(self.process)
                more = f" ({option} allows more)" if option else ""
                limit = time_text(seconds) if seconds < 1 else seconds_text(seconds)
                raise KernelFailure(f"{slow} {limit}{more}", gone=True)
            answer = json.loads(self.connection.recv_bytes(_MOST_ANSWER))
        except (EOFError, OSError):
            code = child.exit_code(self.process) if child.has_ended(self.process, _PATIENCE) else None
            itself = ": the kernel's code ended it" if code == 0 else ""
            raise KernelFailure(f"its process {child.ending(code)}{itself}", gone=True) from None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise KernelFailure("unexpected reply from its process", gone=True)
        return answer


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have equal bits: -0 differs from 0, NaN may equal NaN."""
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*as_bytes)


@contextmanager
def hosted(
    choice: KernelChoice,
    device: str = "cpu",
    threads: int | None = None,
    limits: TimeLimits = TimeLimits(),
    isolate: bool = False,
    command: Sequence[str] = HOST,
) -> Iterator[HostedKernel]:
    """Start a process for the kernel; at the end, stop it and all processes that it started. With `isolate`, it gives
    up rights before it loads anything; raises FFNError (exit 3) if this system cannot do that."""
    kind = isolation() if isolate else ""
    ours, theirs = socket.socketpair()
    memory_number = child.shared_memory()
    process = None
    with isolated(isolate) as before, unreadable(), passed_on(PrintedBytes(choice.label)) as output:
        try:
            with theirs:
                numbers = (theirs.fileno(), memory_number)
                process = subprocess.Popen(
                    [*before, *command, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=numbers,
                    # so that Ctrl-C reaches only this process, and killing the group kills the kernel's children
                    process_group=0,
                )
            with Connection(ours.detach()) as connection:
                kernel = HostedKernel(choice, device, limits, process, connection, memory_number)
                # No limit if there is a GPU, because its drivers reserve far more memory than they use.
                most_bytes = available_memory() if device == "cpu" else None
                kernel.torch_threads, kernel.isolated = threads, kind
                ready = kernel._ask(HostSetup(device, threads, most_bytes), _START, "did not start within", "")
                kernel.reads_memory = ready.get("reads_memory")
                yield kernel
        finally:
            ours.close()
            os.close(memory_number)
            if process is not None:
                child.end(process)


@contextmanager
def _allowing(kernel: HostedKernel) -> Iterator[None]:
    """Convert a system error during memory sharing into an FFNError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = f"cannot share memory with the process of {kernel.choice.label}: {error}"
        raise FFNError(why, "take a smaller block", ExitCode.ENVIRONMENT) from None


def _text(answer: Mapping[str, Any], key: str) -> str:
    """Return a string field of an answer, shortened and cleaned, because the user's code may have written it."""
    value = answer.get(key)
    return clean(value if isinstance(value, str) else str(value))[:500]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) < os.pathconf("/", "PC_PATH_MAX")
