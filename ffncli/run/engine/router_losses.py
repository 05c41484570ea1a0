"""The losses that keep a router's experts in balance, by the definitions of the papers and of transformers, as numbers.

f is the share of tokens that each expert receives, P the mean probability that the router gives it; tokens are those of
one call, or of a whole corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Tensor

from ffncli.block.steps import Route, Step, routes
from ffncli.run.engine.execute import scores_of


@dataclass(frozen=True)
class RouterLoss:
    """One loss of a router, without the factor that a training run gives it: its name, its value and its definition."""

    name: str
    value: float
    definition: str


_DEFINITIONS = {
    "switch": "E · Σ f · P, f = share of the choices, P = mean softmax (Fedus et al. 2021, arXiv:2101.03961, eq. 4)",
    "transformers": "E · Σ f · P, f = tokens of an expert / tokens (load_balancing_loss_func of Mixtral and others)",
    "deepseek-v3": "Σ f · P, f = E / top_k · tokens of an expert / tokens, P = mean normalised score"
    " (arXiv:2412.19437, eq. 17 to 20)",
    "z-loss": "mean of logsumexp(logits)² (Zoph et al. 2022, arXiv:2202.08906, eq. 5; router_z_loss_func)",
}


class RouterSums:
    """Sums over tokens of what the losses of one router need."""

    def __init__(self, op: Route) -> None:
        self._op, self.tokens, self._squares = op, 0, 0.0
        self._experts = op.experts.size - op.always
        self._probabilities = torch.zeros(self._experts, dtype=torch.float64)
        self._scores = torch.zeros(self._experts, dtype=torch.float64)

    def add(self, logits: Tensor) -> None:
        """Add the router's logits [..., experts]."""
        wide = logits.detach().flatten(0, -2)[:, : self._experts].double().cpu()
        self.tokens += len(wide)
        self._probabilities += wide.softmax(-1).sum(0)
        self._squares += float(wide.logsumexp(-1).square().sum())
        if self._op.score != "softmax":
            scores = scores_of(self._op, wide)
            self._scores += (scores / scores.sum(-1, keepdim=True)).sum(0)

    def __add__(self, other: "RouterSums") -> "RouterSums":
        """Return the sums over the tokens of both."""
        out = RouterSums(self._op)
        out.tokens, out._squares = self.tokens + other.tokens, self._squares + other._squares
        out._probabilities = self._probabilities + other._probabilities
        out._scores = self._scores + other._scores
        return out

    def losses(self, load: Sequence[int]) -> tuple[RouterLoss, ...]:
        """Return the losses, given the number of tokens of each expert; none without tokens."""
        choices = sum(load)
        if not (self.tokens and choices):
            return ()
        counts = torch.zeros(self._experts, dtype=torch.float64)
        counts[: len(load)] = torch.tensor(load, dtype=torch.float64)[: self._experts]
        mean = self._probabilities / self.tokens
        values = {
            "switch": self._experts * float((counts / choices * mean).sum()),
            "transformers": self._experts * float((counts / self.tokens * mean).sum()),
        }
        if self._op.score != "softmax":
            shares = self._experts / self._op.top_k * counts / self.tokens
            values["deepseek-v3"] = float((shares * self._scores / self.tokens).sum())
        values["z-loss"] = self._squares / self.tokens
        return tuple(RouterLoss(name, value, _DEFINITIONS[name]) for name, value in values.items())


def load_figures(load: Sequence[int]) -> dict[str, Any]:
    """Return the figures of a load, the number of tokens of each expert, by their names in Routing."""
    choices, most = sum(load), max(load)
    shares = [tokens / choices for tokens in load if tokens]
    return {
        "choices": choices,
        "even_load": choices / len(load),
        "idle_experts": tuple(expert for expert, tokens in enumerate(load) if not tokens),
        "busiest_expert": load.index(most) if choices else None,
        "busiest_share": most / choices if choices else None,
        "entropy_bits": sum(-share * log2(share) for share in shares) if choices else None,
        "max_entropy_bits": log2(len(load)),
    }


def routers(steps: Sequence[Step]) -> dict[str, tuple[Route, str]]:
    """Return a mapping from each step that routes to experts to its op and the name of its logits."""
    chosen = routes(steps)
    return {
        step.output: (step.op, step.inputs[0]) for step in steps if isinstance(step.op, Route) and step.output in chosen
    }
