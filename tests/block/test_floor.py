"""The time floor against the roofline's closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.traffic import time_floor

amounts, rates = st.integers(1, 10**15), st.floats(1e6, 1e16)


@given(amounts, amounts, rates, rates)
def test_the_floor_is_work_over_the_attainable_rate(flops, moved, peak, bandwidth):
    """As Williams et al. write it: attainable FLOP/s = min(peak, bandwidth x intensity)."""
    floor = time_floor(flops, moved, peak, bandwidth)
    assert floor.seconds == pytest.approx(flops / min(peak, bandwidth * (flops / moved)))
    if abs(flops / moved / (peak / bandwidth) - 1) > 1e-9:
        assert floor.bound == ("memory" if flops / moved < peak / bandwidth else "compute")


def test_at_the_ridge_itself():
    floor = time_floor(8, 2, 4.0, 1.0)
    assert (floor.compute_s, floor.memory_s, floor.seconds, floor.bound) == (2.0, 2.0, 2.0, "compute")
