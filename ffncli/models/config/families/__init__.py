"""The model families, with one row each: the meaning of its config fields, and what its code fixes.

Each kind of model has its own file of rows. Facts: transformers 5.23, `configuration_*.py` and `modeling_*.py`.
"""

from collections.abc import Mapping

from ffncli.models.config.families import composites, decoders, encoders, hybrids, moe, remote, routers
from ffncli.models.config.family import Family

FAMILIES: Mapping[str, Family] = {
    **decoders.ROWS, **remote.ROWS, **encoders.ROWS, **decoders.PAIRS, **moe.ROWS, **hybrids.ROWS,
    **composites.ROWS, **routers.EXPERTS, **routers.ROWS, **encoders.MEDIA,
}  # fmt: skip
OF_REPOSITORIES = frozenset(remote.ROWS)  # families whose code is not in transformers
# maps a model_type to the reason why its blocks cannot be described
REFUSED: Mapping[str, str] = {**hybrids.REFUSED, **composites.REFUSED, **encoders.REFUSED}
TEXT_TYPES, TEXT_DEFAULTS = composites.TEXT_TYPES, composites.TEXT_DEFAULTS
BY_TYPE: Mapping[str, str] = {alias: name for name, row in FAMILIES.items() for alias in (name, *row.aliases)}


def family_of(model_type: object) -> Family | None:
    """Return the row for a config's model_type; None if it is unknown or not a string."""
    return FAMILIES.get(BY_TYPE.get(model_type, "")) if isinstance(model_type, str) else None
