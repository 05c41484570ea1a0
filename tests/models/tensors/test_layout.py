"""How a layer's tensors are read: by names and shapes, by the family where these do not tell, else as usual."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Resolved
from ffncli.models.source import load
from ffncli.models.tensors.layout import Located
from ffncli.run.engine.weights import located_weights, read_located
from tests.oracles.checkpoints import GPT2, LLAMA, MIXTRAL, folder, tensors

D, F, E = 4, 6, 3
SQUARE = {**GPT2, "n_inner": D}


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A random tensor of each shape."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def read(model: Resolved, layer: str = "0") -> tuple[dict[str, Located], dict[str, Tensor]]:
    """(Where every parameter is, the weights) of one layer."""
    located = located_weights(model, model.model.layer(layer))
    assert located is not None
    assert model.checkpoint is not None
    return {item.parameter: item for item in located}, read_located(model.checkpoint, located, torch.float32)


def dense(path: Path, stored: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, **said: Any) -> Any:
    """What is read of a directory with these tensors, activation and more said by options."""
    return read(load(folder(path, config, stored), Dimensions(activation="silu", **said)))


# --- orientation ------------------------------------------------------------------------------------------------------


def square(stem: str, up: str, down: str) -> dict[str, Tensor]:
    return drawn({f"{stem}{up}.weight": (D, D), f"{stem}{down}.weight": (D, D)})


def test_a_square_conv1d_is_read_as_its_family_has_it(tmp_path: Path):
    stem = "transformer.h.0.mlp."
    stored = square(stem, "c_fc", "c_proj") | drawn({f"{stem}{n}.bias": (D,) for n in ("c_fc", "c_proj")})
    found, weights = read(load(folder(tmp_path, {**SQUARE, "n_layer": 1}, stored)))
    assert torch.equal(weights["up.weight"], stored[f"{stem}c_fc.weight"].T)
    assert torch.equal(weights["down.weight"], stored[f"{stem}c_proj.weight"].T)
    assert "[in, out] as in gpt2" in found["up.weight"].slice.evidence
    assert found["up.weight"].slice.words == "transposed"
    assert {item.slice.assumed for item in found.values()} == {""}


@pytest.mark.parametrize("family", ["llama", None])
def test_another_square_is_read_as_a_linear_and_of_an_unknown_family_that_is_said(family: str | None, tmp_path: Path):
    stored = square("model.layers.0.mlp.", "up_proj", "down_proj")
    config = {**LLAMA, "model_type": family, "intermediate_size": D, "num_hidden_layers": 1} if family else None
    found, weights = dense(tmp_path, stored, config)
    assert torch.equal(weights["up.weight"], stored["model.layers.0.mlp.up_proj.weight"])
    assumed = "" if family else "square matrices are read as nn.Linear's [out, in]"
    assert {found[n].slice.assumed for n in ("up.weight", "down.weight")} == {assumed}


def test_a_matrix_that_is_not_square_tells_how_the_other_lies(tmp_path: Path):
    """Experts of width d_model: down is square, gate and up together are not."""
    stem = "model.layers.0.mlp.experts."
    shapes = {f"{stem}gate_up_proj": (E, D, 2 * D), f"{stem}down_proj": (E, D, D),
              "model.layers.0.mlp.gate.weight": (E, D)}  # fmt: skip
    stored = drawn(shapes)
    found, weights = dense(tmp_path, stored, top_k=2)
    assert torch.equal(weights["down.weight"], stored[f"{stem}down_proj"].transpose(1, 2))
    assert torch.equal(weights["up.weight"], stored[f"{stem}gate_up_proj"][..., D:].transpose(1, 2))
    assert found["down.weight"].stored_shape() == (E, D, D)
    assert f"[in, out] according to the shapes {[D, 2 * D]} and {[D, D]}" in found["down.weight"].slice.evidence


def test_a_convolution_of_width_one_and_a_correction_of_two_axes(tmp_path: Path):
    stem = "model.layers.0.mlp."
    stored = drawn({f"{stem}fc1.weight": (F, D, 1), f"{stem}fc2.weight": (D, F, 1)})
    _, weights = dense(tmp_path / "conv", stored)
    assert torch.equal(weights["up.weight"], stored[f"{stem}fc1.weight"][..., 0])
    shapes = {f"{stem}gate.weight": (E, D), f"{stem}gate.moe_statics.e_score_correction_bias": (1, E)}
    shapes |= {f"{stem}experts.{e}.{n}_proj.weight": (F, D) for e in range(E) for n in ("gate", "up")}
    shapes |= {f"{stem}experts.{e}.down_proj.weight": (D, F) for e in range(E)}
    stored = drawn(shapes)
    found, weights = dense(tmp_path / "moe", stored, top_k=2)
    assert torch.equal(weights["route.correction"], stored[f"{stem}gate.moe_statics.e_score_correction_bias"][0])
    assert found["up.weight"].names == tuple(f"{stem}experts.{e}.up_proj.weight" for e in range(E))


def test_experts_one_below_the_other(tmp_path: Path):
    """DBRX's: gate and up as nn.Linear has them, down is used as it lies."""
    stem = "transformer.blocks.0.ffn."
    stored = drawn({f"{stem}experts.mlp.{n}": (E * F, D) for n in ("w1", "v1", "w2")})
    stored |= drawn({f"{stem}router.layer.weight": (E, D)})
    found, weights = dense(tmp_path, stored, top_k=2)
    w1, v1, w2 = (stored[f"{stem}experts.mlp.{n}"].reshape(E, F, D) for n in ("w1", "v1", "w2"))
    for name, tensor in {"gate.weight": w1, "up.weight": v1, "down.weight": w2.transpose(1, 2)}.items():
        assert torch.equal(weights[name], tensor)
    assert found["down.weight"].slice.words == "transposed, experts stacked as rows"
    assert {item.stored_shape() for name, item in found.items() if name != "router.weight"} == {(E * F, D)}


def test_transformerlens_matrices_are_transposed(tmp_path: Path):
    stored = drawn({f"blocks.0.mlp.{n}": shape for n, shape in
                    {"W_in": (D, F), "b_in": (F,), "W_out": (F, D), "b_out": (D,)}.items()})  # fmt: skip
    _, weights = dense(tmp_path, stored)
    theirs = {name.rpartition(".")[2]: tensor.t() for name, tensor in stored.items()}
    ours = {"up.weight": "W_in", "up.bias": "b_in", "down.weight": "W_out", "down.bias": "b_out"}
    assert weights.keys() == ours.keys()
    assert all(torch.equal(weights[name], theirs[other]) for name, other in ours.items())


# --- which half is the gate's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("up", "down", "first", "assumed"), [
    ("gate_up_proj", "down_proj", "gate", ""), ("up_gate_proj", "down_proj", "up", ""),
    ("ff_proj", "ff_out", "up", ""), ("net.0.proj", "net.2", "up", ""),
    ("Wi", "Wo", "gate", "Wi: the first half is read as the gate"),
    ("fc1", "fc2", "gate", "fc1: the first half is read as the gate"),
])  # fmt: skip
def test_the_order_in_a_fused_matrix(up: str, down: str, first: str, assumed: str, tmp_path: Path):
    stem = "model.layers.0.mlp."
    stored = drawn({f"{stem}{up}.weight": (2 * F, D), f"{stem}{down}.weight": (D, F)})
    found, weights = dense(tmp_path, stored)
    halves = stored[f"{stem}{up}.weight"].split(F)
    second = {"gate": "up", "up": "gate"}[first]
    assert [torch.equal(weights[f"{n}.weight"], half) for n, half in zip((first, second), halves, strict=True)] == [
        True, True,
    ]  # fmt: skip
    assert (found["gate.weight"].slice.assumed, found["up.weight"].slice.assumed) == (assumed, assumed)
    assert found["down.weight"].slice.assumed == ""
    assert found[f"{first}.weight"].slice.words == "concatenated 1 of 2"


@pytest.mark.parametrize("family", ["gpt_oss", None])
def test_experts_with_biases_are_interleaved(family: str | None, tmp_path: Path):
    stem = "model.layers.0.mlp."
    shapes = {f"{stem}experts.gate_up_proj": (E, D, 2 * F), f"{stem}experts.gate_up_proj_bias": (E, 2 * F),
              f"{stem}experts.down_proj": (E, F, D), f"{stem}experts.down_proj_bias": (E, D),
              f"{stem}router.weight": (E, D), f"{stem}router.bias": (E,)}  # fmt: skip
    stored = drawn(shapes)
    config = {**MIXTRAL, "model_type": family, "num_local_experts": E, "num_hidden_layers": 1} if family else None
    found, weights = read(load(folder(tmp_path, config, stored), Dimensions(**({} if family else {
        "activation": "silu", "top_k": 2}))))  # fmt: skip
    both, biases = stored[f"{stem}experts.gate_up_proj"], stored[f"{stem}experts.gate_up_proj_bias"]
    assert torch.equal(weights["gate.weight"], both[..., 0::2].transpose(1, 2))
    assert torch.equal(weights["up.weight"], both[..., 1::2].transpose(1, 2))
    assert torch.equal(weights["up.bias"], biases[:, 1::2])
    assert found["up.weight"].slice.words == "transposed, interleaved 2 of 2"
    assert bool(found["up.weight"].slice.assumed) == (family is None)


# --- names ------------------------------------------------------------------------------------------------------------


def test_experts_whose_names_say_expert_and_layers_of_an_adapter(tmp_path: Path):
    stem = "decoder.block.0.layer.2.mlp."
    shapes = {f"{stem}router.classifier.weight": (E, D)}
    for e in range(E):
        shapes |= {f"{stem}experts.expert_{e}.wi.weight": (F, D), f"{stem}experts.expert_{e}.wo.weight": (D, F)}
    stored = drawn(shapes)
    found, weights = dense(tmp_path / "switch", stored, top_k=1)
    assert found["up.weight"].names == tuple(f"{stem}experts.expert_{e}.wi.weight" for e in range(E))
    assert torch.equal(weights["up.weight"][1], stored[f"{stem}experts.expert_1.wi.weight"])
    llama = {n.replace("_proj.", "_proj.base_layer."): t for n, t in tensors("llama").items()}
    llama |= {n.replace("base_layer", "lora_A.default"): torch.zeros(2, D) for n in llama if "base_layer" in n}
    found, _ = read(load(folder(tmp_path / "peft", LLAMA, llama)), "1")
    assert found["gate.weight"].names == ("model.layers.1.mlp.gate_proj.base_layer.weight",)


def test_norms_are_found_by_usual_names_and_by_what_they_hold(tmp_path: Path):
    stored = tensors("llama")
    for i in range(2):  # a LayerNorm, by its bias: not what Llama has
        stored[f"model.layers.{i}.pre_feedforward_layernorm.weight"] = torch.ones(D)
        stored[f"model.layers.{i}.pre_feedforward_layernorm.bias"] = torch.ones(D)
    found, _ = read(load(folder(tmp_path, LLAMA, stored)))
    assert found["norm.weight"].names == ("model.layers.0.post_attention_layernorm.weight",)
    assert found["norm.weight"].slice.evidence == "named post_attention_layernorm"


def test_norms_outside_of_the_layers(tmp_path: Path):
    config = {"model_type": "xlm", "emb_dim": D, "n_layers": 2, "gelu_activation": True}
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        shapes |= {f"transformer.ffns.{i}.lin1.weight": (4 * D, D), f"transformer.ffns.{i}.lin1.bias": (4 * D,)}
        shapes |= {f"transformer.ffns.{i}.lin2.weight": (D, 4 * D), f"transformer.ffns.{i}.lin2.bias": (D,)}
        shapes |= {f"transformer.layer_norm2.{i}.{n}": (D,) for n in ("weight", "bias")}
    found, _ = read(load(folder(tmp_path, config, drawn(shapes))), "1")
    assert found["post_norm.weight"].names == ("transformer.layer_norm2.1.weight",)
