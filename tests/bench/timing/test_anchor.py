"""The machine anchor: the work that it says, on buffers of its own, without torch."""

import random
import subprocess
import sys
from itertools import pairwise

import numpy

from ffncli.bench.records import ANCHOR
from ffncli.bench.timing import reference_arms
from ffncli.system import hardware


def arrays(arm) -> dict[str, numpy.ndarray]:
    return dict(zip(arm.call.__code__.co_freevars, (c.cell_contents for c in arm.call.__closure__), strict=True))


def test_it_multiplies_and_copies():
    arm = reference_arms.anchor(random.Random(0))
    own = arrays(arm)
    own["product"][...] = own["destination"][...] = 7
    out = arm.call()
    assert arm.name == ANCHOR
    assert arm.inner is None
    exact = own["a"].astype(numpy.float64) @ own["b"].astype(numpy.float64)
    assert out.shape == (72, 64, 64)
    assert numpy.allclose(out, exact, atol=1e-4 * abs(exact).max())
    assert own["destination"].nbytes == 2 << 20
    assert numpy.array_equal(own["destination"], own["source"])
    assert all(
        0.9 < array.std() < 1.1 for name, array in own.items() if name != "product"
    )  # no constants: they are fast


def test_the_same_numbers_elsewhere_at_whole_lines():
    draw = random.Random(0)
    some = [arrays(reference_arms.anchor(draw)) for _ in range(6)]
    every = [array for own in some for array in own.values()]
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in every)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(a.ctypes.data % 64 == 0 for a in every)
    assert len({own["a"].ctypes.data % 4096 for own in some}) > 2
    for name in ("a", "b", "source"):
        assert all(numpy.array_equal(own[name], some[0][name]) for own in some)


def test_no_torch():
    code = "import sys, ffncli.bench.timing.reference_arms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_on_a_gpu_the_copy_is_far_larger_than_any_l2_and_random(monkeypatch):
    import torch

    largest_l2 = max(device.llc_bytes for device in hardware.devices() if device.name.startswith(("H", "B", "GB")))
    assert 8 * largest_l2 < 2 * reference_arms._GPU_COPIED
    monkeypatch.setattr(reference_arms, "_GPU_COPIED", 1 << 16)
    monkeypatch.setattr(reference_arms, "_GPU_SIDE", 32)
    run = reference_arms.gpu_anchor.__wrapped__("cpu")
    copied = dict(zip(run.__code__.co_freevars, (c.cell_contents for c in run.__closure__), strict=True))
    left, right, source = copied["left"], copied["right"], copied["source"]
    torch.testing.assert_close(run(), left @ right)
    assert torch.equal(copied["target"], source)
    assert 250 < len(source.unique()) <= 256
    assert left.std() > 0.9
