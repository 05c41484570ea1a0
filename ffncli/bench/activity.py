"""Tell a worker's parent which kernel's code is running, through an integer in shared memory, written between blocks.

A message would cost the timed block a system call, and the reader a CPU core; this write costs less than a microsecond,
outside the timed section. The integer outlives a worker that ends or hangs, so the parent still knows which kernel was
running. An arm is one of the calls that are timed in alternation: a kernel, or a reference such as the anchor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap

SIZE = 8  # bytes of the integer: a count, one bit that marks a first call, and the kernel's index
_FIRST, _KERNELS = 16, 17  # bit positions of the first-call bit and of the lowest bit of the count


@dataclass(frozen=True)
class RunningCode:
    """The kernel whose code is running (empty if none is); `first` is true while it is built or called for the first
    time. `count` changes with every call (while timing: with every block of calls)."""

    kernel: str = ""
    first: bool = False
    count: int = 0


class Activity:
    """The code that a process is running: a worker writes, its parent reads; before `share`, one process does both."""

    def __init__(self) -> None:
        self.share(bytearray(SIZE), ())

    def share(self, memory: mmap | bytearray, kernels: Sequence[str]) -> None:
        """Write to and read from this memory. In both processes, a kernel's index is its position in `kernels`."""
        self._cell = memoryview(memory).cast("Q")
        self._names = ("", *kernels)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._count = 0

    def stands_for(self, arm: str, kernel: str) -> None:
        """From now on, record calls of this arm as calls of the kernel."""
        self._numbers[arm] = self._numbers.get(kernel, 0)

    def calls(self, name: str) -> None:
        """Record that this kernel or arm, or a block of its calls, begins. An unknown name counts as no kernel."""
        self._write(self._numbers.get(name, 0))

    def first_call(self, name: str) -> None:
        """Record that this kernel is being built or called for the first time, which may include compilation."""
        self._write(self._numbers.get(name, 0) | 1 << _FIRST)

    def rests(self) -> None:
        """Record that no kernel's code is running."""
        self._write(0)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Record no kernel inside the `with` block, and the previous kernel again afterwards."""
        before = self._cell[0] & ((1 << _KERNELS) - 1)
        self.rests()
        try:
            yield
        finally:
            self._write(before)

    def read(self) -> RunningCode:
        """Return what is running now."""
        value = self._cell[0]
        number = value & ((1 << _FIRST) - 1)
        name = self._names[number] if number < len(self._names) else ""
        return RunningCode(name, bool(value >> _FIRST & 1), value >> _KERNELS)

    def _write(self, what: int) -> None:
        self._count += 1
        self._cell[0] = self._count << _KERNELS | what  # one aligned 8-byte write: never half read
