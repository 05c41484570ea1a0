"""One training step of a block: losses and new weights against torch's, explanations against the gradients."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ffncli
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.models.model import Resolved, block_model
from ffncli.run.engine.execute import run
from ffncli.run.explain.gradients import GradientScene, explain_gradient
from ffncli.run.saved.compare import compare
from ffncli.run.saved.saved import open_saved


def torch_losses(out: Tensor, target: Tensor) -> dict[str, Tensor]:
    classes = torch.arange(len(out)) % out.shape[-1]
    return {
        "sum": out.sum(), "mse": functional.mse_loss(out, target),
        "cross-entropy": functional.cross_entropy(out, classes),
    }  # fmt: skip


@pytest.mark.parametrize("source", ["4x8:relu", "6x10:swiglu"])
@pytest.mark.parametrize("loss", ["sum", "mse", "cross-entropy"])
def test_the_loss_and_the_new_weights_are_those_of_torch(source: str, loss: str) -> None:
    session = ffncli.trace(source, tokens=3, dtype="fp64", bias=True)
    target = torch.randn(session["down"].shape, dtype=torch.float64)
    given = {"sum": None, "mse": target, "cross-entropy": [0, 1, 2]}[loss]
    step = session.backward(loss=loss, target=given, lr=0.05)
    leaves = {n: nn.Parameter(t.clone()) for n, t in session.prepared.weights.items()}
    optimizer = torch.optim.SGD([*leaves.values()], lr=0.05)
    value = torch_losses(run(session.prepared.steps, leaves, {"x": session["x"]}), target)[loss]
    value.backward()
    assert step.loss == pytest.approx(value.item(), rel=1e-14)
    for name, leaf in leaves.items():
        assert torch.allclose(step[name], leaf.grad, rtol=1e-12, atol=1e-14)
    optimizer.step()
    for name, leaf in leaves.items():
        assert torch.allclose(step.weights[name], leaf.detach(), rtol=1e-14, atol=1e-16)
    after = torch_losses(run(session.prepared.steps, leaves, {"x": session["x"]}), target)[loss]
    assert step.loss_after == pytest.approx(after.item(), rel=1e-13)
    assert step.change == pytest.approx(after.item() - value.item(), rel=1e-9)


def test_mse_has_zeros_as_its_default_target_and_takes_files(tmp_path: Path) -> None:
    session = ffncli.trace("4x8:gelu", tokens=2)
    assert session.backward(loss="mse").loss == pytest.approx(float(session["down"].double().square().mean()))
    (tmp_path / "t.csv").write_text("1,2,3,4\n5,6,7,8\n")
    target = torch.arange(1.0, 9.0).reshape(2, 4)
    assert torch.equal(
        session.backward(loss="mse", target=str(tmp_path / "t.csv"))["down"],
        session.backward(loss="mse", target=target)["down"],
    )


@pytest.mark.parametrize("source", ["6x10:gelu", "6x10:swiglu", "6x10:relu"])
def test_the_first_order_predicts_the_change_of_a_small_step(source: str) -> None:
    session = ffncli.trace(source, tokens=3, dtype="fp64", norm="rmsnorm", residual=True)
    far = []
    for lr in (1e-2, 1e-3, 1e-4, 1e-5):
        step = session.backward(loss="mse", lr=lr)
        far.append(abs(step.predicted_change / step.change - 1))
    assert far[0] > far[1] > far[2]
    assert far[-1] < 1e-3


def test_the_final_layer_reads_the_logits() -> None:
    session = ffncli.trace("4x8:gelu", tokens=2, vocab=5, dtype="fp64")
    step = session.backward(loss="cross-entropy", target=[4, 0])
    expected = functional.cross_entropy(session["logits"], torch.tensor([4, 0]))
    assert step.loss == pytest.approx(expected.item(), rel=1e-14)
    assert next(iter(step)) == "logits"


def test_dropout_keeps_its_mask() -> None:
    session = ffncli.trace("4x8:gelu", tokens=5, dropout=0.5, train=True, keep=True)
    step = session.backward()
    dropped = (session["dropout"] == 0) & (session["act"] != 0)
    assert dropped.any()
    assert not step["act"][dropped].any()
    assert torch.equal(step["act"][~dropped], 2 * step["dropout"][~dropped])
    assert step["down.weight"] == pytest.approx(session["dropout"].sum(0).expand(4, 8), rel=1e-5)


def test_records_and_frames() -> None:
    step = ffncli.trace("4x8:swiglu", experts=4, top_k=2, tokens=6).backward(lr=0.1)
    assert [name for name in step if "." not in name] == ["experts", "route", "router", "x"]
    record = step.gradient("up.weight")
    assert (record.symbol, record.shape, record.weight) == ("dW3", (4, 8, 4), True)
    assert record.norm == pytest.approx(float(step["up.weight"].norm()), rel=1e-6)
    frame = step.frame("router.weight")
    assert frame.value.tolist() == pytest.approx(step["router.weight"].flatten().tolist())
    assert step.frame().name.tolist() == [*step]
    assert "TrainingStep" in repr(step)
    assert "dW3" in step._repr_html_()
    with pytest.raises(FFNError, match="no gradient of 'up'"):
        step.gradient("up")


# --- explanations -----------------------------------------------------------------------------------------------------

BLOCKS = {
    "plain": FFNSpec(4, 5, "gelu", bias=True, norm="layernorm", residual=True, dropout=0.4),
    "gated": FFNSpec(4, 5, "swiglu", norm="rmsnorm", norm_weight="one_plus", residual=True, residual_scale=0.5),
    "learned": FFNSpec(4, 5, "xielu", gated=True, learned_scale=True, sub_norm=True),
    "mixture": FFNSpec(4, 5, "swiglu", moe=MoE(4, 2, 1, score_dtype="input", shared_gate=True)),
    "weigh-input": FFNSpec(4, 5, "swiglu", moe=MoE(4, 2, weigh="input", score_dtype="input", expert_norm=True)),
    "identity": FFNSpec(4, 5, "swiglu", bias=True, moe=MoE(4, 3, identity_experts=2, score_dtype="input")),
    "routed": FFNSpec(4, 5, "swiglu", learned_scale=True,
                      moe=MoE(4, 2, 2, score="sigmoid", correction=True, shared_routed=True, score_dtype="input")),
}  # fmt: skip


def model_of(spec: FFNSpec) -> Resolved:
    return block_model(spec, "a block")


@pytest.mark.parametrize("name", BLOCKS)
def test_every_element_is_explained(name: str) -> None:
    """The terms of every element of every gradient add up to it."""
    from ffncli.run.engine.prepare import prepare
    from ffncli.run.trace.step_question import StepOptions
    from ffncli.run.trace.training_step import training_step

    model = model_of(BLOCKS[name])
    ready = prepare(model, leading=(2, 2), dtype="fp64", train=name == "plain")
    state = ready.mode.generator.get_state() if ready.mode.train and ready.mode.generator else None
    step = training_step(model, ready, StepOptions(backward=True, loss="mse"), 8, None, state)
    scene = GradientScene(ready.steps, step.ran, step.tensors)
    explained = 0
    for record in step.gradients:
        for index in product(*map(range, record.shape)):
            if record.weight:
                inside = "experts" in step.tensors and record.name.split(".")[0] in ("gate", "up", "down")
                routed = len(record.shape) == 3 or (inside and len(record.shape) == 2)
                asked = f"experts.{index[0]}.{record.name}" if routed else record.name
                place = index[1:] if routed else index
                if name == "routed" and record.name.startswith("shared."):
                    continue  # the experts that every token uses have no names for single weights
            else:
                asked, place = record.name, index
            one = explain_gradient(scene, asked, place, 4)[0]
            value = step[record.name][index].item()
            assert one.value == value
            assert one.computed == pytest.approx(value, rel=1e-9, abs=1e-14), (record.name, index)
            explained += 1
    assert explained > 100


def test_a_weights_gradient_is_a_sum_over_tokens() -> None:
    session = ffncli.trace(
        "4x8:gelu", tokens=3, dtype="fp64", backward=True, explain=["dW1[0,3]", "dup.weight[3,0]", "d up[1,2]"], depth=2
    )
    one, *_ = session.explain
    x, du = session["x"], session.training_step["up"]
    assert one.place == "dW1[0,3]"
    assert sorted(t.value for t in one.terms) == pytest.approx(sorted((x[:, 0] * du[:, 3]).tolist()), rel=1e-14)
    assert {t.factors[0].place for t in one.terms} == {f"x[{t},0]" for t in range(3)}
    assert {t.factors[1].place for t in one.terms} == {f"dup[{t},3]" for t in range(3)}
    assert session.explain[1].place.startswith("dup[")  # the origin of the largest term
    assert next(e for e in session.explain if e.place.startswith("dup.weight[3,0]")).value == one.value


# --- saved traces -----------------------------------------------------------------------------------------------------


def saved(path: Path, **options: Any) -> Any:
    spec = FFNSpec(12, 24, "swiglu")
    ffncli.trace(model_of(spec), tokens=33, backward=True, loss="mse", save=str(path), **options)
    return open_saved(path)


def test_two_backward_passes_are_compared(tmp_path: Path) -> None:
    base, same = (saved(tmp_path / f"{name}.npz") for name in "ab")
    found = compare(base, same)
    assert found.first is None
    assert [row.step for row in found.rows if row.op == "gradient"][:3] == ["d down", "d down.weight", "d hidden"]
    without = tmp_path / "c.json"
    ffncli.trace(model_of(FFNSpec(12, 24, "swiglu")), tokens=33, save=str(without))
    assert not [row for row in compare(base, open_saved(without)).rows if row.op == "gradient"]


def test_a_gradient_of_another_shape_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "b.json").write_text(text.replace('"symbol": "dW2"', '"symbol": 7', 1))
    with pytest.raises(FFNError, match="symbol"):
        open_saved(tmp_path / "b.json")
    (tmp_path / "c.json").write_text(text.replace("gradients/down.weight", "gradients/gone", 1))
    with pytest.raises(FFNError, match=r"gradient of 'down\.weight'"):
        open_saved(tmp_path / "c.json")


# --- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse", "target": [1.0]}, "target has 1 values, but down has shape"),
        ({"loss": "mse", "target": [[1.0, 2.0], [3.0, 4.0]]}, "target has shape"),
        ({"loss": "cross-entropy"}, "one class from 0 to 3 for each of 2 tokens"),
        ({"loss": "cross-entropy", "target": [0, 4]}, "got 4 for token 1"),
        ({"loss": "cross-entropy", "target": [0, -1]}, "got -1 for token 1"),
        ({"loss": "cross-entropy", "target": [0, 0.5]}, "got 0.5 for token 1"),
        ({"loss": "cross-entropy", "target": [0, float("nan")]}, "got nan for token 1"),
        ({"loss": "cross-entropy", "target": [0, 1, 2]}, "got 3 values"),
        ({"loss": "mse", "target": "missing.npy"}, "does not exist"),
        ({"loss": "l1"}, "unknown value 'l1'"), ({"lr": float("nan")}, "number above 0"), ({"lr": -1}, "above 0"),
        ({"lr": float("inf")}, "above 0"), ({"target": [1, 2]}, "needs loss"), ({"kernel": "nope"}, "nope"),
        ({"kernel": "frozen"}, "."), ({"rate": 1}, "rate"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    session = ffncli.trace("4x8:gelu", tokens=2)
    with pytest.raises((FFNError, TypeError), match=message):
        session.backward(**options)


def test_a_kernel_computes_an_ffn_alone() -> None:
    with pytest.raises(FFNError, match="more than that"):
        ffncli.trace("4x8:gelu", tokens=2, norm="rmsnorm", residual=True).backward(kernel="eager")


def test_nan_reaches_the_gradients_that_depend_on_it() -> None:
    step = ffncli.trace("4x8:gelu", input=[[1.0, 2.0, float("nan"), 4.0], [1.0, 2.0, 3.0, 4.0]]).backward()
    assert step.gradient("up.weight").nan > 0
    assert step["x"][0].isnan().all()
    assert step["x"][1].isfinite().all()
    assert step.loss != step.loss


def test_the_commands_page_json_and_csv_say_the_same(call: Any, json_of: Any, csv_of: Any, tmp_path: Path) -> None:
    arguments = ("trace", "4x8:relu", "--input", "1,2,3,4", "--backward", "--loss", "mse", "--lr", "0.1")
    step = ffncli.trace("4x8:relu", input=[1, 2, 3, 4]).backward(loss="mse", lr=0.1)
    answer = json_of(*arguments)
    assert [one["name"] for one in answer["gradients"]] == [*step]
    for one in answer["gradients"]:
        assert {"name", "formula", "shape", "values", "values_index", "min", "max", "mean", "std"} <= {*one}
        assert one["values"] == step[one["name"]].double().tolist()
    assert (answer["loss"], answer["loss_after"]) == (step.loss, step.loss_after)
    assert answer["predicted_change"] == step.predicted_change
    assert {one["name"] for one in answer["new_weights"]} == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert [line["name"] for line in csv_of(*arguments)] == [*step]
    code, page, _ = call(*arguments, "--explain", "dW1[0,1]")
    assert code == 0
    assert "d up = d act ⊙ relu'(up)  [1, 8] float32" in page
    assert "dW1 = xᵀ · d up  [4, 8] float32, up.weight" in page  # transposed, as the formula multiplies
    first = page.split("dW1 = xᵀ · d up")[1].splitlines()[1].split()
    assert [float(v) for v in first[1:]] == pytest.approx(step["up.weight"][:, 0].tolist(), abs=5e-5)
    assert "dW1[0,1] in dW1 = xᵀ · d up" in page
    code, _, err = call(*arguments, "-o", str(tmp_path / "page.html"))
    assert code == 2
    assert "contradicts" in err
    names = []
    for name in ("a", "b"):
        names.append(str(tmp_path / f"{name}.safetensors"))
        assert call(*arguments, "--save", names[-1])[0] == 0
    code, page, _ = call("compare", *names)
    assert code == 0
    assert "all 4 steps and 8 gradients agree" in page
