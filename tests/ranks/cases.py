"""The blocks that ranks compute together, what a rank is asked and answers, and the start of a world size's ranks.

Every parameter is drawn: a bias of zero hides that it is added twice.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import Ranks
from ffncli.block.steps import Route, Step, block_inputs, id_inputs, input_shapes, parameters, tables
from ffncli.run.engine.weights import random_weights
from ffncli.run.ranks.simulate import CollectiveCall
from tests.ranks.started import Started

D, F = 6, 24
NORMED = FFNSpec(D, F, "swiglu", norm="rmsnorm", residual=True)
BIASED = replace(NORMED, bias=True)
DENSE: Mapping[str, FFNSpec] = {
    "plain": FFNSpec(D, F, "gelu", bias=False),
    "gated": FFNSpec(D, F, "swiglu"),
    "biased": FFNSpec(D, F, "relu", residual=True),
    "biased-down": FFNSpec(D, F, "geglu", bias=False, down_bias=True, residual=True),
    "pre-norm": FFNSpec(D, F, "swiglu", bias=True, norm="rmsnorm", norm_weight="one_plus", residual=True),
    "post-norm": FFNSpec(D, F, "gelu", norm="layernorm", norm_position="post", residual=True),
    "branch-norm": FFNSpec(D, F, "swiglu", norm="rmsnorm", norm_position="pre+branch", residual=True),
    "norm-gate": replace(NORMED, norm_gate=2),
    "capped": FFNSpec(D, F, "gpt_oss_swiglu", bias=True, residual=True),
    "soft-capped": FFNSpec(D, F, "situ", residual=True),
    "learned-activation": replace(BIASED, activation="xielu", gated=False),
    "scaled": replace(BIASED, learned_scale=True, gate_scale=0.5, residual_scale=0.22),
    "dropout": FFNSpec(D, F, "relu", dropout=0.5, residual=True),
    "two-inputs": replace(BIASED, parallel=True),
}
GROUPS = MoE(8, 3, 1, groups=4, top_groups=2, group_best=2, correction=True, score="sigmoid", scale=2.5)
MIXTURES: Mapping[str, FFNSpec] = {
    "mixtral": FFNSpec(D, F, "swiglu", moe=MoE(8, 2)),
    "deepseek": FFNSpec(D, F, "swiglu", moe=replace(GROUPS, eps=1e-20)),
    "mixture": replace(BIASED, moe=MoE(8, 2)),
    "mixture-capped": FFNSpec(D, F, "gpt_oss_swiglu", bias=True, moe=MoE(8, 3, order="choose_first", router_bias=True)),
    "mixture-shared": replace(BIASED, moe=MoE(8, 2, 2, shared_gate=True)),
    "mixture-scaled": replace(NORMED, learned_scale=True, moe=MoE(8, 2, 1, shared_scale=0.5)),
    "mixture-input": replace(BIASED, moe=MoE(8, 2, 1, weigh="input", score="sigmoid", renormalise=False)),
    "mixture-groups": replace(NORMED, moe=GROUPS),
    "mixture-identity": replace(BIASED, moe=MoE(8, 4, identity_experts=3)),
    "mixture-latent": replace(NORMED, moe=MoE(8, 2, 1, latent=4, latent_norm=True, mixed_norm=True)),
    "mixture-normed": replace(BIASED, moe=MoE(8, 2, 1, expert_norm=True)),
    "mixture-sum-biased": replace(NORMED, moe=MoE(8, 2, mixed_bias=True)),
    "mixture-always": replace(NORMED, learned_scale=True, moe=MoE(8, 2, 2, shared_routed=True, score="sigmoid")),
    "mixture-lookup": replace(NORMED, moe=MoE(8, 2, 1, lookup=5, score="sqrtsoftplus")),
    "mixture-learned": replace(BIASED, activation="xielu", gated=False, moe=MoE(8, 2)),
    "mixture-router": replace(NORMED, moe=MoE(8, 1, router_width=4, router_carries=True, skip_experts=1)),
}
IN_FLOAT32 = tuple("mixtral deepseek plain gated biased pre-norm capped mixture mixture-capped mixture-shared".split())
TOKENS: Mapping[int, tuple[int, ...]] = {1: (7,), 2: (4, 3), 4: (3, 0, 1, 3)}  # by ranks along ep: unequal, and none


def cases(world_size: int) -> "Iterator[RankCase]":
    """Every block over every split of so many ranks, in float64; some in float32 too."""
    splits = [Ranks(tp, world_size // tp) for tp in (1, 2, 4) if world_size % tp == 0]
    for ranks in splits:
        for name, spec in {**(DENSE if ranks.ep == 1 else {}), **MIXTURES}.items():
            yield case(name, spec, ranks, torch.float64)
            if name in IN_FLOAT32:
                yield case(name, spec, ranks, torch.float32)
        if ranks.ep > 1:
            yield one_busy_expert(ranks)


def case(name: str, spec: FFNSpec, ranks: Ranks, dtype: torch.dtype) -> "RankCase":
    if spec.moe and dtype == torch.float64:  # scores in float32 would hide everything below 1e-8
        spec = replace(spec, moe=replace(spec.moe, score_dtype="input"))
    block, generator = steps(spec), torch.Generator().manual_seed(3)
    weights = drawn(block, generator, dtype)
    tokens = TOKENS[ranks.ep]
    inputs = {}
    for entry, shape in input_shapes(block, (sum(tokens),)).items():
        vocabulary = id_inputs(block).get(entry)
        inputs[entry] = (
            torch.randint(vocabulary, shape, generator=generator)
            if vocabulary
            else torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        )
    upstream = torch.randn(sum(tokens), spec.d_model, generator=generator, dtype=torch.float64).to(dtype)
    assert block_inputs(block)[0] == "x"
    return RankCase(f"{name}/{ranks}/{str(dtype)[-2:]}", block, ranks, weights, inputs, upstream, tokens)


def drawn(block: tuple, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights around 0 with a deviation of a half, and a table as `random_weights` draws it."""
    out = {n: t for n, t in random_weights(block, generator, dtype).items() if n in tables(block)}
    for name, axes in parameters(block).items():
        values = torch.randn([axis.size for axis in axes], generator=generator, dtype=torch.float64)
        out[name] = (values / 2).to(dtype)
    return out


def one_busy_expert(ranks: Ranks) -> "RankCase":
    """All tokens choose expert 0 and one of its neighbours: the other ranks' experts get no rows."""
    spec = replace(BIASED, moe=MoE(8, 1, correction=True, score="sigmoid"))
    made = case("mixture-one-busy", spec, ranks, torch.float64)
    correction = torch.zeros(8, dtype=torch.float64)
    correction[0] = 9.0
    (route,) = [step.output for step in made.steps if isinstance(step.op, Route)]
    return replace(made, weights={**made.weights, f"{route}.correction": correction})


@dataclass(frozen=True, repr=False)  # a failing test would print every tensor
class RankCase:
    """A block, the ranks that compute it, and what every rank along `ep` enters: tokens by token counts in `tokens`."""

    name: str
    steps: tuple[Step, ...]
    ranks: Ranks
    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    upstream: Tensor
    tokens: tuple[int, ...]


CASES: Mapping[str, tuple[int, RankCase]] = {
    f"{world}:{case.name}": (world, case) for world in (2, 4) for case in cases(world)
}


@dataclass(repr=False)
class Answer:
    """What one rank has after a forward and a backward pass; gradients of its parts of the weights by name."""

    error: str = ""
    output: Tensor = field(default_factory=lambda: torch.zeros(0))
    input_gradient: Tensor = field(default_factory=lambda: torch.zeros(0))
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    forward: dict[str, int] = field(default_factory=dict)
    both: dict[str, int] = field(default_factory=dict)
    calls: list[CollectiveCall] = field(default_factory=list)


def answers_of(cases: Sequence[RankCase], world_size: int, folder: Path) -> list[dict[str, Answer]]:
    """By rank, the answers by the names of the cases. Fails with what the ranks wrote if one of them did not answer."""
    torch.save(list(cases), folder / "cases.pt")
    command = (sys.executable, "-m", "tests.ranks.worker", str(folder))
    ranks = [Started((*command, str(rank), str(world_size))) for rank in range(world_size)]
    try:
        ends = [one.ended() for one in ranks]
    finally:
        for one in ranks:
            one.process.kill()
            one.process.wait()
    assert [one.code for one in ends] == [0] * world_size, "\n".join(one.out + one.err for one in ends)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
