"""Check conditions on a row's keys, for CI: `ffn params --assert 'ffn_params_total == 4328521728'`.

A key may also be given by its label in the output of `ffn params`.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from ffncli.errors import ExitCode, FFNError, did_you_mean, option, shown
from ffncli.models.counting.traffic import DeviceFloor

_OF_DEVICE = {f.name for f in fields(DeviceFloor)}
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
# Both read text with single blanks: patterns that try every blank as a border take 20 s for 2,000 blanks.
_FORM = re.compile(r"([^=!<>]+)(==|!=|<=|>=|<|>|=)(.*)")
# only before another condition, since strings may contain "and"
_AND = re.compile(r" and (?=[^=!<>])", re.IGNORECASE)
_WORDS = {"true": True, "yes": True, "false": False, "no": False, "null": None, "none": None}
_NUMBER = re.compile(
    r"([-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:e[-+]?\d{1,3})?) ?([kmbt]|[kmgt]b|%)?", re.IGNORECASE
)
_UNITS: dict[str, int | Fraction] = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_UNITS["%"] = Fraction(1, 100)


@dataclass(frozen=True)
class Assertion:
    """One condition: `text` is what the user typed, `operand` is the value that the row's value is compared with."""

    text: str
    key: str
    operator: str
    operand: Any

    def check(self, row: Mapping[str, Any], name: str) -> "CheckedAssertion":
        """Check the condition for a row. Raises FFNError if the two values have different kinds."""
        actual = self._actual(row)
        return CheckedAssertion(name, self.text, self.key, self.operator, self.operand, actual, self._holds(actual))

    def _holds(self, actual: Any) -> bool:
        wrong = f"{option('asserted')} {shown(self.text)}: {self.key} is {_words(actual)}"
        if actual is None or self.operand is None:
            if self.operator in ("==", "!="):
                return _OPERATORS[self.operator](actual, self.operand)
            raise FFNError(f"{wrong}, which has no order relative to {_words(self.operand)}")
        if _kind(actual) != _kind(self.operand):
            raise FFNError(
                f"{wrong}, {shown(self.operand)} is {_kind(self.operand)}", f"compare it with {_kind(actual)}"
            )
        if self.operator not in ("==", "!=") and _kind(actual) != "a number":
            raise FFNError(f"{wrong}, which has no order", "use == or !=")
        return _OPERATORS[self.operator](actual, self.operand)

    def _actual(self, row: Mapping[str, Any]) -> Any:
        """Return the row's value, or a list's length. Raises FFNError if the key exists only with another option."""
        if self.key not in row:
            of_device = self.key in _OF_DEVICE
            ridge = option("ridge") if self.key.startswith("ridge") else option("tp")
            other = option("ridge", "DEVICE") if of_device else ridge
            other = option("training") if self.key.startswith("training_") else other
            raise FFNError(f"{option('asserted')} {shown(self.text)}: {self.key} exists only with {other}")
        value = row[self.key]
        return len(value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class CheckedAssertion:
    """A condition on one row: the row's name, the condition, the `actual` value, whether it holds."""

    name: str
    text: str
    key: str
    operator: str
    operand: Any
    actual: Any
    holds: bool

    def line(self, several: bool = False) -> str:
        """Return text such as `ok d_ff == 3,072` or `FAILED d_ff == 1 (actual 3072)`, with the row's name if there are
        `several` rows."""
        of = f"{self.name}: " if several else ""
        if not self.holds:
            return f"FAILED  {of}{self.failure()}"
        if self.operator == "==":
            return f"ok  {of}{self.key} == {_digits(self.actual)}"
        return f"ok  {of}{self.text} (actual {_digits(self.actual)})"

    def failure(self, several: bool = False) -> str:
        """Return text such as `d_ff == 1 (actual 3072)`."""
        return f"{self.text} (actual {_words(self.actual)}{f' in {shown(self.name)}' if several else ''})"


def parse(texts: Sequence[str], keys: Sequence[str]) -> list[Assertion]:
    """Parse all conditions; one string may join several conditions with `and`."""
    return [_parse(text, keys) for joined in texts for text in _conditions(joined)]


def check(assertions: Sequence[Assertion], rows: Sequence[Mapping[str, Any]]) -> list[CheckedAssertion]:
    """Check every condition on every row."""
    named = zip(rows, _names(rows), strict=True)
    return [assertion.check(row, name) for row, name in named for assertion in assertions]


def require(checked: Sequence[CheckedAssertion], several: bool = False) -> None:
    """Raise FFNError (exit 1) if any condition fails, naming each failed condition and the actual value."""
    failed = [one.failure(several) for one in checked if not one.holds]
    if failed:
        raise FFNError(f"assertion failed: {'; '.join(failed)}", code=ExitCode.FAILED)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each row's name: its model, plus `tokens=32` or `d_ff=4x` if several rows have the same model."""
    if len({row["name"] for row in rows}) == len(rows):
        return [row["name"] for row in rows]
    keys = [key for key in rows[0] if key in ("dtype", "tokens", "device") or key.startswith("sweep_")]
    apart = [key for key in keys if len({row[key] for row in rows}) > 1]
    return [" ".join([row["name"], *(f"{key.removeprefix('sweep_')}={row[key]}" for key in apart)]) for row in rows]


def _conditions(joined: str) -> list[str]:
    """Split conditions at `and`; a part without an operator belongs to a name that contains the word."""
    out: list[str] = []
    is_name = False
    text = " ".join(joined.split())
    end = max(0, *map(text.rfind, "=!<>"))
    *before, last = _AND.split(text[:end])
    for part in (*before, last + text[end:]):
        if is_name:
            out[-1] += f" and {part}"
        else:
            out.append(part)
        is_name = not re.search("[=!<>]", part)
    return out


def _parse(text: str, keys: Sequence[str]) -> Assertion:
    match = _FORM.fullmatch(text)
    name, sign, value = (part.strip() for part in match.groups()) if match else ("", "", "")
    if not name or sign == "=" or not value:
        raise FFNError(
            f"{option('asserted')} {shown(text)} is not a condition", "write it as 'ffn_params_total == 4328521728'"
        )
    key = name if name in keys else key_of(name)
    if key not in keys:
        names = [*keys, *(label for labels in LABELS.values() for label in labels)]
        hint = did_you_mean(name, names, "use any key of the row with a single value; --json shows them")
        raise FFNError(f"{option('asserted')} {shown(text)}: no key {shown(name)}", hint)
    operand = _value(value)
    if sign not in ("==", "!=") and _kind(operand) != "a number":
        raise FFNError(
            f"{option('asserted')} {shown(text)}: {shown(operand)} is not a number, so {sign} cannot compare it"
        )
    return Assertion(text.strip(), str(key), sign, operand)


def _value(text: str) -> Any:
    """Parse a number (1_000, 1,000, 6.7e9, 60B, 1.5 GB, 60 %), true, false, null, or a string, quoted or not."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    number = _NUMBER.fullmatch(re.sub(r"(?<=\d)[_,](?=\d{3}(?!\d))", "", text))
    if number:
        value = Fraction(number[1]) * _UNITS[(number[2] or "")[:1].upper()]
        return int(value) if value.denominator == 1 else float(value)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, (int, float)) else "a text"


def _words(value: object) -> str:
    """Format a value as in JSON."""
    return "not known (null)" if value is None else str(value).lower() if isinstance(value, bool) else shown(value)


def _digits(value: object) -> str:
    """Format a value as in JSON, with thousands separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _words(value)


# key → (label for one source, label for several sources side by side)
_PLAIN = ("d_model", "d_ff", "activation", "gated", "bias", "layers", "experts", "top_k", "tokens", "dtype")
LABELS: Mapping[str, tuple[str, str]] = {name: (name, name) for name in _PLAIN} | {
    name: (label, short or label)
    for name, label, short in (
        ("shared_experts", "shared experts", ""),
        ("latent", "latent width of the experts", "latent width"),
        ("ffn_params_per_layer", "parameters per layer", "parameters/layer"),
        ("ffn_params_active_per_layer", "active per layer", "active/layer"),
        ("norm_params_per_layer", "norm parameters per layer", "norm/layer"),
        ("attention_params_per_layer", "attention parameters per layer", "attention/layer"),
        ("ffn_share_of_layer", "FFN share of layer", ""),
        ("matmul_flops_per_token", "matmul FLOPs per token and layer", "matmul FLOPs/token"),
        ("elementwise_flops_per_token", "elementwise FLOPs per token and layer", "elementwise FLOPs/token"),
        ("ffn_params_total", "parameters, all layers", "parameters"),
        ("ffn_params_active", "active, all layers", "active"),
        ("matmul_flops_total", "matmul FLOPs", ""),
        ("elementwise_flops_total", "elementwise FLOPs", ""),
        ("weight_bytes", "weight bytes", ""),
        ("model_params_total", "whole model, parameters", "whole model"),
        ("model_params_active", "whole model, active", "whole model active"),
        ("model_params_active_no_embedding", "whole model, active without the input embedding", "... no embedding"),
        ("model_weight_bytes", "whole model, weight bytes", "whole model bytes"),
        ("ffn_share_of_model", "FFN's share of the model", "FFN share of model"),
        ("ffn_params_stored", "FFN parameters by the tensors", ""),
        ("ffn_stored_bytes", "FFN bytes as stored", ""),
        ("ffn_bits_per_weight", "FFN bits per weight as stored", ""),
        ("stored_params", "parameters in the files", ""),
        ("stored_bytes", "bytes of all tensors", ""),
        ("bits_per_weight", "bits per weight as stored, all tensors", "bits per weight as stored"),
    )
}


def label(key: str) -> str:
    """Return a key's label in the output for one source."""
    return LABELS[key][0]


def key_of(name: str) -> str | None:
    """Return the key for a name, which is the key itself or its label in the output, with or without additions to the
    label.

    `weight bytes (bf16)`, `parameters per MoE layer` and `matmul FLOPs, all layers, 1 token` mean
    `weight bytes`, `parameters per layer` and `matmul FLOPs`.
    """
    text = " ".join(name.split()).lower()
    label, bracket, _ = text.partition("(")
    text = label.rstrip() if bracket and text.endswith(")") else text
    text = re.sub(r"\b(moe|dense|commonest) layer", "layer", text)
    return _KEYS.get(text) or _KEYS.get(text.partition(",")[0])


_KEYS = {text.lower(): key for key, labels in LABELS.items() for text in (key, *labels)}
# short forms that a user may type
_KEYS |= {"ffn bits per weight": "ffn_bits_per_weight", "bits per weight": "bits_per_weight"}
