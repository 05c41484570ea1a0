"""The inventory of a checkpoint: every tensor once, experts together, against the library's own reading."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ffncli.errors import FFNError
from ffncli.models.files.headers import Columns
from ffncli.models.files.inventory import UNSEEN, Inventory, collect, shared_name, take_inventory
from tests.oracles.checkpoints import INDEX, checkpoint_in

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def taken(path: Path, files: dict[str, dict[str, Any]], index: dict[str, str] | None = None) -> Inventory:
    """The inventory of these files, after they were written."""
    for file, stored in files.items():
        save_file(stored, path / file)
    if index is not None:
        (path / INDEX).write_text(json.dumps({"weight_map": index}))
    return take_inventory(checkpoint_in(path))


def check_sums(inventory: Inventory, folder: Path) -> None:
    """Numbers and bytes of everything are what safetensors says of the files."""
    numbers = size = tensors = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                tensor = opened.get_tensor(name)
                numbers, size, tensors = numbers + tensor.numel(), size + tensor.nbytes, tensors + 1
    rows = [(inventory.counts[name], info) for name, info in inventory.tensors.items()]
    assert sum(count for count, _ in rows) == tensors
    assert sum(count * prod(info.shape) for count, info in rows) == numbers
    assert sum(count * info.bytes for count, info in rows) == size


@pytest.mark.parametrize("style", ["experts.{}.", "experts.expert_{}.", "mlp.experts.{}.", "a.experts.{}.b.experts."])
def test_experts_are_one_entry(style: str, tmp_path: Path):
    stem = "model.layers.{}." + style
    stored = {stem.format(i, e) + "up.weight": torch.zeros(3, 2) for i in range(2) for e in range(12)}
    stored["model.layers.0.norm.weight"] = torch.zeros(2, dtype=torch.bfloat16)
    inventory = taken(tmp_path, {"model.safetensors": stored})
    up = [stem.format(i, "#").replace("expert_#", "#") + "up.weight" for i in range(2)]
    assert inventory.counts == {**dict.fromkeys(up, 12), "model.layers.0.norm.weight": 1}
    assert inventory.tensors[up[0]] == ("F32", (3, 2), 24)
    check_sums(inventory, tmp_path)


@pytest.mark.parametrize(
    "name", ["experts.7", "experts.gate_up_proj", "shared_experts.up.weight", "experts7.up", "expert.7.up", "l.3.up"]
)
def test_what_has_no_experts_number_keeps_its_name(name: str, tmp_path: Path):
    assert shared_name(name) == name
    assert list(taken(tmp_path, {"model.safetensors": {name: torch.zeros(1)}}).tensors) == [name]


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("how", [torch.zeros(4, 2), torch.zeros(3, 2, dtype=torch.float16)])
def test_an_expert_unlike_its_neighbours_keeps_its_name(odd: int, how: torch.Tensor, tmp_path: Path):
    stored = {f"l.0.experts.{e}.up": torch.zeros(3, 2) for e in range(4)} | {f"l.0.experts.{odd}.up": how}
    inventory = taken(tmp_path, {"model.safetensors": stored})
    assert len(inventory.tensors) > 1
    check_sums(inventory, tmp_path)


def test_files_together_and_one_that_is_not_here(tmp_path: Path):
    first = {f"l.0.experts.{e}.up": torch.zeros(3, 2) for e in range(3)} | {"a": torch.zeros(5)}
    second = {f"l.0.experts.{e}.up": torch.zeros(3, 2) for e in range(3, 8)} | {"l.1.experts.0.up": torch.zeros(1)}
    index = dict.fromkeys(first, ONE) | dict.fromkeys(second, TWO)
    whole = taken(tmp_path, {ONE: first, TWO: second}, index)
    assert (whole.counts["l.0.experts.#.up"], whole.missing, whole.files) == (8, (), 2)
    check_sums(whole, tmp_path)
    (tmp_path / TWO).unlink()
    half = taken(tmp_path, {})
    assert (half.missing, half.files) == ((TWO,), 2)
    assert half.counts == whole.counts
    assert half.tensors == {**whole.tensors, "l.1.experts.#.up": UNSEEN}


@pytest.mark.parametrize("width", [3, 2], ids=["as_wide", "narrower"])
@pytest.mark.parametrize("images_first", [False, True])
def test_experts_of_image_tokens_are_entries_of_their_own(images_first: bool, width: int, tmp_path: Path):
    """The second half of a list with two routers, wherever its files put them; a list with one router is all text's."""
    text = {f"l.{i}.mlp.experts.{e}.up": torch.zeros(3, 2) for i in range(2) for e in range(3)}
    text |= {"l.0.mlp.gate.weight": torch.zeros(2, 3), "l.1.mlp.gate.weight": torch.zeros(2, 3)}
    images = {f"l.0.mlp.experts.{e}.up": torch.zeros(width, 2) for e in range(3, 6)}
    images["l.0.mlp.gate.weight_1"] = torch.zeros(2, 3)
    files = dict(zip((ONE, TWO), (images, text) if images_first else (text, images), strict=True))
    index = {name: file for file, stored in files.items() for name in stored}
    inventory = taken(tmp_path, files, index)
    ups = {name: (inventory.counts[name], info.shape) for name, info in inventory.tensors.items() if "experts" in name}
    assert ups == {
        "l.0.mlp.experts.#.up": (3, (3, 2)), "l.0.mlp.vision_moe.experts.#.up": (3, (width, 2)),
        "l.1.mlp.experts.#.up": (3, (3, 2)),
    }  # fmt: skip
    check_sums(inventory, tmp_path)
    (tmp_path / (ONE if images_first else TWO)).unlink()
    assert taken(tmp_path, {}).counts == inventory.counts


def test_a_tensor_that_the_index_does_not_name_is_there_all_the_same(tmp_path: Path):
    stored = {"a": torch.zeros(2), "b": torch.zeros(3)}
    inventory = taken(tmp_path, {ONE: stored}, {"a": ONE})
    assert set(inventory.tensors) == {"a", "b"}
    check_sums(inventory, tmp_path)


def test_a_tensor_that_the_index_promises_is_named(tmp_path: Path):
    with pytest.raises(FFNError, match=r"model-00001-of-00002.*'b' is in the index but not in this file"):
        taken(tmp_path, {ONE: {"a": torch.zeros(2)}}, {"a": ONE, "b": ONE})


NAMES = st.text(st.sampled_from("a.1\n#é") | st.characters(codec="utf-8"), min_size=1, max_size=6)


@given(st.lists(st.tuples(NAMES, st.integers(0, 20), NAMES), unique=True, max_size=8))
def test_names_of_any_kind_are_kept(parts: list[tuple[str, int, str]]):
    """Newlines in them too, though all names go through one pass joined by newlines."""
    names = list(dict.fromkeys(f"{before}.experts.{e}.{after}" for before, e, after in parts))
    tensors, counts = collect([Columns(names, ["F32"] * len(names), [[2]] * len(names), [8] * len(names))])
    assert list(tensors) == list(counts) == list(dict.fromkeys(map(shared_name, names)))
    assert sum(counts.values()) == len(names)
