"""Times of collectives by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.models.counting.cluster import Wires
from ffncli.system.hardware import Link, link_named

NVLINK, NDR = link_named("nvlink4", "--link"), link_named("ndr", "--network")
H100 = Wires(NVLINK, NDR, per_node=8, efficiency=0.8)
# NCCL's protocol for many bytes (Simple): seconds of a call, of a step within a node, of a step between nodes
CALL, STEP, CROSSING = 8.4e-6, 3.4e-6, 14e-6


def test_a_ring_in_a_node():
    expected = CALL + 14 * STEP + 2 * 7 / 8 * 1e9 / (0.8 * 450e9)
    assert H100.all_reduce_s(1e9, 8) == pytest.approx(expected)
    assert H100.all_reduce_s(1e9, 1) == H100.all_reduce_s(0, 8) == 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [  # the least of NCCL's LL (6.6 + 14 × 0.6 us, a quarter of the bandwidth), LL128 (14 + 14 × 1.9, 0.92), Simple
        (1e3, 15.0e-6 + 1.75e3 / (0.25 * 360e9)),
        (4e6, 40.6e-6 + 1.75 * 4e6 / (0.92 * 360e9)),
        (1e8, 56.0e-6 + 1.75e8 / 360e9),
    ],
)
def test_few_bytes_wait_less_and_many_are_sent_faster(size, expected):
    assert H100.all_reduce_s(size, 8) == pytest.approx(expected)


def test_over_pcie_there_is_no_ll128():
    cards = Wires(link_named("pcie4", "--link"), None, per_node=8, efficiency=1.0)
    for size in (1e3, 1e5, 1e6, 1e7):
        expected = min(20.6e-6 + 1.75 * size / (0.25 * 31e9), 88.2e-6 + 1.75 * size / 31e9)
        assert cards.all_reduce_s(size, 8) == pytest.approx(expected)


def test_a_ring_over_two_nodes_leaves_them_by_eight_ports():
    """8 ports of 50 GB/s are slower than the link's 450; of its 30 steps, 4 cross."""
    expected = CALL + 26 * STEP + 4 * CROSSING + 2 * 15 / 16 * 1e9 / (0.8 * 400e9)
    assert H100.all_reduce_s(1e9, 16) == pytest.approx(expected)
    assert (H100.names(8), H100.names(9), H100.names(1)) == (("nvlink4",), ("nvlink4", "ndr"), ())


def test_without_a_link_only_the_network_is_left():
    alone = Wires(None, NDR, per_node=1, efficiency=1.0)
    assert alone.all_reduce_s(1e9, 4) == pytest.approx(CALL + 6 * CROSSING + 1.5 * 1e9 / 50e9)
    assert alone.names(4) == ("ndr",)
    unknown = Wires(None, None, per_node=8, efficiency=1.0)
    assert unknown.all_reduce_s(1, 2) is unknown.all_to_all_s(1, 2) is unknown.names(2) is None


def test_an_all_to_all_takes_the_slower_of_link_and_network():
    """Of 16 ranks, 7 others are here and 8 there."""
    assert H100.all_to_all_s(1e9, 8) == pytest.approx(CALL + STEP + 7 / 8 * 1e9 / (0.8 * 450e9))
    assert H100.all_to_all_s(1e9, 16) == pytest.approx(CALL + CROSSING + 8 / 16 * 1e9 / (0.8 * 50e9))
    assert H100.all_to_all_s(1e9, 8, apart=8) == pytest.approx(CALL + CROSSING + 7 / 8 * 1e9 / (0.8 * 50e9))


def test_of_a_link_without_a_switch_two_ranks_have_one_wire():
    mesh = Wires(link_named("xgmi-mi300x", "--link"), None, per_node=8, efficiency=1.0)
    wire = 448e9 / 7
    assert mesh.all_reduce_s(1e9, 2) == pytest.approx(CALL + 2 * STEP + 1e9 / wire)
    assert mesh.all_reduce_s(1e9, 8) == pytest.approx(CALL + 14 * STEP + 1.75e9 / 448e9)
    assert Link("x", "x", 10, "node", "").bytes_per_s(2) == 10e9


@given(st.integers(1, 300), st.integers(2, 64), st.integers(1, 10**9), st.integers(1, 10**9))
def test_more_bytes_never_take_less(per_node, ranks, a, b):
    wires = Wires(NVLINK, NDR, per_node, 0.8)
    small, large = sorted((a, b))
    for call in (wires.all_reduce_s, wires.all_to_all_s):
        assert call(small, ranks) <= call(large, ranks)
