"""The table of activation functions. Each activation is one row, which every command reads.

A row's `f(x, m)` and `slope(x, m)` are written over a namespace `m` with torch's names (exp, erf, tanh, where, ...):
`formulas.SCALAR` runs them on Python floats, `torch` itself on tensors; longer formulas are in `formulas.py`. `native`
names the function in torch.nn.functional that computes the activation; without `native`, `f` is used. Slopes at a kink
are torch's. Learned parameters reach `f` as attributes of `m` through `formulas.with_learned`.

A gated unit may limit its two factors, and some gated units are named after their limits. Several variants are in use:
gpt-oss and DeepSeek-V4 limit the gate before its activation function, Step-3.5 limits it after the function, and
Kimi-K3 and Inkling-2 bound the linear factors by tanh. A limit is never a separate step: `recipe.unit_ops` writes it
into the fields of `steps.Activation`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ffncli.block import formulas as formulas
from ffncli.block.formulas import Function, zero
from ffncli.errors import FFNError, did_you_mean, shown


@dataclass(frozen=True)
class ActivationRow:
    """One activation: its names, its formulas, the models that use it, and the source of its definition.

    `kinks` holds a pair (x, order) for each jump of a derivative: order 1 if the slope jumps, 2 if the slope is
    continuous and the second derivative jumps, 0 if f itself jumps. Everywhere else f is smooth. Formulas consist of
    arithmetic, comparisons, `&`, and the functions of `m` that are in `formulas.SCALAR`.
    """

    name: str
    formula: str
    f: Function
    slope: Function
    aliases: tuple[str, ...] = ()
    native: tuple[str, Mapping[str, Any]] | None = None
    learned: Mapping[str, float] = field(default_factory=dict)  # parameter → initial value; each is a single value
    learned_slopes: Mapping[str, Function] = field(default_factory=dict)  # parameter → the derivative of f by it
    used_by: str = ""
    source: str = ""
    kinks: tuple[tuple[float, int], ...] = ()
    stable: Function | None = None  # the same function, without the cancellation that makes f lose digits in a tail
    stable_slope: Function | None = None

    @property
    def accurate(self) -> Function:
        """The variant of f that is accurate to nearly all digits of float64, even in the tails: the reference for
        errors."""
        return self.stable or self.f

    @property
    def accurate_slope(self) -> Function:
        """The variant of the slope that is accurate to nearly all digits of float64, even in the tails."""
        return self.stable_slope or self.slope


# --- the table --------------------------------------------------------------------------------------------------------

_HENDRYCKS = "Hendrycks & Gimpel 2016, arXiv:1606.08415"
_ROWS = (
    ActivationRow("identity", "x", lambda x, m: x, lambda x, m: zero(x, m) + 1.0, ("linear",), used_by="bilinear GLU"),
    ActivationRow(
        "relu",
        "max(x, 0)",
        lambda x, m: m.where(x <= 0, zero(x, m), x),
        lambda x, m: m.where(x > 0, zero(x, m) + 1.0, zero(x, m)),
        (),
        ("relu", {}),
        used_by="Transformer (2017), OPT, T5 v1.0, Switch Transformers, M2M-100, NLLB-MoE, DETR",
        source="Nair & Hinton 2010",
        kinks=((0.0, 1),),
    ),
    ActivationRow(
        "relu2",
        "max(x, 0)²",
        lambda x, m: m.where(x <= 0, zero(x, m), x * x),
        lambda x, m: m.where(x > 0, 2.0 * x, zero(x, m)),
        ("relu_squared", "squared_relu"),
        used_by="Primer, Nemotron, nanochat, Persimmon, AFM (Arcee), Jais-2, BitNet (gated)",
        source="So et al. 2021, arXiv:2109.08668",
        kinks=((0.0, 2),),
    ),
    ActivationRow(
        "relu6",
        "min(max(x, 0), 6)",
        lambda x, m: m.where(x <= 0, zero(x, m), m.where(x > 6, zero(x, m) + 6.0, x)),
        lambda x, m: m.where((x > 0) & (x < 6), zero(x, m) + 1.0, zero(x, m)),
        (),
        ("relu6", {}),
        used_by="MobileNet",
        source="Krizhevsky 2010",
        kinks=((0.0, 1), (6.0, 1)),
    ),
    ActivationRow(
        "leaky_relu",
        "x if x > 0 else 0.01 x",
        lambda x, m: m.where(x > 0, x, 0.01 * x),
        lambda x, m: m.where(x > 0, zero(x, m) + 1.0, zero(x, m) + 0.01),
        (),
        ("leaky_relu", {}),
        source="Maas et al. 2013",
        kinks=((0.0, 1),),
    ),
    ActivationRow(
        "prelu",
        "x if x > 0 else a x, a learned",
        lambda x, m: m.where(x > 0, x, m.weight * x),
        lambda x, m: m.where(x > 0, zero(x, m) + 1.0, zero(x, m) + m.weight),
        (),
        learned={"weight": 0.25},
        learned_slopes={"weight": lambda x, m: m.where(x > 0, zero(x, m), x)},
        used_by="DAB-DETR",
        source="He et al. 2015, arXiv:1502.01852",
        kinks=((0.0, 1),),
    ),
    ActivationRow(
        "gelu",
        "x Φ(x)",
        formulas.gelu,
        formulas.gelu_slope,
        ("gelu_erf", "gelu_python", "gelu_exact"),
        ("gelu", {}),
        used_by="BERT, RoBERTa, BART, ViT, wav2vec 2.0, Whisper, Falcon, Pythia, ModernBERT (gated)",
        source=_HENDRYCKS,
        stable=formulas.gelu_stable,
        stable_slope=formulas.gelu_slope_stable,
    ),
    ActivationRow(
        "gelu_tanh",
        "x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))",
        lambda x, m: 0.5 * x * (1.0 + m.tanh(formulas.tanh_argument(x))),
        formulas.gelu_tanh_slope,
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"),
        ("gelu", {"approximate": "tanh"}),
        used_by="GPT-2, GPT-3, GPT-J, GPT-NeoX-20B, BLOOM, Phi-2, StarCoder, SigLIP; T5 v1.1, Gemma (gated)",
        source=_HENDRYCKS,
        stable=lambda x, m: x * m.sigmoid(2.0 * formulas.tanh_argument(x)),
        stable_slope=formulas.gelu_tanh_slope_stable,
    ),
    ActivationRow(
        "quick_gelu",
        "x σ(1.702 x)",
        formulas.swish(1.702),
        formulas.swish_slope(1.702),
        ("gelu_sigmoid",),
        used_by="CLIP, OWL-ViT, ImageGPT; gpt-oss, Privacy Filter, MiniMax-M3 (gated, clamped)",
        source=_HENDRYCKS,
    ),
    ActivationRow(
        "gelu_10",
        "min(x Φ(x), 10)",
        formulas.clip10(formulas.gelu),
        lambda x, m: m.where(formulas.gelu(x, m) <= 10.0, formulas.gelu_slope(x, m), zero(x, m)),
        ("gelu_clipped",),
        source="transformers ClippedGELU; arXiv:2004.09602",
        kinks=((10.0, 1),),
        stable=formulas.clip10(formulas.gelu_stable),
    ),
    ActivationRow(
        "silu",
        "x σ(x)",
        formulas.swish(1.0),
        formulas.swish_slope(1.0),
        ("swish", "swish1"),
        ("silu", {}),
        used_by="Llama, Mistral, Mixtral, Qwen, DeepSeek, OLMo, Phi-3, Phi-4, Granite, Falcon3, PaLM (all gated)",
        source="Elfwing et al. 2017, arXiv:1702.03118",
    ),
    ActivationRow(
        "sigmoid",
        "1 / (1 + e⁻ˣ)",
        formulas.sigma,
        formulas.sigmoid_slope,
        ("logistic",),
        ("sigmoid", {}),
        used_by="GLU, MoE routers",
        stable_slope=lambda x, m: m.sigmoid(x) * m.sigmoid(-x),
    ),
    ActivationRow(
        "tanh", "tanh(x)", lambda x, m: m.tanh(x), lambda x, m: 1.0 - m.tanh(x) * m.tanh(x), (), ("tanh", {})
    ),
    ActivationRow(
        "mish",
        "x tanh(softplus(x))",
        lambda x, m: x * m.tanh(formulas.softplus(x, m)),
        formulas.mish_slope,
        (),
        ("mish", {}),
        used_by="YOLOv4",
        source="Misra 2019, arXiv:1908.08681",
    ),
    ActivationRow(
        "hardswish",
        "x min(max(x + 3, 0), 6) / 6",
        formulas.hardswish,
        formulas.hardswish_slope,
        ("hard_swish", "hardsilu"),
        ("hardswish", {}),
        used_by="MobileNetV3",
        source="Howard et al. 2019, arXiv:1905.02244",
        kinks=((-3.0, 1), (3.0, 1)),
    ),
    ActivationRow(
        "softplus",
        "log(1 + eˣ)",
        formulas.softplus,
        formulas.sigma,
        (),
        ("softplus", {"threshold": 40.0}),
        source="Dugas et al. 2000",
    ),
    ActivationRow(
        "sqrtsoftplus",
        "√log(1 + eˣ)",
        lambda x, m: m.sqrt(formulas.softplus(x, m)),
        formulas.sqrtsoftplus_slope,
        ("sqrt_softplus",),
        used_by="DeepSeek-V4's router",
        source="transformers SqrtSoftplusActivation",
    ),
    ActivationRow(
        "elu",
        "x if x > 0 else eˣ − 1",
        *formulas.elu(1.0, 1.0),
        (),
        ("elu", {}),
        used_by="EnCodec",
        source="Clevert et al. 2015, arXiv:1511.07289",
        kinks=((0.0, 2),),
    ),
    ActivationRow(
        "selu",
        "1.0507 · (x if x > 0 else 1.6733 (eˣ − 1))",
        *formulas.elu(formulas.SELU_ALPHA, formulas.SELU_SCALE),
        (),
        ("selu", {}),
        source="Klambauer et al. 2017, arXiv:1706.02515",
        kinks=((0.0, 1),),
    ),
    ActivationRow(
        "laplace",
        "(1 + erf((x − 0.7071) / (0.2821 √2))) / 2",
        lambda x, m: 0.5 * (1.0 + m.erf(formulas.laplace_argument(x))),
        formulas.laplace_slope,
        (),
        used_by="MEGA",
        source="Ma et al. 2022, arXiv:2209.10655",
        stable=lambda x, m: 0.5 * m.erfc(-formulas.laplace_argument(x)),
    ),
    ActivationRow(
        "xielu",
        "α₊x² + x/2 if x > 0 else α₋(eˣ − 1 − x) + x/2, α learned",
        formulas.xielu,
        formulas.xielu_slope,
        (),
        learned={"alpha_p": formulas.inverse_softplus(0.8), "alpha_n": formulas.inverse_softplus(0.3)},
        learned_slopes={"alpha_p": formulas.xielu_by_alpha_p, "alpha_n": formulas.xielu_by_alpha_n},
        used_by="Apertus",
        source="Huang & Schlag 2024, arXiv:2411.13010; initial values as in transformers",
        kinks=((formulas.XIELU_EPS, 1), (0.0, 0)),
    ),
)
TABLE: dict[str, ActivationRow] = {row.name: row for row in _ROWS}
CANONICAL: dict[str, str] = {alias: row.name for row in _ROWS for alias in (row.name, *row.aliases)}
# Maps each gated unit to the function applied to its gate (Shazeer 2020, arXiv:2002.05202).
GATED: dict[str, str] = {
    "swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid", "bilinear": "identity",
    "geglu_tanh": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The limits on the gate, on its activation and on up; None means no limit.

    gate ≤ `gate_high` before the activation function, act ≤ `act_high` after it, |up| ≤ `up_limit`; `up_plus` is added
    to the limited up. A soft cap c replaces a linear factor x by c·tanh(x/c): `gate_cap` replaces the x in silu(x) =
    x·sigmoid(x), `up_cap` replaces up itself. In a plain block the gate's limits apply to its only projection, up.
    """

    gate_high: float | None = None
    act_high: float | None = None
    gate_cap: float | None = None
    up_limit: float | None = None
    up_cap: float | None = None
    up_plus: float = 0.0

    @property
    def sizes(self) -> dict[str, float]:
        """The limits that are set, keyed by the name used in error messages."""
        named = {
            "the limit of the gate": self.gate_high, "the limit of the activated gate": self.act_high,
            "the soft cap of the gate": self.gate_cap, "the limit of up": self.up_limit,
            "the soft cap of up": self.up_cap,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


def hard_limits(limit: float, up_plus: float = 0.0) -> Limits:
    """Return limits on the gate before its function and on |up|: the variant of gpt-oss and DeepSeek-V4."""
    return Limits(gate_high=limit, up_limit=limit, up_plus=up_plus)


def limits_after(limit: float) -> Limits:
    """Return limits on the gate after its function and on |up|: the variant of Step-3.5 and Ling-3."""
    return Limits(act_high=limit, up_limit=limit)


@dataclass(frozen=True)
class LimitedUnit:
    """A gated unit with limits: the gate's function, the published limits, and other spellings of the unit's name."""

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
# Maps each spelling of a gated unit that also limits gate or up to the unit's key in UNITS_WITH_LIMITS.
LIMITED: dict[str, str] = {
    spelling: unit.name for unit in UNITS_WITH_LIMITS.values() for spelling in (unit.name, *unit.spellings)
}
# Maps each function of the form x · s(x) to the name of s, or to None for s = 1; a soft cap bounds only the factor x.
SOFT_CAPPED: dict[str, str | None] = {"identity": None, "silu": "sigmoid"}


def known_names() -> list[str]:
    """Return every spelling that a user may type, canonical names first."""
    return [*TABLE, *(n for n in CANONICAL if n not in TABLE), *GATED, *LIMITED]


def resolve(name: str, field: str = "--activation") -> tuple[str, bool | None]:
    """Return (canonical name, gated) for any spelling; `gated` is True for the name of a gated unit, otherwise None
    (undecided).

    Raises FFNError for an unknown name, with the nearest known ones. Names are looked up, never evaluated.
    """
    key = spelled(name)
    if key in GATED:
        return GATED[key], True
    if key in LIMITED:
        return UNITS_WITH_LIMITS[LIMITED[key]].function, True
    if key in CANONICAL:
        return CANONICAL[key], None
    hint = did_you_mean(key, known_names(), "known: " + ", ".join([*TABLE, *GATED, *UNITS_WITH_LIMITS]))
    raise FFNError(f"{field}: unknown activation {shown(name)}", hint)


def function_of(name: str) -> str | None:
    """Return the canonical name of a function, given its name or a gated unit's name; None for an unknown name."""
    try:
        return resolve(name)[0]
    except FFNError:
        return None


def limits_of(name: str) -> Limits | None:
    """Return the limits of the gated unit with this name, in any spelling (NO_LIMITS for `swiglu`), or None for a plain
    function, whose name says nothing about limits."""
    key = spelled(name)
    if key in LIMITED:
        return UNITS_WITH_LIMITS[LIMITED[key]].limits
    return NO_LIMITS if key in GATED else None


def spelled(name: str) -> str:
    """Return a name as the tables spell it: lower case, with underscores."""
    return name.strip().lower().replace("-", "_")


def unit_name(function: str, limits: Limits) -> str | None:
    """Return the name of the gated unit with this gate function and these limits, or None if no such unit is named."""
    gated = (name for name, gate in GATED.items() if limits == NO_LIMITS and gate == function)
    limited = (u.name for u in UNITS_WITH_LIMITS.values() if (u.function, u.limits) == (function, limits))
    return next(gated, None) or next(limited, None)


def gated_name(name: str) -> str | None:
    """Return the tables' name for a gated unit with this name in any spelling; None for any other name."""
    key = spelled(name)
    return key if key in GATED else LIMITED.get(key)


NO_LIMITS = Limits()
