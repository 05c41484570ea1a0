"""Graphs on a simulated GPU: the calls of a block in one, all arms or none, and a reason where there is none."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from ffncli.bench.judge.roofline import work_of
from ffncli.bench.records import Case
from ffncli.bench.timing.gpu.cuda_clock import CudaClock
from ffncli.bench.timing.gpu.cuda_graphs import (
    MOST_CALLS,
    Launching,
    NotCaptured,
    SpoiledCapture,
    by_graphs,
    calls_of_graph,
    captured,
    repeated,
)
from ffncli.bench.timing.outcomes import BrokenArm, verdict_of
from ffncli.block.recipe import FFNSpec
from tests.bench.fake_cuda import FakeCuda, FakeGraph
from tests.bench.fake_graphs import CostedGraphs


def arm(cuda, kernels=4, seconds=1e-6, name="kernel"):
    def call(copy):
        for _ in range(kernels):
            cuda.launch(seconds, f"{name} {copy}")
        return copy

    return call


def test_one_graph_holds_the_calls_of_a_block_on_the_copies_in_turn():
    cuda = FakeCuda()
    (replay,) = captured(arm(cuda, 1), ["a", "b", "c"], 6, cuda)
    del cuda.log[:]
    assert replay() == "c"
    assert cuda.log == [f"kernel {copy}" for copy in "abcabc"]
    assert cuda.current == "default"


def test_where_a_block_has_fewer_calls_than_copies_several_graphs_go_through_all():
    cuda = FakeCuda()
    replays = captured(arm(cuda, 1), ["a", "b", "c", "d"], 2, cuda)
    del cuda.log[:]
    assert [replay() for replay in replays] == ["b", "d"]
    assert cuda.log == [f"kernel {copy}" for copy in "abcd"]
    assert len(captured(arm(cuda), ["a", "b", "c"], 1, cuda)) == 3


def test_the_graph_that_is_judged_shares_no_memory_with_those_replayed_after_it():
    """Its answers are read last: in a shared pool a graph that was captured before it writes where they stand."""
    cuda, pools = FakeCuda(), {}

    class Pooled(FakeGraph):
        def capture_begin(self, pool=None):
            super().capture_begin(pool)
            self.pool = pool

        def replay(self):
            pools.setdefault(self.work[0][1].split()[0], set()).add(self.pool)
            super().replay()

    cuda.CUDAGraph = lambda: Pooled(cuda)
    captured(arm(cuda, 1), ["a", "b", "c", "d"], 2, cuda, arm(cuda, 1, name="judged"))
    assert {name: len(of) for name, of in pools.items()} == {"kernel": 1, "judged": 1}
    assert not pools["kernel"] & pools["judged"]


@pytest.mark.parametrize("copies", range(1, 30))
def test_a_copy_is_used_again_only_after_half_of_the_others(copies):
    for count in range(copies, 4 * copies + 1):
        order = repeated(range(copies), count)
        assert len(order) == count
        assert set(order) == set(range(copies))
        least = min(later - at for copy in range(copies) for at, later in pairwise(uses(order * 2, copy)))
        assert least >= max(1, copies // 2)
    assert Counter(repeated("abc", 6)) == {"a": 2, "b": 2, "c": 2}


def uses(order, copy):
    return [at for at, one in enumerate(order) if one == copy]


def test_any_number_of_copies_is_replayed():
    """256x512 in bf16 needs 288 copies for one GPU's cache and 504 for another's: both replay."""
    cuda = FakeCuda()
    assert len(captured(arm(cuda), range(1024), 96, cuda)) == 11
    assert len(captured(arm(cuda), range(504), 512, cuda)) == 1


@pytest.mark.parametrize(("inner", "calls"), [(1, 1), (96, 96), (1024, 1024), (1536, 768), (2**20, 1024)])
def test_a_graph_holds_a_whole_block_or_an_equal_part(inner, calls):
    assert calls_of_graph(inner) == calls <= MOST_CALLS
    assert inner % calls == 0


def test_the_beginning_of_a_graph_is_paid_once_a_block():
    """Calls of 3 µs on a GPU that begins a graph 4 µs later than a kernel: 7 µs a call if each has its own graph."""
    cuda = CostedGraphs(begin=4e-6)
    clock = CudaClock(cuda, cuda.now)
    per_call = {}
    for calls in (1, 256):
        (replay,) = captured(arm(cuda, 1, 3e-6), [0], calls, cuda)
        for _ in range(3):
            clock.time(replay, 1)
        per_call[calls] = clock.time(replay, 256 // calls) / 256
    assert per_call[1] == pytest.approx(7e-6)
    assert per_call[256] == pytest.approx(3e-6 + 4e-6 / 256)


def test_no_timed_replay_uploads_its_graph():
    cuda = CostedGraphs(begin=0.0, upload=1e-3)
    clock = CudaClock(cuda, cuda.now)
    for replay in captured(arm(cuda, 2, 1e-6), range(4), 2, cuda):
        assert clock.time(replay, 1) == pytest.approx(4e-6)


def test_nothing_runs_while_captured_and_the_warm_up_is_in_the_side_stream():
    cuda = FakeCuda()
    streams = []

    def call(copy):
        streams.append((cuda.current, cuda.capturing is None))
        cuda.launch(1e-6, copy)

    captured(call, ["a"], cuda=cuda)
    assert set(streams) == {("side", True), ("side", False)}
    assert streams.count(("side", True)) == 4
    assert cuda.log.count("a") == 5  # and the first replay


def test_a_capture_begins_when_the_work_before_it_is_done():
    """A second of another arm's work on the current stream: the first calls on the side stream come after it."""
    cuda, ended = FakeCuda(), []

    def call(copy):
        cuda.launch(1e-6)
        ended.append(cuda.free)

    cuda.launch(1.0, "before")
    captured(call, ["a"], cuda=cuda)
    assert ended[0] >= 1.0


def test_a_replay_is_one_launch():
    """Forty kernels of 1 µs that take the host 8 µs each to launch: 40 µs of the GPU, 320 µs of the host."""
    cuda = FakeCuda(overhead=8e-6)
    (call,) = captured(arm(cuda, 40), [0], cuda=cuda)
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
        captured(routed(cuda), [0], cuda=cuda)
    assert not cuda.spoiled
    assert (cuda.sync_mode, cuda.current, cuda.capturing) == (0, "default", None)


def test_a_wait_that_torch_does_not_see_spoils_the_capture():
    """A library that waits by its own means. Nothing is tried to mend it: torch may not recover."""
    cuda = CostedGraphs()
    cuda.set_sync_debug_mode = lambda mode: None
    with pytest.raises(SpoiledCapture, match=r"^CUDA error: operation not permitted when stream is capturing$"):
        captured(routed(cuda), [0], cuda=cuda)
    assert (cuda.current, cuda.stuck) == ("default", True)


def test_a_capture_that_fails_only_at_its_end():
    cuda = CostedGraphs()

    def call(copy):
        cuda.launch(1e-6)
        cuda.spoiled = cuda.capturing is not None

    with pytest.raises(SpoiledCapture, match="previous error during capture"):
        captured(call, [0], cuda=cuda)


def test_a_capture_that_cannot_begin():
    cuda = CostedGraphs()

    def call(copy):
        cuda.stuck = cuda.sync_mode == "error"

    cuda.synchronize = lambda: None
    with pytest.raises(SpoiledCapture, match="INTERNAL ASSERT"):
        captured(call, [0], cuda=cuda)


def test_what_a_call_refuses_while_captured_spoils_nothing():
    cuda = CostedGraphs()

    def call(copy):
        cuda.launch(1e-6)
        if cuda.capturing is not None:
            raise ValueError("not in a graph")

    with pytest.raises(NotCaptured, match=r"^not in a graph$") as caught:
        captured(call, [0], cuda=cuda)
    assert not isinstance(caught.value, SpoiledCapture)
    assert len(captured(arm(cuda), [0], cuda=cuda)) == 1


def test_what_a_call_raises_by_itself_goes_through():
    cuda = FakeCuda()

    def call(copy):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        captured(call, [0], cuda=cuda)
    assert cuda.current == "default"


class Seated:
    """An arm as a case has it."""

    def __init__(self, call, copies):
        self.on_copy, self.copies, self.calls = call, copies, None

    def replay(self, replays):
        self.calls = replays


def launched(launching, arms, inner=2):
    return launching.capture(arms, dict.fromkeys(arms, inner))


def test_all_arms_are_replayed():
    cuda = FakeCuda(overhead=1e-5)
    arms = {"eager": Seated(arm(cuda), "ab"), "packed": Seated(arm(cuda, 3), "ab")}
    launching = Launching("auto", True, cuda=cuda)
    assert launched(launching, arms) == {"eager": 2, "packed": 2}
    assert (launching.launch, launching.note) == ("graphs", "")
    assert [[call() for call in one.calls] for one in arms.values()] == [["b"], ["b"]]
    before = cuda.host
    arms["eager"].calls[0]()
    assert cuda.host - before == pytest.approx(1e-5)


def test_one_arm_that_cannot_be_captured_makes_all_plain():
    cuda = FakeCuda()
    launching = Launching("auto", True, cuda=cuda)
    for _ in range(2):  # and it is not tried again
        cuda.log.clear()
        arms = {"packed": Seated(arm(cuda), "a"), "mine": Seated(routed(cuda), "a"), "eager": Seated(arm(cuda), "a")}
        assert launched(launching, arms) == {}
        assert launching.launch == "plain"
        assert launching.note == "no CUDA graphs, as mine cannot be captured: called a synchronizing CUDA operation"
        assert [one.calls for one in arms.values()] == [None] * 3
    assert not cuda.log


def test_where_graphs_were_asked_for_the_arm_that_cannot_is_skipped():
    cuda = FakeCuda()
    arms = {"packed": Seated(arm(cuda), "a"), "mine": Seated(routed(cuda), "a")}
    launching = Launching("graphs", False, cuda=cuda)
    with pytest.raises(BrokenArm) as broken:
        launched(launching, arms)
    assert broken.value.name == "mine"
    assert verdict_of(broken.value.__cause__) == (
        "skipped", "cannot be captured: called a synchronizing CUDA operation",
    )  # fmt: skip
    assert launching.launch == "graphs"
    assert launched(launching, {"packed": arms["packed"]}) == {"packed": 2}


def test_plain_calls_that_were_asked_for_need_no_note():
    cuda = FakeCuda()
    launching = Launching("plain", True, cuda=cuda)
    assert launched(launching, {"mine": Seated(arm(cuda), "a")}) == {}
    assert (launching.launch, launching.note, cuda.log) == ("plain", "", [])


@pytest.mark.parametrize("asked", ["auto", "graphs"])
def test_a_spoiled_capture_names_its_arm_and_ends_the_measurement(asked):
    cuda = CostedGraphs()
    cuda.set_sync_debug_mode = lambda mode: None
    arms = {"eager": Seated(arm(cuda), "a"), "mine": Seated(routed(cuda), "a")}
    with pytest.raises(SpoiledCapture, match="operation not permitted") as spoiled:
        launched(Launching(asked, True, cuda=cuda), arms)
    assert spoiled.value.arm == "mine"


def test_what_spoiled_a_capture_in_another_process_is_not_tried_again():
    cuda = CostedGraphs()
    cuda.set_sync_debug_mode = lambda mode: None
    launching = Launching("auto", True, "mine cannot be captured: it waits", cuda)
    assert launched(launching, {"mine": Seated(routed(cuda), "a")}) == {}
    assert (launching.launch, launching.note) == ("plain", "no CUDA graphs, as mine cannot be captured: it waits")
    assert not cuda.stuck


def test_an_arm_that_no_longer_can_be_captured_is_out():
    """Its blocks of the first placement were replays: launches cannot be compared with them."""
    cuda = FakeCuda()
    launching = Launching("auto", True, cuda=cuda)
    launched(launching, {"eager": Seated(arm(cuda), "a"), "mine": Seated(arm(cuda), "a")})
    with pytest.raises(BrokenArm) as broken:
        launched(launching, {"eager": Seated(arm(cuda), "a"), "mine": Seated(routed(cuda), "a")})
    assert broken.value.name == "mine"
    assert "synchronizing" in str(broken.value.__cause__)


def test_large_cases_are_called_plainly_without_a_word():
    cuda = FakeCuda()
    launching = Launching("auto", False, cuda=cuda)
    assert launched(launching, {"mine": (one := Seated(routed(cuda), "ab"))}) == {}
    assert (launching.launch, launching.note, one.calls, cuda.log) == ("plain", "", None, [])


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
        captured(call, [0], cuda=cuda)


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
