"""The layout doctor: a misread file is named, whoever misread it; and a right reading is proven by another program.

Files are transformers' own tiny models, and copies of them in which tensors lie otherwise than they should.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from ffncli.errors import FFNError
from ffncli.models.source import load
from ffncli.models.tensors import slices as pieces
from ffncli.models.tensors.slices import Arrangement, Order
from ffncli.run.verify.checks.case import CheckRow
from ffncli.run.verify.checks.layouts import resplit
from ffncli.run.verify.verify import verify_layer
from tests.oracles import gguf_files, huggingface
from tests.oracles.huggingface import CASES, make

pytestmark = pytest.mark.models

Zoo = Callable[[str], Path]
SQUARE, MANY = "gpt2-square", "qwen3_moe-many"
MADE = {
    SQUARE: replace(CASES["gpt2"], values={**CASES["gpt2"].values, "n_inner": 16}),
    MANY: replace(CASES["qwen3_moe"], values={**CASES["qwen3_moe"].values, "num_experts": 12}),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            path = made[name] = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(huggingface, "CASES", {**CASES, **MADE})
                make(name, path)
        return made[name]

    return get


def rows(source: Path | str, against: Path | str | None = None, **run) -> dict[str, CheckRow]:
    other = load(str(against)) if against else None
    return {
        row.subject: row
        for row in verify_layer(load(str(source)), **{"layer": "1", **run}, checks=("layout",), against=other).rows
    }


def copy(source: Path, to: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Path:
    """The same model with other tensors."""
    (to / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {
        name: tensor.contiguous().clone() for name, tensor in change(load_file(source / "model.safetensors")).items()
    }
    save_file(tensors, to / "model.safetensors")
    return to


# --- ours is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "proof", "misread"),
    [
        ("llama", "llama", {"gate and up swapped"}),
        ("phi3", "phi3", {"gate and up swapped", "gate and up interleaved"}),
        ("gpt_oss", "gpt_oss", {"gate and up swapped", "gate and up as halves"}),
        (
            MANY,
            "qwen3_moe",
            {"gate and up swapped", "experts sorted by name as text", "experts written sorted by name as text"},
        ),
        ("gpt2", "gpt2", set()),
        (SQUARE, "gpt2", {"up and down swapped", "all square matrices transposed", "up transposed", "down transposed"}),
    ],
)
def test_a_right_reading_is_proven_and_misreadings_would_show(zoo, name, proof, misread):
    found = rows(zoo(name))
    assert found[f"as read = transformers' {proof}"].passed is True
    figures = {subject: row for subject, row in found.items() if subject.startswith("with ")}
    assert {subject.removeprefix("with ") for subject in figures} == misread
    assert all(row.passed is None and row.relative_error > 0.05 for row in figures.values())
    if not misread:
        assert found["misreadings"].note == "no other reading fits these shapes"


def test_the_place_of_every_tensor_is_said(zoo):
    note = rows(zoo("gpt_oss"))["gate.weight"].note
    assert "model.layers.1.mlp.experts.gate_up_proj [4, 16, 80], transposed, interleaved 1 of 2" in note
    assert "interleaved, as in gpt_oss" in note
    note = rows(zoo(MANY))["up.weight"].note
    assert note.startswith("model.layers.1.mlp.experts.0.up_proj.weight and 11 more [12, 16], per expert")


# --- ours is wrong ----------------------------------------------------------------------------------------------------


def misread(monkeypatch, **fields):
    """Let our own table say something wrong of a family."""
    right = pieces.arrangement
    monkeypatch.setattr(pieces, "arrangement", lambda model_type: replace(right(model_type), **fields))


@pytest.mark.parametrize(
    ("name", "wrong", "named"),
    [
        (SQUARE, {"transposed": False}, "all square matrices transposed"),
        ("gpt_oss", {"interleaved": False}, "gate and up interleaved"),
        ("phi3", {"interleaved": True}, "gate and up as halves"),
    ],
)
def test_a_misreading_of_ours_is_named_by_transformers(zoo, monkeypatch, name, wrong, named):
    misread(monkeypatch, **wrong)
    found = rows(zoo(name))
    (failed,) = [row for row in found.values() if row.passed is False]
    assert failed.subject.startswith("as read = transformers'")
    assert failed.note.startswith(f"read with {named}, it agrees with transformers'")
    (agreeing,) = [row for row in found.values() if row.passed]
    assert agreeing.subject.startswith(f"with {named} = transformers'")


@pytest.mark.parametrize(
    ("order", "named"),
    [
        (Order(False, False, "up before gate, by mistake"), "gate and up swapped"),
        (Order(False, True, "by turns, up first, by mistake"), "gate and up swapped and gate and up as halves"),
    ],
)
def test_a_wrong_order_is_named_and_two_mistakes_at_once_together(zoo, monkeypatch, order, named):
    monkeypatch.setattr(Arrangement, "order", lambda self, way, beside: order)
    (failed,) = [row for row in rows(zoo("phi3")).values() if row.passed is False]
    assert failed.note.startswith(f"read with {named}, it agrees")


# --- a port against its original --------------------------------------------------------------------------------------


def _gate_up_swapped(tensors):
    return {
        n.replace("gate_proj", "@").replace("up_proj", "gate_proj").replace("@", "up_proj"): t
        for n, t in tensors.items()
    }


def _interleaved(tensors):
    out = dict(tensors)
    for name, tensor in tensors.items():
        if "gate_up_proj" in name:
            out[name] = torch.stack(tensor.chunk(2), 1).flatten(0, 1)
    return out


def _transposed(tensors):
    return {n: t.T if ".mlp." in n and t.dim() == 2 else t for n, t in tensors.items()}


def _as_text(tensors):
    order = sorted(str(e) for e in range(12))  # 0, 1, 10, 11, 2 ...
    out = dict(tensors)
    for name, tensor in tensors.items():
        if ".experts." in name:
            left, e, right = (
                name.partition(".experts.")[0],
                name.split(".experts.")[1].split(".")[0],
                name.split(".", 6)[6],
            )
            out[f"{left}.experts.{order[int(e)]}.{right}"] = tensor
    return out


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama", _gate_up_swapped, "gate and up swapped"),
        ("phi3", _interleaved, "gate and up interleaved"),
        (SQUARE, _transposed, "all square matrices transposed"),
    ],
)
def test_a_wrong_port_is_named_against_its_original(zoo, tmp_path, name, change, named):
    port = copy(zoo(name), tmp_path, change)
    found = rows(port, zoo(name))
    failed = found[f"as read = {zoo(name)}"]
    assert failed.passed is False
    assert failed.note == f"read with {named}, it agrees with {zoo(name)}"
    assert found[f"with {named} = {zoo(name)}"].passed is True
    model_type = json.loads((port / "config.json").read_text())["model_type"]
    assert found[f"as read = transformers' {model_type}"].passed is True  # it too reads the file as it is
    assert found[f"down.weight vs {zoo(name)}"].max_error == (0 if name != SQUARE else pytest.approx(2.2, abs=1))


def test_experts_in_the_order_of_text(zoo, tmp_path):
    """Whether the port's reader or its writer sorted the names, it is seen which of them did."""
    port = copy(zoo(MANY), tmp_path, _as_text)
    found = rows(port, zoo(MANY))[f"as read = {zoo(MANY)}"]
    assert found.passed is False
    assert found.note.startswith("read with experts sorted by name as text, it agrees")
    back = rows(zoo(MANY), port)[f"as read = {port}"]
    assert back.note.startswith("read with experts written sorted by name as text, it agrees")


def test_equal_ports_agree_and_unequal_ones_say_where(zoo, tmp_path):
    same = rows(zoo("llama"), zoo("llama"))
    assert same[f"as read = {zoo('llama')}"].max_error == 0

    def nudged(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        return {**tensors, name: tensors[name] * 1.01}

    port = copy(zoo("llama"), tmp_path, nudged)
    found = rows(port, zoo("llama"))
    failed = found[f"as read = {zoo('llama')}"]
    assert failed.relative_error == pytest.approx(0.01, rel=1e-3)
    assert failed.note.startswith("no other reading is closer: the weights themselves differ")
    assert found[f"down.weight vs {zoo('llama')}"].max_error > 0
    assert found[f"gate.weight vs {zoo('llama')}"].max_error == 0


def test_weights_that_differ_by_quantization_are_called_that(tmp_path):
    model = gguf_files.llama()
    exact = gguf_files.write(tmp_path / "exact.gguf", model)
    packed = gguf_files.write(tmp_path / "packed.gguf", model, GGMLQuantizationType.Q8_0)
    failed = rows(packed, exact)[f"as read = {exact}"]
    assert failed.passed is False
    assert failed.relative_error < 0.05
    assert "no other reading is closer: the weights differ by quantization (Q8_0 here, none there)" in failed.note
    assert "(none here, Q8_0 there)" in rows(exact, packed)[f"as read = {packed}"].note


def test_what_cannot_be_compared_is_one_line(zoo):
    for against, why in (("gpt2", "has no weights of its own"), ("512x64", "has no weights of its own")):
        with pytest.raises(FFNError, match=why):
            rows(zoo("llama"), against)
    with pytest.raises(FFNError, match="layer 1 is out of range"):
        verify_layer(load("8x16"), layer="1", checks=("layout",))


def test_other_functions_are_said(zoo, tmp_path):
    config = json.loads((zoo("llama") / "config.json").read_text())
    port = copy(zoo("llama"), tmp_path, dict)
    (port / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    failed = rows(port, zoo("llama"))[f"as read = {zoo('llama')}"]
    assert (failed.passed, failed.note.endswith("activation gelu here, silu there")) == (False, True)


# --- not proven -------------------------------------------------------------------------------------------------------


def test_without_transformers_it_is_not_proven(zoo, monkeypatch):
    llama = zoo("llama")  # transformers makes it
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    found = rows(llama)
    assert "needs the transformers library" in found["transformers"].note
    assert found["transformers"].passed is None
    assert found["with gate and up swapped"].relative_error > 0.05
    assert not [row for row in found.values() if row.passed is not None]


def test_an_architecture_that_transformers_does_not_have(zoo, tmp_path):
    port = copy(zoo("llama"), tmp_path, dict)
    config = json.loads((port / "config.json").read_text())
    (port / "config.json").write_text(json.dumps({**config, "model_type": "llama99"}))
    from ffncli.models.dimensions import Dimensions

    model = load(str(port), Dimensions(activation="silu"))
    found = {row.subject: row for row in verify_layer(model, layer="1", checks=("layout",)).rows}
    assert "does not know the model_type 'llama99'" in found["transformers"].note


def test_no_file_no_layout():
    (row,) = rows("8x16", layer=None).values()
    assert (row.passed, row.note) == (None, "the weights do not come from a file, so nothing was read")


# --- a port that made gate and up out of one tensor -------------------------------------------------------------------


def _split_in_halves(tensors):
    """phi3's gate_up read as if gate and up lay by turns, and written as llama's two tensors."""
    out = {}
    for name, tensor in tensors.items():
        if "gate_up_proj" in name:
            out[name.replace("gate_up", "gate")], out[name.replace("gate_up", "up")] = tensor[::2], tensor[1::2]
        else:
            out[name] = tensor
    return out


@pytest.mark.parametrize("swapped", [False, True])
def test_a_port_that_split_one_tensor_wrongly_is_named(zoo, tmp_path, swapped):
    original, port, halves = zoo("phi3"), tmp_path / "port", tmp_path / "original"
    port.mkdir()
    halves.mkdir()

    def split(tensors):
        out = _split_in_halves(tensors)
        return _gate_up_swapped(out) if swapped else out

    copy(original, port, split)
    found = rows(port, original)[f"as read = {original}"]
    name = f"{'up and gate' if swapped else 'gate and up'}, put together, cut into halves"
    assert (found.passed, found.note) == (False, f"read with {name}, it agrees with {original}")
    # and the other way round: the original has them by turns, the port took the halves
    copy(original, halves, _interleaved)
    copy(halves, port, lambda tensors: {
        new: part
        for n, t in tensors.items()
        for new, part in (
            zip((n.replace("gate_up", "gate"), n.replace("gate_up", "up")), t.chunk(2), strict=True)
            if "gate_up_proj" in n
            else [(n, t)]
        )
    })  # fmt: skip
    found = rows(port, original)[f"as read = {original}"]
    assert found.note == f"read with gate and up, put together, taken by turns, it agrees with {original}"


def test_resplit_undoes_itself():
    """One is the other's inverse, in two axes and in three, biases too."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (4, 6, 5), "bias": (4, 6)}
    own = {f"{step}.{n}": torch.randn(s, generator=generator) for step in ("gate", "up") for n, s in shapes.items()}
    turns, _, _, halves, *_ = (dict(made) for _, made in resplit(own))
    again = dict(resplit(turns))["gate and up, put together, cut into halves"]
    assert all(torch.equal(again[name], tensor) for name, tensor in own.items())
    whole = torch.cat([own["gate.weight"], own["up.weight"]], 1)
    assert torch.equal(turns["up.weight"], whole[:, 1::2])
    assert torch.equal(halves["gate.bias"][:, :2], torch.stack([own["gate.bias"][:, 0], own["up.bias"][:, 0]], 1))
    assert list(resplit({"up.weight": whole})) == []


def test_a_module_of_ones_own_is_held_to_a_checkpoint(zoo, tmp_path):
    """The port is code: its mistake has the same names."""
    from dataclasses import replace as with_

    from ffncli.models.model import block_model
    from ffncli.run.engine.weights import stored_layer

    original = load(str(zoo("llama")))
    layer = original.model.layer("0")
    weights = dict(stored_layer(original, layer, torch.float32)[0])
    weights["gate.weight"], weights["up.weight"] = weights["up.weight"], weights["gate.weight"]
    spec = with_(layer.spec, norm="none", residual=False)
    port = with_(block_model(spec, "mine.py:FFN"), weights={("block", 0): weights})
    found = {row.subject: row for row in verify_layer(port, checks=("layout",), against=original).rows}
    failed = found[f"as read = {zoo('llama')}"]
    assert (failed.passed, failed.note) == (False, f"read with gate and up swapped, it agrees with {zoo('llama')}")


# --- every family -----------------------------------------------------------------------------------------------------

FAMILIES = ["bert", "t5-gated-gelu", "opt", "bloom", "falcon-7b", "phi", "gemma2", "olmo2", "mixtral", "deepseek_v2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_proven_by_its_module(zoo, name):
    stack = list(CASES[name].at)[-1]
    found = rows(zoo(name), layer=f"{stack}.1")
    (proof,) = [row for subject, row in found.items() if subject.startswith("as read = transformers'")]
    assert proof.passed is True


def test_a_norm_that_the_file_lacks_leaves_the_ffn(zoo, tmp_path):
    port = copy(zoo("llama"), tmp_path, lambda ts: {n: t for n, t in ts.items() if "post_attention" not in n})
    found = verify_layer(load(str(port)), layer="1", checks=("module", "kernels")).rows
    assert [row.passed for row in found][:8] == [True, None, *[True] * 6]
    assert all(row.passed is not False for row in found)
    assert found[0].subject == "torch.nn, eval"


def test_an_exchanged_axis_of_experts_is_named(zoo, tmp_path, monkeypatch):
    """As many experts as d_model: the shapes do not tell the two axes apart."""
    name, values = "gpt_oss-square", {**CASES["gpt_oss"].values, "num_local_experts": 16}
    monkeypatch.setitem(MADE, name, replace(CASES["gpt_oss"], values=values))

    def exchanged(tensors):
        axes = {"experts.gate_up_proj": 1, "experts.down_proj": 2}  # [E, d, 2 · d_ff] and [E, d_ff, d]
        places = {n: axis for n in tensors for end, axis in axes.items() if n.endswith(end)}
        return {n: t.transpose(0, places[n]) if n in places else t for n, t in tensors.items()}

    port = copy(zoo(name), tmp_path, exchanged)
    found = rows(port, zoo(name))
    assert found["with the experts axis mistaken for d_model"].relative_error > 0.05
    failed = found[f"as read = {zoo(name)}"]
    assert failed.note == f"read with the experts axis mistaken for d_model, it agrees with {zoo(name)}"


def test_a_misreading_without_effect_is_said(zoo, tmp_path):
    def equal(tensors):
        return {n: tensors[n.replace("up_proj", "gate_proj")] for n in tensors}

    found = rows(copy(zoo("llama"), tmp_path, equal))["with gate and up swapped"]
    assert (found.max_error, found.note) == (0.0, "makes no difference with these weights")


# --- what no token shows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", range(4))
def test_an_expert_that_few_tokens_reach_is_compared(zoo, tmp_path, expert):
    """One token goes to three experts of twelve: the others are given tokens of their own."""
    name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
    port = copy(zoo(MANY), tmp_path, lambda tensors: {**tensors, name: tensors[name] * 0})
    assert rows(port, zoo(MANY), leading=(1,))[f"as read = {zoo(MANY)}"].passed is False


def test_equal_experts_that_few_tokens_reach_are_equal(zoo):
    assert rows(zoo(MANY), zoo(MANY), leading=(1,))[f"as read = {zoo(MANY)}"].max_error == 0


@pytest.mark.parametrize("expert", [0, 3])
def test_an_expert_that_no_token_reaches_is_run_by_itself(zoo, tmp_path, expert):
    """A correction keeps every token away from the group of expert 0; of its experts the broken one is named."""

    def away(tensors):
        out = dict(tensors)
        for name, tensor in tensors.items():
            if "e_score_correction_bias" in name:
                out[name] = torch.where(torch.arange(len(tensor)) == 0, -9.0, 0.0)
        return out

    base = copy(zoo("deepseek_v3"), _folder(tmp_path / "base"), away)
    name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
    port = copy(base, _folder(tmp_path / "port"), lambda tensors: {**tensors, name: tensors[name] * 2})
    found = rows(port, base)
    assert found[f"as read = {base}"].passed is (expert == 0)
    row = next(row for subject, row in found.items() if subject.startswith("experts 0"))
    assert (row.passed, row.note) == (expert != 0, "no token goes there, so they ran separately")
    if expert == 0:
        assert row.relative_error == pytest.approx(1)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_norm_that_differs_is_named(zoo, tmp_path):
    """The FFN's output says nothing of the norm that stands before it."""
    name = "model.layers.1.post_attention_layernorm.weight"
    port = copy(zoo("llama"), tmp_path, lambda tensors: {**tensors, name: tensors[name] * 1.5})
    found = rows(port, zoo("llama"))
    assert found[f"as read = {zoo('llama')}"].passed is True
    assert found[f"norm = {zoo('llama')}"].passed is False
    assert found[f"norm = {zoo('llama')}"].relative_error == pytest.approx(0.5)


# --- rounding that is no misreading -----------------------------------------------------------------------------------


def test_float64_allows_what_transformers_computes_in_float32(zoo):
    """BLOOM's GELU has eight digits of its constant."""
    found = rows(zoo("bloom"), dtype="fp64")["as read = transformers' bloom"]
    assert 1e-12 < found.relative_error < 1e-8
    assert found.passed is True


@pytest.mark.parametrize("step", [0.01, 1e-3])
def test_tokens_whose_experts_rounding_decides_are_left_out(zoo, tmp_path, step):
    """The experts' router rows differ by a hundredth, about what one rounding to bf16 makes of a logit."""

    def tied(tensors):
        (name,) = (name for name in tensors if name.startswith("model.layers.1.") and name.endswith(".gate.weight"))
        router = tensors[name]
        return {**tensors, name: router[:1].expand_as(router) * (1 + step * torch.arange(len(router))[:, None])}

    found = verify_layer(
        load(str(copy(zoo("mixtral"), tmp_path, tied))),
        layer="1",
        dtype="bf16",
        checks=("module",),
    ).rows
    assert found[0].passed in (True, None)
    left_out = int(found[0].note.split(" of 16 tokens left out: rounding decides")[0])
    assert (found[0].passed is None) == (left_out == 16)  # of no token at all nothing is proven


def test_a_known_fault_of_transformers_is_no_misreading(tmp_path):
    """Its NLLB-MoE gives something else than its own router says."""
    from tests.oracles.prompted import built

    built("nllb-moe", tmp_path)
    verdict = verify_layer(load(str(tmp_path)), layer="encoder.1", checks=("layout",))
    (row,) = [row for row in verdict.rows if row.subject.startswith("as read")]
    assert (row.passed, verdict.failed) == (None, ())
    assert "not checked against its module: transformers (at least 5.23) encodes" in row.note


def test_the_sum_that_renormalises_has_its_epsilon(tmp_path):
    """LFM2 adds a millionth: a sum of small sigmoids shows it, in float64 beyond doubt."""
    from tests.oracles.prompted import built

    built("lfm2_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("model.layers.2.") and name.endswith(".gate.weight"))
    save_file({**tensors, name: tensors[name] * 3}, file, {"format": "pt"})
    found = rows(tmp_path, layer="2", dtype="fp64")["as read = transformers' lfm2_moe"]
    assert found.relative_error < 2e-7


def test_shared_experts_packed_otherwise_than_the_routed_ones(tmp_path):
    """Either of the two may have been written by turns."""
    from tests.oracles.prompted import built

    base = _folder(tmp_path / "base")
    built("granitemoeshared", base)
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    port = copy(
        base, _folder(tmp_path / "port"), lambda ts: {**ts, name: torch.stack(ts[name].chunk(2, 1), 2).flatten(1, 2)}
    )
    failed = rows(port, base)[f"as read = {base}"]
    assert failed.note == f"read with gate and up interleaved in the routed experts, it agrees with {base}"
