"""Write docs/claims.md: the statements of the five example texts, and the figures that `ffn` computes for them.

make claims                                        # writes docs/claims.md
.venv/bin/python -m benchmarks.claims              # prints the page
"""

import sys

from benchmarks import conv1x1
from benchmarks.script import read
from ffncli.run.texts import TEXTS, TextClaim, claims

HEAD = """# Claims of the texts

This page lists the statements of five public texts about the feed-forward network that can be checked. Each has the
figure that `ffn` computes, and the command that prints it. `make claims` computes all figures and writes the page; a
test compares it. Only times are quoted, from benchmarks/results. If a text gives no weights or inputs, they are random,
from seed 0. The verdicts are `wrong`, `depends` (on what the text leaves open) and `holds`.

"""
# Times cannot be computed while the page is written: a mapping from a claim to its measured answer, or to "".
MEASURED = {"as 1×1 convolutions it can be faster": lambda: conv1x1.sentence(read(conv1x1.RESULTS))}
COLUMNS = ("text", "claim", "verdict", "figure", "why", "command")


def page(found: tuple[TextClaim, ...]) -> str:
    counts = ", ".join(f"{sum(c.verdict == v for c in found)} {v}" for v in ("wrong", "depends", "holds"))
    rows = [(c.text, c.claim, c.verdict, c.figure, why(c), f"`{c.command}`") for c in found]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    table = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    return f"{HEAD}{len(found)} claims of {len(TEXTS)} texts: {counts}.\n\n{table}"


def why(claim: TextClaim) -> str:
    """Return what the claim's figure means, and the measured answer if there is one."""
    said = MEASURED[claim.claim]() if claim.claim in MEASURED else ""
    return f"{claim.why}; {said}" if said else claim.why


if __name__ == "__main__":
    sys.stdout.write(page(claims()))
