"""Which kernel's code runs, as one side writes it and the other reads it."""

import os
from mmap import mmap

from ffncli.bench.activity import SIZE, Activity, RunningCode
from ffncli.bench.records import GEMM, TWIN
from ffncli.system.child import shared_memory


def both_sides() -> tuple[Activity, Activity]:
    """The worker's, and its parent's, on two mappings of one memory."""
    number = shared_memory(SIZE)
    worker, parent = Activity(), Activity()
    for side in (worker, parent):
        side.share(mmap(number, SIZE), ("eager", "mine"))
    os.close(number)
    return worker, parent


def test_the_parent_reads_what_the_worker_wrote():
    worker, parent = both_sides()
    assert parent.read() == RunningCode()
    worker.first_call("mine")
    assert (parent.read().kernel, parent.read().first) == ("mine", True)
    before = parent.read()
    worker.calls("mine")
    assert (parent.read().kernel, parent.read().first) == ("mine", False)
    worker.calls("mine")  # one more block of the same kernel
    assert len({before.count, parent.read().count}) == 2
    worker.rests()
    assert parent.read().kernel == ""


def test_arms_of_ours_are_nobody_and_the_twin_is_the_baseline():
    worker, parent = both_sides()
    worker.calls(GEMM)
    assert parent.read().kernel == ""
    worker.calls(TWIN)
    assert parent.read().kernel == ""
    worker.stands_for(TWIN, "eager")
    worker.calls(TWIN)
    assert parent.read().kernel == "eager"


def test_a_reference_is_no_kernels_code():
    worker, parent = both_sides()
    worker.first_call("mine")
    seen = [parent.read()]
    with worker.resting():
        seen.append(parent.read())
    seen.append(parent.read())
    assert [(one.kernel, one.first) for one in seen] == [("mine", True), ("", False), ("mine", True)]
    assert len({one.count for one in seen}) == 3


def test_as_many_kernels_as_the_number_has_room_for_and_more_blocks_than_a_run_has():
    side = Activity()
    side.share(bytearray(SIZE), [f"k{n}" for n in range(65535)])
    side._count = 2**46
    side.first_call("k65534")
    assert side.read() == RunningCode("k65534", True, 2**46 + 1)
