"""Which kernel's code a worker runs: a number in memory that its parent reads, written between blocks.

A message would cost a timed block a system call, and its reader a core; this costs less than a microsecond, outside the
clock. It is still there when the worker has ended or hangs: the parent then knows which kernel did that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap

SIZE = 8  # bytes of the number: a count, one bit for a first call, and the kernel
_FIRST, _KERNELS = 16, 17  # bits: that of a first call, and all below the count


@dataclass(frozen=True)
class RunningCode:
    """The kernel whose code runs, empty for none; `first`: it is built, or called for the first time. `count` differs
    from one call (while timing: from one block of calls) to the next."""

    kernel: str = ""
    first: bool = False
    count: int = 0


class Activity:
    """The code that a process runs. The worker writes, its parent reads; without `share` both are the same process."""

    def __init__(self) -> None:
        self.share(bytearray(SIZE), ())

    def share(self, memory: mmap | bytearray, kernels: Sequence[str]) -> None:
        """Use this memory; both sides number the kernels as they are listed here."""
        self._cell = memoryview(memory).cast("Q")
        self._names = ("", *kernels)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._count = 0

    def stands_for(self, arm: str, kernel: str) -> None:
        """Calls of this arm count as the kernel's."""
        self._numbers[arm] = self._numbers.get(kernel, 0)

    def calls(self, name: str) -> None:
        """That kernel, or arm, is called now, or a block of its calls begins; none of ours if it is not one of them."""
        self._write(self._numbers.get(name, 0))

    def first_call(self, name: str) -> None:
        """That kernel is built or called for the first time: it may compile."""
        self._write(self._numbers.get(name, 0) | 1 << _FIRST)

    def rests(self) -> None:
        """No kernel's code runs."""
        self._write(0)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, no kernel's code runs; afterwards, that of the same kernel as before."""
        before = self._cell[0] & ((1 << _KERNELS) - 1)
        self.rests()
        try:
            yield
        finally:
            self._write(before)

    def read(self) -> RunningCode:
        """What runs now."""
        value = self._cell[0]
        number = value & ((1 << _FIRST) - 1)
        name = self._names[number] if number < len(self._names) else ""
        return RunningCode(name, bool(value >> _FIRST & 1), value >> _KERNELS)

    def _write(self, what: int) -> None:
        self._count += 1
        self._cell[0] = self._count << _KERNELS | what  # eight aligned bytes: nobody reads half of them
