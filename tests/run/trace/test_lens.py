"""The lens in 30 families, by hand in float64: what an output, or a unit, adds to the logits as a part of the stream.

By hand: the final norm's weight times the part, over the size of the stream after the layer, through the head's matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ffncli
from ffncli.errors import FFNError
from tests.oracles.prompted import DENSE, PROMPT, ids, in_double, made, through

pytestmark = pytest.mark.models


class Lens(NamedTuple):
    """The modules of a family: its layer `{i}`, its FFN's output, the norm of the branch, the final norm."""

    layer: str = "model.layers.{i}"
    ffn: str = "model.layers.{i}.mlp"
    final: str = "model.norm"
    branch: str | None = None
    one_plus: bool = False
    residual: float = 1.0
    logits: float = 1.0


_H = "transformer.h.{i}"
_FINAL = "model.layers.{i}.post_feedforward_layernorm"
LENSES: Mapping[str, Lens] = {
    **dict.fromkeys(("llama", "mistral", "smollm3", "qwen3", "stablelm", "phi3", "glm", "starcoder2"), Lens()),
    "olmo2": Lens(branch=_FINAL),
    "glm4": Lens(branch="model.layers.{i}.post_mlp_layernorm"),
    "gemma": Lens(one_plus=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), Lens(branch=_FINAL, one_plus=True)),
    "nemotron": Lens(one_plus=True),
    "granite": Lens(residual=-1, logits=-1),  # its config's
    "cohere": Lens(logits=-1),
    "gpt2": Lens(_H, _H + ".mlp", "transformer.ln_f"),
    "gpt_neo": Lens(_H, _H + ".mlp", "transformer.ln_f"),
    **dict.fromkeys(("gptj", "codegen"), Lens(_H, _H + ".mlp", "transformer.ln_f")),
    "bloom": Lens(_H, _H + ".mlp.dense_4h_to_h", "transformer.ln_f"),
    "falcon": Lens(_H, _H + ".mlp", "transformer.ln_f"),
    "gpt_neox": Lens("gpt_neox.layers.{i}", "gpt_neox.layers.{i}.mlp", "gpt_neox.final_layer_norm"),
    "phi": Lens(final="model.final_layernorm"),
    "opt": Lens("model.decoder.layers.{i}", "model.decoder.layers.{i}.fc2", "model.decoder.final_layer_norm"),
    "xglm": Lens("model.layers.{i}", "model.layers.{i}.fc2", "model.layer_norm"),
    "biogpt": Lens("biogpt.layers.{i}", "biogpt.layers.{i}.fc2", "biogpt.layer_norm"),
    "mpt": Lens("transformer.blocks.{i}", "transformer.blocks.{i}.ffn.down_proj", "transformer.norm_f"),
    **{name: Lens() for name in ("mixtral", "qwen3_moe", "gpt_oss")},
}
LAYER, UNIT, TOKEN = 1, 5, 7
VOCABULARY = 10_000  # more than any of them has


class ByHand:
    """A run of the model, and the maps of its end."""

    def __init__(self, name: str) -> None:
        self.path, self.model = (
            in_double(name) if name in DENSE else (made(name).path, deepcopy(made(name).model).double())
        )
        self.at, config = LENSES[name], self.model.config
        names = {"stream_output": self.at.layer, "output": self.at.ffn}
        names |= {"hidden": DENSE[name][0]} if name in DENSE else {}
        self.seen = through(self.model, {k: v.format(i=LAYER) for k, v in names.items()}, input_ids=ids())
        self.residual = config.residual_multiplier if self.at.residual < 0 else 1.0
        self.scale = {"granite": lambda: 1 / config.logits_scaling, "cohere": lambda: config.logit_scale}.get(
            name, lambda: 1.0
        )()
        self.down = self.model.get_submodule(DENSE[name][0].format(i=LAYER)) if name in DENSE else None

    def normed(self, path: str, part: Tensor, whole: Tensor) -> Tensor:
        """A part of what a norm reads, over the size of the whole, times its weight."""
        norm = self.model.get_submodule(path)
        eps = next(getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n))
        if "RMS" not in type(norm).__name__:
            part, whole = (x - x.mean(-1, keepdim=True) for x in (part, whole))
        return part / (whole.square().mean(-1, keepdim=True) + eps).sqrt() * (norm.weight + self.at.one_plus)

    def share(self, part: Tensor) -> Tensor:
        """What a part of the FFN's output [tokens, d_model] adds to the logits [tokens, vocabulary]."""
        if self.at.branch is not None:
            part = self.normed(self.at.branch.format(i=LAYER), part, self.seen["output"])
        part = self.normed(self.at.final, self.residual * part, self.seen["stream_output"])
        return self.scale * part @ self.model.get_output_embeddings().weight.T

    def columns(self) -> Tensor:
        """What each unit writes [d_ff, d_model]."""
        assert self.down is not None
        weight: Tensor = self.down.weight
        return weight if type(self.down).__name__ == "Conv1D" else weight.T


def values(tokens: Any) -> Tensor:
    """The logits of all tokens, in the order of the vocabulary."""
    return torch.tensor([t.logit for t in sorted(tokens, key=lambda t: t.id)], dtype=torch.float64)


def close(ours: Tensor, theirs: Tensor, dtype: str) -> bool:
    return float((ours - theirs).abs().max()) <= (1e-6 if dtype == "fp64" else 1e-4) * float(theirs.abs().max())


def dtype_of(name: str) -> str:
    return "fp32" if name == "xglm" else "fp64"


@pytest.mark.parametrize("name", LENSES)
def test_what_an_output_adds(name: str) -> None:
    with torch.no_grad():
        hand = ByHand(name)
        theirs = hand.share(hand.seen["output"]).double()
    how: dict[str, Any] = {"layer": LAYER, "prompt": PROMPT, "dtype": dtype_of(name), "position": "all"}
    session = ffncli.trace(hand.path, unembed=True, top_tokens=VOCABULARY, **how)
    assert session.unembed is not None
    for one, row in zip(session.unembed, theirs, strict=True):
        assert one.direct is not None
        assert close(values(one.direct.promoted), row, dtype_of(name))
        assert [t.id for t in one.direct.suppressed[:3]] == row.argsort()[:3].tolist()


@pytest.mark.parametrize("name", [name for name in LENSES if name in DENSE])
def test_what_a_unit_adds(name: str) -> None:
    """`--neuron` names one unit's tokens, `promotes` one token's units: the same numbers."""
    with torch.no_grad():
        hand = ByHand(name)
        parts = hand.seen["hidden"][:, UNIT, None] * hand.columns()[UNIT]
        theirs = hand.share(parts).double()
        every = torch.stack(
            [hand.share(hand.seen["hidden"][:, u, None] * c)[:, TOKEN] for u, c in enumerate(hand.columns())]
        )
        output = hand.share(hand.seen["output"])[:, TOKEN].double()
    how: dict[str, Any] = {"layer": LAYER, "prompt": PROMPT, "dtype": dtype_of(name), "position": "all"}
    session = ffncli.trace(
        hand.path, unembed=True, neuron=UNIT, top_tokens=VOCABULARY, promotes=f"id:{TOKEN}", top_units=1000, **how
    )
    assert session.unembed is not None
    assert session.promotes is not None
    for row, (one, units) in enumerate(zip(session.unembed, session.promotes, strict=True)):
        assert one.activation == pytest.approx(float(hand.seen["hidden"][row, UNIT]), rel=1e-5, abs=1e-7)
        assert one.direct is not None
        assert close(values(one.direct.promoted), theirs[row], dtype_of(name))
        logits = {unit.unit: unit.logit for unit in units.promoting}
        assert [unit.unit for unit in units.suppressing] == [unit.unit for unit in units.promoting][::-1]
        ours = torch.tensor([logits[unit] for unit in range(len(logits))], dtype=torch.float64)
        assert close(ours, every[:, row].double(), dtype_of(name))
        assert units.units == pytest.approx(float(every[:, row].sum()), rel=1e-3, abs=1e-5)
        assert units.output == pytest.approx(float(output[row]), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_units_of_experts_add_up_to_the_output(name: str) -> None:
    """All units that get a token, with the biases where experts have one, make what the FFN adds."""
    how: dict[str, Any] = {"layer": LAYER, "prompt": PROMPT, "dtype": "fp64"}
    session = ffncli.trace(made(name).path, promotes=f"id:{TOKEN}", top_units=1000, **how)
    assert session.promotes is not None
    (one,) = session.promotes
    with torch.no_grad():
        hand = ByHand(name)
        output = hand.share(hand.seen["output"])[-1, TOKEN]
    assert one.output == pytest.approx(float(output), rel=1e-6)
    if name != "gpt_oss":
        assert one.units == pytest.approx(float(output), rel=1e-6)
    route = session["route"][-1]
    assert {unit.expert for unit in one.promoting} == {*route.nonzero().flatten().tolist()}
    unit = one.promoting[0]
    alone = ffncli.trace(
        made(name).path, unembed=True, neuron=unit.unit, expert=unit.expert, top_tokens=VOCABULARY, **how
    ).unembed
    assert alone is not None
    assert alone[0].activation == pytest.approx(unit.activation)
    assert alone[0].direct is not None
    assert values(alone[0].direct.promoted)[TOKEN] == pytest.approx(unit.logit, rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma2", "mixtral"])
def test_columns_alone(name: str) -> None:
    """Without a prompt: each column in place of the last layer's output, as `--unembed --neuron` has it."""
    stack = "encoder" if name == "bert" else "decoder"
    how: dict[str, Any] = {"layer": f"{stack}.1", "dtype": "fp64"}
    session = ffncli.trace(made(name).path, promotes=f"id:{TOKEN}", top_units=4, **how)
    assert session.promotes is not None
    (one,) = session.promotes
    assert (one.row, one.units, one.output, one.residual_rms) == (None, None, None, None)
    assert [u.alone for u in one.promoting] == sorted((u.alone for u in one.promoting), reverse=True)
    for unit in (*one.promoting, *one.suppressing):
        assert (unit.activation, unit.logit) == (None, None)
        lens = ffncli.trace(
            made(name).path, unembed=True, neuron=unit.unit, expert=unit.expert, top_tokens=VOCABULARY, **how
        ).unembed
        assert lens is not None
        logit = float(values(lens[0].promoted)[TOKEN])
        cap = 30.0 if name == "gemma2" else None
        assert logit == pytest.approx(
            unit.alone if cap is None else cap * float(torch.tensor(unit.alone / cap).tanh()), rel=1e-5
        )


def test_a_token_by_its_text() -> None:
    path = made("llama").path
    by_text, by_id = (ffncli.trace(path, layer=1, promotes=name).promotes for name in ("Hello", "id:3"))
    assert by_text == by_id
    assert by_text is not None
    assert (by_text[0].id, by_text[0].text) == (3, "Hello")
    assert len(by_text[0].promoting) == 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"promotes": "Hello the"}, "is 2 tokens: 'Hello', 'the'"),
        ({"promotes": "id:999999"}, "is out of range"),
        ({"promotes": ""}, "is 0 tokens"),
        ({"promotes": 3}, "promotes must be text"),
        ({"promotes": "Hello", "layer": "9"}, "layer"),
    ],
)
def test_what_is_no_token_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(FFNError) as caught:
        ffncli.trace(made("llama").path, **arguments)
    assert words in str(caught.value)


def test_only_a_model_with_a_head_has_tokens() -> None:
    with pytest.raises(FFNError, match="promotes"):
        ffncli.trace("8x16:swiglu", promotes="Hello")
    with pytest.raises(FFNError, match="encoder"):
        ffncli.trace(made("t5-relu").path, layer="encoder.1", promotes="id:3")


def test_a_token_that_no_such_expert_gets() -> None:
    session = ffncli.trace(made("mixtral").path, layer=1, prompt=PROMPT)
    idle = next(e for e in range(8) if not float(session["route"][-1, e]))
    with pytest.raises(FFNError, match="not routed"):
        ffncli.trace(made("mixtral").path, layer=1, prompt=PROMPT, unembed=True, neuron=1, expert=idle, position=-1)
