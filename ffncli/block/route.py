"""The op that chooses experts: what a router's logits, or a table of token ids, make of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal, TypeAlias

from ffncli.block.op import ONE, Axis, Op, Shape, Symbols, require_axis
from ffncli.dataclass import dataclass

Score: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Order: TypeAlias = Literal["score_first", "choose_first", "one_by_one"]
ScoreDType: TypeAlias = Literal["fp32", "input"]


@dataclass(frozen=True)
class RoutingRule:
    """How each token's experts are chosen, and how their outputs are weighed.

    score_first scores all experts and keeps top_k (Mixtral, Qwen, DeepSeek); choose_first keeps the top_k logits and
    scores those (gpt-oss); one_by_one (Phi-3.5-MoE) takes the largest logit m, scored by a softmax over the logits with
    m - logit ≤ `threshold` · max(|logit|, m), then leaves that expert out and takes the next. With groups, only experts
    of the `top_groups` best groups may be chosen; a group is ranked by the sum of its `group_best` best scores
    (DeepSeek-V2: 1, V3: 2). With `zero_outside` the others have the score 0 for the choice, and are chosen where those
    of the best groups have less (A.X-K2). `correction` is added to the scores for the choice alone (to the logits if
    the choice comes first). Scores are computed in `score_dtype` ("fp32", or "input" for the logits' dtype). `eps` is
    added to the sum that renormalises (LFM2).
    """

    experts: Any  # how many, or the axis of the logits
    top_k: int
    _: KW_ONLY
    score: Score = "softmax"
    order: Order = "score_first"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    zero_outside: bool = False
    correction: bool = False
    score_dtype: ScoreDType = "fp32"
    eps: float = 0.0
    threshold: float = 0.0


@dataclass(frozen=True)
class Route(Op, RoutingRule):
    """Router logits [..., experts] → weights [..., experts]; zero means 'not chosen'.

    The last `always` experts are taken by every token and share in the renormalisation (Inkling); top_k and
    correction concern the others. `learned_scale` multiplies the weights by one learned number. With a `lookup`, whose
    axis is the vocabulary, a second input of token ids [..., 1] chooses: the token's row of a table of integers
    [vocabulary, top_k] lists its experts (the first layers of DeepSeek-V4).
    """

    experts: Axis
    always: int = 0
    learned_scale: bool = False
    lookup: Axis | None = None

    @property
    def chooses(self) -> bool:
        """Whether any expert can be left out: a Route that keeps all of its axis is a softmax (or sigmoid) over it."""
        return self.taken < self.experts.size

    @property
    def taken(self) -> int:
        """How many experts each token goes to."""
        return self.top_k + self.always

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`correction [experts]` (DeepSeek-V3's e_score_correction_bias) and `factor [1]`, where it has them."""
        choosable = Axis(self.experts.name, self.experts.size - self.always)
        correction: dict[str, tuple[Axis, ...]] = {"correction": (choosable,)} if self.correction else {}
        return correction | ({"factor": (ONE,)} if self.learned_scale else {})

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """`lookup [vocabulary, top_k]`: the experts of each token id."""
        return {"lookup": (self.lookup, Axis("top_k", self.top_k))} if self.lookup else {}

    def shape(self, *inputs: Shape) -> Shape:
        """Unchanged; FFNError if token ids are not one for each token."""
        if self.lookup:
            require_axis(ONE, inputs[1], "Route, of token ids,")
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`normalise(top2(softmax(router)))`, `softmax(top4(router))`; `softmax(logits)` where all are chosen.

        If the choice uses numbers other than the scores, they follow a bar: `top8(sigmoid(router) | + b_route, 4 of 8
        groups)`. A table's choice is an index: `sqrtsoftplus(router)[lookup_route[token_ids]]`.
        """
        text = self._choice(inputs, symbol)
        if self.order == "score_first" and self.renormalise:
            plus = f", sum + {self.eps:g}" if self.eps else ""
            text = f"normalise({text}{plus})"
        text = f"{symbol('factor')} · {text}" if self.learned_scale else text
        return text if self.scale == 1 else f"{self.scale:g} · {text}"

    def _choice(self, inputs: Sequence[str], symbol: Symbols) -> str:
        how = [f"+ {symbol('correction')}"] if self.correction else []
        if self.groups > 1:
            others = ", 0 for the others" if self.zero_outside else ""
            how.append(f"{self.top_groups} of {self.groups} groups{others}")
        if self.order == "one_by_one":
            how.append(f"one by one, of logits within {100 * self.threshold:.4g} % of the best")
        bar = " | " + ", ".join(how) if how else ""
        scores = f"{self.score}({inputs[0]})"
        if self.lookup:
            return f"{scores}[{symbol('lookup')}[{inputs[1]}]]"
        if not (self.chooses or self.renormalise or how):
            return scores
        if self.order == "choose_first":
            return f"{self.score}(top{self.top_k}({inputs[0]}{bar}))"
        return f"top{self.top_k}({scores}{bar})" + (f" and the last {self.always}" if self.always else "")

    def into_axis(self) -> Axis:
        """`experts`."""
        return self.experts
