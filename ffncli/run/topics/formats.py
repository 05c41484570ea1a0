"""The topics about formats with few bits: how a value becomes a code and a scale."""

from ffncli.block.formats import Format, format_of
from ffncli.run.topics.topic import NumberTable, Topic, TopicLine, Value, tiny_run
from ffncli.show.text import percent

_SOURCE, _UNIT, _TIMES = "128x128:swiglu", 3, 30
_GROUPS = ("g16", "g32", "g64", "channel", "tensor")
_ORIGINS = {
    "fp8": "Micikevicius et al. 2022, arXiv:2209.05433",
    "mxfp4": "OCP Microscaling Formats (MX) v1.0, 2023",
    "nvfp4": "NVIDIA 2025, Pretraining Large Language Models with NVFP4, arXiv:2509.25149",
}


def format_topic(line: TopicLine) -> Topic:
    """Explain a format by some weights of a row, with the figures of `ffn precision --explain`."""
    from ffncli.run.quantize.quantized import quantize

    form = format_of(line.topic)
    weights = tiny_run(_SOURCE, tokens=1).prepared.weights["gate.weight"]
    quantized = quantize(weights, form)
    factors = quantized.factors
    assert factors is not None
    block, scale = quantized.blocks.split(weights)[_UNIT, 0], float(factors[_UNIT, 0])
    stored, largest = quantized.dequantize(), int(block.abs().argmax())
    rows: list[tuple[Value, ...]] = []
    for i in sorted({*range(6), largest}):
        at = (_UNIT, i)
        figures = (weights[at], weights[at] / scale, quantized.values()[at], stored[at], stored[at] - weights[at])
        value, scaled, *after = map(float, figures)
        rows.append((i, value, scaled, int(quantized.codes[at]), *after))
    size = f"{len(block)} adjacent values of a row" if form.group else "a row (of activations: a token)"
    whole = ", and the tensor has one more scale, in fp32" if form.name == "nvfp4" else ""
    lost = percent(float((stored - weights).norm() / weights.norm()))
    return line.explained(
        (
            f"{form.name} stores a value as a code of {form.bits:g} bits: {_codes(form)}.",
            f"A block, {size}, shares a scale, which is stored as {form.scale}{whole}.",
            f"The scale fits the block's largest value: here |W1[{largest},{_UNIT}]| = {float(block.abs().max()):.4f} "
            f"makes the scale {scale:.4g}, {_fits(form)}.",
            "Rounding: each value is divided by the scale, and the nearest code is stored.",
            _steps(form),
            f"With scales that is {quantized.bits_per_weight:.4g} bits a weight, and the error is {lost} of W1's norm.",
        ),
        NumberTable(
            f"ffn precision {_SOURCE} --dtype {form.name} --explain 'W1[{largest},{_UNIT}]'",
            ("i", f"W1[i,{_UNIT}]", "/ scale", "code", "it means", "stored", "error"), tuple(rows),
        ),
        f"ffn precision {_SOURCE} --dtype {form.name}",
        (_ORIGINS[form.name],) if form.name in _ORIGINS else (),
    )  # fmt: skip


def _codes(form: Format) -> str:
    """Return what a code consists of, and its range."""
    if form.element == "int":
        return f"an integer from {form.lowest:g} to {form.largest:g}"
    exponent, mantissa = form.element[1], form.element[3]
    return f"a sign, {exponent} bits of exponent and {mantissa} of mantissa, up to {form.largest:g}"


def _fits(form: Format) -> str:
    """Return where the largest value lies among the codes."""
    if form.element == "int":
        steps = form.largest - form.lowest
        return f"{steps / 2:g} times smaller: {steps:g} steps cover both signs"
    return f"for a largest code of {form.largest:g}"


def _steps(form: Format) -> str:
    if form.element == "int":
        return "Integers are equally far apart, so small values lose most of their digits in a block with a large one."
    return (
        "Floats lie closer together near 0, so small values keep their digits; the smallest above 0 is "
        f"{form.smallest:g}."
    )


def scale_topic(line: TopicLine) -> Topic:
    """Explain scales by int4 with blocks of several sizes, on weights with a channel of outliers."""
    from ffncli.run.quantize.quantized import quantize

    weights = tiny_run(_SOURCE, tokens=1).prepared.weights["gate.weight"].clone()
    weights[:, _UNIT] *= _TIMES
    rows: list[tuple[Value, ...]] = []
    for words in _GROUPS:
        quantized = quantize(weights, f"int4:{words}")
        assert quantized.scales is not None
        errors = (quantized.dequantize() - weights).norm(dim=0) / weights.norm(dim=0)
        typical = float(errors.median())
        rows.append((words, quantized.bits_per_weight, quantized.scales.numel(), 100 * float(errors[0]), 100 * typical))
    return line.explained(
        (
            "A format with few bits has few values; a scale stretches them over the values of a block.",
            "A block is a group of a row (g16: 16 values), a row (channel), a tile (block128) or the tensor.",
            "The block's largest value sets the scale, so one outlier makes the steps of its whole block large.",
            f"Here channel {_UNIT} of W1 is {_TIMES} times as large: in small groups, fewer channels share its scale.",
            "But scales take bits: an fp32 scale for 16 values is 2 bits a weight.",
            "MX formats have blocks of 32 with powers of two as scales, NVFP4 has blocks of 16 with fp8 scales.",
        ),
        NumberTable(
            f"ffn precision {_SOURCE} --dtype {','.join(f'int4:{words}' for words in _GROUPS)} --what weights",
            ("group size", "bits a weight", "scales", "error of channel 0 %", "of the median channel %"), tuple(rows),
        ),
        "ffn explain nvfp4",
        (),
    )  # fmt: skip


def budget_topic(line: TopicLine) -> Topic:
    """Explain budgets and recipes by the choices of two formats for two matrices."""
    from ffncli.run.engine.execute import run
    from ffncli.run.quantize.quantized import quantize

    source, names = "64x256:relu", ("nvfp4", "fp8")
    ready = tiny_run(source, tokens=16).prepared
    exact = run(ready.steps, ready.weights, ready.inputs)
    matrices = {name: ready.weights[f"{name}.weight"] for name in ("up", "down")}
    rows: list[tuple[Value, ...]] = []
    for up in names:
        for down in names:
            stored = {name: quantize(matrices[name], form) for name, form in (("up", up), ("down", down))}
            rounded = {f"{name}.weight": one.dequantize() for name, one in stored.items()}
            error = (run(ready.steps, {**ready.weights, **rounded}, ready.inputs) - exact).norm() / exact.norm()
            bits = sum(one.bits_per_weight for one in stored.values()) / 2  # W1 and W2 are equally large
            rows.append((up, down, bits, 100 * float(error)))
    _, _, taken, lost = rows[1]
    return line.explained(
        (
            "A budget is the mean number of bits per weight that a model may take, scales included.",
            "Quantizing every matrix to one format wastes it: some matrices bear few bits better than others.",
            f"W1 in nvfp4 and W2 in fp8 fit a budget of 6.5 bits: they take {taken:.4g}, and err by {lost:.3g} %.",
            "The errors of different matrices hardly correlate, so their squares add up to that of a choice.",
            "A recipe is a file with the format of each matrix, read by the program that quantizes the model.",
        ),
        NumberTable(f"ffn precision {source} --dtype nvfp4,fp8 --tokens 16",
                    ("W1", "W2", "bits a weight", "error of the output %"), tuple(rows)),
        f"ffn precision {source} --dtype nvfp4,fp8 --budget 6.5",
        (),
    )  # fmt: skip
