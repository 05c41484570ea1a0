"""Ratios on a busy machine, against a scheduler whose disturbances are drawn: the truth is known, and so is the bias of
a plain median."""

import math
import random
from dataclasses import replace

import pytest

from ffncli.bench.judge import ratios
from ffncli.bench.judge.ratios import Means, disturbed_share, paired, verdict, with_twins
from ffncli.bench.judge.statistics import Interval, t_quantile
from ffncli.bench.records import TimedBlock

CALL = 2e-4  # s of the baseline's call


def run_of(
    ratio: float, draw: random.Random, *, every: float = 6e-3, block: float = 4e-3, alike: bool = True,
    thread: bool = False, processes: int = 5, noise: float = 0.01, rounds: int = 24,
) -> list[TimedBlock]:  # fmt: skip
    """Blocks of `base` and of `mine`, whose calls take `ratio` times as long. A thread is preempted once in `every`
    seconds of computing, for 3 ms on average. `alike`: all blocks last equally long; otherwise they have as many calls.
    """
    blocks = []
    for process in range(processes):
        own = draw.gauss(0, 0.002)  # what a process does to a ratio
        for at in range(rounds):
            for position, (kernel, factor) in enumerate((("base", 1.0), ("mine", ratio))):
                inner = max(1, round(block / (CALL * factor))) if alike else round(block / CALL)
                computing = inner * CALL * factor * math.exp(draw.gauss(own if factor != 1 else 0, noise))
                waited, left = 0.0, computing
                while (left := left - draw.expovariate(1 / every)) > 0:
                    waited += draw.expovariate(1 / 3e-3)
                flags = ("preempted", f"waited={waited:.6f}") if waited > 0.01 * computing else ()
                flags += (f"thread={computing:.9g}",) if thread else ()
                blocks.append(
                    TimedBlock(process, "c", at // 8, at % 8, position, kernel, inner, computing + waited, flags)
                )
    return blocks


@pytest.mark.parametrize("thread", [True, False], ids=["thread's clock", "wall clock"])
@pytest.mark.parametrize("ratio", [1.0, 1.05, 1.1, 1.3, 2.0])
def test_intervals_hold_the_truth_and_verdicts_are_right(ratio, thread):
    draw, held, words = random.Random(f"{ratio}"), 0, []
    for _ in range(100):
        blocks = run_of(ratio, draw, thread=thread)
        assert disturbed_share(blocks) > 0.3
        found = paired(blocks, "mine", "base")
        assert found.clock == ("thread" if thread else "wall")
        held += found.interval.low <= math.log(ratio) <= found.interval.high
        words.append(verdict(found.interval, 0.02))
    assert held >= 88
    if ratio >= 1.1:
        assert words.count("slower") >= 95
    assert not [word for word in words if word not in ("slower" if ratio > 1 else "same", "inconclusive")]


def test_as_many_calls_are_biased_and_equal_durations_are_not():
    """What the blocks' equal durations are for: a kernel of twice the work, judged by the same number of calls."""
    draw, values = random.Random(1), {True: [], False: []}
    for alike, found in values.items():
        for _ in range(30):
            pairs = run_of(2.0, draw, alike=alike, every=4e-3)
            times: dict[tuple[int, int, int], dict[str, float]] = {}
            for b in pairs:
                times.setdefault((b.process, b.placement, b.round), {})[b.kernel] = b.per_call
            ratios = sorted(one["mine"] / one["base"] for one in times.values())
            found.append(ratios[len(ratios) // 2])
    assert sum(values[False]) / 30 > 2.1
    assert sum(values[True]) / 30 == pytest.approx(2.0, rel=0.03)


def test_unlike_blocks_widen_the_interval_until_it_holds_the_sum_of_all_times():
    """A call of 24 times the length is longer than a block: it is disturbed nearly always."""
    draw, held, narrow = random.Random(2), 0, 0
    for _ in range(60):
        blocks = run_of(100.0, draw, rounds=16)
        found = paired(blocks, "mine", "base")
        held += found.interval.low <= math.log(100) <= found.interval.high
        calm = [replace(b, flags=()) for b in blocks]
        plain = paired(calm, "mine", "base")
        narrow += plain.interval.low <= math.log(100) <= plain.interval.high
        assert verdict(found.interval, 0.02) == "slower"
    assert held >= 54
    assert narrow < 30


@pytest.mark.parametrize(("rounds", "most"), [(1, 3), (2, 10), (8, 3)])
def test_few_blocks_of_identical_code_among_many_busy_processes_get_no_verdict(rounds, most):
    """Threads that wait for each other on oversubscribed cores: times are spread over two orders of magnitude, and no
    block is undisturbed."""
    draw, words = random.Random(7), []
    for _ in range(300):
        blocks = run_of(1.0, draw, rounds=rounds)
        stalled = [replace(b, seconds=b.seconds * math.exp(draw.gauss(0, 2)), flags=("preempted",)) for b in blocks]
        words.append(verdict(paired(stalled, "mine", "base").interval, 0.02))
    assert sum(word in ("slower", "faster") for word in words) <= most


def test_one_disturbed_round_of_one_process_is_inconclusive():
    blocks = run_of(1.3, random.Random(1), processes=1, rounds=1)
    found = paired([replace(block, flags=("preempted",)) for block in blocks], "mine", "base")
    assert (found.interval.low, found.interval.high) == (-math.inf, math.inf)
    assert verdict(found.interval, 0.02) == "inconclusive"


def test_a_kernel_that_suffers_more_from_other_work_is_not_called_slower():
    """Threads that wait for each other stall in nearly every block; the few short blocks show what the kernel takes."""
    draw = random.Random(5)
    blocks = run_of(0.9, draw, every=1e-3)
    stalled = [
        replace(b, seconds=b.seconds * draw.uniform(5, 30), flags=("preempted", "waited=0.05"))
        if b.kernel == "mine" and b.round % 8 else b
        for b in blocks
    ]  # fmt: skip
    assert paired(stalled, "mine", "base").interval.value > math.log(2)
    assert verdict(paired(stalled, "mine", "base").interval, 0.02) == "inconclusive"


def test_a_kernel_that_waits_or_computes_elsewhere_is_not_timed_by_its_thread():
    """Its thread's clock stands still while another thread or process computes."""
    draw = random.Random(3)
    blocks = run_of(1.0, draw, thread=True)
    asleep = [
        replace(b, flags=(*(f for f in b.flags if not f.startswith("thread=")), f"thread={b.seconds / 10:.9g}"))
        if b.kernel == "mine" else b
        for b in blocks
    ]  # fmt: skip
    assert paired(asleep, "mine", "base").clock == "wall"
    assert verdict(paired(asleep, "mine", "base").interval, 0.02) != "faster"
    helped = [replace(b, flags=(*b.flags, "others=0.90")) if b.kernel == "mine" else b for b in blocks]
    assert paired(helped, "mine", "base").clock == "wall"
    unread = [replace(b, flags=()) if b.round == 3 else b for b in blocks]
    assert paired(unread, "mine", "base").clock == "wall"


def test_a_kernel_that_always_waits_was_not_stopped_and_a_stopped_block_is_disturbed():
    """Nine tenths of its time it waits for a device, in every block; in one block of eight, something stops it."""
    draw = random.Random(6)
    quiet = run_of(1.0, draw, every=1e3, thread=True)
    waits = [
        replace(b, flags=(f"thread={b.seconds * draw.uniform(0.08, 0.12):.9g}",)) if b.kernel == "mine" else b
        for b in quiet
    ]  # fmt: skip
    assert disturbed_share(waits) == 0
    stopped = [replace(b, seconds=b.seconds + 0.02) if b.kernel == "base" and b.round % 8 == 0 else b for b in waits]
    assert disturbed_share([b for b in stopped if b.kernel == "base"]) == pytest.approx(1 / 8)
    assert disturbed_share([b for b in stopped if b.kernel == "mine"]) == 0


def test_waiting_around_a_block_stops_no_other_block():
    """The counter of waiting is read just before and after the clock, so it may exceed a block's whole time: in half of
    the blocks it does, and the others were not stopped."""
    draw = random.Random(7)
    blocks = run_of(1.0, draw, every=1e3, thread=True)
    around = [
        replace(b, flags=(*b.flags, "preempted", f"waited={b.seconds * 5:.6f}")) if b.round % 2 else b for b in blocks
    ]  # fmt: skip
    assert disturbed_share(around) == pytest.approx(0.5)
    assert paired(around, "mine", "base").clock == "thread"


def test_on_a_quiet_machine_nothing_changes():
    draw = random.Random(4)
    blocks = run_of(1.05, draw, every=10.0, thread=True)
    assert disturbed_share(blocks) < 0.05
    assert paired(blocks, "mine", "base") == paired([replace(b, flags=()) for b in blocks], "mine", "base")


def test_twins_widen_by_hand():
    means = Means(Interval(0.05, 0.05 - 0.0555289, 0.05 + 0.0555289), dict.fromkeys(range(5), 0.05), 15, 60)
    t4 = t_quantile(0.975, 4)
    assert means.error == pytest.approx(0.02)
    quiet = Means(Interval(0.01, -0.03, 0.05), dict.fromkeys(range(5), 0.01), 15, 60)
    assert with_twins(means, [quiet]) == means  # 0.01 is within its noise
    off = replace(quiet, interval=Interval(0.05, 0.05 - t4 * 0.03, 0.05 + t4 * 0.03))
    widened = with_twins(means, [off]).interval
    assert widened.half_width == pytest.approx(t4 * math.sqrt(0.02**2 + 0.05**2 - 0.03**2))
    assert widened.value == 0.05
    both = with_twins(means, [off, quiet]).interval.half_width
    assert means.interval.half_width < both < widened.half_width
    assert with_twins(means, []) == means


def two_threads(
    ratio: float, draw: random.Random, *, rounds: int, stalled: float, processes: int = 5
) -> list[TimedBlock]:
    """Blocks of threads that wait for each other: a block is calm, or takes up to 400 times as long."""
    blocks = []
    for process in range(processes):
        own = draw.gauss(0, 0.01)
        for at in range(rounds):
            for position, (kernel, factor) in enumerate((("base", 1.0), ("mine", ratio))):
                inner = max(1, round(2 / factor))
                seconds = inner * CALL * factor * math.exp(draw.gauss(own if factor != 1 else 0, 0.1))
                flags: tuple[str, ...] = ()
                if draw.random() < stalled:
                    seconds, flags = seconds * draw.uniform(5, 400), ("preempted", "waited=0.1")
                blocks.append(TimedBlock(process, "c", 0, at, position, kernel, inner, seconds, flags))
    return blocks


@pytest.mark.parametrize("ratio", [1.0, 1.3, 2.0])
def test_a_few_undisturbed_blocks_in_each_process_decide(ratio):
    """Three or four calm blocks of each kernel in a process: too few for a median, enough over all processes."""
    draw, held, words = random.Random(f"few {ratio}"), 0, []
    for _ in range(200):
        found = paired(two_threads(ratio, draw, rounds=8, stalled=0.55), "mine", "base")
        held += found.interval.low <= math.log(ratio) <= found.interval.high
        words.append(verdict(found.interval, 0.02))
    assert held >= 186
    assert words.count("slower") >= 190 if ratio > 1 else words.count("slower") + words.count("faster") <= 2


@pytest.mark.parametrize("ratio", [1.0, 1.1, 2.0])
def test_the_shortest_blocks_of_several_threads_decide(ratio, monkeypatch):
    """What the other threads suffer is in no flag: most blocks are slow, whether flagged or not."""
    draw, held, words, wider = random.Random(f"shortest {ratio}"), 0, [], 0
    for _ in range(200):
        blocks = [
            replace(
                b,
                seconds=b.seconds * (1 + draw.expovariate(0.5) * (draw.random() < 0.8)),
                flags=("preempted",) if draw.random() < 0.6 else (),
            )
            for b in two_threads(ratio, draw, rounds=40, stalled=0.0)
        ]
        found = paired(blocks, "mine", "base")
        held += found.interval.low <= math.log(ratio) <= found.interval.high
        words.append(verdict(found.interval, 0.02))
        with monkeypatch.context() as without:
            without.setattr(ratios, "_least", lambda pairs: None)
            wider += paired(blocks, "mine", "base").interval.half_width > 2 * found.interval.half_width
    assert held >= 186
    false = {1.0: ("slower", "faster"), 1.1: ("same", "faster"), 2.0: ("same", "faster")}[ratio]
    assert sum(word in false for word in words) <= 2
    assert words.count("slower") >= {1.0: 0, 1.1: 60, 2.0: 195}[ratio]
    assert wider >= 120


def test_two_blocks_that_agree_by_chance_are_not_precise():
    """A process with a single calm block of each kernel says nothing of its noise; three such processes may agree."""
    blocks = [
        TimedBlock(process, "c", 0, 0, position, kernel, 2, seconds, ())
        for process in range(3)
        for position, (kernel, seconds) in enumerate((("base", 4e-4), ("mine", 4.4e-4)))
    ]
    stalled = [
        TimedBlock(process, "c", 0, at, position, kernel, 2, 0.1, ("preempted",))
        for process in range(5) for at in (1, 2) for position, kernel in enumerate(("base", "mine"))
    ]  # fmt: skip
    found = paired([*blocks, *stalled], "mine", "base")
    assert found.interval.value == pytest.approx(math.log(1.1))
    assert not found.interval.bounded


def test_weights_and_the_jackknife_by_hand():
    from ffncli.bench.judge import statistics

    values = (0.1, 0.2, 0.3, 0.6)
    even = statistics.weighted_interval(values, (2.0,) * 4, 0.0)
    plain = statistics.t_interval(values)
    assert even.value == pytest.approx(plain.value)
    assert even.half_width == pytest.approx(plain.half_width)
    # The jackknife of a mean is the t interval, and that of a weighted mean is the error of a ratio of two sums, but
    # for terms of the second order (Cochran 1977).
    left_out = statistics.jackknife(values, lambda chosen: sum(chosen) / len(chosen))
    assert left_out.value == pytest.approx(plain.value)
    assert left_out.half_width == pytest.approx(plain.half_width)
    weights = (1.0, 3.0, 2.0, 2.0)
    found = statistics.weighted_interval(values, weights, 0.0)
    assert found.value == pytest.approx((0.1 + 0.6 + 0.6 + 1.2) / 8)
    pairs = list(zip(values, weights, strict=True))
    left_out = statistics.jackknife(pairs, lambda chosen: sum(v * w for v, w in chosen) / sum(w for _, w in chosen))
    assert found.half_width == pytest.approx(left_out.half_width, rel=0.2)
    floor = statistics.weighted_interval(values, weights, 1.0)
    assert floor.half_width == pytest.approx(t_quantile(0.975, 3))
    assert not statistics.weighted_interval(values, weights, math.inf).bounded
    assert not statistics.jackknife((1.0,), sum).bounded
