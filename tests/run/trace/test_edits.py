"""Edits of steps, in a block by hand, and in models against hooks on transformers' modules in float64."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ffncli
from ffncli.errors import FFNError
from tests.oracles.prompted import DENSE, IDS, PROMPT, SINGLE, ids, in_double, made

Edit = Callable[[Tensor], Tensor]
FAMILIES = [name for name in DENSE if name not in SINGLE and not name.startswith("t5")]
# More than one unit in the last place, relative to the largest logit: BLOOM's GELU has a constant of eight digits, and
# Phi's multiplies and adds in another order than torch's.
CLOSE = {"bloom": 1e-9, "phi": 1e-15}
FEW = ("llama", "gemma2", "gpt2", "phi3", "bert")


def logits_with(model: Any, module: str, edit: Edit) -> Tensor:
    """Return the last logits of a model in which the input [tokens, units] of a module is edited."""
    hook = model.get_submodule(module).register_forward_pre_hook(
        lambda m, args: (edit(args[0].reshape(-1, args[0].shape[-1])).view_as(args[0]), *args[1:])
    )
    with torch.no_grad():
        out = model(input_ids=ids())
    hook.remove()
    found: Tensor = (out.logits if "logits" in out else out[0])[0, -1]
    return found.double()


def ulp(value: Tensor, close: float = 0.0) -> Any:
    """Return what equals a value up to a unit in the last place, or up to `close`."""
    return pytest.approx(float(value), rel=0, abs=max(close, math.ulp(float(value))))


def units_step(path: Path) -> str:
    """Return the step that the down projection reads."""
    steps = ffncli.trace(path, layer=1).prepared.steps
    return next(step.inputs[0] for step in steps if step.output == "down")


def doubled(x: Tensor) -> Tensor:
    new = x.clone()
    new[:, 3] = 2
    new[2] *= 0.5
    return new


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.models) for name in FAMILIES]
)
def test_edits_in_a_model_are_those_of_hooks(name: str) -> None:
    path, model = in_double(name)
    step = units_step(path)
    down = DENSE[name][0].format(i=1)
    expected = logits_with(model, down, doubled)
    for how in ({"set": [f"{step}[:,3]=2", f"{step}[2,:]*=0.5"]}, {"edit": {step: doubled}}):
        session = ffncli.trace(path, layer=1, prompt=PROMPT, dtype="fp64", top_tokens=5, **how)  # type: ignore[arg-type]
        assert session.prediction is not None
        for token in session.prediction.tokens:
            assert token.new_logit == ulp(expected[token.id], CLOSE.get(name, 0) * float(expected.abs().max()))
        assert session.prediction.logit_change > 0


def test_an_edit_of_a_mixtures_output() -> None:
    """Against a hook on the block of a mixture with eager experts."""
    path, model = in_double("mixtral")
    model.set_experts_implementation("eager")

    def edited(m: Any, args: Any, out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        new = first.clone()
        new[..., 3] = 0.25
        return (new, *out[1:]) if isinstance(out, tuple) else new

    hook = model.get_submodule("model.layers.1.mlp").register_forward_hook(edited)
    with torch.no_grad():
        expected = model(input_ids=ids()).logits[0, -1]
    hook.remove()
    session = ffncli.trace(path, layer=1, prompt=PROMPT, dtype="fp64", set="experts[:,3]=0.25")
    assert session.prediction is not None
    for token in session.prediction.tokens:
        assert token.new_logit == ulp(expected[token.id])


def test_each_step_by_hand() -> None:
    """A block of 4 → 8: what an edit changes is what follows from it, and nothing before."""
    for text, edit in (
        ("act[:,3]=2", lambda x: torch.cat([x[:, :3], torch.full((2, 1), 2.0), x[:, 4:]], 1)),
        ("act[1,2:5]+=0.25", lambda x: x + torch.tensor([[0.0] * 8, [0, 0, 0.25, 0.25, 0.25, 0, 0, 0]])),
        ("act /= 4", lambda x: x / 4),
        ("act[-1]-=1", lambda x: x - torch.tensor([[0.0], [1.0]])),
    ):
        session = ffncli.trace("4x8:relu", tokens=2, set=text)
        up, act = session["up"], edit(session["act"])
        weights = session.prepared.weights
        down = act @ weights["down.weight"].t() + weights["down.bias"]
        assert session.changes is not None
        changes = {one.name: one for one in session.changes}
        assert changes["up"].changed == 0
        assert changes["act"].changed == int((act != up.relu()).sum())
        old = session["down"]
        assert changes["down"].relative == pytest.approx(float((down - old).norm() / old.norm()), rel=1e-6)


def test_a_step_inside_an_expert() -> None:
    session = ffncli.trace("8x16:swiglu", experts=4, top_k=2, tokens=5, expert="all", keep=True)
    for expert in range(4):
        name = f"experts.{expert}.hidden"
        if name not in session:
            continue
        changed = ffncli.trace("8x16:swiglu", experts=4, top_k=2, tokens=5, set=f"{name}[:,3]=2", keep=True)
        hidden, rows = session[name], session.step(name).tokens
        change = hidden.clone()
        change[:, 3] = 2
        down = (change - hidden) @ session.prepared.weights["down.weight"][expert].t()
        new = session["experts"].clone()
        new[list(rows or ())] += down * session["route"][list(rows or ()), expert, None]
        assert changed.changes is not None
        one = next(one for one in changed.changes if one.name == "experts")
        size = float((new - session["experts"]).norm() / session["experts"].norm())
        assert one.relative == pytest.approx(size, rel=1e-4)


def test_several_layers_at_once() -> None:
    path, model = in_double("llama")

    def without(unit: int) -> Edit:
        return lambda x: x.index_fill(-1, torch.tensor([unit]), 0)

    hook = model.get_submodule("model.layers.0.mlp.down_proj").register_forward_pre_hook(
        lambda m, args: (without(5)(args[0]),)
    )
    expected = logits_with(model, "model.layers.1.mlp.down_proj", without(7))
    hook.remove()
    for layer in (0, 1):
        session = ffncli.trace(path, layer=layer, prompt=PROMPT, dtype="fp64", ablate="L0.unit:5,L1.unit:7")
        assert session.prediction is not None
        for token in session.prediction.tokens:
            assert token.new_logit == ulp(expected[token.id])
    with pytest.raises(FFNError, match=r"ablate='L9.unit:5' is in no layer; .* has decoder layers 0 to 1"):
        ffncli.trace(path, layer=0, prompt=PROMPT, ablate="L9.unit:5")
    with pytest.raises(FFNError, match="need a text"):
        ffncli.trace(path, layer=0, ablate="L1.unit:7")


def test_a_unit_is_replaced_by_its_mean(tmp_path: Path) -> None:
    path, model = in_double("llama")
    table = tmp_path / "units.csv"
    texts = ["Hello the cat sat", "the mat", "world world"]
    frame = ffncli.corpus(path, texts, dtype="fp64", save=table).frame()
    mean = float(frame[(frame.layer == 1) & (frame.unit == 7)]["mean"].iloc[0])
    fill = torch.tensor([7])
    expected = logits_with(model, "model.layers.1.mlp.down_proj", lambda x: x.index_fill(-1, fill, mean))
    how: dict[str, Any] = {"layer": 1, "prompt": PROMPT, "dtype": "fp64", "ablate": "unit:7"}
    session = ffncli.trace(path, **how, ablate_with=f"mean:{table}")
    assert session.prediction is not None
    for token in session.prediction.tokens:
        assert token.new_logit == ulp(expected[token.id])
    for text, words in ((f"mean:{tmp_path / 'none.csv'}", "cannot read"), ("mean", "not a value"),
                        (f"mean:{made('llama').path / 'config.json'}", "has no mean")):  # fmt: skip
        with pytest.raises(FFNError, match=words):
            ffncli.trace(path, **how, ablate_with=text)


def test_a_finished_session_explains_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompt = made("llama").path, PROMPT
    session = ffncli.trace(path, layer=1, prompt=prompt)
    (asked,) = ffncli.trace(path, layer=1, prompt=prompt, explain="up[0,3]").explain
    from ffncli.run.pretrained import capture

    monkeypatch.setattr(capture, "load", None)
    assert session.explain("up", 0, 3) == asked
    assert not session.explain
    assert session.explain("up", -1, 2, terms=2).place == f"up[{len(IDS) - 1},2]"
    with pytest.raises(FFNError, match="nope"):
        session.explain("nope", 0)
    with pytest.raises(FFNError, match="up"):
        session.explain("up", 99, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"set": "act[:,99]=2"}, "out of range"),
        ({"set": "act[x]=2"}, "not an index"),
        ({"set": "act[0,1]=two"}, "not a number"),
        ({"set": "nope[0]=2"}, "no weight"),
        ({"set": "atc[:,3]=2"}, "no step and no weight 'atc'; did you mean 'act'?"),
        ({"set": "act[:,3]=2", "experts": 4, "top_k": 2}, "'act'; give experts.N.act, with an expert N from 0 to 3"),
        ({"set": "experts.4.act[:,3]=2", "experts": 4, "top_k": 2}, "'experts.4.act'; give experts.N.act"),
        ({"edit": {"nope": lambda x: x}}, "no step"),
        ({"edit": {"act": lambda x: x[:1, :1]}}, "it must return a tensor"),
        ({"edit": {"act": lambda x: 1 / 0}}, "ZeroDivisionError"),
        ({"edit": {"act": 3}}, "edit must be"),
        ({"ablate": "gate", "ablate_with": "mean:x.csv"}, "cannot read"),
        ({"ablate_with": "mean:x.csv"}, "needs ablate"),
        ({"edit": {"act": lambda x: x}, "train": True}, "contradicts"),
    ],
)
def test_what_cannot_be_edited(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(FFNError, match=words):
        ffncli.trace("4x8:relu", tokens=2, **arguments)
