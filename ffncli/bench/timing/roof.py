"""measured_roof: this machine's best rates, measured in the process that times the kernels, in about half a second."""

from collections.abc import Callable
from typing import Any

import torch

from ffncli.bench.machine import machine
from ffncli.bench.records import Roof
from ffncli.bench.timing.clock import Clock
from ffncli.bench.timing.gpu.cuda_clock import clock_for
from ffncli.bench.timing.outcomes import verdict_of
from ffncli.block.dtypes import dtype as dtype_named
from ffncli.kernels import blas, onednn

_GEMMS = {"cpu": (256, 512, 768, 1024, 1536, 2048), "cuda": (1024, 2048, 4096, 8192)}  # n tokens, n × n weights
_SECONDS = 0.3  # s for the matmuls; memory is measured for two thirds of that time
_WIDTH = 4096  # width of the matrix that is multiplied by one token
_COPY_LEAST, _COPY_MOST, _COPY_GPU = 16 << 20, 1 << 30, 512 << 20  # bytes of a buffer


def measured_roof(device: str, dtype: str, threads: int, clock: Clock | None = None) -> Roof:
    """Return the machine's best rates. For matrix products, this is the best rate over a few shapes; for memory, the
    best rate of a copy (counting bytes read and written), a sum, and the product of a matrix and one token.

    Takes about half a second, or more if the caches are large; if matmuls are slow, only the smaller shapes are tried.
    `threads` is set in torch while this runs; `clock` defaults to the device's clock.
    """
    clock = clock or clock_for(device)
    before = torch.get_num_threads()
    try:
        if threads != before:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            flops = _best_gemm(device, getattr(torch, dtype_named(dtype).torch), clock)
            moved, llc = _best_copy(device, clock)
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
    return Roof(flops, moved, llc)


def guarded(measure: Callable[[], Roof]) -> tuple[Roof, str]:
    """Return the roof, and a note if the roof could not be measured, such as for lack of memory. The case's blocks are
    already finished, so they are kept."""
    try:
        return measure(), ""
    except (RuntimeError, MemoryError) as error:
        return Roof(), f"the machine's roof could not be measured: {verdict_of(error)[1]}"


def _best_gemm(device: str, kind: Any, clock: Clock) -> float | None:
    """Return the FLOP/s of the best matmul; sizes grow while the next matmul is expected to fit into the time."""
    began, best = clock.now(), 0.0
    left = _SECONDS
    for n in _GEMMS["cuda" if device.startswith("cuda") else "cpu"]:
        expected = 2 * n**3 / best if best else 0.0
        if 3 * expected > left:
            break
        products = _products(n, device, kind)
        share = max(left / 4, 3 * expected) / len(products)
        seconds = min(_best_of(product, clock, share) for product in products)
        best = max(best, 2 * n**3 / seconds) if seconds > 0 else best
        left = _SECONDS - (clock.now() - began)
    return best or None


def _products(n: int, device: str, kind: Any) -> list[Callable[[], object]]:
    """Return ways to multiply n tokens by n × n weights. On a CPU, these include numpy's matmul, and matmuls with
    weights that oneDNN or MKL has reordered in advance: torch's own matmul reorders them in every call, and may use MKL
    on a processor that is not Intel's.

    Values in a 16-bit dtype that the processor cannot multiply are widened to float32, as kernels do.
    """
    on_cpu = not device.startswith("cuda")
    if on_cpu and kind.itemsize == 2 and not (onednn.available(device) and onednn.multiplies(kind)):
        kind = torch.float32
    x, w, out = (torch.randn(n, n, device=device).to(kind) for _ in range(3))
    ways: list[Callable[[], object]] = [lambda: torch.mm(x, w.t(), out=out)]
    if on_cpu and blas.numpy_multiplies(kind):
        ways.append(lambda: blas.numpy_matmul(x, w, out))
    if onednn.available(device) and onednn.multiplies(kind):
        reordered = torch.ops.mkldnn._reorder_linear_weight(w, n)
        ways.append(lambda: onednn.linear(x, reordered, None))
    if blas.mkl_multiplies(device, kind):
        packed = blas.mkl_packed(w, n)
        ways.append(lambda: blas.mkl_linear(x, packed, w, None))
    return ways


def _best_copy(device: str, clock: Clock) -> tuple[float | None, int]:
    """Return the best rate in bytes/s of a copy, a sum and matmuls with one token, on a buffer larger than the
    last-level cache, and that cache's size.

    The rate is None if so little memory is free that the buffer would fit into the cache.
    """
    llc = machine.llc_bytes(device)
    if device.startswith("cuda"):  # long enough that start and end do not matter
        size, free = max(4 * llc, _COPY_GPU), torch.cuda.mem_get_info(torch.device(device))[0]
    else:
        # three times the cache's size: with twice its size, part of a buffer would still be cached
        size, free = min(max(3 * llc, _COPY_LEAST), _COPY_MOST), machine.available_memory() or _COPY_MOST
    size = min(size, free // 8)
    if size <= llc:
        return None, llc
    source = _numbers(max(2 * _WIDTH, size // 8 // _WIDTH * 2 * _WIDTH), device)
    low, high = source.chunk(2)  # a copy from one to the other moves as many bytes as a sum of both
    bytes_ = source.numel() * 4
    ways = [lambda: high.copy_(low), *_reads(source, device)]
    rates = [bytes_ / seconds for call in ways if (seconds := _best_of(call, clock, _SECONDS / 6)) > 0]
    return max(rates, default=None), llc


def _reads(source: torch.Tensor, device: str) -> list[Callable[[], object]]:
    """Return ways to read float32 values once: a sum, and the product of one token with a matrix of these values, which
    a library may read faster."""
    matrix, y = source.view(-1, _WIDTH), _numbers(_WIDTH, device)
    ways: list[Callable[[], object]] = [source.sum, lambda: torch.mv(matrix, y)]
    if not device.startswith("cuda"):
        x, out = _numbers(len(matrix), device)[None], torch.empty(1, _WIDTH)
        ways.append(lambda: blas.numpy_matmul(x, matrix, out))
    return ways


def _numbers(count: int, device: str) -> torch.Tensor:
    """Return random values on a GPU, because it draws less power on constants and therefore clocks higher. Return ones
    on a CPU, which would take seconds to draw a GiB of random values."""
    return torch.rand(count, device=device) if device.startswith("cuda") else torch.ones(count, device=device)


def _best_of(call: Callable[[], object], clock: Clock, seconds: float) -> float:
    """Return the least time of one call among at least three blocks, which together take about `seconds`."""
    first = clock.time(call, 1)
    # Blocks last a millisecond, which makes the clock's overhead negligible.
    inner = max(1, round(1e-3 / first)) if first > 0 else 1
    best, end, count = first, clock.now() + seconds, 0
    while count < 2 or (clock.now() < end and count < 100):
        best = min(best, clock.time(call, inner) / inner)
        count += 1
    return best
