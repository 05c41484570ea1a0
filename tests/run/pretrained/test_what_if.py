"""What if: a changed weight, an ablated unit or expert, no gate; against torch modules with that change by hand."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ffncli
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import parameters
from ffncli.errors import FFNError
from ffncli.run.engine.changes import WeightChange, changes_of
from ffncli.run.pretrained.what_if import PredictionChange
from tests.oracles.prompted import DENSE, PROMPT, SINGLE, ids, in_double, made


def by_name(session: Any) -> dict[str, Any]:
    return {one.name: one for one in session.changes}


@pytest.mark.parametrize(("place", "index"), [("W1[0,3]", (3, 0)), ("up.weight[3,0]", (3, 0)), ("W1[-4,-5]", (3, 0))])
def test_a_weight_is_set_as_the_formula_prints_it(place: str, index: tuple[int, int]) -> None:
    """up = x · W1: W1[0,3] reads x[0] and writes up[3]."""
    session = ffncli.trace("4x8:relu", tokens=3, set=f"{place}=5")
    x, w = session["x"], session.prepared.weights
    assert w["up.weight"][index] != 5  # the block itself stays
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    for linear, name in ((up, "up"), (down, "down")):
        linear.load_state_dict({"weight": w[f"{name}.weight"], "bias": w[f"{name}.bias"]})
    with torch.no_grad():
        old = {"up": up(x), "act": up(x).relu(), "down": down(up(x).relu())}
        up.weight[index] = 5
        new = {"up": up(x), "act": up(x).relu(), "down": down(up(x).relu())}
    changes = by_name(session)
    assert [*changes] == ["up", "act", "down"]
    for name, change in changes.items():
        gap = new[name] - old[name]
        assert change.values == gap.numel()
        assert change.changed == int((gap != 0).sum())
        assert change.difference == float((new[name].double() - old[name].double()).flatten()[gap.abs().argmax()])
        assert change.at is not None
        assert (change.old, change.new) == (float(old[name][change.at]), float(new[name][change.at]))
        assert change.relative == pytest.approx(float(gap.norm() / old[name].norm()))
    assert {tuple(at)[1] for at in (new["up"] != old["up"]).nonzero().tolist()} == {3}


def test_biases_and_several_changes() -> None:
    session = ffncli.trace("4x8:relu", tokens=2, set=["b1[2]=100,b2[0]=7"])
    changes = by_name(session)
    assert changes["up"].changed == 2
    assert changes["up"].at[1] == 2
    assert changes["down"].changed == 8


@pytest.mark.parametrize(("block", "reads"), [("4x8:relu", "act"), ("4x8:swiglu", "hidden")])
def test_a_removed_unit_is_zero_where_the_down_projection_reads_it(block: str, reads: str) -> None:
    session = ffncli.trace(block, tokens=3, ablate="unit:1,unit:5")
    changes, w = by_name(session), session.prepared.weights
    old, kept = session[reads], torch.ones(8)
    kept[[1, 5]] = 0
    assert changes[reads].changed == int((old * (1 - kept) != 0).sum()) > 0
    assert changes[reads].new == 0
    assert changes[reads].relative == pytest.approx(float((old * (1 - kept)).norm() / old.norm()))
    gap = functional.linear(old * kept, w["down.weight"]) - functional.linear(old, w["down.weight"])
    assert changes["down"].relative == pytest.approx(float(gap.norm() / session["down"].norm()), rel=1e-5)
    assert all(one.changed == 0 for name, one in changes.items() if name not in (reads, "down"))


def test_a_removed_unit_that_is_zero_is_said() -> None:
    session = ffncli.trace("2x3:relu", input=[[-1.0, 0.0]], set=["W1[0,0]=9", "b1[0]=0"])
    found = ffncli.trace("2x3:relu", input=[[1.0, 2.0]], ablate=["unit:0", "unit:2"], seed=3)
    idle = [unit for unit in (0, 2) if not found["act"][..., unit].any()]
    assert [*found.notes] == [f"unit {unit} is 0 for every token: without it, nothing changes" for unit in idle]
    assert idle
    assert session.notes == ()


def test_without_its_gate_hidden_is_up() -> None:
    session = ffncli.trace("8x16:swiglu", tokens=2, ablate="gate")
    changes = by_name(session)
    assert (changes["gate"].changed, changes["up"].changed) == (0, 0)
    up, act = session["up"], session["act"]
    gap = (up - act * up).double()
    assert changes["act"].new == 1.0
    assert changes["hidden"].relative == pytest.approx(float(gap.norm() / (act * up).double().norm()))
    with pytest.raises(FFNError, match="has no gate"):
        ffncli.trace("8x16:relu", ablate="gate")


def test_a_unit_writes_nothing() -> None:
    session = ffncli.trace("8x16:swiglu", tokens=2, ablate="unit:5", dtype="fp64")
    hidden, down = session["hidden"].clone(), session.prepared.weights["down.weight"]
    hidden[:, 5] = 0
    expected = functional.linear(hidden, down) - session["down"]
    change = by_name(session)["down"]
    assert abs(change.difference) == pytest.approx(float(expected.abs().max()), rel=1e-12)
    assert by_name(session)["hidden"].changed == 2


def test_an_expert_writes_nothing() -> None:
    session = ffncli.trace("8x16:swiglu", experts=4, top_k=2, tokens=6, ablate="expert:1", expert="all", keep=True)
    route = session["route"]
    changes = by_name(session)
    tokens = route[:, 1].nonzero().flatten()
    assert changes["route"].changed == 0
    assert changes["experts"].changed == 8 * len(tokens) > 0
    gap = torch.zeros(6, 8)
    gap[tokens] = -route[tokens, 1, None] * session["experts.1.down"]
    assert abs(changes["experts"].difference) == pytest.approx(float(gap.abs().max()), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"set": "W1[0,3]"}, "expected a weight or a step followed by its value"),
        (
            {"set": "W1[0,3]*=2"},
            "changes the values of a step, not a weight; give the weight's new value: W1[0,3]=VALUE",
        ),
        ({"set": "W1[8,0]=1"}, "out of range; W1 is"),
        ({"set": "W9[0,0]=1"}, "no weight 'W9'"),
        ({"set": "W1[0]=1"}, "out of range"),
        ({"set": "W1[0,0]=x"}, "not a number"),
        ({"set": "experts.0.W1[0,0]=1"}, "not an expert's weight"),
        ({"ablate": "unit:16"}, "there are 16 units"),
        ({"ablate": "expert:0"}, "there are no experts"),
        ({"ablate": "unit:1:1"}, "has no experts"),
        ({"ablate": "head:1"}, "not a part of a block"),
        ({"set": 3}, "set must be"),
        ({"train": True, "ablate": "gate"}, "train=True"),
    ],
)
def test_what_the_block_does_not_have_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(FFNError) as caught:
        ffncli.trace("8x16:swiglu", **arguments)
    assert words in str(caught.value)


def test_experts_have_their_own_weights() -> None:
    with pytest.raises(FFNError, match="every expert has this weight"):
        ffncli.trace("8x16:swiglu", experts=4, set="W1[0,0]=1")
    with pytest.raises(FFNError, match="each of 4 experts has this unit"):
        ffncli.trace("8x16:swiglu", experts=4, ablate="unit:1")
    for name in ("experts.2.W1[0,3]=9", "experts[2].W1[0,3]=9", "experts.2.gate.weight[3,0]=9"):
        session = ffncli.trace("8x16:swiglu", experts=4, top_k=4, tokens=2, set=name, expert="2", keep=True)
        weights = session.prepared.weights
        matrix = weights["gate.weight"][2].clone()
        matrix[3, 0] = 9
        act = functional.silu(functional.linear(session["x"], matrix))
        new = functional.linear(act * session["experts.2.up"], weights["down.weight"][2])
        gap = session["route"][:, 2, None] * (new - session["experts.2.down"])
        assert abs(by_name(session)["experts"].difference) == pytest.approx(float(gap.abs().max()), rel=1e-4)


# --- the whole model --------------------------------------------------------------------------------------------------


def as_loaded(name: str) -> Any:
    """The model in float64 as transformers loads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made(name).path, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    return model


def assert_from_old_to_new(change: PredictionChange, old: Tensor, new: Tensor, within: float) -> None:
    """Logits are equal bit by bit, the divergence as far as their dtype allows."""
    assert {t.id: t.old_logit for t in change.tokens} == dict(enumerate(old.tolist()))
    assert {t.id: t.new_logit for t in change.tokens} == dict(enumerate(new.tolist()))
    assert change.logit_change == float((new - old).abs().max()) > 0
    expected = functional.kl_div(new.log_softmax(-1), old.log_softmax(-1), log_target=True, reduction="sum")
    assert change.divergence == pytest.approx(float(expected), abs=within)


@pytest.mark.parametrize(
    ("name", "part", "zeroed"),
    [
        ("llama", "unit:7", {"down_proj.weight": (slice(None), 7)}),
        ("gpt2", "unit:7", {"c_proj.weight": 7}),
        ("mixtral", "expert:2", {"experts.down_proj": 2}),
        ("gpt_oss", "expert:2", {"experts.down_proj": 2, "experts.down_proj_bias": 2}),
        ("qwen3_moe", "expert:2", {"experts.down_proj": 2}),
    ],
)
def test_the_prediction_is_that_of_the_model_with_zeros(name: str, part: str, zeroed: dict[str, Any]) -> None:
    """Bitwise in float64: the same module with the same numbers."""
    model = as_loaded(name)
    session = ffncli.trace(made(name).path, prompt=PROMPT, layer=1, dtype="fp64", ablate=part, top_tokens=60)
    with torch.no_grad():
        old = model(ids()).logits[0, -1]
        mlp = (model.transformer.h if name == "gpt2" else model.model.layers)[1].mlp
        for weight, place in zeroed.items():
            mlp.get_parameter(weight)[place] = 0
        new = model(ids()).logits[0, -1]
    assert session.prediction is not None
    assert_from_old_to_new(session.prediction, old, new, 1e-12)
    assert session.prediction.position == 3
    assert session.prediction.argmax_changed == bool(old.argmax() != new.argmax())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_prediction_without_a_gate(name: str) -> None:
    """transformers' activation, made to give 1."""
    model = as_loaded(name)
    session = ffncli.trace(made(name).path, prompt=PROMPT, layer=0, dtype="fp64", ablate="gate", top_tokens=60)

    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x)

    mlp = model.model.layers[0].mlp
    (mlp if name == "llama" else mlp.experts).act_fn = One()
    with torch.no_grad():
        new = model(ids()).logits[0, -1]
    change = session.prediction
    assert change is not None
    ours = torch.tensor([t.new_logit for t in sorted(change.tokens, key=lambda t: t.id)])
    assert float((ours.double() - new).abs().max()) <= 1e-6 * float(new.abs().max())


def test_the_model_is_not_needed_without_a_prompt() -> None:
    session = ffncli.trace(made("llama").path, layer=1, ablate="unit:3")
    assert session.prediction is None
    assert by_name(session)["down"].changed


UNITS = range(4, 12)  # several, since a relu may be 0 for one
_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")


def with_head(name: str) -> Any:
    """The model with its head as transformers loads it, in float64 where its code allows that."""
    import transformers

    path, model = in_double(name)
    kind = next(kind for kind in _CLASSES if type(model.config) in getattr(transformers, kind)._model_mapping)
    if type(model) is getattr(transformers, kind)._model_mapping[type(model.config)]:
        return deepcopy(model)  # it has the head and the dtype already: units are set to 0 in the copy
    dtype = torch.float32 if name in SINGLE else torch.float64
    return getattr(transformers, kind).from_pretrained(path, dtype=dtype).eval()


def zeroed(model: Any, name: str, layer: int) -> None:
    """The units write nothing: by hand, in the module that they enter."""
    at = DENSE[name][0].format(i=layer)
    down = dict(model.named_modules()).get(at) or model.base_model.get_submodule(at)
    columns = down.weight if type(down).__name__ == "Conv1D" else down.weight.T  # [d_ff, d_model]
    columns[UNITS.start : UNITS.stop] = 0


@pytest.mark.parametrize("name", DENSE)
def test_ablated_units_in_30_families(name: str) -> None:
    """The prediction is bitwise that of transformers' model with columns of zeros."""
    model, layer = with_head(name), 0 if name.startswith("t5") else 1
    dtype = "fp32" if name in SINGLE else "fp64"
    where = f"encoder.{layer}" if name.startswith("t5") else layer
    units = [f"unit:{unit}" for unit in UNITS]
    change = ffncli.trace(
        in_double(name)[0],
        prompt=PROMPT,
        layer=where,
        dtype=dtype,
        ablate=units,
        top_tokens=1000,
    ).prediction
    given = {"input_ids": ids()} | ({"decoder_input_ids": torch.tensor([[0]])} if name.startswith("t5") else {})
    with torch.no_grad():
        old = model(**given).logits[0, -1]
        zeroed(model, name, layer)
        new = model(**given).logits[0, -1]
    assert change is not None
    assert_from_old_to_new(change, old.double(), new.double(), 1e-9)


def test_a_norm_that_experts_share_is_set_once() -> None:
    block = steps(FFNSpec(6, 8, "swiglu", moe=MoE(4, 2, expert_norm=True)))
    shapes = {name: [axis.size for axis in axes] for name, axes in parameters(block).items()}
    (change,) = changes_of(block, ["expert_norm.weight[1]=5"], [])
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert isinstance(change, WeightChange)
    weights[change.name][change.index] = change.value
    assert weights["expert_norm.weight"].tolist() == [0, 5, 0, 0, 0, 0]
    with pytest.raises(FFNError, match=r"not an expert's weight; give expert_norm.weight\[...\]"):
        changes_of(block, ["experts.0.expert_norm.weight[1]=5"], [])
