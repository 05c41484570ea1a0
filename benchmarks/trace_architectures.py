"""For how many text architectures of transformers is a trace, with weights read from disk, what the model computes?

What: for every model_type of `architectures.csv` that is counted, a tiny model with random weights is saved as
transformers saves it, and one layer of every group of layers (dense, experts; encoder, decoder) is read back from disk
and run. transformers' own model runs once on random tokens:

- `relative_error`: max|ours − theirs| / max|theirs| over what leaves the FFN, the worst layer, float32 on CPU; what
  enters it is what entered it there
- `norms`: the norms around the FFN that were read from disk too and give what the model's own give
- `block`: `same` where norms, FFN and residual together give what leaves the model's layer; else why that is not
  compared

`result` is `same` where all of them are within 1e-6.

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
    """Trace, print, save; 1 where any architecture differs or fails."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about = "Every text architecture's FFN, traced beside transformers' own."
    return report(about, COLUMNS, _row, "text architectures traced alike")


def _row(name: str, case: Architecture) -> tuple[object, ...]:
    return row(name, case, () if case.reason else compare(make(name, case)))


if __name__ == "__main__":
    sys.exit(main())
