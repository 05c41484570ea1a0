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

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter

import torch
import transformers

from benchmarks.common import save
from tests.oracles.architectures import cases
from tests.oracles.architectures.traced import COLUMNS, compare, row


def main() -> int:
    """Trace, print, save; 1 where any architecture differs."""
    parser = argparse.ArgumentParser(description="Every text architecture's FFN, traced beside transformers' own.")
    parser.add_argument("--save", metavar="FILE", help="write the results there as CSV")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [row(name, case, () if case.reason else compare(name, case)) for name, case in sorted(cases().items())]
    results = Counter(line[COLUMNS.index("result")] for line in rows)
    for line in rows:
        if line[COLUMNS.index("reason")]:
            print(f"{line[0]}: {line[COLUMNS.index('result')]}: {line[COLUMNS.index('reason')]}")
    print(f"transformers {transformers.__version__}: {results['same']} of {len(rows)} text architectures traced alike")
    if options.save:
        save(options.save, COLUMNS, rows, {})
    return int(results["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
