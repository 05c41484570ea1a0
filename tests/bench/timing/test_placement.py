"""Every arm has bytes of its own, at offsets that change; what the caches hold is named as it is."""

import random
from itertools import combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.timing import bare_products
from ffncli.bench.timing.arms import Arms, twin_of
from ffncli.bench.timing.bare_products import Chain
from ffncli.bench.timing.placed_kernel import PlacedKernel, arm_sizes, build_kernel, shuffle_buffers, touched
from ffncli.bench.timing.placement import Arena, caching, flusher, nbytes, placeable
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels import built_in

MIB = 1 << 20


def arena() -> Arena:
    return Arena("cpu", random.Random(1))


def test_copies_are_equal_at_whole_lines_and_elsewhere_each_time():
    tensors = (torch.randn(7, 5), torch.randn(3, dtype=torch.float64), torch.randn(9, 4).bfloat16())
    mine, seen = arena(), set()
    for _ in range(8):
        sets = mine.place([tensors, tensors])
        for copy in sets:
            for a, b in zip(copy, tensors, strict=True):
                assert torch.equal(a, b)
                assert a.dtype == b.dtype
                assert a.data_ptr() % 64 == 0
        seen.add(sets[0][0].data_ptr() % 4096)
    assert len(seen) > 4


def test_a_gpu_s_places_are_multiples_of_256():
    mine = arena()
    mine._line = 256  # what a device that is no CPU gets
    assert all(t.data_ptr() % 256 == 0 for (t,) in mine.place([(torch.randn(5),)] * 9))


def test_a_call_reads_the_weights_of_every_step():
    problem = Problem.of(Case("s", "s", FFNSpec(4, 8), tokens=2), 5)
    assert touched(problem) == 4 * (4 * 8 + 8 + 8 * 4 + 4)  # W1, b1, W2, b2 in fp32


def test_strides_and_views_of_one_storage_stay():
    whole = torch.arange(24.0).reshape(4, 6)
    params = (whole[:2], whole[2:], whole.T, whole[:, 1:3], torch.empty(0, 3))
    (copy,) = arena().place([params])
    for a, b in zip(copy, params, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    copy[0][0, 1] = -1  # seen by the others, as it is among the originals
    assert copy[2][1, 0] == copy[3][0, 0] == -1
    assert whole[0, 1] == 1
    assert nbytes(params) == 96


def test_what_is_packed_in_a_library_s_form_cannot_be_copied_by_its_bytes():
    assert placeable((torch.randn(2, 2), torch.nn.Parameter(torch.randn(2))))
    assert not placeable((torch.randn(2, 2).to_sparse(),))


def spans(tensors):
    return [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_no_two_arms_share_a_byte_neither_does_the_twin(passes):
    case = Case("s", "s", FFNSpec(8, 16, "swiglu"), 3, passes=passes)
    problem = refereed(Problem.of(case, 5))
    kernels = [
        PlacedKernel(name, build_kernel(built_in(name), problem), problem, random.Random(0))
        for name in ("eager", "packed")
    ]
    twin = twin_of(kernels[0], problem, random.Random(0))
    arms = Arms(problem, kernels, twin, caching("cold-weights", [(1, 1536)], 3500, None), 230)
    assert arms._copies == [7, 7, 7]  # ceil(3 · 3500 / 1536)
    places = []
    for number in range(2):
        assert [arm.name for arm in arms.place(number)] == ["eager", "packed", "(aa)", "(gemm)", "(anchor)"]
        groups = [[placed.x, *(t for own in placed.copies for t in own)] for placed in (*kernels, twin)]
        assert all(len(placed.copies) == 7 for placed in (*kernels, twin))
        owned = [span for group in groups for span in spans(group)]
        assert all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(owned, 2))
        chain = arms.chain
        there = [
            (arena._memory.data_ptr(), arena._memory.data_ptr() + arena._memory.numel()) for arena in chain._arenas
        ]
        assert all(a[1] <= b[0] or b[1] <= a[0] for a in there for b in owned)
        places.append(tuple(t.data_ptr() for group in groups for t in group))
    assert places[0] != places[1]


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_many_copies_are_made_once_and_every_call_reads_the_one_used_longest_ago(passes, monkeypatch):
    """By hand: any 8 calls in a row, of the twin, the baseline or the bare products, read 8 different copies."""
    case = Case("s", "s", FFNSpec(8, 16, "swiglu"), 3, passes=passes)
    problem, seen = refereed(Problem.of(case, 5)), []

    def placed_of(name, draw):
        built = build_kernel(built_in(name), problem)
        placed = PlacedKernel(name, built, problem, random.Random(draw))

        def compute(x, params, compute=built.compute):
            seen.append(params[0].data_ptr())
            return compute(x, params)

        object.__setattr__(built, "compute", compute)
        return placed

    names = ("eager", "packed", "eager" if passes != "forward" else "inplace")
    eager, packed, inplace = (placed_of(name, n) for n, name in enumerate(names))
    twin = PlacedKernel("(aa)", eager.built, problem, random.Random(9))
    arms = Arms(problem, [eager, packed, inplace], twin, caching("cold-weights", [(1, 1536)], 4000, None), 250)
    chain, orders = arms.chain, []
    monkeypatch.setattr(bare_products, "_mm", lambda a, b, out: lambda: seen.append(b.data_ptr()))
    for number in range(3):
        arms.place(number)
        assert eager.copies is twin.copies is inplace.copies
        numbers = {tensor.data_ptr(): at for at, own in enumerate(eager.copies) for tensor in own}
        assert numbers.keys().isdisjoint(tensor.data_ptr() for own in packed.copies for tensor in own)
        order = []
        for one in [eager, twin, inplace, chain, chain, twin, eager, eager, inplace, chain, twin, twin] * 2:
            seen.clear()
            one.call()
            order.append(numbers[seen[0]])
        assert set(order[:8]) == set(range(8))
        assert order[8:16] == order[:8]
        assert order[16:] == order[:8]
        orders.append(tuple(eager.copies[at][0].data_ptr() for at in order))
        assert all(placed.arenas[1]._memory.numel() == 0 for placed in (twin, inplace))
    assert len(set(orders)) == 3  # another order in every placement
    assert torch.equal(eager.output, twin.output)


@pytest.mark.parametrize(("copies", "stay"), [(7, False), (8, True)])
@pytest.mark.parametrize("name", ["eager", "packed", "onednn"])
def test_many_copies_stay_and_only_change_their_order(name, copies, stay):
    """Copying them again would take most of a process's time; the input moves in any case."""
    case = Case("s", "s", FFNSpec(8, 16, "swiglu"), 3)
    problem, draw = refereed(Problem.of(case, 5)), random.Random(1)
    one, other = (
        PlacedKernel(name, build_kernel(built_in(name), problem), problem, random.Random(n)) for n in range(2)
    )
    chain = Chain(problem, draw)
    seen, inputs = [], []
    for _ in range(4):
        shuffle_buffers([one, other], draw, [copies] * 2)
        for placed in (one, other, chain):
            placed.place(copies)
        assert len(one.copies) == copies
        seen.append([id(tensor) for own in one.copies for tensor in own])
        inputs.append(one.x.data_ptr())
        assert torch.equal(one.call(), other.call())
        assert not one.changed()
        assert not one.moved()
    assert (len({frozenset(ids) for ids in seen}) == 1) == stay
    assert len({tuple(ids) for ids in seen}) == 4  # in another order each time
    assert len(set(inputs)) > 1
    one.place(1)
    assert len(one.copies) == 1


def test_a_call_turns_through_the_copies():
    case = Case("s", "s", FFNSpec(8, 16), 3)
    problem = refereed(Problem.of(case, 5))
    seen = []
    placed = PlacedKernel("eager", build_kernel(built_in("eager"), problem), problem, random.Random(0))
    object.__setattr__(placed.built, "compute", lambda x, params: seen.append(id(params)))
    placed.place(3)
    for _ in range(6):
        placed.call()
    assert seen == [id(own) for own in placed.copies] * 2


def test_cache_modes_are_named_as_they_are():
    assert caching("warm", [(10 * MIB, MIB)] * 3, 32 * MIB, None).mode == "warm"
    assert caching("warm", [(10 * MIB, MIB)] * 4, 32 * MIB, None).mode == "shared"
    cold = caching("cold-weights", [(10 * MIB, 10 * MIB)] * 3, 32 * MIB, 1000 * MIB)
    assert (cold.mode, cold.copies) == ("cold-weights", 10)  # ceil(96 / 10)
    assert caching("cold-weights", [(200 * MIB, 200 * MIB)] * 3, 32 * MIB, None).copies == 1
    assert caching("flush", [(MIB, MIB)], 32 * MIB, 200 * MIB).mode == "flush"


def test_short_of_memory_a_mode_is_renamed_and_a_note_says_so():
    cold = caching("cold-weights", [(10 * MIB, 10 * MIB)] * 3, 32 * MIB, 299 * MIB)
    assert (cold.mode, cold.copies, cold.copies_of(1)) == ("warm", 1, 1)
    assert cold.note == "measured warm, since cold-weights would need 0.3 GB of memory and only 0.3 GB may be used"
    assert caching("flush", [(40 * MIB, MIB)], 32 * MIB, 100 * MIB).mode == "shared"


def test_an_arm_with_weights_in_fewer_bits_has_more_copies():
    """By hand: 96 MiB of weights between two uses of a copy are 3 calls that read 40 MiB, and 20 that read 5 MiB."""
    sizes = [(40 * MIB, 40 * MIB), (5 * MIB, 5 * MIB)]
    cold = caching("cold-weights", sizes, 32 * MIB, (3 * 40 + 20 * 5) * MIB)
    assert [cold.copies_of(touched) for _, touched in sizes] == [3, 20]
    assert caching("cold-weights", sizes, 32 * MIB, (3 * 40 + 20 * 5) * MIB - 1).mode == "shared"
    assert caching("cold-weights", [(10 * MIB, 10 * MIB), (9, 9)], 32 * MIB, None).note.startswith(
        "measured warm, since cold-weights would need 11,184,811 copies of the weights (9 bytes each)"
    )
    whole = caching("cold-weights", [(100 * MIB, 100 * MIB), (20 * MIB, 20 * MIB)], 32 * MIB, None)
    assert (whole.copies, whole.copies_of(20 * MIB)) == (1, 5)


def test_every_arm_reads_as_many_bytes_before_it_uses_a_copy_again():
    """Two arms share the drawn weights; int8 has a quarter of their bytes, and scales."""
    problem = refereed(Problem.of(Case("s", "s", FFNSpec(32, 64, "swiglu"), 3), 5))
    kernels = [
        PlacedKernel(name, build_kernel(built_in(name), problem), problem, random.Random(0))
        for name in ("eager", "packed", "int8")
    ]
    drawn, few = nbytes(tuple(problem.weights.values())), nbytes(kernels[-1].built.params)
    twin = twin_of(kernels[0], problem, random.Random(0))
    arms = Arms(problem, kernels, twin, caching("cold-weights", arm_sizes(problem, kernels), drawn, None), 230)
    arms.place(0)
    assert [len(one.copies) for one in (*kernels, twin, arms.chain)] == [3, 3, -(-3 * drawn // few), 3, 3]
    before = [one.arenas[1] for one in kernels]
    arms.place(1)
    assert kernels[2].arenas[1] is before[2]  # its many copies stay where they are
    assert all(torch.equal(a, b) for a, b in zip(kernels[2].copies[-1], kernels[2].built.params, strict=True))


def test_the_flush_writes_three_caches():
    assert flusher(1000, "cpu")().numel() * 4 == 3000


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "kind", "way"),
    [("cpu", "", "write"), ("cpu", "read", "read"), ("cuda:0", "", "read"), ("cuda:0", "write", "write")],
)
def test_a_gpu_reads_unless_told_otherwise(monkeypatch, device, kind, way):
    monkeypatch.setenv("FFN_FLUSH", kind)
    here, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device, **k: (here.append(device), empty(*a, **k))[1])
    with Operators() as operators:
        flush = flusher(1000, device)
        operators.called.clear()
        flush()
    assert operators.called == [{"read": "amax", "write": "fill_"}[way]]
    assert set(here) == {device}


@pytest.mark.parametrize(
    ("kind", "once", "each"), [("write", [], "fill_"), ("", [], "fill_"), ("read", ["fill_"], "amax")]
)
def test_a_flush_that_reads_writes_its_buffer_once(monkeypatch, kind, once, each):
    """So no line of it is still to be written when the call begins."""
    monkeypatch.setenv("FFN_FLUSH", kind)
    with Operators() as operators:
        flush = flusher(1000, "cpu")
        assert [name for name in operators.called if name != "empty"] == once
        operators.called.clear()
        flush()
        flush()
    assert operators.called == [each, each]
    note = caching("flush", [(MIB, MIB)], 32 * MIB, 200 * MIB).note
    assert note == (f"caches emptied by FFN_FLUSH={kind}" if kind else "")
    assert not caching("cold-weights", [(MIB, MIB)], MIB, 200 * MIB).note


def test_an_unknown_way_to_flush_is_refused(monkeypatch):
    monkeypatch.setenv("FFN_FLUSH", "burn")
    with pytest.raises(FFNError, match="FFN_FLUSH: unknown value 'burn'; use write or read") as caught:
        flusher(1000, "cpu")
    assert caught.value.code == 2


def test_order_gaps_and_the_first_place_are_all_drawn():
    mine, tensors = arena(), tuple(torch.randn(64) for _ in range(3))
    orders, gaps, firsts = set(), set(), set()
    for _ in range(12):
        (copy,) = mine.place([tensors])
        places = sorted((t.data_ptr(), n) for n, t in enumerate(copy))
        orders.add(tuple(n for _, n in places))
        gaps |= {b[0] - a[0] - 256 for a, b in combinations(places, 2) if places.index(b) == places.index(a) + 1}
        firsts.add((places[0][0] - mine._memory.data_ptr()) // 4096)
    assert len(orders) > 2
    assert len(gaps) > 4
    assert max(gaps) < 4096
    assert len(firsts) > 4  # not only within a page: up to 64 KiB


def test_a_view_into_a_line_keeps_its_place_within_the_line():
    whole = torch.arange(40.0)
    for _ in range(4):
        ((copy,),) = arena().place([(whole[3:30],)])
        assert copy.data_ptr() % 64 == whole[3:].data_ptr() % 64 == 12 + whole.data_ptr() % 64
        assert torch.equal(copy, whole[3:30])


def test_flush_and_warm_have_one_copy():
    assert [caching(mode, [(MIB, MIB)], 32 * MIB, None).copies for mode in ("warm", "shared", "flush")] == [1, 1, 1]


def test_turning_through_the_copies_touches_three_caches():
    """By the bytes of every weight that a kernel was given, between two uses of one copy."""
    problem = Problem.of(Case("s", "s", FFNSpec(8, 16, "swiglu"), 3, cache="cold-weights"), 5)
    llc = 10_000
    mode = caching("cold-weights", [(1, touched(problem))], llc, None)
    placed = PlacedKernel("eager", build_kernel(built_in("eager"), problem), problem, random.Random(0))
    seen: list[frozenset[int]] = []

    def compute(x, params):
        lines = {line for t in params for line in range(t.data_ptr() // 64, (t.data_ptr() + t.nbytes - 1) // 64 + 1)}
        seen.append(frozenset(lines))

    object.__setattr__(placed.built, "compute", compute)
    placed.place(mode.copies)
    for _ in range(mode.copies + 1):
        placed.call()
    assert seen[0] == seen[-1]
    assert 64 * len(frozenset().union(*seen)) >= 3 * llc
    assert all(not a & b for a, b in combinations(seen[:-1], 2))


def test_weights_so_small_that_thousands_of_copies_would_be_needed_stay_warm() -> None:
    llc = 1 << 25
    few, many = 3 * llc // 1024, 3 * llc // 1024 - 1  # bytes of the weights: 1024 copies, and one more
    assert caching("cold-weights", [(few, few)], llc, None).copies == 1024
    found = caching("cold-weights", [(many, many)], llc, None)
    assert (found.mode, found.copies) == ("warm", 1)
    assert found.note == "measured warm, since cold-weights would need 1,025 copies of the weights (98,303 bytes each)"


def test_seats_trade_their_memory_and_still_own_all_of_it() -> None:
    problem = Problem.of(Case("8x16:swiglu", "8x16:swiglu", FFNSpec(8, 16, "swiglu"), tokens=2), 0)
    draw = random.Random(0)
    kernels = [PlacedKernel(name, build_kernel(built_in("eager"), problem), problem, draw) for name in ("a", "b", "c")]
    homes, met = (
        {id(memory) for placed in kernels for memory in placed.arenas},
        {placed.name: set() for placed in kernels},
    )
    for _ in range(20):
        shuffle_buffers(kernels, draw, [1] * 3)
        for placed in kernels:
            placed.place(1)
            met[placed.name].add(id(placed.arenas[1]))
        assert {id(memory) for placed in kernels for memory in placed.arenas} == homes  # nobody shares, nothing is lost
        assert len({tensor.data_ptr() for placed in kernels for tensor in placed.copies[0]}) == 9
        with torch.inference_mode():
            first, *others = (placed.call() for placed in kernels)
        assert all(torch.equal(first, other) for other in others)
    assert all(len(places) == 3 for places in met.values())
