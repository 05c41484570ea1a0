"""The topics about training: gradients, losses, a step, a router's balance, optimizers, what is kept, ZeRO."""

from __future__ import annotations

from math import log, log2
from typing import TYPE_CHECKING

from ffncli.block import dtypes
from ffncli.models.counting.training import TrainingOptions, training_memory
from ffncli.run.topics.topic import NumberTable, TinyRun, Topic, TopicLine, Value, catalog_model, fixed, tiny_run
from ffncli.show.text import bytes_text

if TYPE_CHECKING:
    from torch import Tensor

    from ffncli.models.counting.training import TrainingMemory
    from ffncli.run.engine.backward import ForwardPass

_SOURCE, _TOKENS = "4x6:gelu", 4096
_ADAM = "Loshchilov & Hutter 2017, arXiv:1711.05101"


def _passes(run: TinyRun, weights: dict[str, Tensor] | None = None) -> tuple[ForwardPass, float, dict[str, Tensor]]:
    """Return (the forward pass, the mean square of its output, the gradients) of a tiny block, with other weights if
    given."""
    from ffncli.run.engine.backward import backward, forward

    ready = run.prepared
    ran = forward(ready.steps, weights or ready.weights, ready.inputs)
    last = ready.steps[-1].output
    out = ran.tensors[last].double()
    upstream = {last: ("g", (2 * out / out.numel()).to(ran.tensors[last].dtype))}
    return ran, float(out.square().mean()), {one.name: one.tensor for one in backward(ready.steps, ran, upstream)}


def gradient_topic(line: TopicLine) -> Topic:
    """Explain gradients by the units of a tiny block."""
    source = "4x6:relu"
    run = tiny_run(source, tokens=1)
    ran, _, back = _passes(run)
    columns = [t[0].tolist() for t in (ran.tensors["up"], ran.tensors["act"], back["act"], back["up"])]
    rows = tuple((unit, *values) for unit, values in enumerate(zip(*columns, strict=True)))
    dead = sum(row[1] <= 0 for row in rows)
    return line.explained(
        (
            "The gradient of a number says how much the loss changes when that number grows by a little.",
            "The backward pass goes from the last step to the first; each step multiplies by its own slope.",
            "relu's slope is 1 for a positive input, else 0: d up = d act ⊙ relu'(up).",
            f"Below, {dead} of the {len(rows)} units are off for this token, so no gradient passes through them.",
            "A weight's gradient is a sum over tokens: dW1[i,j] = Σ x[t,i] · d up[t,j].",
        ),
        NumberTable(
            "ffn trace 4x6:relu --tokens 1 --backward --loss mse", ("unit", "up", "act", "d act", "d up"), rows
        ),
        "ffn trace 4x8:relu --tokens 2 --backward --explain 'dW1[0,3]'",
        ("Rumelhart, Hinton & Williams 1986, Nature 323",),
    )


def loss_topic(line: TopicLine) -> Topic:
    """Explain losses by probabilities of the right token."""
    rows = tuple((p, -log(p), p - 1, (1 - p) ** 2) for p in (0.99, 0.9, 0.5, 0.1, 0.01))
    return line.explained(
        (
            "A loss is one number that says how wrong an output is; training makes it smaller.",
            "Cross-entropy is -log p of the right class: for p = 0.5 it is 0.6931 nats, for p = 0.01 it is 4.6052.",
            "Its gradient at the right class's logit is p - 1: a confident mistake pulls hard, a right answer hardly.",
            "The mean square error is the mean of (output - target)².",
            "A language model's loss is the mean cross-entropy of its next tokens; e to that is its perplexity.",
        ),
        NumberTable(
            "ffn trace 4x8:relu --tokens 1 --backward --loss cross-entropy --target 0",
            ("p of the right class", "cross-entropy", "gradient of its logit", "(1 - p)²"), rows,
        ),
        "ffn trace 4x8:relu --tokens 1 --backward --loss mse --target 1,2,3,4", (),
    )  # fmt: skip


def ablation_topic(line: TopicLine) -> Topic:
    """Explain ablation and attribution by the units of a tiny block."""
    run = tiny_run(_SOURCE, tokens=2)
    ran, loss, back = _passes(run)
    act, down, rows = ran.tensors["act"], run.prepared.weights["down.weight"], list[tuple[Value, ...]]()
    for unit in range(act.shape[1]):
        without = down.clone()
        without[:, unit] = 0
        change = _passes(run, {**run.prepared.weights, "down.weight": without})[1] - loss
        rows.append((unit, float(act[:, unit].norm()), change, -float((act * back["act"])[:, unit].sum())))
    return line.explained(
        (
            "To ablate a unit is to run again with 0 or its mean instead of its values: what changes is its effect.",
            "Patching puts in the values of another run, which shows what makes the difference between two texts.",
            "Attribution predicts both from one backward pass: the change of a value times its gradient.",
            "Below it differs from the exact change, since the loss is not linear in a unit's values.",
            "An expert's saliency (REAP) needs one run: the norm of its output times its router weight, on average.",
        ),
        NumberTable("ffn trace 4x6:gelu --tokens 2 --backward --loss mse",
                    ("unit", "norm of act", "change of the loss without it", "by attribution"), tuple(rows)),
        "ffn trace 4x6:gelu --tokens 2 --set 'act[:,3]=0'", (),
    )  # fmt: skip


def rate_topic(line: TopicLine) -> Topic:
    """Explain the learning rate by steps of several sizes."""
    run = tiny_run(_SOURCE, tokens=2)
    _, loss, back = _passes(run)
    weights = run.prepared.weights
    steep = sum(float(back[name].double().square().sum()) for name in weights)
    rows = []
    for lr in (0.01, 0.1, 1.0, 10.0):
        moved = {name: tensor - lr * back[name] for name, tensor in weights.items()}
        change = _passes(run, moved)[1] - loss
        rows.append((lr, loss + change, change, -lr * steep))
    return line.explained(
        (
            "One step of gradient descent moves every weight against its gradient: new W = W - lr · dW.",
            "To first order, the loss then changes by -lr · Σ gradient², always downwards.",
            f"Below, the loss starts at {fixed(loss)}; with lr 0.01 the prediction is nearly exact.",
            f"With lr 10 the loss is {fixed(rows[-1][1])}, though {fixed(loss + rows[-1][3])} was predicted.",
            "So a learning rate is too large where the loss bends within one step.",
        ),
        NumberTable(f"ffn trace {_SOURCE} --tokens 2 --backward --loss mse --lr 0.1",
                    ("lr", "loss after", "change", "predicted"), tuple(rows)),
        "ffn trace 4x8:relu --tokens 1 --backward --lr 0.1", (),
    )  # fmt: skip


def balance_topic(line: TopicLine) -> Topic:
    """Explain load-balancing losses by loads that are even and uneven."""
    import torch

    from ffncli.block.steps import Axis, Route
    from ffncli.run.engine.router_losses import RouterSums

    op, rows = Route(Axis("experts", 4), 1, score_dtype="input"), []
    for load in ((4, 4, 4, 4), (7, 5, 3, 1), (13, 1, 1, 1), (16, 0, 0, 0)):
        logits = torch.cat([4.0 * torch.eye(4, dtype=torch.float64)[[e] * n] for e, n in enumerate(load)])
        sums = RouterSums(op)
        sums.add(logits)
        value = {one.name: one.value for one in sums.losses(load)}
        bits = sum(-n / 16 * log2(n / 16) for n in load if n)
        rows.append((", ".join(map(str, load)), value["switch"], value["z-loss"], bits))
    return line.explained(
        (
            "A router that always picks the same experts wastes the others, so training adds a loss for balance.",
            "Switch's is E · Σ f · P: f is an expert's share of the choices, P its mean probability; 1 is even.",
            "transformers divides by tokens instead of choices, which gives top_k times as much.",
            "DeepSeek-V3 mostly shifts the choice by a bias, which has no gradient, and adds a small loss.",
            "The z-loss, the mean of logsumexp(logits)², keeps logits small (Zoph et al. 2022).",
            "The entropy of the load is log2 of the number of experts if it is even, and 0 if one gets all.",
        ),
        NumberTable("ffn trace 8x16:swiglu --experts 4 --tokens 16",
                    ("tokens of 4 experts", "switch", "z-loss", "entropy bits"), tuple(rows)),
        "ffn trace mixtral-8x7b --d-model 8 --d-ff 16 --tokens 16",
        ("Fedus et al. 2021, arXiv:2101.03961", "Zoph et al. 2022, arXiv:2202.08906",
         "DeepSeek-AI 2024, arXiv:2412.19437"),
    )  # fmt: skip


def _memory(optimizer: str, name: str = "llama-2-7b", **options: object) -> TrainingMemory:
    given = TrainingOptions(training=optimizer, **options)  # type: ignore[arg-type]
    return training_memory(catalog_model(name).model, given, dtypes.dtype("bf16"), _TOKENS)


def optimizer_topic(line: TopicLine) -> Topic:
    """Explain optimizers by the state that each keeps."""
    names = ("sgd", "muon", "adamw8bit", "adamw")
    made = {name: _memory(name) for name in names}
    rows = tuple((n, one.optimizer_bytes, one.optimizer_bytes / one.params, one.total_bytes) for n, one in made.items())
    return line.explained(
        (
            "An optimizer turns gradients into steps; most remember something for each weight between steps.",
            "SGD without momentum keeps nothing; Muon keeps a momentum for each matrix.",
            "AdamW keeps a mean of the gradient and one of its square, so twice the weights.",
            f"For the FFNs of llama-2-7b in bf16 that is {bytes_text(made['adamw'].optimizer_bytes)}.",
            "Its 8-bit form keeps a byte for each value and a scale for 256 of them.",
            "Many frameworks also keep fp32 copies of the weights: 18 bytes a parameter in all.",
        ),
        NumberTable("ffn params llama-2-7b --training adamw --tokens 4096",
                    ("optimizer", "state, bytes", "a parameter", "in all"), rows),
        "ffn params llama-2-7b --training adamw8bit", (_ADAM, "Dettmers et al. 2021, arXiv:2110.02861"),
    )  # fmt: skip


def recompute_topic(line: TopicLine) -> Topic:
    """Explain recomputation by what a layer keeps."""
    made = {name: _memory("sgd", recompute=name) for name in ("none", "act", "block")}
    rows = tuple((n, one.kept_bytes, one.recomputed_flops, one.recomputed_flops / one.forward_matmul_flops)
                 for n, one in made.items())  # fmt: skip
    return line.explained(
        (
            "The backward pass needs tensors of the forward pass, so these are kept: x, gate, act, up and hidden.",
            f"For {_TOKENS} tokens, the FFNs of llama-2-7b keep {bytes_text(made['none'].kept_bytes)} in bf16.",
            "Recomputing `act` keeps only gate and up, and computes silu and the product again: almost no FLOPs.",
            f"Recomputing the block keeps only its input, {bytes_text(made['block'].kept_bytes)}, for a second forward"
            " pass.",
            "Fused kernels keep less than the unfused ones counted here.",
        ),
        NumberTable("ffn params llama-2-7b --training sgd --tokens 4096 --recompute act",
                    ("recompute", "kept, bytes", "FLOPs again", "of a forward pass"), rows),
        "ffn params llama-2-7b --training sgd --tokens 4096 --recompute block", ("Chen et al. 2016, arXiv:1604.06174",),
    )  # fmt: skip


def zero_topic(line: TopicLine) -> Topic:
    """Explain ZeRO by its stages on eight ranks."""
    made = {stage: _memory("adamw", zero=stage, dp=8) for stage in range(4)}
    rows: list[tuple[Value, ...]] = [
        (stage, one.weight_bytes, one.gradient_bytes, one.optimizer_bytes) for stage, one in made.items()
    ]
    return line.explained(
        (
            "Data-parallel ranks hold the same weights and read different tokens, so their states are copies.",
            "ZeRO divides the copies: stage 1 the optimizer state, 2 also gradients, 3 also weights (FSDP).",
            f"On 8 ranks, AdamW's state for llama-2-7b's FFNs falls to {bytes_text(made[1].optimizer_bytes)} a rank.",
            "Stage 3 gathers each layer's weights before use, which costs communication.",
        ),
        NumberTable("ffn params llama-2-7b --training adamw --dp 8 --zero 1 --tokens 4096",
                    ("stage", "weights", "gradients", "optimizer state"), tuple(rows)),
        "ffn params llama-2-7b --training adamw --dp 8 --zero 3", ("Rajbhandari et al. 2019, arXiv:1910.02054",),
    )  # fmt: skip
