"""In how many text architectures of transformers do config, headers and module hold the same number of FFN parameters?

What: for every model_type with a model class that takes token ids (tests/oracles/architectures/walk.py finds them in
the source of the installed release), a tiny model is built from its config class, saved as transformers saves it, and
its FFN parameters are counted, those of the tower that the ids go to:

- `module_count`: sum(numel) of the module's FFN parameters, which names written by hand pick out (tests/oracles)
- `config_count`: what ffn makes of the saved config.json
- `header_count`: what ffn recognises in the safetensors headers by names and shapes, without the config

`result` is `same` where all three agree, and where `ffn params DIR`, which reads both files, counts the same and
reports no difference. What is `not counted` has a reason: it has no FFN, it cannot be built, or ffn refuses it.

    python -m benchmarks.architectures [--save FILE]
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence

import transformers

from benchmarks import script
from tests.oracles.architectures import Architecture
from tests.oracles.architectures.nested import architectures
from tests.oracles.architectures.tiny import COLUMNS, row


def main() -> int:
    """Count, print, save; 1 where any architecture differs or fails."""
    about = "FFN parameters of every text architecture, counted in three ways."
    return report(about, COLUMNS, row, "text architectures agree")


def report(about: str, columns: Sequence[str], row: Callable[[str, Architecture], Sequence[object]], said: str) -> int:
    """A row for each architecture: those with a reason printed, all saved where --save asks; 1 where any differs or
    fails."""
    options = script.options_of(about)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = [_tried(row, columns, name, case) for name, case in architectures().items()]
    result, reason = columns.index("result"), columns.index("reason")
    results = Counter(line[result] for line in rows)
    for line in rows:
        if line[reason]:
            print(f"{line[0]}: {line[result]}: {line[reason]}")
    print(f"transformers {transformers.__version__}: {results['same']} of {len(rows)} {said}")
    script.save(options.save, [dict(zip(columns, line, strict=True)) for line in rows])
    return int(results["differs"] + results["error"] > 0)


def _tried(
    row: Callable[[str, Architecture], Sequence[object]], columns: Sequence[str], name: str, case: Architecture
) -> Sequence[object]:
    """The row; where making it fails, one that says so, and the table goes on."""
    try:
        return row(name, case)
    except Exception as error:  # whatever a model's own code raises
        said = {"model_type": name, "result": "error", "reason": f"error: {type(error).__name__}: {error}"}
        return [" ".join(said.get(column, "").split()) or None for column in columns]


if __name__ == "__main__":
    sys.exit(main())
