"""Which other readings a file's shapes allow: none that does not fit, and each that does once."""

from ffncli.block.steps import Axis
from ffncli.models.tensors.layout import Located, misreadings, mixed_misreadings
from ffncli.models.tensors.slices import StoredSlice

D, F, E = Axis("d_model", 6), Axis("d_ff", 10), Axis("experts", 4)
SQUARE = Axis("d_ff", 6)


def placed(parameter: str, *axes: Axis, names: tuple[str, ...] = (), **piece) -> Located:
    return Located(parameter, axes, StoredSlice(parameter, **piece), names or (parameter,))


def names(*located: Located) -> list[str]:
    return [found.name for found in misreadings(located)]


PLAIN = (placed("up.weight", F, D), placed("up.bias", F), placed("down.weight", D, F), placed("down.bias", D))
GATED = (placed("gate.weight", F, D), placed("up.weight", F, D), placed("down.weight", D, F))


def test_an_oblong_plain_block_has_one_reading():
    assert names(*PLAIN) == []
    assert list(mixed_misreadings(PLAIN)) == []


def test_gate_and_up_take_each_others_place():
    (found,) = misreadings(GATED)
    assert found.name == "gate and up swapped"
    assert [(item.parameter, item.names) for item in found.located] == [
        ("gate.weight", ("up.weight",)), ("up.weight", ("gate.weight",)), ("down.weight", ("down.weight",)),
    ]  # fmt: skip


def test_biases_go_with_their_matrices():
    biases = (placed("gate.bias", F), placed("up.bias", F), placed("down.bias", D))
    (found,) = misreadings((*GATED, *biases))
    assert {item.parameter: item.names[0] for item in found.located}["up.bias"] == "gate.bias"


def test_square_matrices():
    square = (placed("up.weight", SQUARE, D), placed("down.weight", D, SQUARE))
    assert names(*square) == [
        "up and down swapped", "all square matrices transposed", "up transposed", "down transposed",
    ]  # fmt: skip
    found = {m.name: m for m in misreadings(square)}["down transposed"]
    assert [item.slice.transposed for item in found.located] == [False, True]


def test_one_matrix_for_two():
    halves = [placed(f"{s}.weight", F, D, part=at, parts=2) for at, s in enumerate(("gate", "up"))]
    assert names(*halves, GATED[2]) == ["gate and up swapped", "gate and up interleaved"]
    turns = [placed(f"{s}.weight", F, D, part=at, parts=2, interleaved=True) for at, s in enumerate(("gate", "up"))]
    assert names(*turns, GATED[2]) == ["gate and up swapped", "gate and up as halves"]
    assert [m.name for m in mixed_misreadings([*turns, GATED[2]])][2:] == [
        "gate and up swapped and gate and up as halves"
    ]


def test_a_fused_matrix_is_square_where_both_halves_make_it_so():
    half = Axis("d_ff", 3)
    halves = [placed(f"{s}.weight", half, D, part=at, parts=2) for at, s in enumerate(("gate", "up"))]
    assert "all square matrices transposed" in names(*halves, placed("down.weight", D, half))


def test_shared_experts_have_readings_of_their_own():
    shared = [placed(f"shared.{s}.weight", F, D) for s in ("gate", "up")]
    assert names(*GATED, *shared, placed("shared.down.weight", D, F)) == [
        "gate and up swapped", "gate and up swapped in the shared experts",
    ]  # fmt: skip


def _experts(count: int) -> Located:
    axis = Axis("experts", count)
    every = tuple(f"experts.{e}.up" for e in range(count))
    return Located("up.weight", (axis, F, D), StoredSlice("experts.{e}.up"), every)


def test_the_order_of_experts():
    assert names(_experts(10)) == []  # 0 to 9 sort alike as numbers and as text
    read, written = misreadings([_experts(12)])
    assert read.located[0].names[1:4] == ("experts.1.up", "experts.10.up", "experts.11.up")
    places = [int(name.split(".")[1]) for name in read.located[0].names]
    back = [int(name.split(".")[1]) for name in written.located[0].names]
    assert [back[e] for e in places] == list(range(12))  # one undoes the other


def test_the_axis_of_experts():
    experts = Axis("experts", 6)
    down = placed("down.weight", experts, D, F)
    (found,) = misreadings([down])
    assert (found.name, found.exchanged) == ("the experts axis mistaken for d_model", (("down.weight", 1),))
    halves = placed("up.weight", Axis("experts", 10), F, D, parts=2)
    assert "the experts axis mistaken for d_ff" not in names(halves)  # half of an axis is no axis of the file
