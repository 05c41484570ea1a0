"""Output that several pages share: records in JSON and CSV, a block, a model's tokens, lines per check, devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ffncli.show.parts import Answer, Line, Part, Table
from ffncli.show.tensors import edges
from ffncli.show.text import pad, plural
from ffncli.system.hardware import devices, typed_names

if TYPE_CHECKING:
    from ffncli.models.model import Model
    from ffncli.run.activations.on_data import LayerData
    from ffncli.run.corpus.experts import LayerExperts
    from ffncli.run.corpus.results import CorpusLayer
    from ffncli.run.engine.prepare import BlockSummary, Token
    from ffncli.run.engine.router_losses import RouterLoss
    from ffncli.run.measure.gap import Agreement
    from ffncli.run.precision.results import MixedFormat, PrecisionRow
    from ffncli.run.trace.survey import LayerRow
    from ffncli.run.trace.training_step import LayerGradients


def in_json(value: Any) -> Any:
    """Convert one record, or several, for JSON; None stays None."""
    if value is None:
        return None
    return [asdict(one) for one in value] if isinstance(value, Sequence) else asdict(value)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows with the same keys as a CSV table; under `ffn verify --tp` only rank 0 has rows."""
    return Table(tuple(rows[0]) if rows else (), [tuple(row.values()) for row in rows])


def dimensions_text(block: BlockSummary) -> str:
    """Return text such as `d_model 4, d_ff 8, relu, plain, bias`; a lone final layer has neither d_ff nor activation.

    For a mixture, the text also has the number of experts and the number of experts that each token uses; `d_ff` is the
    width of one expert.
    """
    kind, bias = "gated" if block.gated else "plain", "bias" if block.bias else "no bias"
    ffn = "" if block.d_ff is None else f", d_ff {block.d_ff}, {block.activation}, {kind}"
    norm = f", {block.norm}" if block.norm else ""
    shared = f" + {block.shared_experts} shared" if block.shared_experts else ""
    moe = f", MoE of {block.experts} experts{shared}, top {block.top_k}" if block.experts else ""
    return f"d_model {block.d_model}{ffn}, {bias}{norm}{moe}"


def layer_name(
    row: LayerRow | LayerGradients | CorpusLayer | LayerExperts | LayerData | PrecisionRow | MixedFormat, model: Model
) -> str:
    """Return a name such as `3`, or `encoder.3` if the model has several stacks."""
    return f"{row.stack}.{row.layer}" if len({group.stack for group in model.groups}) > 1 else str(row.layer)


_LONGEST = 12  # maximum characters of a token's string in a label: a row of eight values still fits 100 columns


def label(token: Token) -> str:
    """Return the row label of a token: `3 " world"`, or with its id if its string is unknown."""
    return f"{token.position} {named(token.id, token.text)}"


def named(number: int, text: str | None) -> str:
    """Return a token's string in quotation marks, or `#1917` if the string is unknown."""
    if text is None:
        return f"#{number}"
    return f'"{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"}"'


def listed(tokens: Sequence[Token]) -> str:
    """Return text such as `2 tokens: 0 "Hello", 1 " my"`. If there are many tokens, only some are listed."""
    shown = edges(len(tokens), 8)
    some = "".join(f"{', ' if i == last + 1 else ' … '}{label(tokens[i])}" for last, i in pairwise((-1, *shown)))
    return f"{len(tokens)} {plural('token', len(tokens))}: {some.removeprefix(', ')}"


def labels(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return labels for the rows of a trace; none without a prompt."""
    return tuple(map(label, tokens))


def agreement_text(agreement: Agreement) -> str:
    """Return one line on how much our steps' result differs from that of the model's own FFN."""
    if not agreement.max_error:
        return "matches the model's own FFN exactly"  # NaN for NaN and 0 for -0 count as equal, so bits may differ
    ulps = "" if agreement.ulps is None else f", {agreement.ulps:.3g} ulp at that element"
    error, relative = f"max error {agreement.max_error:.2e}", f"relative {agreement.relative_error:.2e}"
    return f"against the model's own FFN: {error}, {relative}{ulps}"


def loss_lines(losses: Sequence[RouterLoss]) -> list[Part]:
    """Show a router's losses on one line; `ffn explain load-balancing` defines them."""
    values = ", ".join(f"{one.name} {one.value:.4g}" for one in losses)
    return [Line(f"load-balancing losses and z-loss: {values}", quiet=True)] if losses else []


ShortLine = tuple[str, str, str]  # PASS, FAIL or SKIP; the check or the kernel; the reason


def short_lines(lines: Sequence[ShortLine]) -> list[Part]:
    """Align the names of the lines in one column."""
    width = max((len(name) for _, name, _ in lines), default=0)
    return [Line(f"{word}  {pad(name, width)}  {text}".rstrip(), quiet=word == "SKIP") for word, name, text in lines]


_CLASSES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")


def devices_answer(command: str) -> Answer:
    """Build a table with one row per accelerator, under the name that users type; `devices` in JSON."""
    records = list(_records())
    lines = [{**one, **{f"{name}_tflops": one["tflops"].get(name) for name in _CLASSES}} for one in records]
    columns = [name for name in lines[0] if name != "tflops"]
    flat = Table(tuple(columns), [tuple(line[name] for name in columns) for line in lines])
    rows = [
        (one["device"], _half(one), one["gbytes_per_s"], _sizes(one), _ridge(one), (one["module"] or "").split(";")[0])
        for one in records
    ]
    table = Table(("device", "TFLOP/s", "GB/s", "GB", "FLOPs/byte", "module"), rows, labels=1)
    note = Line("TFLOP/s: dense, in bf16 (in fp16 without bf16); FLOPs/byte: the ridge", quiet=True)
    return Answer(command, {"rows": [], "devices": records}, flat, [table, note], {})


def _records() -> Iterator[dict[str, Any]]:
    """Yield every accelerator in the table's order; `device` is the first of its names in shell completion."""
    typed: dict[str, str] = {}
    for name, device in typed_names().items():
        typed.setdefault(device.name, name)
    for device in devices():
        yield {
            "device": typed[device.name],
            "name": device.name,
            "tflops": dict(device.tflops),
            "gbytes_per_s": device.gbytes_per_s,
            "memory_gb": list(device.memory_gb),
            "memory_bytes": device.memory_bytes,
            "approximate": sorted(device.approx),
            "source": device.source,
            "link": device.link or None,
            "per_node": device.per_node,
            "network": device.network or None,
            "module": device.module or None,
        }


def _half(record: Mapping[str, Any]) -> float:
    return float(record["tflops"].get("bf16") or record["tflops"]["fp16"])


def _sizes(record: Mapping[str, Any]) -> str:
    return "/".join(f"{size:g}" for size in record["memory_gb"])


def _ridge(record: Mapping[str, Any]) -> int:
    return round(_half(record) * 1e3 / float(record["gbytes_per_s"]))
