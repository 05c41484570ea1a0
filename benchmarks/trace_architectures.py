"""For how many text architectures of transformers does a trace with weights from disk equal the model's own results?

What: for every model_type of `architectures.csv` that is counted, a tiny model with random weights is saved with
save_pretrained, and one layer of every group of layers (dense, experts; encoder, decoder) is read back from disk and
run. transformers' own model runs once on random tokens:

- `relative_error`: max|ours − theirs| / max|theirs| of the FFN's output for the model's own FFN input, in float32 on
  the CPU; the largest over the layers
- `norms`: the norms around the FFN that were also read from disk and give the same output as the model's norms
- `block`: `same` if norms, FFN and residual together give the output of the model's layer; else the reason why they
  are not compared

`result` is `same` if all of them agree within 1e-6.

    python -m benchmarks.trace_architectures [--save FILE]
"""

import sys
import warnings

import torch

from benchmarks.architectures import report
from tests.oracles.architectures import Architecture
from tests.oracles.architectures.tiny import make
from tests.oracles.architectures.traced import COLUMNS, compare, row


def main() -> int:
    """Trace, print and save; return 1 if any architecture differs or fails."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about = "The FFN of every text architecture, traced and compared with transformers' own."
    return report(about, COLUMNS, _row, "text architectures have the same trace")


def _row(name: str, case: Architecture) -> tuple[object, ...]:
    return row(name, case, () if case.reason else compare(make(name, case)))


if __name__ == "__main__":
    sys.exit(main())
