"""Blocks that a page computes: what is changed there is held to torch, in a real browser."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ffncli
from ffncli.block.activations import TABLE, Limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import id_inputs, input_shapes
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights
from ffncli.run.saved.saved import save
from tests.browser.conftest import CHANGE, Open, texts

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x, "relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu, "tanh": torch.tanh,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "mish": functional.mish,
    "relu2": lambda x: torch.relu(x) ** 2, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "elu": functional.elu,
    "softplus": functional.softplus, "leaky_relu": functional.leaky_relu, "selu": functional.selu,
    "relu6": functional.relu6, "hardswish": functional.hardswish, "gelu_10": lambda x: functional.gelu(x).clamp(max=10),
    "sqrtsoftplus": lambda x: functional.softplus(x).sqrt(),
    "laplace": lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5))),
}  # fmt: skip


def computed(browser: Any, name: str) -> torch.Tensor:
    """The numbers of a step as the page has them, in full."""
    script = """
    const rows = {};
    for (const cell of document.querySelectorAll(`[data-cell^="${arguments[0]}["]`)) {
      if (cell.parentElement.hidden) continue;
      const row = cell.dataset.cell.split(/[\\[,]/)[1];
      (rows[row] = rows[row] || []).push(Number(cell.dataset.value));
    }
    return Object.keys(rows).map((row) => rows[row]);
    """
    return torch.tensor(browser.execute_script(script, name), dtype=torch.float64)


def test_what_is_changed_is_computed_as_by_torch(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["small"])
    session = ffncli.trace("4x8:gelu", tokens=3)
    weights = {name: tensor.double() for name, tensor in session.prepared.weights.items()}
    x = session["x"].double()
    up = torch.addmm(weights["up.bias"], x, weights["up.weight"].T)
    assert torch.allclose(computed(browser, "up"), up, rtol=1e-12, atol=1e-14)
    for label, value in (("x[1, 2]", 3.25), ("W1[2, 5]", -4.0), ("up.bias[0]", 0.5)):
        browser.execute_script(CHANGE, f"[aria-label='{label}']", value, "input")
    x[1, 2], weights["up.weight"][5, 2], weights["up.bias"][0] = 3.25, -4.0, 0.5
    up = torch.addmm(weights["up.bias"], x, weights["up.weight"].T)
    assert torch.allclose(computed(browser, "up"), up, rtol=1e-12, atol=1e-14)
    assert sorted(texts(browser, ".live select option")) == sorted(ACTIVATIONS)
    for name, function in ACTIVATIONS.items():
        browser.execute_script(CHANGE, ".live select", name, "change")
        act = function(up)
        assert torch.allclose(computed(browser, "act"), act, rtol=1e-11, atol=1e-13), name
        down = torch.addmm(weights["down.bias"], act, weights["down.weight"].T)
        assert torch.allclose(computed(browser, "down"), down, rtol=1e-11, atol=1e-13), name
    browser.find_element("css selector", "[data-live] > button").click()
    assert torch.allclose(computed(browser, "act"), functional.gelu(session["up"].double()), rtol=1e-5, atol=1e-6)


LEARNED = ("4x8:swiglu --norm rmsnorm --residual", "4x8:geglu --norm layernorm --bias", "--example notebook --eval")


@pytest.mark.parametrize("source", LEARNED)
def test_a_page_for_learners(source: str, tmp_path: Path, opened: Open) -> None:
    """`ffn trace -o page.html`: all steps as torch has them."""
    command = [sys.executable, "-m", "ffncli", "trace", *source.split(), "--dtype", "fp64"]
    subprocess.run([*command, "-o", tmp_path / "page.html"], check=True, capture_output=True)
    answer = subprocess.run([*command, "--json", "--show", "all"], check=True, capture_output=True)
    browser = opened(tmp_path / "page.html")
    steps = json.loads(answer.stdout)["steps"]
    assert len(steps) > 3
    for step in steps[1:]:
        ours, theirs = computed(browser, step["name"]), torch.tensor(step["values"], dtype=torch.float64).flatten(0, -2)
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12), step["name"]


def test_a_number_is_explained_where_the_focus_is(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["small"])
    browser.execute_script("document.querySelector('[data-cell=\"up[0,3]\"]').focus()")
    read = texts(browser, "[data-live] .reading")[0]
    assert re.fullmatch(r"up\[0, 3\] = (\S+·\S+ \+ ){4}\S+ = \S+", read), read


GATED = FFNSpec(4, 6, "swiglu")
DEEPSEEK = MoE(6, 3, 1, score="sigmoid", correction=True, groups=3, top_groups=2, group_best=2, scale=2.5)
BLOCKS: dict[str, FFNSpec] = {
    "softmax": replace(GATED, moe=MoE(5, 2), norm="rmsnorm", residual=True),
    "groups": replace(GATED, moe=DEEPSEEK),
    "groups, 0 outside": replace(GATED, moe=replace(DEEPSEEK, zero_outside=True)),
    "choose first": replace(GATED, bias=True, moe=MoE(5, 2, order="choose_first", router_bias=True)),
    "one by one": replace(GATED, moe=MoE(6, 2, order="one_by_one", renormalise=False, threshold=0.9)),
    "shared, with a gate": replace(GATED, moe=MoE(5, 2, 2, shared_gate=True, renormalise=False)),
    "shared in the route": replace(
        GATED, learned_scale=True, moe=MoE(5, 2, 3, score="sigmoid", correction=True, scale=8.0, shared_routed=True)
    ),
    "a table of token ids": replace(GATED, moe=MoE(8, 3, 1, score="sqrtsoftplus", eps=0.25, lookup=20)),
    "identities": replace(GATED, moe=MoE(4, 3, identity_experts=3)),
    "experts' inputs weighed": replace(GATED, moe=MoE(5, 1, weigh="input", score="sigmoid", renormalise=False)),
    "a norm of all experts": replace(GATED, moe=MoE(5, 2, expert_norm=True), norm="rmsnorm", residual=True),
    "a bias of the sum": replace(GATED, moe=MoE(5, 2, mixed_bias=True)),
    "a narrow space": replace(GATED, moe=MoE(5, 2, latent=3, latent_norm=True, mixed_norm=True), norm="rmsnorm"),
    "a router of several layers": replace(GATED, moe=MoE(5, 2, router_width=3, router_carries=True, skip_experts=1)),
    "soft caps": replace(GATED, limits=Limits(gate_cap=0.5, up_cap=0.75)),
    "limits": replace(GATED, limits=Limits(gate_high=0.2, up_limit=0.3, up_plus=1.0, act_high=0.1)),
    "a norm that weighs its input": replace(
        GATED, norm="rmsnorm", norm_position="pre+branch", norm_weight="one_plus", post_norm_weigh="input"
    ),
    "a gate of the norm": replace(GATED, norm="layernorm", norm_gate=2, residual=True, residual_scale=0.22),
    "xielu": FFNSpec(4, 6, "xielu"),
    "prelu": FFNSpec(4, 6, "prelu"),
    "parallel": FFNSpec(4, 6, "gelu_tanh", norm="layernorm", parallel=True, residual=True),
}  # fmt: skip


def traced(spec: FFNSpec, path: Path) -> dict[str, Tensor]:
    """A saved trace in float64, of weights that are no identities; every tensor of the run."""
    moe = spec.moe and replace(spec.moe, score_dtype="input")
    block, generator = steps(replace(spec, moe=moe)), torch.Generator().manual_seed(3)
    weights = random_weights(block, generator, torch.float64)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            shift = -3.0 if name.endswith("correction") else 0.0  # so that 0 for the others is more
            weights[name] = tensor + shift + 0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    inputs: Mapping[str, Tensor] = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) if shape[-1] > 1
        else torch.randint(20, shape, generator=generator).double()
        for name, shape in input_shapes(block, (7,)).items()
    }  # fmt: skip
    run = {name: tensor.long() if name in id_inputs(block) else tensor for name, tensor in inputs.items()}
    result = trace(block, weights, run, inside=None, keep=None)
    save(path, block, result, {"name": "a block", "mode": "eval"}, weights)
    return dict(result.tensors)


NAMESPACE = {
    **{name: lambda x, f=f: float(f(torch.tensor(x, dtype=torch.float64))) for name, f in ACTIVATIONS.items()},
    "min": min, "max": max, "clip": lambda x, low, high: min(max(x, low), high),
}  # fmt: skip
NO_EQUATION = ("norm", "route", "xielu", "prelu")


def equations(browser: Any) -> set[str]:
    """The steps whose numbers are what the right-hand sides of their texts come to; an equation that is not raises."""
    script = """
    const cells = [...document.querySelectorAll("[data-cell]")].filter((cell) => !cell.parentElement.hidden);
    return cells.map((cell) => { cell.dispatchEvent(new Event("focus"));
      return [cell.dataset.cell, Number(cell.dataset.value), document.querySelector(".reading").textContent]; });
    """
    checked = set()
    for cell, value, text in browser.execute_script(script):
        place, _, rest = text.partition(" = ")
        assert place.replace(", ", ",") == cell
        sides, _, _ = rest.partition(": this token goes to ")
        left, _, right = sides.rpartition(" = ")
        assert float(right) == pytest.approx(value, rel=1e-3, abs=1e-9)
        left = re.sub(r" \((expert \d+|identities)\)", "", left).replace("·", "*")
        if any(word in left for word in NO_EQUATION):
            continue
        left = re.sub(r"^\w+ (?=-?\d)|(?<=\*)\w+ (?=-?\d)", "", left)  # `x` of what an expert receives
        terms = [abs(float(number)) for number in re.findall(r"(?<![\w.])\d+\.?\d*(?:e-?\d+)?", left)]
        assert eval(left, dict(NAMESPACE)) == pytest.approx(value, abs=2e-3 * max(1.0, *terms)), text
        checked.add(cell.partition("[")[0])
    return checked


@pytest.mark.parametrize("name", BLOCKS)
def test_every_kind_of_block(name: str, tmp_path: Path, opened: Open) -> None:
    """Each step, those inside experts with it, as `execute` has it, which is held to transformers elsewhere; and as
    the text that explains it."""
    tensors = traced(BLOCKS[name], tmp_path / "t.safetensors")
    ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    browser = opened(tmp_path / "page.html")
    given = {*input_shapes(steps(BLOCKS[name]), (1,))}
    for step in tensors.keys() - given:
        assert torch.allclose(computed(browser, step), tensors[step].double(), rtol=1e-11, atol=1e-13), step
    checked = equations(browser)
    assert {"router", "experts"} & checked or BLOCKS[name].moe is None
    assert checked & {"down", "shared.down", "experts"}


def mixture(x: Tensor, weights: Mapping[str, Tensor], act: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(the two experts of each token, the sum over them): token by token in plain torch."""
    chosen, out = [], torch.zeros_like(x)
    for i, token in enumerate(x):
        share, experts = (weights["router.weight"] @ token).softmax(0).topk(2)
        chosen.append(experts)
        for weight, e in zip(share / share.sum(), experts.tolist(), strict=True):
            gate, up, down = (weights[f"{name}.weight"][e] for name in ("gate", "up", "down"))
            out[i] += weight * (down @ (act(gate @ token) * (up @ token)))
    return torch.stack(chosen), out


def expert_tokens(browser: Any) -> list[list[int]]:
    return [[int(n) for n in re.findall(r"\d+", text)[1:]] for text in texts(browser, ".expert > summary")]


def test_tokens_change_their_experts(tmp_path: Path, opened: Open) -> None:
    """A changed input sends a token elsewhere; an expert's weights, and the activation of all, follow in the sum."""
    session = ffncli.trace("4x6:swiglu", experts=5, top_k=2, tokens=3, save=tmp_path / "t.safetensors")
    ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    browser = opened(tmp_path / "page.html")
    weights = {name: tensor.double() for name, tensor in session.prepared.weights.items()}
    x = session["x"].double()

    def agrees(act: Callable[[Tensor], Tensor] = functional.silu) -> Tensor:
        chosen, out = mixture(x, weights, act)
        assert torch.allclose(computed(browser, "experts"), out, rtol=1e-11, atol=1e-13)
        tokens = [(chosen == e).any(1).nonzero().flatten().tolist() for e in range(5)]
        assert expert_tokens(browser) == tokens
        for e, here in enumerate(tokens):
            gate = computed(browser, f"experts.{e}.gate")
            assert torch.allclose(gate, x[here] @ weights["gate.weight"][e].T) if here else gate.numel() == 0
        return chosen

    before = agrees()
    x[1] = -x[1]
    for j, value in enumerate(x[1].tolist()):
        browser.execute_script(CHANGE, f"[aria-label='x[1, {j}]']", value, "input")
    after = agrees()
    assert set(before[1].tolist()) != set(after[1].tolist())
    e = int(after[1, 0])
    weights["gate.weight"][e, 4, 2] = 3.5
    browser.execute_script(CHANGE, f"[aria-label='W1[{e}, 2, 4]']", 3.5, "input")
    agrees()
    browser.execute_script(CHANGE, "[aria-label='Activation of experts.act']", "relu", "change")
    agrees(torch.relu)
    browser.execute_script("document.querySelector('[data-cell=\"experts[1,2]\"]').focus()")
    (read,) = texts(browser, "[data-live] > .reading")
    terms = re.fullmatch(r"experts\[1, 2\] = (\S+)·(\S+) \(expert (\d)\) \+ (\S+)·(\S+) \(expert (\d)\) = (\S+)", read)
    assert terms is not None, read
    assert {int(terms[3]), int(terms[6])} == set(after[1].tolist())
    total = float(terms[1]) * float(terms[2]) + float(terms[4]) * float(terms[5])
    assert total == pytest.approx(float(terms[7]), rel=5e-3)
    browser.execute_script(f"document.querySelector('[data-cell=\"route[1,{e}]\"]').focus()")
    names = " and ".join(f"expert {n}" for n in sorted(after[1].tolist()))
    assert f": this token goes to {names}; the softmax of expert {e} is 0." in texts(browser, ".reading")[0]
    browser.execute_script(CHANGE, "[aria-label='x[1, 0]']", 50, "input")
    shown = float(computed(browser, "route")[1, e])
    assert f"= {shown:.4g}" in texts(browser, ".reading")[0].replace("= 0;", "= 0")  # what is read follows too


def test_what_is_changed_is_marked(tmp_path: Path, opened: Open) -> None:
    ffncli.trace("4x6:swiglu", experts=3, tokens=2, save=tmp_path / "t.safetensors")
    ffncli.report(tmp_path / "t.safetensors", tmp_path / "page.html")
    browser = opened(tmp_path / "page.html")
    assert texts(browser, ".changed") == []
    browser.execute_script(CHANGE, "[aria-label='x[0, 0]']", 3, "input")
    marked = browser.execute_script("return [...document.querySelectorAll('td.changed')].map((e) => e.dataset.cell)")
    assert len(browser.execute_script("return [...document.querySelectorAll('input.changed')]")) == 1
    assert {"router[0,0]", "route[0,0]", "experts[0,0]"} <= {*marked}
    assert any(re.fullmatch(r"experts\.\d\.x\[0,0\]", cell) for cell in marked)
    assert not any("[1," in cell for cell in marked)
    browser.execute_script(CHANGE, "[aria-label='x[0, 0]']", "", "input")  # 3 still counts
    assert len(texts(browser, "[aria-invalid=true]")) == 1
    browser.execute_script(CHANGE, ".live select", "laplace", "change")
    assert any("= laplace(gate)" in text for text in texts(browser, ".live h3"))
    browser.execute_script("document.querySelector('[data-live] > button').click()")
    assert texts(browser, ".changed, [aria-invalid=true]") == []
    assert not any("laplace" in text for text in texts(browser, ".live h3"))


def test_a_function_can_be_chosen_if_nothing_in_it_is_learned(pages: dict[str, Path], opened: Open) -> None:
    names = opened(pages["small"]).execute_script("return Object.keys(FUNCTIONS)")
    assert sorted(names) == sorted(TABLE)
    assert sorted(ACTIVATIONS) == sorted(name for name, row in TABLE.items() if not row.learned)


# --- the drawing ------------------------------------------------------------------------------------------------------


def drawn(browser: Any, name: str) -> torch.Tensor:
    """What the cells of a matrix show, or their gradients."""
    script = """
    const picture = document.querySelector("[data-live]").picture, rows = [];
    for (const part of picture.rects.keys()) {
      const at = picture.place(part);
      if (at.name !== arguments[0]) continue;
      (rows[at.i] = rows[at.i] || [])[at.j] = picture.gradients ? picture.gradients.get(part) : picture.valueOf(at);
    }
    return rows;
    """
    return torch.tensor(browser.execute_script(script, name), dtype=torch.float64)


def press(browser: Any, label: str) -> None:
    """Press the button with this text."""
    script = "[...document.querySelectorAll('button')].find((one) => one.textContent === arguments[0]).click()"
    browser.execute_script(script, label)


def test_the_gradient_and_a_training_step_are_autograds(pages: dict[str, Path], opened: Open) -> None:
    """Of every weight, of the input and of every step: differences of the loss on both sides, within 1e-7."""
    browser = opened(pages["small"])
    session = ffncli.trace("4x8:gelu", tokens=3)
    w = {name: tensor.double().requires_grad_() for name, tensor in session.prepared.weights.items()}
    x = session["x"].double().requires_grad_()
    up = torch.addmm(w["up.bias"], x, w["up.weight"].T)
    down = torch.addmm(w["down.bias"], functional.gelu(up), w["down.weight"].T)
    up.retain_grad()
    (down**2).mean().backward()
    press(browser, "Show the gradient")
    for name, expected in {"up": up.grad, "x": x.grad, **{name: one.grad for name, one in w.items()}}.items():
        assert expected is not None
        ours = drawn(browser, name)
        ours = ours.T if name.endswith(".weight") else ours
        assert torch.allclose(ours.reshape(expected.shape), expected, rtol=1e-6, atol=1e-8), name
    press(browser, "Show the values")
    press(browser, "One training step")
    moved = {name: (one - 0.1 * one.grad).detach() for name, one in w.items() if one.grad is not None}
    assert torch.allclose(drawn(browser, "up.weight").T, moved["up.weight"], rtol=1e-7, atol=1e-9)
    hidden = functional.gelu(torch.addmm(moved["up.bias"], x.detach(), moved["up.weight"].T))
    loss = (torch.addmm(moved["down.bias"], hidden, moved["down.weight"].T) ** 2).mean()
    said = browser.execute_script("return document.querySelector('[data-live]').picture.loss()")
    assert said == pytest.approx(float(loss), rel=1e-7)


def test_a_cell_lights_what_makes_it_and_is_changed_by_keys(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["small"])
    browser.execute_script("document.querySelector('[data-part=\"up[1,3]\"]').focus()")
    lit = browser.execute_script("return [...document.querySelectorAll('.lit')].map((one) => one.dataset.part)")
    assert set(lit) == {
        "up[1,3]", "up.bias[0,3]", *(f"x[1,{k}]" for k in range(4)), *(f"up.weight[{k},3]" for k in range(4))
    }  # fmt: skip
    assert re.fullmatch(r"up\[1, 3\] = (\S+·\S+ \+ ){4}\S+ = \S+", texts(browser, ".said")[0])
    before = drawn(browser, "up")
    cell = browser.find_element("css selector", '[data-part="x[1,2]"]')
    browser.execute_script("arguments[0].focus()", cell)
    cell.send_keys("+")
    assert not torch.equal(drawn(browser, "up")[1], before[1])
    assert torch.equal(drawn(browser, "up")[0], before[0])
    press(browser, "Next step")
    assert texts(browser, ".walk")[0].startswith("1 of 4. x. One row per token")


def test_weights_rounded_to_bf16_are_torchs(pages: dict[str, Path], opened: Open) -> None:
    browser = opened(pages["small"])
    weights = ffncli.trace("4x8:gelu", tokens=3).prepared.weights
    browser.execute_script(CHANGE, ".side select", "bf16", "change")
    assert torch.equal(drawn(browser, "up.weight").T, weights["up.weight"].bfloat16().double())
    browser.execute_script(CHANGE, ".side select", "int8", "change")
    scale = weights["up.weight"].double().abs().max() / 127
    expected = (weights["up.weight"].double() / scale).round() * scale
    assert torch.allclose(drawn(browser, "up.weight").T, expected, rtol=1e-9)


def test_an_exercise_is_filled_in_by_keyboard(pages: dict[str, Path], opened: Open) -> None:
    """From a blank's cell to its field; a wrong answer is told how far off it is, a right one shows what was hidden."""
    from selenium.webdriver import Keys

    session = ffncli.trace("2x3:relu", integers=True, seed=1)
    browser = opened(pages["exercise"])
    blanks = browser.execute_script("return DATA['block-live'].blanks")
    assert any(one["hides"] for one in blanks)
    assert len(browser.execute_script("return [...document.querySelectorAll('.side input')]")) == 5

    def shown(cell: str) -> str:
        return str(texts(browser, f"[data-text='{cell}']")[0])

    def value(cell: str) -> float:
        name, i, j = re.fullmatch(r"(\w+)\[(\d+),(\d+)\]", cell).groups()  # type: ignore[union-attr]
        return float(session[name][int(i), int(j)])

    for at, one in enumerate(blanks):
        cell = browser.find_element("css selector", f"[data-part='{one['cell']}']")
        browser.execute_script("arguments[0].focus()", cell)
        assert "is to be filled in" in texts(browser, ".said")[0]
        cell.send_keys(Keys.ENTER)
        browser.switch_to.active_element.send_keys(f"{value(one['cell']) + 7:g}", Keys.ENTER)
        assert texts(browser, ".exercise li span")[at] == "not yet: off by at most 10"
        assert shown(one["cell"]) == f"{at + 1}?"
        assert {shown(hidden) for hidden in one["hides"]} <= {"…"}
        for hidden in one["hides"]:
            browser.execute_script(f"document.querySelector(\"[data-part='{hidden}']\").focus()")
            assert str(round(value(hidden))) not in texts(browser, ".said")[0].partition("is hidden")[2]
        browser.execute_script("arguments[0].focus()", cell)
        cell.send_keys(Keys.ENTER)
        browser.switch_to.active_element.send_keys(Keys.CONTROL, "a")
        browser.switch_to.active_element.send_keys(f"{value(one['cell']):g}", Keys.ENTER)
        assert texts(browser, ".exercise li span")[at] == "right"
        assert texts(browser, ".exercise > .strong") == [f"{at + 1} of 5 right"]
        for cell_ in (one["cell"], *one["hides"]):
            assert float(shown(cell_)) == value(cell_)


def test_an_answer_may_be_as_exact_as_the_numbers_shown(pages: dict[str, Path], opened: Open) -> None:
    """Within a unit of the last digit of the exact number, or of what the rounded numbers give; no further."""
    browser = opened(pages["rounded"])
    script = """
    const picture = document.querySelector("[data-live]").picture, { verdict } = Exercise.prototype;
    return DATA["block-live"].blanks.map(({ cell }) => {
      const value = picture.valueOf(picture.place(cell));
      return [value, ...[0.0009, -0.0009, 0.02, -0.02].map((by) => picture.exercise.verdict(cell, value + by))];
    });
    """
    for value, *verdicts in browser.execute_script(script):
        assert abs(value) < 10
        assert verdicts == ["right", "right", "not yet: off by at most 0.1", "not yet: off by at most 0.1"]


def test_a_mixture_says_what_stands_out(pages: dict[str, Path], opened: Open) -> None:
    """The largest hidden value, where tokens go and the weights that make an output are torch's; so after a step."""
    session = ffncli.trace("3x4:swiglu", experts=3, top_k=2, tokens=2)
    weights = {name: tensor.double() for name, tensor in session.prepared.weights.items()}
    browser = opened(pages["learner"])
    x, before = session["x"].double(), texts(browser, ".glance p")

    def sums() -> tuple[str, list[list[int]], dict[str, float]]:
        chosen, _ = mixture(x, weights, functional.silu)
        hidden = {}
        for i, experts in enumerate(chosen.tolist()):
            for e in experts:
                gate, up = weights["gate.weight"][e] @ x[i], weights["up.weight"][e] @ x[i]
                hidden[i, e] = functional.silu(gate) * up
        share = (x[0] @ weights["router.weight"].T)[chosen[0]].softmax(0)
        terms = {
            f"expert {e}: W2[{k},0]": float(share[at] * hidden[0, e][k] * weights["down.weight"][e, 0, k])
            for at, e in enumerate(chosen[0].tolist()) for k in range(4)
        }  # fmt: skip
        (i, e), k = max(
            ((at, k) for at in hidden for k in range(4)), key=lambda one: abs(float(hidden[one[0]][one[1]]))
        )
        return f"expert {e}: hidden[{i},{k}] = {float(hidden[i, e][k]):.3f}", chosen.tolist(), terms

    for _ in range(2):
        largest, chosen, terms = sums()
        assert largest in texts(browser, ".glance p")[0]
        for i, experts in enumerate(chosen):
            line = texts(browser, ".glance p")[1 + i]
            assert re.findall(r"expert (\d)", line) == [str(e) for e in sorted(experts)]
        most = max(terms, key=lambda name: abs(terms[name]))
        assert f"{most} has the largest part." in texts(browser, ".terms p")[0]
        told = re.findall(r"(-?[\d.]+) = (expert \d: \S+)", " ".join(texts(browser, ".terms li")))
        assert len(told) == 5
        for value, name in told:
            assert float(value) == pytest.approx(terms[name], abs=6e-4)
        press(browser, "One training step")
        for name in weights:
            parts = range(3) if name != "router.weight" else [None]
            new = [drawn(browser, name if e is None else f"{name}[{e}]").T for e in parts]
            weights[name] = torch.stack(new) if name != "router.weight" else new[0]
    told = texts(browser, ".trained")[0]
    count = sum(weight.numel() for weight in weights.values())
    said = r"the loss fell from \S+ to \S+, and experts\[0,0\] went from \S+ to \S+\. It moved \d+ weights of "
    assert re.search(rf"{said}{count}, as the others have gradient 0", told)
    assert texts(browser, ".moved") == [""] * 3
    press(browser, "Back to the saved numbers")
    assert (texts(browser, ".moved"), texts(browser, ".trained"), texts(browser, ".glance p")) == ([], [""], before)
