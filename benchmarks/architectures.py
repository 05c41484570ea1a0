"""For how many text architectures of transformers do config, headers and module give the same FFN parameter count?

What: for every model_type with a model class that takes token ids (tests/oracles/architectures/walk.py finds them in
the source of the installed release), a tiny model is built from its config class and saved with save_pretrained. The
FFN parameters of the tower that receives the ids are then counted in three ways:

- `module_count`: sum(numel) of the module's FFN parameters, selected by a hand-written list of names (tests/oracles)
- `config_count`: ffn's count from the saved config.json
- `header_count`: ffn's count from names and shapes in the safetensors headers, without the config

`result` is `same` if all three agree, and `ffn params DIR`, which reads both files, gives the same count and reports
no difference. A model that is `not counted` has a reason: it has no FFN, it cannot be built, or ffn refuses it.

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
    """Count, print and save; return 1 if any architecture differs or fails."""
    about = "FFN parameters of every text architecture, counted in three ways."
    return report(about, COLUMNS, row, "text architectures agree")


def report(about: str, columns: Sequence[str], row: Callable[[str, Architecture], Sequence[object]], said: str) -> int:
    """Compute a row for each architecture; print the rows that have a reason, and save all rows to --save FILE.

    Return 1 if any architecture differs or fails."""
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
    """Return the row of an architecture, or a row with the error, so that the other rows are still computed."""
    try:
        return row(name, case)
    except Exception as error:  # whatever a model's own code raises
        said = {"model_type": name, "result": "error", "reason": f"error: {type(error).__name__}: {error}"}
        return [" ".join(said.get(column, "").split()) or None for column in columns]


if __name__ == "__main__":
    sys.exit(main())
