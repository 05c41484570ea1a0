"""`ffncli.replace` and `ffncli.kernel`: a tiny model's own logits and torch's own functions, in float64, are right."""

import copy
import io
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import ffncli
from ffncli.block.recipe import MoE
from ffncli.errors import ExitCode, FFNError
from ffncli.kernels import built_in
from ffncli.kernels.kernel import kernel_steps
from tests.oracles.huggingface import make

LLAMA: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60,
}  # fmt: skip
GRADIENTS = "gradients are on: call the model under torch.no_grad()"


def llama(**values: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | values)).eval()


def logits(model: Any, ids: Tensor | None = None, **more: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(torch.arange(10)[None] if ids is None else ids, **more).logits
    return out


def far(a: Tensor, b: Tensor) -> float:
    """max|a-b| / max|b|."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@pytest.mark.parametrize(("name", "kernel", "place", "count"), [
    ("llama", "packed", "model.layers.0.mlp", 2),
    ("phi3", "packed", "model.layers.0.mlp", 2),  # gate and up in one matrix
    ("gpt2", "inplace", "transformer.h.0.mlp", 2),  # Conv1D
    ("bert", "module", "bert.encoder.layer.0.intermediate.dense to bert.encoder.layer.0.output.dense", 2),
    ("opt", "inplace", "model.decoder.layers.0.fc1 to model.decoder.layers.0.fc2", 2),
    # its module adds the residual
    ("bloom", "eager", "transformer.h.0.mlp.dense_h_to_4h to transformer.h.0.mlp.dense_4h_to_h", 2),
    ("t5-gated-gelu", "packed", "encoder.block.0.layer.1.DenseReluDense", 5),
    ("gemma2", "conv1x1", "model.layers.0.mlp", 2),
    ("mixtral", "eager", "model.layers.0.mlp", 2),
    ("qwen3_moe", "eager", "model.layers.0.mlp", 3),
    ("axk1", "eager", "model.layers.0.mlp", 3),  # the experts' module ends with a norm
])  # fmt: skip
def test_logits_stay_within_the_dtypes_bound(name: str, kernel: str, place: str, count: int, tmp_path):
    made = make(name, tmp_path)
    model: Any = made.model
    given = made.case.inputs(torch.Generator().manual_seed(7))
    wide, keys, tensors = copy.deepcopy(model).double(), [*model.state_dict()], [*model.parameters()]
    with torch.no_grad():
        right, before = wide(**given).logits, model(**given).logits
    replaced = ffncli.replace(model, kernel)
    with torch.no_grad():
        after = model(**given).logits
    first = replaced.ffns[0]
    assert (first.path, first.kernel, len(replaced.ffns), replaced.kept) == (place, kernel, count, ())
    assert replaced.calls == {"kernel": count}  # the kernels computed all of them
    assert 0 < first.error <= first.tolerance < 1e-5
    assert far(after, right) <= max(4 * far(before, right), first.tolerance)
    assert [*model.state_dict()] == keys
    assert all(a is b for a, b in zip(model.parameters(), tensors, strict=True))
    replaced.restore()
    with torch.no_grad():
        assert torch.equal(model(**given).logits, before)
    assert not replaced.active
    assert not any("forward" in vars(part) for part in model.modules())


def test_bf16_is_verified_and_computed_in_bf16(tmp_path):
    model: Any = make("llama", tmp_path).model.bfloat16()
    wide, before = logits(copy.deepcopy(model).double()), logits(model)
    with ffncli.replace(model, "packed") as replaced:
        after = logits(model)
    assert after.dtype == torch.bfloat16
    assert 1e-4 < replaced.ffns[0].error <= replaced.ffns[0].tolerance < 0.05
    assert far(after, wide) <= max(4 * far(before, wide), replaced.ffns[0].tolerance)


def test_a_trained_model_predicts_the_same_tokens():
    """Trained to count upwards: it predicts each next token, and does so with kernels too."""
    model = llama(hidden_size=32)
    ids = (torch.arange(12) + torch.arange(48)[:, None]) % 60
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval()
    before, wide = logits(model, ids), logits(copy.deepcopy(model).double(), ids)
    assert (before[:, 3:-1].argmax(-1) == ids[:, 4:]).float().mean() > 0.95
    replaced = ffncli.replace(model, "packed")
    after = logits(model, ids)
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    assert far(after, wide) <= max(4 * far(before, wide), replaced.ffns[0].tolerance)
    made = model.generate(ids[:2, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.tolist() == [[*range(8)], [*range(1, 9)]]
    assert replaced.calls["kernel"] == 2 * (1 + 4)


# --- never on weights that are no longer the model's ------------------------------------------------------------------


def optimizer_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.arange(10)[None], labels=torch.arange(10)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def write_behind_torch(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.25)  # torch counts no write


def load_other_tensors(model: Any) -> None:
    model.load_state_dict({name: 0.5 * t for name, t in model.state_dict().items()}, assign=True)


def move_there_and_back(model: Any) -> None:
    model.double().float()


def a_row_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.layers[0].mlp.up_proj.weight[3] += 1


CHANGES = [optimizer_step, write_behind_torch, load_other_tensors, move_there_and_back, a_row_in_inference_mode]


@pytest.mark.parametrize("kernel", ["packed", "eager"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_prepared_anew(change: Any, kernel: str):
    model = llama()
    replaced = ffncli.replace(model, kernel)
    before = logits(model)
    change(model)
    after, computed = logits(model), replaced.calls["kernel"]
    assert computed == 4  # by the kernels, both times
    assert change is move_there_and_back or far(after, before) > 1e-4
    replaced.restore()
    assert far(after, logits(model)) <= 1e-6


def test_a_model_in_another_dtype_computes_by_itself():
    model = llama()
    replaced = ffncli.replace(model, "packed")
    model.double()
    assert torch.equal(logits(model), logits(copy.deepcopy(model)))
    (reason,) = replaced.calls
    assert reason == "its parameters are no longer fp32 on cpu, for which the kernel was verified"
    model.float()
    logits(model)
    assert replaced.calls["kernel"] == 2


def test_refresh_takes_a_single_value_that_torch_did_not_count():
    model = llama(intermediate_size=128)
    replaced = ffncli.replace(model, "packed")
    model.model.layers[0].mlp.up_proj.weight.data.view(-1)[17] = 1e3  # not among those compared: every 256th
    stale = logits(model)
    replaced.refresh()
    fresh = logits(model)
    replaced.restore()
    assert far(stale, logits(model)) > 1e-6 >= far(fresh, logits(model))


# --- where the model computes by itself -------------------------------------------------------------------------------


def test_train_mode_keeps_dropout_and_gradients(tmp_path):
    model: Any = make("t5-gated-gelu", tmp_path).model
    given = {"input_ids": torch.arange(3, 8)[None], "decoder_input_ids": torch.arange(4, 9)[None]}
    replaced = ffncli.replace(model, "packed")
    model.train()

    def step() -> tuple[float, list[Tensor]]:
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(**given).logits.square().mean()
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with_kernels = step()
    assert replaced.calls == {"train mode": 5}
    replaced.restore()
    alone = step()
    assert with_kernels[0] == alone[0]
    assert all(torch.equal(a, b) for a, b in zip(with_kernels[1], alone[1], strict=True))


def test_gradients_in_eval_mode_are_the_models():
    model = llama()
    replaced = ffncli.replace(model, "packed")
    model(torch.arange(10)[None]).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    assert replaced.calls == {GRADIENTS: 2}
    model.requires_grad_(False)
    model(torch.arange(10)[None])
    assert replaced.calls["kernel"] == 2


def test_hooks_autocast_and_replaced_modules():
    model = llama()
    replaced = ffncli.replace(model, "packed")
    seen: list[int] = []
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    logits(model)
    handle.remove()
    assert (len(seen), replaced.calls) == (1, {"there are hooks on its modules": 1, "kernel": 1})
    with torch.autocast("cpu", torch.bfloat16):
        logits(model)
    assert replaced.calls["autocast"] == 2
    model.model.layers[0].mlp.up_proj = nn.Linear(16, 40, bias=False)
    after = logits(model)
    assert replaced.calls["its modules were replaced"] == 1
    replaced.restore()
    assert far(after, logits(model)) <= 1e-6


@pytest.mark.parametrize(("name", "backend", "count"), [("llama", "eager", 2), ("bert", "eager", 2),
                                                        ("gpt2", "aot_eager", 2), ("opt", "eager", 2)])  # fmt: skip
def test_calls_inside_torch_compile_are_counted_when_they_are_traced(name: str, backend: str, count: int, tmp_path):
    made = make(name, tmp_path)
    model: Any = made.model.eval()
    given = made.case.inputs(torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = model(**given)[0]
        with ffncli.replace(model, "eager") as replaced:
            compiled = torch.compile(model, backend=backend)
            assert far(compiled(**given)[0], expected) <= 1e-6
            assert replaced.calls == {"inside torch.compile": count}
            compiled(**given)
            assert replaced.calls == {"inside torch.compile": count}
            model(**given)
            assert replaced.calls == {"inside torch.compile": count, "kernel": count}


def test_a_hook_on_the_whole_ffn_keeps_its_output():
    """A kernel that overwrites its last output hands out copies."""
    model, outs = llama(), []
    ffncli.replace(model, "inplace")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: outs.append((out, out.clone())))
    logits(model)
    logits(model, torch.arange(20, 30)[None])
    assert len(outs) == 4
    assert all(torch.equal(kept, then) for kept, then in outs)


def test_router_logits_are_still_recorded(tmp_path):
    model: Any = make("mixtral", tmp_path).model
    ids = torch.arange(3, 8)[None]
    with torch.no_grad():
        before = model(ids, output_router_logits=True).router_logits
        ffncli.replace(model, "eager")
        after = model(ids, output_router_logits=True).router_logits
    assert [t.shape for t in after] == [t.shape for t in before]
    assert all(far(a, b) <= 1e-6 for a, b in zip(after, before, strict=True))


def test_a_copied_and_a_pickled_model_are_without_kernels():
    model = llama()
    replaced = ffncli.replace(model, "packed")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight.zero_()
            other.model.layers[1].mlp.up_proj.weight.zero_()
        assert far(logits(other), logits(model)) > 1e-4  # it computes with parameters of its own
        again = ffncli.replace(other, "eager")
        logits(other)
        assert again.calls == {"kernel": 2}
        again.restore()
        assert not any("forward" in vars(part) for part in other.modules())
    assert set(replaced.calls) == {"kernel"}
    assert replaced.calls["kernel"] == 4


def test_changed_weights_that_memory_has_no_room_for_are_computed_by_the_model(monkeypatch):
    model = llama()
    replaced = ffncli.replace(model, "packed")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)

    def full(*args: Any) -> None:
        raise FFNError("full", code=ExitCode.ENVIRONMENT)

    monkeypatch.setattr("ffncli.run.in_model.swap.require_memory", full)
    assert torch.equal(logits(model), logits(copy.deepcopy(model)))
    assert replaced.calls == {"kernel": 1, "memory is too small to prepare its changed weights again": 1}
    monkeypatch.undo()
    logits(model)
    assert replaced.calls["kernel"] == 3


def test_a_kernel_that_compiles_computes_the_verified_counts_alone(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from dataclasses import replace\nfrom ffncli.kernels import built_in\n"
                    "mine = replace(built_in('eager'), compiles=True)\n")  # fmt: skip
    model = llama()
    replaced = ffncli.replace(model, f"{file}:mine", tokens=(1, 10))
    logits(model)
    logits(model, torch.arange(11)[None])
    assert replaced.calls == {"kernel": 2, "the kernel was made ready for 1 and 10 tokens": 2}


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_some_layers_and_what_is_kept(tmp_path):
    model: Any = make("qwen3_moe-layer-1-dense", tmp_path).model
    replaced = ffncli.replace(model, "packed")
    assert [ffn.layer for ffn in replaced.ffns] == ["decoder.1"]
    assert {(ffn.layer, ffn.reason) for ffn in replaced.kept} == {
        ("decoder.0", "packed: cannot compute experts"), ("decoder.2", "packed: cannot compute experts"),
    }  # fmt: skip
    assert repr(replaced) == "<1 FFN by packed, 2 kept, in place>"
    replaced.restore()
    with ffncli.replace(model, layers=[2, "decoder.0"]) as replaced:
        assert [ffn.layer for ffn in replaced.ffns] == ["decoder.2", "decoder.0"]
        assert {ffn.kernel for ffn in replaced.ffns} <= {"eager", "grouped", "batched"}
        assert replaced.notes[0].startswith("auto: ")  # why it is that one
    with pytest.raises(FFNError, match="layer 9"):
        ffncli.replace(model, layers=9)


def test_what_cannot_be_replaced(tmp_path):
    for name, kernel, message in (
        ("gpt2", "packed", "no FFN of GPT2LMHeadModel was replaced: packed: a plain block has no gate to pack"),
        ("gpt_oss", "eager", "returns a tuple, not one tensor"),
    ):
        with pytest.raises(FFNError, match=message):
            ffncli.replace(make(name, tmp_path / name).model, kernel)
    with pytest.raises(FFNError, match="Linear is not a transformers model"):
        ffncli.replace(nn.Linear(4, 4))
    with torch.device("meta"):
        empty = llama()
    with pytest.raises(FFNError, match="on the meta device"):
        ffncli.replace(empty, "eager")
    for tokens in ((), 0, "many"):
        with pytest.raises(FFNError, match="tokens must be one or more whole numbers from 1"):
            ffncli.replace(llama(), "eager", tokens=tokens)


def test_a_module_that_computes_something_else_is_kept():
    model = llama()
    model.model.layers[1].mlp.act_fn = nn.ReLU()  # not what its config says
    replaced = ffncli.replace(model, "eager")
    ((layer, reason),) = [(ffn.layer, ffn.reason) for ffn in replaced.kept]
    assert layer == "decoder.1"
    assert "LlamaMLP (model.layers.1.mlp) does not compute exactly its FFN from its current parameters" in reason


def test_a_wrong_kernel_replaces_nothing(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mlp(x, gate, up, down):\n    import torch.nn.functional as F\n"
                    "    return F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down)\n"
                    "def raises(x):\n    return x[0, 10_000]\n"
                    "def writes(x):\n    return x.zero_()\n")  # fmt: skip
    model = llama()
    for name, message in (
        ("mlp", "is wrong: its error against float64 is .*, more than"),
        ("raises", "mine.py"),
        ("writes", "changes its input"),
    ):
        with pytest.raises(FFNError, match=message) as caught:
            ffncli.replace(model, f"{file}:{name}")
        assert caught.value.code == 1 or name == "raises"
        assert not any("forward" in vars(part) for part in model.modules())


def test_a_layer_that_works_between_the_modules_is_not_computed_silently(tmp_path):
    model: Any = make("opt", tmp_path).model
    replaced = ffncli.replace(model, "eager")
    layer = model.model.decoder.layers[0]
    original = layer.activation_fn.forward
    layer.activation_fn.forward = lambda x: 2 * original(x)
    with pytest.raises(FFNError, match="the layer changes its hidden units between these modules"):
        logits(model)
    with pytest.raises(FFNError, match="something else has replaced the forward of ReLU since"):
        replaced.restore()
    layer.activation_fn.forward = original
    replaced.restore()


def test_twice_and_again():
    model = llama()
    replaced = ffncli.replace(model, "packed")
    with pytest.raises(FFNError, match=r"the forward of LlamaMLP in model\.layers\.0\.mlp has been replaced before"):
        ffncli.replace(model, "eager")
    replaced.restore()
    replaced.restore()
    replaced.apply()
    logits(model)
    assert (replaced.active, replaced.calls) == (True, {"kernel": 2})


def test_modes_are_left_as_they_were():
    model = llama().train()
    model.model.layers[1].eval()
    modes = [part.training for part in model.modules()]
    ffncli.replace(model, "packed")
    assert [part.training for part in model.modules()] == modes


@pytest.mark.parametrize("kernel", ["mkl", "frozen"])
def test_what_is_made_of_the_weights_is_made_again_when_they_change(kernel):
    if reason := built_in(kernel).missing("cpu"):
        pytest.skip(reason)
    model, other = llama(), llama()
    alone = logits(model)
    replaced = ffncli.replace(model, kernel, tokens=10)
    assert all(ffn.copied_bytes == 3 * 4 * 16 * 40 for ffn in replaced.ffns)
    assert far(logits(model), alone) < 1e-5
    with torch.no_grad():
        for one in (model, other):
            one.model.layers[0].mlp.down_proj.weight.mul_(2.0)
    assert far(logits(model), logits(other)) < 1e-5
    assert far(logits(model), alone) > 1e-3
    assert {*replaced.calls} == {"kernel"}


# --- kernels with weights of a library's own form, and in fewer bits --------------------------------------------------


@pytest.mark.parametrize("kernel", ["onednn", "onednn_packed", "int8"])
def test_weights_in_another_form_and_in_fewer_bits(kernel, tmp_path):
    """Their bytes are counted, a changed weight is prepared again, and what fewer bits allow is the kernel's limit."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(9)[None]
    alone = logits(model, tokens)
    with ffncli.replace(model, kernel) as replaced:
        assert [ffn.kernel for ffn in replaced.ffns] == [kernel, kernel]
        assert all(ffn.copied_bytes >= 3 * 32 * 64 for ffn in replaced.ffns)
        coarse = kernel == "int8"
        assert all((1e-4 < ffn.error < ffn.tolerance) == coarse for ffn in replaced.ffns)
        assert far(logits(model, tokens), alone) < (0.1 if coarse else 1e-5)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(2.0)
        changed = logits(model, tokens)
    assert far(changed, logits(model, tokens)) < (0.1 if coarse else 1e-5)
    assert far(changed, alone) > 1e-3


SPEC = ffncli.FFNSpec(8, 24, "swiglu", bias=True, norm="rmsnorm", residual=True)


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (24, 8), "up": (24, 8), "down": (8, 24)}
    return {
        f"{name}.{kind}": (0.4 * torch.randn(shape[: 2 - (kind == "bias")], generator=generator)).to(dtype)
        for name, shape in shapes.items() for kind in ("weight", "bias")
    }  # fmt: skip


def expected(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gated block by torch's functions, in float64."""
    x, w = x.double(), {name: tensor.double() for name, tensor in w.items()}
    gate, up = (functional.linear(x, w[f"{n}.weight"], w[f"{n}.bias"]) for n in ("gate", "up"))
    return functional.linear(functional.silu(gate) * up, w["down.weight"], w["down.bias"])


@pytest.mark.parametrize("name", ["eager", "module", "packed", "inplace", "conv1x1", "numpy"])
def test_every_kernel_is_a_function_of_x(name: str):
    weights, x = drawn(), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    f = ffncli.kernel(name, SPEC, weights)
    out, right = f(x), expected(x, weights)
    assert (out.shape, out.dtype) == (x.shape, torch.float32)
    assert (out - right).abs().max() <= 2e-6 * right.abs().max()
    other, once = f(2 * x), out.clone()
    assert f(x[0, 0]).shape == (8,)
    assert torch.equal(out, once)  # a later call overwrites no earlier output
    assert not torch.equal(other, out)
    assert f(x[:0]).shape == (0, 3, 8)


def test_auto_and_steps_and_the_names():
    weights, x = drawn(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    right = expected(x, weights)
    for f in (ffncli.kernel("auto", SPEC, weights), ffncli.kernel("packed", kernel_steps(ffncli.steps(SPEC)), weights)):
        assert (f(x) - right).abs().max() <= 2e-6 * right.abs().max()
    assert {"eager", "packed", "compiled"} <= {*ffncli.kernel_names()}


def test_a_users_kernel(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch.nn.functional import linear, silu\n"
        "def mlp(x, gate, up, down, gate_bias, up_bias, down_bias):\n"
        "    return linear(silu(linear(x, gate, gate_bias)) * linear(x, up, up_bias), down, down_bias)\n"
    )
    weights, x = drawn(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ffncli.kernel(f"{file}:mlp", SPEC, weights)(x).double(), expected(x, weights), atol=1e-6)
    with pytest.raises(FFNError, match=r"needs the block as an ffncli\.FFNSpec"):
        ffncli.kernel(f"{file}:mlp", ffncli.steps(SPEC), weights)


def test_gradients_flow_to_x_where_the_kernel_has_any():
    weights, x = drawn(torch.float64), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(ffncli.kernel("packed", SPEC, weights)(x).sum(), x)
    (right,) = torch.autograd.grad(expected(x, weights).sum(), x)
    assert torch.allclose(ours, right, rtol=1e-12)
    with pytest.raises(FFNError, match="inplace computes forward only"):
        ffncli.kernel("inplace", SPEC, weights)(x)


def _without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in drawn().items() if key != name}


@pytest.mark.parametrize(("weights", "message"), [
    (_without("up.bias"), "weights: up.bias missing"),
    (drawn() | {"upp.weight": torch.zeros(2)}, "weights: no weight 'upp.weight'"),
    (drawn() | {"up.weight": torch.zeros(8, 24)}, r"up.weight has shape \[8, 24\], expected \[24, 8\] \(d_ff = 24"),
    (drawn() | {"up.weight": torch.zeros(24, 8, dtype=torch.bfloat16)}, "gate.weight is fp32 on cpu, up.weight is b"),
    (drawn() | {"up.weight": 3.0}, "up.weight must be a tensor, got a float"),
    ([], "weights must be a mapping"),
])  # fmt: skip
def test_weights_that_do_not_fit(weights: object, message: str):
    with pytest.raises(FFNError, match=message):
        ffncli.kernel("packed", SPEC, weights)


def test_what_a_kernel_and_its_function_refuse():
    plain = ffncli.FFNSpec(8, 24, "relu", bias=False)
    with pytest.raises(FFNError, match="packed: a plain block has no gate to pack"):
        ffncli.kernel("packed", plain, {"up.weight": torch.zeros(24, 8), "down.weight": torch.zeros(8, 24)})
    for name, message in (("fast", "unknown kernel 'fast'"), (3, "name must be a string")):
        with pytest.raises(FFNError, match=message):
            ffncli.kernel(name, SPEC, drawn())
    with pytest.raises(FFNError, match=r"block must be an ffncli\.FFNSpec"):
        ffncli.kernel("packed", "8x24:swiglu", drawn())
    f = ffncli.kernel("packed", SPEC, drawn())
    for x, message in (
        (torch.zeros(3, 9), r"shape \[3, 9\], expected \[..., 8\]"), (torch.zeros(8).double(), "x is fp64 on cpu"),
        ([1.0], "x must be a tensor"),
    ):  # fmt: skip
        with pytest.raises(FFNError, match=message):
            f(x)


def test_a_mixture_is_the_sum_of_its_chosen_experts():
    spec = ffncli.FFNSpec(8, 12, "swiglu", bias=False, moe=MoE(experts=4, top_k=2))
    generator = torch.Generator().manual_seed(3)
    shapes = {"router": (4, 8), "gate": (4, 12, 8), "up": (4, 12, 8), "down": (4, 8, 12)}
    w = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(5, 8, generator=generator)
    out, right = ffncli.kernel("eager", spec, w)(x), torch.zeros(5, 8, dtype=torch.float64)
    wide, score = {n: t.double() for n, t in w.items()}, torch.softmax(x.double() @ w["router.weight"].double().T, -1)
    top, chosen = score.topk(2)
    for token in range(5):
        for share, e in zip(top[token] / top[token].sum(), chosen[token], strict=True):
            gate, up, down = (wide[f"{n}.weight"][e] for n in ("gate", "up", "down"))
            right[token] += share * (down @ (functional.silu(gate @ x[token].double()) * (up @ x[token].double())))
    assert (out - right).abs().max() <= 2e-6 * right.abs().max()
