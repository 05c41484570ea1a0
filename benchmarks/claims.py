"""Write the claims in docs/findings.md: the statements of the five example texts, and the figures that `ffn` computes.

make claims                                        # computes and writes them
"""

from benchmarks import conv1x1
from benchmarks.script import ROOT, put, read
from ffncli.run.texts import TEXTS, TextClaim, claims

PAGE = ROOT / "docs" / "findings.md"
START = "<!-- claims: written by make claims -->"
# Times cannot be computed while the table is written: a mapping from a claim to its measured answer, or to "".
MEASURED = {"as 1×1 convolutions it can be faster": lambda: conv1x1.sentence(read(conv1x1.RESULTS))}
COLUMNS = ("text", "claim", "verdict", "figure", "why, and a command that shows it")
EXAMPLE_OF = {text: example for example, text in TEXTS.items()}


def section(found: tuple[TextClaim, ...]) -> str:
    """Return how many claims hold, and a table of all of them."""
    counts = ", ".join(f"{sum(c.verdict == v for c in found)} {v}" for v in ("wrong", "depends", "holds"))
    rows = [
        (f"`{EXAMPLE_OF[c.text]}`", c.claim, c.verdict, c.figure, "<br>".join(filter(None, (why(c), f"`{c.command}`"))))
        for c in found
    ]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{len(found)} claims of {len(TEXTS)} texts: {counts}.\n\n{table}"


def why(claim: TextClaim) -> str:
    """Return what the claim's figure means, and the measured answer if there is one."""
    said = MEASURED[claim.claim]() if claim.claim in MEASURED else ""
    return f"{claim.why}; {said}" if said else claim.why


if __name__ == "__main__":
    PAGE.write_text(put(PAGE.read_text("utf-8"), START, section(claims())), "utf-8")
