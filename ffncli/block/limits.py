"""Limits on the two factors of a gated unit, and the units that are known by the name of their limits.

Four orders are in use: gpt-oss and DeepSeek-V4 limit the gate before its activation function, Step-3.5 after it, and
Kimi-K3 and Inkling-2 bound the linear factors by tanh. A limit is never a step of its own: `recipe.unit_ops` writes it
into the fields of `steps.Activation`.
"""

from __future__ import annotations

from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class Limits:
    """What bounds the gate, its activation and up; None for no limit.

    gate ≤ `gate_high` before the activation function, act ≤ `act_high` after it, |up| ≤ `up_limit`; `up_plus` is added
    to the limited up. A soft cap c replaces the linear factor of a function by c·tanh(x/c): `gate_cap` the x of
    silu(x) = x·sigmoid(x), `up_cap` up itself. In a plain block the gate's limits apply to its one projection.
    """

    gate_high: float | None = None
    act_high: float | None = None
    gate_cap: float | None = None
    up_limit: float | None = None
    up_cap: float | None = None
    up_plus: float = 0.0

    @property
    def sizes(self) -> dict[str, float]:
        """The limits that are set, under their names in a message."""
        named = {
            "the limit of the gate": self.gate_high, "the limit of the activated gate": self.act_high,
            "the soft cap of the gate": self.gate_cap, "the limit of up": self.up_limit,
            "the soft cap of up": self.up_cap,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


NO_LIMITS = Limits()


def hard_limits(limit: float, up_plus: float = 0.0) -> Limits:
    """gate ≤ limit before its function, and |up| ≤ limit: gpt-oss's order, and DeepSeek-V4's."""
    return Limits(gate_high=limit, up_limit=limit, up_plus=up_plus)


def limits_after(limit: float) -> Limits:
    """act ≤ limit after its function, and |up| ≤ limit: Step-3.5's order, and Ling-3's."""
    return Limits(act_high=limit, up_limit=limit)


@dataclass(frozen=True)
class LimitedUnit:
    """A gated unit with limits: the function of its gate, its published limits, other spellings of its name."""

    name: str
    function: str
    limits: Limits
    spellings: tuple[str, ...] = ()
    used_by: str = ""
    source: str = ""


UNITS_WITH_LIMITS: dict[str, LimitedUnit] = {
    unit.name: unit
    for unit in (
        LimitedUnit(
            "swiglu_oai",
            "quick_gelu",
            hard_limits(7.0, 1.0),
            ("swigluoai", "swiglu_clamped", "clamped_swiglu", "gpt_oss_swiglu"),
            "gpt-oss, Privacy Filter, MiniMax-M3",
            "gpt-oss model card, arXiv:2508.10925; transformers GptOssExperts",
        ),
        LimitedUnit(
            "deepseek_v4",
            "silu",
            hard_limits(10.0),
            ("deepseek_v4_swiglu", "silu_clamp", "silu_clamped", "clamped_silu"),
            "DeepSeek-V4, GLM-5.3-Flash, Hy4",
            "transformers DeepseekV4MLP",
        ),
        LimitedUnit(
            "swiglustep",
            "silu",
            limits_after(7.0),
            ("swiglu_step", "step_swiglu"),
            "Step-3.5, Step-3.7",
            "transformers Step3p7Experts",
        ),
        LimitedUnit(
            "situ",
            "silu",
            Limits(gate_cap=4.0, up_cap=25.0),
            ("situ_glu", "situglu", "softcapped_swiglu", "swiglu_softcap"),
            "Kimi-K3, Inkling-2",
            "transformers Inkling2SoftcappedSwiGLU",
        ),
    )
}
