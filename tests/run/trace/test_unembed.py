"""The logit lens against transformers' own final norm and head, each applied to the same vector by hand."""

import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ffncli
from ffncli.errors import FFNError
from ffncli.models.model import Layer, Resolved
from ffncli.models.source import load
from ffncli.run.engine.prepare import Prepared
from ffncli.run.pretrained.capture import capture
from ffncli.run.pretrained.prompt import Prompt
from ffncli.run.trace import head as head_module
from ffncli.run.trace.head import to_stream
from ffncli.run.trace.unembed import Added, Promoted, PromotedTokens, TokenLimits
from ffncli.run.trace.unembed import unembed as unembedded
from tests.oracles.huggingface import D_MODEL, VOCAB
from tests.oracles.prompted import DENSE, PROMPT, built, ids, in_double, made, through

pytestmark = pytest.mark.models

Head = Callable[[Any, Tensor], Tensor]


def _llama(m: Any, v: Tensor) -> Tensor:
    return m.lm_head(m.model.norm(v))


def _gemma2(m: Any, v: Tensor) -> Tensor:
    logits = m.lm_head(m.model.norm(v))
    return 30.0 * torch.tanh(logits / 30.0)


def _t5(m: Any, v: Tensor) -> Tensor:
    hidden = m.decoder.final_layer_norm(v)
    return m.lm_head(hidden * (m.config.d_model**-0.5 if m.config.tie_word_embeddings else 1.0))


# Families whose last layer is followed by one norm and the head, by the code of each.
HEADS: dict[str, Head] = {
    "llama": _llama, "mixtral": _llama, "qwen3_moe": _llama, "deepseek_v3": _llama, "gpt_oss": _llama, "olmo2": _llama,
    "gemma2": _gemma2, "t5-gated-gelu": _t5,
    "gpt2": lambda m, v: m.lm_head(m.transformer.ln_f(v)),
    "gpt2-n_inner-null": lambda m, v: m.ln_f(v) @ m.wte.weight.T,  # saved without a head: tied
    "opt": lambda m, v: m.lm_head(m.model.decoder.final_layer_norm(v)),
    "whisper": lambda m, v: m.proj_out(m.model.decoder.layer_norm(v)),
    # post-norm: the last layer's own norm is the last one there is
    "bert": lambda m, v: m.cls(m.bert.encoder.layer[-1].output.LayerNorm(v)),
    "opt-post-norm": lambda m, v: m.lm_head(
        m.model.decoder.project_out(m.model.decoder.layers[-1].final_layer_norm(v))
    ),
}  # fmt: skip


def added(given: Tensor) -> list[Added]:
    return [Added(vector) for vector in given]


def unembed(model: Resolved, layer: Layer, given: Tensor, top: int) -> list[tuple[Promoted, ...]]:
    """The promoted tokens alone."""
    return [one.promoted for one in unembedded(model, layer, added(given), TokenLimits(top, 5, 0.9))]


def vectors(count: int = 3) -> Tensor:
    return torch.randn(count, D_MODEL, generator=torch.Generator().manual_seed(5))


def check(found: Any, logits: Tensor) -> None:
    """Every token in order of its logit, with it and its softmax probability."""
    for tokens, row in zip(found, logits, strict=True):
        shares = row.double().softmax(-1)
        assert [t.id for t in tokens] == row.argsort(descending=True).tolist()[: len(tokens)]
        for t in tokens:
            assert t.logit == pytest.approx(float(row[t.id]), rel=1e-4, abs=1e-5)
            assert t.probability == pytest.approx(float(shares[t.id]), rel=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_models_own_norm_and_head(name: str) -> None:
    stack = "encoder" if name == "bert" else "decoder"
    model = load(str(made(name).path))
    found = unembed(model, model.model.layer(f"{stack}.1"), vectors(), VOCAB)
    with torch.no_grad():
        check(found, HEADS[name](made(name).model, vectors()))


SCALED: dict[str, tuple[dict[str, Any], Head]] = {
    "granite": ({"logits_scaling": 8.0}, lambda m, v: m.lm_head(m.model.norm(v)) / 8.0),
    "cohere": ({"logit_scale": 0.25}, lambda m, v: m.lm_head(m.model.norm(v)) * 0.25),
    "gemma2": ({"final_logit_softcapping": 2.0}, lambda m, v: 2.0 * torch.tanh(m.lm_head(m.model.norm(v)) / 2.0)),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_and_capped_logits(name: str, tmp_path: Path) -> None:
    values, head = SCALED[name]
    module: Any = built(name, tmp_path, **values)
    model = load(str(tmp_path))
    given = torch.randn(2, model.model.main.spec.d_model, generator=torch.Generator().manual_seed(5))
    found = unembed(model, model.model.layer(None), given, 5)
    with torch.no_grad():
        check(found, head(module, given))


def sets(name: str, given: Tensor, *wanted: Any) -> tuple[PromotedTokens, ...]:
    model = load(str(made(name).path))
    return unembedded(model, model.model.layer("1"), added(given), TokenLimits(*wanted))


@pytest.mark.parametrize(("top", "top_k", "top_p"), [(10, 5, 0.9), (3, 7, 0.5), (VOCAB, 1, 0.1), (10, VOCAB + 9, 1.0)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_samplers_sets_are_torchs(name: str, top: int, top_k: int, top_p: float) -> None:
    with torch.no_grad():
        shares = HEADS[name](made(name).model, vectors()).double().softmax(-1)
    for one, row in zip(sets(name, vectors(), top, top_k, top_p), shares, strict=True):
        k = min(top_k, VOCAB)
        best = row.topk(k)
        mass = row.sort(descending=True).values.cumsum(0)
        enough = min(int((mass < top_p - 1e-7).sum()) + 1, VOCAB)
        assert (one.vocab, one.argmax, one.top_k, one.top_p) == (VOCAB, int(row.argmax()), k, top_p)
        assert one.top_k_mass == pytest.approx(float(best.values.sum()), rel=1e-4)
        assert one.top_p_count == pytest.approx(enough, abs=int(top_p == 1))  # the last of all is within rounding
        assert one.top_p_mass == pytest.approx(float(mass[enough - 1]), rel=1e-4)
        assert [t.cumulative for t in one.promoted] == pytest.approx(mass[:top].tolist(), rel=1e-4)
        assert [t.id for t in one.promoted if t.in_top_k] == best.indices[:top].tolist()
        assert [t.in_top_p for t in one.promoted] == [at < enough for at in range(top)]


def test_tokens_that_are_out_of_reach_keep_their_order() -> None:
    """Where probabilities have become 0, the logits still differ."""
    from ffncli.run.trace.unembed import _best

    logits = torch.tensor([-3000.0, 0.0, -1000.0, -2000.0], dtype=torch.float64)
    found = _best(Added(logits), logits, None, TokenLimits(4, 2, 0.9))
    assert [t.id for t in found.promoted] == [1, 2, 3, 0]
    assert [t.probability for t in found.promoted] == [1, 0, 0, 0]
    assert (found.argmax, found.top_p_count) == (1, 1)


def test_nothing_is_picked_from_what_is_no_number() -> None:
    (one,) = sets("gpt2", torch.full((1, D_MODEL), float("nan")), 10, 5, 0.9)
    assert (one.promoted, one.argmax, one.top_p_count, one.top_k_mass) == ((), None, None, None)


def prepared(name: str) -> Prepared:
    return capture(load(str(made(name).path)), Prompt(PROMPT), layer="1")


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("gemma2", "post_feedforward_layernorm"),
        ("olmo2", "post_feedforward_layernorm"),
        ("axk1", "mlp.post_mlp_layernorm"),
    ],
)
def test_a_branch_norm_comes_before_the_residual_stream(name: str, norm: str) -> None:
    layer = made(name).layer("decoder", 1)
    ready = prepared(name)
    with torch.no_grad():
        assert torch.allclose(
            to_stream(ready, vectors(), vectors())[0], layer.get_submodule(norm)(vectors()), atol=1e-6
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_other_branches_write_what_the_ffn_gives(name: str) -> None:
    assert torch.equal(to_stream(prepared(name), vectors(), vectors())[0], vectors())


def test_the_answer_does_not_depend_on_the_layer_or_on_what_stands_beside() -> None:
    model = load(str(made("llama").path))
    both = [unembed(model, model.model.layer(index), vectors(), 4) for index in ("0", "1")]
    assert both[0] == both[1]
    alone = unembed(model, model.model.layer("0"), vectors()[1:2], 4)
    assert [t.id for t in alone[0]] == [t.id for t in both[0][1]]


def test_many_vectors_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_AT_ONCE", 2)
    model = load(str(made("llama").path))
    found = unembed(model, model.model.layer("0"), vectors(5), 3)
    with torch.no_grad():
        check(found, _llama(made("llama").model, vectors(5)))


def test_texts_are_the_tokenizers() -> None:
    model = load(str(made("llama").path))
    (tokens,) = unembed(model, model.model.layer("0"), vectors(1), VOCAB)
    texts = {token.id: token.text for token in tokens}
    assert (texts[3], texts[VOCAB - 1]) == ("Hello", None)


def test_a_head_that_is_not_in_the_files_is_not_made_up(tmp_path: Path) -> None:
    folder = shutil.copytree(made("llama-no-prefix").path, tmp_path / "model")
    model = load(str(folder))
    with pytest.raises(FFNError, match=r"the checkpoint has no 'lm_head\.weight', which the model needs to run"):
        unembed(model, model.model.layer("0"), vectors(), 3)


def test_pictures_have_no_vocabulary() -> None:
    model = load(str(made("vit").path))
    with pytest.raises(FFNError, match="transformers has no language-model head for vit"):
        unembed(model, model.model.layer("0"), vectors(), 3)


def test_layers_that_give_a_list(tmp_path: Path) -> None:
    """GPT-1's do; it has no final norm, but the last layer's own."""
    model: Any = built("openai-gpt", tmp_path)
    (found,) = unembed(load(str(tmp_path)), load(str(tmp_path)).model.layer("0"), vectors(1), 3)
    with torch.no_grad():
        logits = model.lm_head(model.transformer.h[-1].ln_2(vectors(1)))[0]
    assert [token.id for token in found] == logits.argsort(descending=True)[:3].tolist()
    assert [token.logit for token in found] == pytest.approx(logits.sort(descending=True).values[:3].tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("layers", "why"), [(1, "reads more than the output of its layers"), (2, "only its first layer")]
)
def test_a_layer_without_a_module_of_its_own_is_refused(tmp_path: Path, layers: int, why: str) -> None:
    """XLM adds what an FFN gives to what the head reads: nothing stands in the place of a whole layer's output."""
    built("xlm", tmp_path, n_layers=layers, num_hidden_layers=layers)
    model = load(str(tmp_path))
    with pytest.raises(FFNError, match=why):
        unembed(model, model.model.layer("0"), vectors(1), 3)


def test_an_encoder_decoder_saved_without_its_head(tmp_path: Path) -> None:
    """BART has a class of its decoder alone too; the head of the whole one is tied."""
    from tests.oracles.architectures import build, cases

    whole: Any = build("bart", cases()["bart"]).eval()
    whole.model.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    (found,) = unembed(model, model.model.layer("decoder.0"), vectors(1), 3)
    with torch.no_grad():
        logits = whole.lm_head(whole.model.decoder.layers[-1].final_layer_norm(vectors(1)))[0]
    assert [token.id for token in found] == logits.argsort(descending=True)[:3].tolist()


def test_a_class_that_cannot_be_made_of_the_config_is_passed_over(tmp_path: Path) -> None:
    """The text model's head is a class beside that of text and pictures; only the latter takes the whole config."""
    from tests.oracles.architectures import build, cases

    whole: Any = build("qwen3_5", cases()["qwen3_5"])
    base = whole.base_model
    base.config = whole.config
    base.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    with pytest.raises(FFNError, match=r"the checkpoint has no 'lm_head\.weight'"):
        unembed(model, model.model.layer("0"), vectors(1), 3)


def test_time_may_go_before_the_batch(tmp_path: Path) -> None:
    """As it does in XLNet."""
    module: Any = built("xlnet", tmp_path)
    given = torch.randn(3, 16, generator=torch.Generator().manual_seed(5))
    found = unembed(load(str(tmp_path)), load(str(tmp_path)).model.layer(None), given, 5)
    with torch.no_grad():
        check(found, module.lm_loss(module.transformer.layer[-1].ff.layer_norm(given)))


def test_several_heads_are_refused(tmp_path: Path) -> None:
    """Musicgen has one for each token of sound that stands at one position; its FFN can be traced all the same."""
    built("musicgen", tmp_path)
    model = load(str(tmp_path))
    ready = capture(model, Prompt(ids=(5, 6, 7)))
    assert ready.steps
    with pytest.raises(FFNError, match="musicgen has several heads"):
        unembed(model, model.model.layer(None), torch.ones(1, model.model.main.spec.d_model), 5)


def test_no_direct_logits_where_they_are_not_a_sum() -> None:
    """No norm lies between BERT's layers and its head."""
    import ffncli

    for how in ({}, {"neuron": 3}):
        session = ffncli.trace(made("bert").path, layer="1", prompt=PROMPT, unembed=True, **how)
        assert all(one.direct is None and one.suppressed for one in session.unembed or ())
    unit = ffncli.trace(made("llama").path, layer=1, unembed=True, neuron=3)
    assert all(one.direct is None and one.suppressed for one in unit.unembed or ())


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
        ({"promotes": 3}, "promotes must be a string"),
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
