"""--as latex: the text is read by a TeX parser (matplotlib's), and says what the steps say."""

import re

import pytest
from matplotlib.mathtext import MathTextParser

from ffncli.block.steps import Linear, walk
from ffncli.models.model import Model, Resolved, block_model
from ffncli.models.source import load
from ffncli.run.export.latex import escaped, latex_text
from ffncli.run.export.problem import problem_of
from tests.run.export.blocks import DENSE, MIXTURES, problem

BLOCKS = DENSE | MIXTURES
_PARSED: set[str] = set()


def formulas(text: str) -> list[str]:
    """Every cell of an align*, and every formula in a sentence."""
    blocks = re.findall(r"\\begin\{align\*\}\n(.*?)\n\\end\{align\*\}", text, re.DOTALL)
    cells = [cell.strip() for block in blocks for line in block.split("\\\\\n") for cell in line.split("&")]
    return [cell for cell in cells if cell] + re.findall(r"\$(.+?)\$", text)


def parse(text: str) -> None:
    """Raises for braces that do not match, a double superscript, an unknown macro."""
    parser = MathTextParser("path")
    for formula in formulas(text):
        if formula not in _PARSED:
            parser.parse(f"${formula}$")
            _PARSED.add(formula)


@pytest.mark.parametrize("name", BLOCKS)
def test_it_parses_and_has_every_step(name):
    block = problem(BLOCKS[name])
    text = latex_text(block)
    parse(text)
    assert text.count("{") == text.count("}")
    assert (
        text.count("\\begin{") == text.count("\\end{") == 2 + sum(type(s.op).__name__ == "Experts" for s in block.steps)
    )
    for _, step in walk(block.steps):
        upright = "\\mathrm{" + step.output.replace("_", "\\_") + "}"
        assert f"  {upright} &= " in text
        if isinstance(step.op, Linear):
            size, weight = step.op.out.size, re.escape("\\mathrm{" + step.output.replace("_", "\\_") + ".weight}^\\top")
            formula = rf"{re.escape(upright)} &= .* \\, (W.*?)(?: \+ b.*)? && "
            line = re.search(rf"{formula}\\in \\mathbb{{R}}\^{{T.* \\times {size}}}", text)
            assert line
            shape = rf"\\mathbb{{R}}\^{{{step.op.into.size} \\times {size}}}"
            assert re.search(rf"{re.escape(line[1])} &= {weight} && \\in {shape}", text)


def test_a_gated_block_in_full():
    text = latex_text(problem_of(load("llama-2-7b"), "block", tokens=(1,)))
    assert text.splitlines()[2:] == [
        "% silu(x) = x σ(x)",
        "\\begin{align*}",
        "  & x \\in \\mathbb{R}^{T \\times 4096} \\\\",
        "  \\mathrm{norm} &= \\frac{x}{\\sqrt{\\operatorname{mean}(x^2) + 10^{-6}}} \\odot W_{\\mathrm{norm}}"
        " && \\in \\mathbb{R}^{T \\times 4096} \\\\",
        "  \\mathrm{gate} &= \\mathrm{norm} \\, W_{1} && \\in \\mathbb{R}^{T \\times 11008} \\\\",
        "  \\mathrm{up} &= \\mathrm{norm} \\, W_{3} && \\in \\mathbb{R}^{T \\times 11008} \\\\",
        "  \\mathrm{act} &= \\operatorname{silu}(\\mathrm{gate}) && \\in \\mathbb{R}^{T \\times 11008} \\\\",
        "  \\mathrm{hidden} &= \\mathrm{act} \\odot \\mathrm{up} && \\in \\mathbb{R}^{T \\times 11008} \\\\",
        "  \\mathrm{down} &= \\mathrm{hidden} \\, W_{2} && \\in \\mathbb{R}^{T \\times 4096} \\\\",
        "  \\mathrm{out} &= x + \\mathrm{down} && \\in \\mathbb{R}^{T \\times 4096} \\\\",
        "  W_{1} &= \\mathrm{gate.weight}^\\top && \\in \\mathbb{R}^{4096 \\times 11008} \\\\",
        "  W_{3} &= \\mathrm{up.weight}^\\top && \\in \\mathbb{R}^{4096 \\times 11008} \\\\",
        "  W_{2} &= \\mathrm{down.weight}^\\top && \\in \\mathbb{R}^{11008 \\times 4096}",
        "\\end{align*}",
        "% matmul_flops: 1 multiply-add = 2 FLOPs; biases are elementwise",
        "% elementwise_flops: 1 per element for bias, activation, multiply, add; RMSNorm 4, LayerNorm 7; dropout 0;",
        "% routing: 1 per logit for the score and for a choice correction, top_k for a renormalisation and for a"
        " scale,",
        "% and the multiplies and adds that mix the chosen experts",
        "% bytes: every used weight and the input read once, the output written once",
        "\\begin{tabular}{rrrr}",
        "  \\multicolumn{4}{l}{llama-2-7b, decoder layer 0: d\\_model 4096, d\\_ff 11008, silu, gated:"
        " 135{,}270{,}400 parameters} \\\\",
        "  \\hline",
        "  tokens & matmul FLOPs & elementwise FLOPs & bytes (fp16) \\\\",
        "  \\hline",
        "  1 & 270{,}532{,}608 & 42{,}496 & 270{,}557{,}184 \\\\",
        "\\end{tabular}",
    ]


def test_a_name_cannot_leave_its_place():
    assert escaped("50%_{a}\\b$^~#&") == (r"50\%\_\{a\}\textbackslash{}b\$\textasciicircum{}\textasciitilde{}\#\&")
    base = block_model(DENSE["gated"], "x")
    bad = "a}\n\\input{/etc/passwd}%"
    text = latex_text(problem_of(Resolved(Model(bad, base.model.groups, bare=True), bad), "block"))
    lines = [line for line in text.splitlines() if "passwd" in line]
    assert [line.startswith("%") for line in lines] == [True, False]
    assert "\\input" not in lines[1]
    parse(text)
