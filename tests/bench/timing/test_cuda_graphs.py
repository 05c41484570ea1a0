"""Graphs on a simulated GPU: one for each copy, all arms or none, and a reason where there is none."""

import pytest
import torch

from ffncli.bench.judge.roofline import work_of
from ffncli.bench.records import Case
from ffncli.bench.timing.cuda_clock import CudaClock
from ffncli.bench.timing.cuda_graphs import MOST_COPIES, REPLAYED, Launching, NotCaptured, by_graphs, captured
from ffncli.bench.timing.outcomes import BrokenArm
from ffncli.block.recipe import FFNSpec
from tests.bench.fake_cuda import FakeCuda


def arm(cuda, kernels=4, seconds=1e-6, name="kernel"):
    def call(copy):
        for _ in range(kernels):
            cuda.launch(seconds, f"{name} {copy}")
        return copy

    return call


def test_each_copy_has_its_own_graph_and_its_own_output():
    cuda = FakeCuda()
    calls = captured(arm(cuda), ["a", "b", "c"], cuda)
    del cuda.log[:]
    assert [call() for call in calls] == ["a", "b", "c"]
    assert cuda.log == [f"kernel {copy}" for copy in "abc" for _ in range(4)]
    assert cuda.current == "default"


def test_nothing_runs_while_captured_and_the_warm_up_is_in_the_side_stream():
    cuda = FakeCuda()
    streams = []

    def call(copy):
        streams.append((cuda.current, cuda.capturing is None))
        cuda.launch(1e-6, copy)

    captured(call, ["a"], cuda)
    assert set(streams) == {("side", True), ("side", False)}
    assert cuda.log.count("a") == streams.count(("side", True)) == 4


def test_a_replay_is_one_launch():
    """Forty kernels of 1 µs that take the host 8 µs each to launch: 40 µs of the GPU, 320 µs of the host."""
    cuda = FakeCuda(overhead=8e-6)
    (call,) = captured(arm(cuda, 40), [0], cuda)
    clock = CudaClock(cuda, cuda.now)
    for _ in range(4):
        clock.time(call, 1)
    before = cuda.now()
    assert clock.time(call, 100) == pytest.approx(100 * 40e-6)
    assert cuda.now() - before < 1.1 * 100 * 40e-6


def routed(cuda):
    def call(copy):
        cuda.launch(1e-6)
        cuda.wait()

    return call


def test_a_call_that_looks_at_its_data_is_refused_before_a_capture_is_tried():
    cuda = FakeCuda()
    with pytest.raises(NotCaptured, match=r"^called a synchronizing CUDA operation$"):
        captured(routed(cuda), [0], cuda)
    assert not cuda.spoiled
    assert (cuda.sync_mode, cuda.current, cuda.capturing) == (0, "default", None)


def test_a_wait_that_torch_does_not_see_spoils_the_capture_and_no_more():
    """A library that waits by its own means."""
    cuda = FakeCuda()
    cuda.set_sync_debug_mode = lambda mode: None
    with pytest.raises(NotCaptured, match=r"^CUDA error: operation not permitted when stream is capturing$"):
        captured(routed(cuda), [0], cuda)
    assert (cuda.current, cuda.capturing, cuda.spoiled) == ("default", None, False)  # an empty capture ended well


def test_a_capture_that_fails_only_at_its_end():
    cuda = FakeCuda()

    def call(copy):
        cuda.launch(1e-6)
        cuda.spoiled = cuda.capturing is not None

    with pytest.raises(NotCaptured, match="previous error during capture"):
        captured(call, [0], cuda)
    assert not cuda.spoiled


def test_what_a_call_raises_by_itself_goes_through():
    cuda = FakeCuda()

    def call(copy):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        captured(call, [0], cuda)
    assert cuda.current == "default"


def test_too_many_copies():
    cuda = FakeCuda()
    with pytest.raises(NotCaptured, match=f"257 copies .* the limit is {MOST_COPIES}"):
        captured(arm(cuda), range(MOST_COPIES + 1), cuda)
    assert len(captured(arm(cuda), range(MOST_COPIES), cuda)) == MOST_COPIES


class Seated:
    """An arm as a table has it."""

    def __init__(self, call, copies):
        self.on_copy, self.copies, self.calls = call, copies, None

    def replay(self, calls):
        self.calls = calls


def test_all_arms_are_replayed():
    cuda = FakeCuda(overhead=1e-5)
    arms = {"eager": Seated(arm(cuda), "ab"), "packed": Seated(arm(cuda, 3), "ab")}
    launching = Launching(True, cuda)
    launching.settle(arms)
    assert (launching.graphs, launching.note) == (True, REPLAYED)
    assert [[call() for call in one.calls] for one in arms.values()] == [["a", "b"], ["a", "b"]]
    before = cuda.host
    arms["eager"].calls[0]()
    assert cuda.host - before == pytest.approx(1e-5)


def test_one_arm_that_cannot_be_captured_makes_all_plain():
    cuda = FakeCuda()
    launching = Launching(True, cuda)
    for _ in range(2):  # and it is not tried again
        cuda.log.clear()
        arms = {"packed": Seated(arm(cuda), "a"), "mine": Seated(routed(cuda), "a"), "eager": Seated(arm(cuda), "a")}
        launching.settle(arms)
        assert launching.graphs is False
        assert launching.note == "no CUDA graphs, as mine cannot be captured: called a synchronizing CUDA operation"
        assert [one.calls for one in arms.values()] == [None] * 3
    assert not cuda.log


def test_an_arm_that_no_longer_can_be_captured_is_out():
    """Its blocks of the first placement were replays: launches cannot stand beside them."""
    cuda = FakeCuda()
    launching = Launching(True, cuda)
    launching.settle({"eager": Seated(arm(cuda), "a"), "mine": Seated(arm(cuda), "a")})
    with pytest.raises(BrokenArm) as broken:
        launching.settle({"eager": Seated(arm(cuda), "a"), "mine": Seated(routed(cuda), "a")})
    assert broken.value.name == "mine"
    assert "synchronizing" in str(broken.value.__cause__)


def test_large_cases_are_called_plainly_without_a_word():
    cuda = FakeCuda()
    launching = Launching(False, cuda)
    launching.settle({"mine": (one := Seated(routed(cuda), "ab"))})
    assert (launching.graphs, launching.note, one.calls, cuda.log) == (False, "", None, [])


def test_the_reason_is_what_was_raised_first():
    """A user's kernel makes an error of its own of what torch raised."""
    cuda = FakeCuda()

    def call(copy):
        try:
            cuda.wait()
        except RuntimeError as error:
            raise BrokenArm("mine") from FFNErrorLike.of(error)

    class FFNErrorLike(Exception):
        @classmethod
        def of(cls, error):
            made = cls("mine.py raised when it was called")
            made.__cause__ = error
            return made

    with pytest.raises(NotCaptured, match=r"^called a synchronizing CUDA operation$"):
        captured(call, [0], cuda)


@pytest.mark.parametrize(
    ("tokens", "d_model", "d_ff", "passes", "graphs"),
    [
        (1, 512, 2048, "forward", True),
        (1, 4096, 11008, "forward", True),  # 270 MB in bf16: 68 µs at 4 TB/s
        (1, 4096, 11008, "forward+backward", False),  # and their gradients
        (32, 512, 2048, "forward+backward", True),
        (4096, 4096, 11008, "forward", False),  # 1.1 TFLOP: 1.1 ms at 1 PFLOP/s
    ],
)
def test_small_cases_are_replayed(tokens, d_model, d_ff, passes, graphs):
    spec = FFNSpec(d_model, d_ff, "silu", gated=True)
    work = work_of(Case("", "", spec, tokens, "bf16", passes, device="cuda"))
    assert by_graphs(work.flops, work.bytes) is graphs
